"""Entropy beyond its confounds, on planted activations; rank agreement against scipy."""

import numpy as np
import pytest
import torch
from planted import activations
from scipy.stats import spearmanr

from probes import ProbeError, entropy_agreement, entropy_beyond_controls

N, Q = 400, 6
POSITION = torch.arange(Q).expand(N, Q)


def normal(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def values(*columns):
    """Activations whose features are these columns, ``batch query`` each."""
    return activations(v=torch.stack(columns, -1)[:, :, None, :])


def beyond(acts, entropy, controls):
    return entropy_beyond_controls(acts, entropy, controls, POSITION, components=2, resamples=100, permutations=99)


def test_a_component_that_codes_only_a_control_explains_nothing_beyond_it():
    length = normal(0, N, 1).expand(N, Q)
    entropy = length + 0.5 * normal(1, N, Q)
    found = beyond(values(10 * length, normal(2, N, Q)), entropy, {"length": {"prompt length": length}})
    assert found.value("entropy_r2", layer=0) == pytest.approx(0.8, abs=0.05)
    assert found.row("entropy_r2", layer=0)["null_controls"] == pytest.approx(0.8, abs=0.05)
    row = found.row("entropy_r2_beyond_length", layer=0)
    assert row["estimate"] < 0.02
    assert row["p_value"] > 0.05


def test_a_component_that_codes_entropy_beyond_a_control_explains_the_planted_share():
    length, own = normal(0, N, 1).expand(N, Q), normal(1, N, Q)
    entropy = length + own
    # what the control leaves of entropy is own, of variance 1; the component shows it with noise of variance 1
    found = beyond(values(10 * (own + normal(3, N, Q)), normal(2, N, Q)), entropy, {"length": {"length": length}})
    row = found.row("entropy_r2_beyond_length", layer=0)
    assert row["estimate"] == pytest.approx(0.5, abs=0.06)
    assert row["low"] > 0.4
    assert abs(row["null_permutation"]) < 0.02
    assert row["p_value"] == pytest.approx(0.01)


def test_sets_of_controls_accumulate():
    a, b, own = (normal(seed, N, Q) for seed in (4, 5, 6))
    found = beyond(values(10 * (a + b), own), a + b, {"a": {"a": a}, "b": {"b": b}})
    assert found.value("entropy_r2_beyond_a", layer=0) == pytest.approx(1, abs=0.02)
    # nothing of entropy is left beyond both
    assert not found.value("entropy_r2_beyond_b", layer=0) > 0.02


def test_a_categorical_control_takes_out_any_function_of_it():
    entropy = (POSITION.double() - 2.5) ** 2 + 0.1 * normal(7, N, Q)
    found = beyond(values(10 * entropy, normal(8, N, Q)), entropy, {"position": {"position": POSITION}})
    assert found.row("entropy_r2", layer=0)["null_controls"] > 0.99
    assert found.value("entropy_r2_beyond_position", layer=0) == pytest.approx(1, abs=0.02)


def test_controls_of_another_shape_are_named():
    with pytest.raises(ProbeError, match="control 'length' has shape"):
        beyond(values(normal(0, N, Q), normal(1, N, Q)), normal(2, N, Q), {"c": {"length": normal(3, N, Q - 1)}})


def test_rank_agreement_is_spearmans():
    measured = normal(0, N, Q)
    exact = measured + normal(1, N, Q)
    found = entropy_agreement(measured, exact, {"position": POSITION}, resamples=50, permutations=99)
    expected = spearmanr(measured.flatten(), exact.flatten()).statistic
    assert found.value("spearman") == pytest.approx(expected, abs=1e-9)
    within = np.mean([spearmanr(measured[:, q], exact[:, q]).statistic for q in range(Q)])
    assert found.value("spearman_within_position") == pytest.approx(within, abs=2e-3)


def test_agreement_that_position_alone_makes_vanishes_within_position():
    measured = POSITION + 0.3 * normal(0, N, Q)
    exact = POSITION + 0.3 * normal(1, N, Q)
    found = entropy_agreement(measured, exact, {"position": POSITION}, resamples=100, permutations=99)
    assert found.value("spearman") > 0.9
    row = found.row("spearman_within_position")
    assert abs(row["estimate"]) < 0.1
    assert row["p_value"] > 0.02
