import numpy as np
import pytest
import torch
from planted import activations

from probes import ProbeError, key_orthogonality
from probes.nulls import expected_abs_cos, welch_bound

LABELS = torch.arange(16).expand(64, 16)


def keys(vectors: torch.Tensor) -> torch.Tensor:
    return vectors[:, :, None, :]


def test_orthonormal_keys_have_cosine_zero():
    frame = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))[0][:16]
    result = key_orthogonality(activations(k=keys(frame.expand(64, 16, 32))), LABELS)
    assert result.value("mean_abs_cos", layer=0, head=0) == pytest.approx(0, abs=1e-6)
    assert result.row("mean_abs_cos", layer=0, head=0)["effect"] == pytest.approx(-expected_abs_cos(32), abs=1e-6)


@pytest.mark.parametrize("d", [2, 8, 32])
def test_random_keys_have_the_analytic_expectation_within_the_interval(d):
    # E|cos| in the plane is 2/pi (uniform angle): an independent check of the formula.
    assert expected_abs_cos(2) == pytest.approx(2 / np.pi)
    vectors = torch.randn(256, 16, d, generator=torch.Generator().manual_seed(d))
    labels = torch.arange(16).expand(256, 16)
    row = key_orthogonality(activations(k=keys(vectors)), labels, level=0.999).row("mean_abs_cos", layer=0, head=0)
    assert row["low"] < expected_abs_cos(d) < row["high"]
    assert row["high"] - row["low"] < 0.05


def test_a_shared_offset_shows_raw_and_not_centred():
    vectors = torch.randn(128, 16, 32, generator=torch.Generator().manual_seed(1)) + 10
    labels = torch.arange(16).expand(128, 16)
    result = key_orthogonality(activations(k=keys(vectors)), labels)
    assert result.value("mean_abs_cos", layer=0, head=0) > 0.95
    assert result.value("mean_abs_cos_centred", layer=0, head=0) == pytest.approx(expected_abs_cos(32), abs=0.01)


def test_an_equiangular_tight_frame_meets_the_welch_bound():
    angle = 2 * np.pi * torch.arange(3) / 3  # three vectors at 120 degrees in the plane
    frame = torch.stack([angle.cos(), angle.sin()], -1).float()
    result = key_orthogonality(activations(k=keys(frame.expand(8, 3, 2))), torch.arange(3).expand(8, 3))
    row = result.row("rms_cos", layer=0, head=0)
    assert welch_bound(3, 2) == pytest.approx(0.5)
    assert row["estimate"] == pytest.approx(0.5, abs=1e-6)
    assert row["bound_welch"] == pytest.approx(0.5)


def test_repeats_of_one_hypothesis_are_not_compared():
    vectors = torch.eye(4).repeat_interleave(2, 0).expand(8, 8, 4)
    labels = torch.arange(4).repeat_interleave(2).expand(8, 8)
    assert key_orthogonality(activations(k=keys(vectors)), labels).value("mean_abs_cos", layer=0, head=0) == 0


def test_bad_input_is_named():
    good = activations(k=torch.randn(8, 16, 1, 4))
    with pytest.raises(ProbeError, match=r"hold no 'k'.*extract"):
        key_orthogonality(activations(v=torch.randn(8, 16, 1, 4)), LABELS[:8])
    with pytest.raises(ProbeError, match="two distinct hypotheses"):
        key_orthogonality(good, torch.zeros(8, 16, dtype=torch.long))
    with pytest.raises(ProbeError, match="pass hypothesis"):
        key_orthogonality(good)
    bad = torch.randn(8, 16, 1, 4)
    bad[3, 2] = torch.nan
    with pytest.raises(ProbeError, match=r"site 'k' holds 4 values that are not finite.*\(3, 2, 0, 0\)"):
        key_orthogonality(activations(k=bad), LABELS[:8])


def test_a_transformer_lens_cache_is_accepted():
    cache = {
        "blocks.0.attn.hook_k": torch.eye(16).expand(8, 16, 16)[:, :, None],
        "hook_embed": torch.zeros(1),
    }
    assert key_orthogonality(cache, LABELS[:8]).value("mean_abs_cos", layer=0, head=0) == 0
