import numpy as np
import pytest
import torch
from scipy.stats import entropy as scipy_entropy

from probes import ProbeError, calibration
from probes.calibration import entropy_bits, kl_bits

N, Q, C = 64, 5, 4


def draws(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(N, Q, C, generator=generator, dtype=torch.float64).softmax(-1)


def test_the_exact_posterior_has_no_error():
    posterior = draws()
    result = calibration(posterior.log(), posterior, posterior.argmax(-1))
    for statistic in ("mae_bits", "curve_mae_bits", "kl_bits", "tv"):
        assert result.value(statistic) == pytest.approx(0, abs=1e-12)
    assert result.value("accuracy") == 1


def test_figures_are_scipys():
    posterior, model = draws(0), draws(1)
    result = calibration(model.log(), posterior)
    assert result.value("kl_bits") == pytest.approx(scipy_entropy(posterior, model, axis=-1, base=2).mean())
    h_model, h = (scipy_entropy(p, axis=-1, base=2) for p in (model, posterior))
    assert result.value("mae_bits") == pytest.approx(np.abs(h_model - h).mean())
    assert result.value("curve_mae_bits") == pytest.approx(np.abs(h_model.mean(0) - h.mean(0)).mean())
    assert result.value("tv") == pytest.approx((model - posterior).abs().sum(-1).mean().item() / 2)


def test_averaging_first_hides_errors_of_single_sequences():
    sharp, flat = torch.tensor([0.97, 0.01, 0.01, 0.01]), torch.full((4,), 0.25)
    even = (torch.arange(N) % 2 == 0)[:, None, None]
    posterior = torch.where(even, sharp, flat).double().expand(N, Q, C)
    swapped = torch.where(even, flat, sharp).double().expand(N, Q, C)
    result = calibration(swapped.log(), posterior)
    assert result.value("curve_mae_bits") == pytest.approx(0, abs=1e-9)
    assert result.value("mae_bits") == pytest.approx(2 - scipy_entropy(sharp, base=2), rel=1e-6)


def test_entropy_ignores_wrong_support_and_kl_does_not():
    posterior = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64).expand(N, Q, C)
    moved = posterior.roll(1, -1)
    result = calibration(moved.log(), posterior)
    assert result.value("mae_bits") == pytest.approx(0, abs=1e-9)
    assert result.value("kl_bits") == pytest.approx(0.6 * np.log2(7))


def test_trivial_predictors_stand_beside():
    posterior = draws()
    row = calibration(draws(1).log(), posterior).row("kl_bits")
    assert row["null_uniform"] == pytest.approx(2 - scipy_entropy(posterior, axis=-1, base=2).mean())
    constant = posterior[:1].expand(N, Q, C)
    assert calibration(draws(1).log(), constant).row("kl_bits")["null_position"] == pytest.approx(0, abs=1e-12)
    named = calibration(draws(1).log(), posterior, baselines={"oracle": posterior})
    assert named.row("kl_bits")["null_oracle"] == pytest.approx(0, abs=1e-12)


def test_gaussian_figures_have_their_closed_form():
    normal = torch.distributions.Normal
    mean, sd, model_mean, model_sd = 0.3, 1.7, -0.4, 0.6
    posterior = torch.tensor([mean, sd**2], dtype=torch.float64).expand(N, Q, 2)
    output = torch.tensor([model_mean, 2 * np.log(model_sd)], dtype=torch.float64).expand(N, Q, 2)
    exact = torch.distributions.kl_divergence(normal(mean, sd), normal(model_mean, model_sd)) / np.log(2)
    result = calibration(output, posterior, readout="gaussian")
    assert result.value("kl_bits") == pytest.approx(exact.item(), rel=1e-6)
    assert result.value("mae_bits") == pytest.approx(np.log2(sd / model_sd), rel=1e-6)
    assert entropy_bits(output, "gaussian")[0, 0].item() == pytest.approx(
        normal(model_mean, model_sd).entropy().item() / np.log(2), rel=1e-6
    )
    assert (
        kl_bits(posterior, torch.stack([posterior[..., 0], posterior[..., 1].log()], -1), "gaussian").abs().max()
        < 1e-12
    )


def test_bad_input_is_named():
    posterior = draws()
    with pytest.raises(ProbeError, match="must be equal"):
        calibration(torch.zeros(N, Q, C + 1), posterior)
    with pytest.raises(ProbeError, match="not finite"):
        calibration(torch.full((N, Q, C), torch.nan), posterior)
    with pytest.raises(ProbeError, match="at least 2"):
        calibration(torch.zeros(1, Q, C), posterior[:1])
