"""Belief geometry on planted activations whose beliefs, clusters and confounds are known."""

import numpy as np
import pytest
import torch
from planted import activations
from scipy.optimize import minimize

from probes import ProbeError, belief_geometry
from probes.simplex import _project
from tasks import get_task

N, Q = 120, 8
POSITION = torch.arange(Q).expand(N, Q)
GENERATOR = np.random.default_rng(0)


def resid(points):
    return activations(resid_post=torch.from_numpy(points).float())


def measure(points, belief, observed):
    belief, observed = torch.from_numpy(belief), torch.from_numpy(observed)
    return belief_geometry(resid(points), belief, observed, POSITION, site="resid_post", resamples=50)


def test_a_linearly_embedded_belief_is_read_exactly_beyond_every_window():
    belief = GENERATOR.dirichlet(np.ones(3), (N, Q))
    observed = GENERATOR.integers(3, size=(N, Q))
    found = measure(belief @ GENERATOR.normal(size=(3, 12)) + 5, belief, observed)
    row = found.row("belief_r2", layer=0)
    assert row["estimate"] == pytest.approx(1, abs=1e-6)
    assert max(row["null_last_1"], row["null_last_2"], row["null_shuffled"]) < 0.05
    # only the floor of 0.001 on probabilities is left
    assert found.value("belief_kl_bits", layer=0) < 0.003
    assert len(found.simplex().data) == 2


def test_noise_lowers_r2_by_its_share_of_the_variance():
    belief = GENERATOR.dirichlet(np.ones(3), (N, Q))
    noisy = belief + np.sqrt(belief.var((0, 1)).mean()) * GENERATOR.normal(size=belief.shape)
    row = measure(noisy, belief, GENERATOR.integers(3, size=(N, Q))).row("belief_r2", layer=0)
    # covariance of Dirichlet(1,1,1) has eigenvalues (v, v, 0) * 3/2: R^2 = 1.5 / (1.5 + 1)
    assert row["estimate"] == pytest.approx(0.6, abs=0.05)
    assert row["low"] < row["estimate"] < row["high"]


def test_a_code_for_the_last_symbol_earns_nothing_over_its_window_or_symbol():
    observed = GENERATOR.integers(3, size=(N, Q))
    belief = np.full((N, Q, 3), 0.1)
    np.put_along_axis(belief, observed[..., None], 0.8, -1)
    found = measure(10 * np.eye(3)[observed] + 0.01 * GENERATOR.normal(size=(N, Q, 3)), belief, observed)
    row = found.row("belief_r2", layer=0)
    assert row["estimate"] == pytest.approx(row["null_last_1"], abs=1e-3)
    clusters = found.row("ami", layer=0)
    assert clusters["estimate"] == pytest.approx(1)
    assert clusters["null_symbol"] == pytest.approx(1)
    assert abs(clusters["null_shuffled"]) < 0.05
    for other in ("silhouette_fewer", "silhouette_more"):
        assert found.value("silhouette", layer=0) > found.value(other, layer=0)


def test_clusters_of_a_hidden_state_are_told_from_those_of_the_symbol():
    state, observed = GENERATOR.integers(3, size=(2, N, Q))
    belief = np.full((N, Q, 3), 0.05)
    np.put_along_axis(belief, state[..., None], 0.9, -1)
    row = measure(10 * belief + 0.1 * GENERATOR.normal(size=(N, Q, 3)), belief, observed).row("ami", layer=0)
    assert row["low"] > 0.99
    assert abs(row["null_symbol"]) < 0.05


def test_windows_of_the_exact_filter_alone_explain_a_short_memory():
    """On mess3 three observations nearly give the belief: the null that the papers lack."""
    batch = get_task("mess3").sample(N, seed=0)
    nothing = np.random.default_rng(1).normal(size=(*batch.position.shape, 4))
    found = belief_geometry(
        resid(nothing), batch.belief, batch.tokens, batch.position, site="resid_post", resamples=0
    ).row("belief_r2", layer=0)
    assert found["estimate"] < 0.05
    assert found["null_last_1"] < found["null_last_2"] < found["null_last_3"]
    assert found["null_last_3"] > 0.8


def test_more_features_than_components_are_compressed_without_losing_the_belief():
    belief = GENERATOR.dirichlet(np.ones(3), (N, Q))
    wide = belief @ GENERATOR.normal(size=(3, 400)) + 0.01 * GENERATOR.normal(size=(N, Q, 400))
    assert measure(wide, belief, GENERATOR.integers(3, size=(N, Q))).value("belief_r2", layer=0) > 0.99


def test_a_lesser_observer_is_scored_as_it_is():
    belief = torch.from_numpy(GENERATOR.dirichlet(np.ones(3), (N, Q)))
    observed = torch.from_numpy(GENERATOR.integers(3, size=(N, Q)))
    predictors = {"itself": belief, "nothing known": torch.full_like(belief, 1 / 3)}
    found = belief_geometry(
        resid(belief.numpy()), belief, observed, POSITION, site="resid_post", predictors=predictors, resamples=0
    )
    assert found.row("belief_r2", layer=0)["null_itself"] == 1
    assert found.row("belief_r2", layer=0)["null_nothing_known"] == pytest.approx(0, abs=0.02)
    # the mean divergence of Dirichlet(1, 1, 1) from uniform: log2 3 - (psi(4) - psi(2)) / ln 2
    expected = np.log2(3) - (1 / 2 + 1 / 3) / np.log(2)
    assert found.row("belief_kl_bits", layer=0)["null_nothing_known"] == pytest.approx(expected, abs=0.04)


def test_projection_is_the_nearest_distribution():
    points = GENERATOR.normal(size=(5, 4))
    for point, projected in zip(points, _project(points), strict=True):
        assert projected.sum() == pytest.approx(1)
        assert projected.min() >= 0
        best = minimize(
            lambda q, point=point: ((q - point) ** 2).sum(),
            np.full(4, 0.25),
            bounds=[(0, 1)] * 4,
            constraints={"type": "eq", "fun": lambda q: q.sum() - 1},
            tol=1e-12,
        ).x
        np.testing.assert_allclose(projected, best, atol=1e-4)


def test_shapes_and_too_few_sequences_are_refused():
    belief, observed = GENERATOR.dirichlet(np.ones(3), (N, Q)), GENERATOR.integers(3, size=(N, Q))
    with pytest.raises(ProbeError, match="first two axes"):
        measure(belief, belief, observed[:, :3])
    few = torch.from_numpy(belief[:6]), torch.from_numpy(observed[:6])
    with pytest.raises(ProbeError, match="at least 8"):
        belief_geometry(resid(belief[:6]), *few, POSITION[:6], site="resid_post")
