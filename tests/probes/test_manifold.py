import numpy as np
import pytest
import skdim
import torch
from planted import activations
from scipy.stats import kstest, spearmanr

from probes import ProbeError, value_manifold

N, Q, D = 128, 12, 16
POSITION = torch.arange(Q).expand(N, Q)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def manifold(points, entropy, **options):
    """Points ``batch query feature`` put at their positions."""
    return value_manifold(activations(v=points[:, :, None, :]), entropy, POSITION, **{"resamples": 100, **options})


def sawtooth(seed=0):
    """An entropy that falls with position and varies within it."""
    return 4 - 0.2 * POSITION.double() + 0.5 * draw(seed, N, Q)


def test_a_planted_curve_is_found_with_its_dimension_and_its_parameter():
    h = sawtooth()
    along = draw(1, D)
    points = h[..., None] * along + 0.01 * draw(2, N, Q, D)
    result = manifold(points, h)
    assert result.value("pc1_variance", layer=0) > 0.99
    assert result.value("participation_ratio", layer=0) == pytest.approx(1, abs=0.01)
    assert result.value("spearman", layer=0) > 0.99
    assert result.value("spearman_within_position", layer=0) > 0.99
    assert result.value("entropy_r2", layer=0) > 0.99
    assert result.value("entropy_r2_within_position", layer=0) > 0.99
    assert result.row("spearman_within_position", layer=0)["p_value"] < 0.01


@pytest.mark.parametrize("dimension", [1, 2, 5])
def test_dimensions_of_flat_patches(dimension):
    points = draw(3, N, Q, dimension) @ torch.linalg.qr(draw(4, D, D))[0][:dimension]
    result = manifold(points, sawtooth())
    held = points[1::2].reshape(-1, D).numpy()
    assert result.value("two_nn_dimension", layer=0) == pytest.approx(dimension, rel=0.15)
    oracle = skdim.id.TwoNN(discard_fraction=0.1).fit(held).dimension_
    assert result.value("two_nn_dimension", layer=0) == pytest.approx(oracle, rel=0.03)
    assert result.value("participation_ratio", layer=0) == pytest.approx(dimension, rel=0.05)


def test_duplicate_points_do_not_break_the_dimension():
    points = draw(5, N, Q, 2) @ torch.linalg.qr(draw(6, D, D))[0][:2]
    points[:, 0] = points[0, 0]
    assert manifold(points, sawtooth()).value("two_nn_dimension", layer=0) == pytest.approx(2, rel=0.15)


def test_a_position_only_code_passes_the_plain_statistic_and_not_the_partial_one():
    code = draw(7, D)
    h = sawtooth(8)
    points = POSITION.double()[..., None] * code + 1e-3 * draw(9, N, Q, D)
    result = manifold(points, h)
    plain, partial = (result.row(s, layer=0) for s in ("spearman", "spearman_within_position"))
    assert plain["estimate"] > 0.6
    assert plain["p_value"] > 0.05, "shuffling whole sequences keeps what position explains"
    assert plain["null_permutation"] == pytest.approx(plain["estimate"], abs=0.03)
    assert plain["null_position"] == pytest.approx(plain["estimate"], abs=0.03)
    assert partial["estimate"] < 0.1
    assert partial["p_value"] > 0.01
    assert result.value("entropy_r2_within_position", layer=0) < 0.02
    exact = manifold(POSITION.double()[..., None] * code, h)
    assert exact.value("spearman_within_position", layer=0) == 0


def test_entropy_that_position_determines_leaves_the_partial_statistics_undefined():
    h = 4 - 0.2 * POSITION.double()
    result = manifold(draw(10, N, Q, D), h)
    assert np.isnan(result.value("spearman_within_position", layer=0))
    assert np.isnan(result.value("entropy_r2_within_position", layer=0))
    assert result.row("entropy_r2", layer=0)["null_position"] == pytest.approx(1)


def test_p_values_are_uniform_when_entropies_are_shuffled():
    points = draw(11, N, Q, 3)
    p_values = [
        manifold(points, sawtooth(100 + i), resamples=0, permutations=99).row("spearman_within_position", layer=0)[
            "p_value"
        ]
        for i in range(100)
    ]
    assert kstest(p_values, "uniform").pvalue > 0.01


def test_spearman_is_scipys():
    h = sawtooth(12)
    points = h[..., None] * draw(13, D) + 2 * draw(14, N, Q, D)
    result = manifold(points, h)
    scatter = result.points
    assert result.value("spearman", layer=0) == pytest.approx(
        abs(spearmanr(scatter["PC1"], scatter["entropy_bits"])[0])
    )


def test_the_interval_covers_sequences_not_tokens():
    # Every token of a sequence repeats one draw: there are N, not N * Q, independent points.
    h = draw(15, N, 1).expand(N, Q) + 3
    points = (h[..., None] + draw(16, N, 1, 1)) * draw(17, D) + 1e-3 * draw(18, N, Q, D)
    row = manifold(points, h.contiguous(), resamples=500).row("spearman", layer=0)
    assert row["high"] - row["low"] > 0.1


def test_bad_input_is_named():
    h = sawtooth()
    with pytest.raises(ProbeError, match="hold no 'v'"):
        value_manifold(activations(k=torch.zeros(N, Q, 1, D)), h, POSITION)
    with pytest.raises(ProbeError, match="at least 8"):
        value_manifold(activations(v=torch.zeros(4, Q, 1, D)), h[:4], POSITION[:4])
    with pytest.raises(ProbeError, match=r"entropy has shape \(128, 11\)"):
        value_manifold(activations(v=torch.zeros(N, Q, 1, D)), h[:, 1:], POSITION)
    with pytest.raises(ProbeError, match="entropy holds"):
        manifold(draw(19, N, Q, D), h.where(h < 4, torch.nan))
