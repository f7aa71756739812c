"""Swaps, ablations and pushes of planted directions do to the answer what the construction says."""

import numpy as np
import pytest
import torch
from toy import D_MODEL, Toy, kl

from probes import (
    ProbeError,
    Subject,
    decoding_axis,
    encoding_subspace,
    principal_subspace,
    steering,
    subspace_ablation,
    subspace_swap,
)
from probes.interventions import partners


@pytest.fixture(scope="module")
def planted():
    """A model that reads one direction, written in its first layer, and a direction that says the same unread."""
    model = Toy((0, 1))
    return model, Subject(model, model.batch(40)), [model.direction(0, 1)] * 2, [model.direction(1, 1)] * 2


def test_a_swap_of_the_belief_direction_gives_the_other_sequences_posterior(planted):
    _, subject, used, _ = planted
    found = subspace_swap(subject, used, per_position=True)
    p = subject.batch.posterior
    target = p[partners(len(p), 0)]
    for layer in (0, 1):
        row = found.row("redirected_bits", layer=layer)
        assert found.value("kl_to_target_bits", layer=layer) == pytest.approx(0, abs=1e-6)
        assert row["estimate"] == pytest.approx(float(kl(target, p).mean()), rel=1e-5)
        assert row["low"] > max(row["null_random"], row["null_wrong_state"], row["null_mean"])
    for q in range(p.shape[1]):
        one = found.value("redirected_bits", layer=1, query=q)
        assert one == pytest.approx(float(kl(target, p)[:, q].mean()), rel=1e-5)


def test_the_target_can_be_any_posterior_that_the_swap_should_produce(planted):
    _, subject, used, _ = planted
    target = torch.full_like(subject.batch.posterior, 0.5)
    found = subspace_swap(subject, used, partner=torch.arange(40), target=target)
    # each sequence gets its own coordinates back
    assert found.value("redirected_bits", layer=0) == pytest.approx(0, abs=1e-6)
    expected = float(kl(target, subject.batch.posterior).mean())
    assert found.value("kl_to_target_bits", layer=0) == pytest.approx(expected, rel=1e-5)


def test_a_direction_that_is_not_read_is_inert_under_every_intervention(planted):
    _, subject, _, unread = planted
    assert subspace_ablation(subject, unread).value("kl_increase_bits", layer=1) == pytest.approx(0, abs=1e-9)
    assert subspace_swap(subject, unread).value("redirected_bits", layer=1) == pytest.approx(0, abs=1e-6)
    assert steering(subject, unread).value("entropy_shift", layer=1) == pytest.approx(0, abs=1e-9)


def test_ablating_the_belief_direction_costs_what_forgetting_it_costs(planted):
    _, subject, used, unread = planted
    p = subject.batch.posterior
    mean = (p[..., 0] / p[..., 1]).log().mean(0).sigmoid()
    expected = kl(p, torch.stack([mean, 1 - mean], -1).expand_as(p))
    found = subspace_ablation(subject, used, shuffled=unread, per_position=True)
    row = found.row("kl_increase_bits", layer=0)
    assert row["estimate"] == pytest.approx(float(expected.mean()), rel=1e-5)
    assert row["low"] > row["null_random"]
    assert row["null_shuffled"] == pytest.approx(0, abs=1e-9)
    assert row["p_value"] == pytest.approx(1 / 9)
    # one position alone costs its answer's share
    assert found.value("kl_increase_bits", layer=1, query=2) == pytest.approx(
        float(expected[:, 2].mean()) / 4, rel=1e-5
    )


def test_steering_shifts_log_odds_by_the_stated_distance(planted):
    _, subject, used, _ = planted
    p = subject.batch.posterior
    log_odds = (p[..., 0] / p[..., 1]).log()
    distance = 0.5 * float(log_odds.float().std())

    def entropy(x):
        q = torch.stack([x.sigmoid(), (-x).sigmoid()], -1)
        return -(q * q.log2()).sum(-1)

    expected = (entropy(log_odds + distance) - entropy(log_odds - distance)).mean()
    found = steering(subject, used, amount=0.5)
    assert found.value("entropy_shift", layer=0) == pytest.approx(float(expected), rel=1e-4)
    with pytest.raises(ProbeError, match="one direction a layer"):
        steering(subject, [torch.eye(D_MODEL)[:, :2]] * 2)


def test_some_layers_alone_keep_their_numbers(planted):
    _, subject, used, _ = planted
    some, whole = (subspace_ablation(subject, bases, per_position=True) for bases in ({1: used[1]}, used))
    assert set(some.frame["layer"]) == {1}
    kept = whole.frame[whole.frame["layer"] == 1].reset_index(drop=True)
    np.testing.assert_allclose(some.frame["estimate"], kept["estimate"])


def test_bases_and_sites_that_do_not_fit_are_named(planted):
    _, subject, used, _ = planted
    with pytest.raises(ProbeError, match=r"bases have shapes \{0: \(16, 1\)\}; .* 2 layers of width 16"):
        subspace_ablation(subject, used[:1])
    with pytest.raises(ProbeError, match="can't edit site 'scores'"):
        subspace_ablation(subject, used, site="scores")


def test_the_encoding_subspace_is_where_the_belief_was_written():
    generator = np.random.default_rng(0)
    belief = generator.dirichlet(np.ones(3), 500)
    written = np.linalg.qr(generator.normal(size=(12, 2)))[0]
    points = (belief @ generator.normal(size=(3, 2))) @ written.T
    found = encoding_subspace(points + 0.01 * generator.normal(size=(500, 12)), belief, 2)
    np.testing.assert_allclose(found.T @ found, np.eye(2), atol=1e-5)
    assert np.linalg.svd(found.numpy().T @ written)[1].min() > 0.999
    with pytest.raises(ProbeError, match="spans 2 directions"):
        encoding_subspace(points, belief, 3)  # probabilities sum to 1


def test_decoding_reads_what_encoding_wrote_and_avoids_what_disturbs_it():
    generator = np.random.default_rng(1)
    target, disturbance = generator.normal(size=(2, 800))
    points = np.stack([target + disturbance, disturbance, 0.001 * generator.normal(size=800)], 1)
    np.testing.assert_allclose(np.abs(encoding_subspace(points, target[:, None], 1)[:, 0]), [1, 0, 0], atol=0.06)
    np.testing.assert_allclose(np.abs(decoding_axis(points, target)[:, 0]), [0.7071, 0.7071, 0], atol=0.02)
    with pytest.raises(ProbeError, match="no axis decodes"):
        decoding_axis(points, np.zeros(800))


def test_the_principal_subspace_holds_the_largest_variance():
    points = np.random.default_rng(2).normal(size=(2000, 3)) * [1, 5, 3]
    found = np.abs(principal_subspace(points, 2).numpy())
    np.testing.assert_allclose(found, [[0, 0], [1, 0], [0, 1]], atol=0.05)
