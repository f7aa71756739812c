"""Responsibilities, the first-order prediction and settling, on heads whose answer is known."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import TINY_MODEL, TINY_TASK
from scipy.stats import pearsonr
from sklearn.metrics import mutual_info_score
from test_advantage import causal, draw, head, llama_gradients

from interp import ModelConfig, build_model
from interp.trajectory import stepped
from probes import Activations, ProbeError, extract_gradients, first_order, responsibilities, settling
from probes.responsibilities import specialisation, users

PLACE = {"layer": 0, "head": 0}


def values(v):
    return {"blocks.0.attn.hook_v": v}


def with_value_gradient(cache, gradient):
    return {**cache, "blocks.0.attn.hook_v_grad": gradient}


def test_users_and_specialisation_of_extreme_heads():
    alone, all_alike = torch.eye(8).double()[None, None], torch.full((1, 1, 8, 8), 1 / 8).double()
    assert users(alone).item() == pytest.approx(1)
    assert users(all_alike).item() == pytest.approx(8)
    assert specialisation(alone).item() == pytest.approx(3)
    assert specialisation(all_alike).item() == pytest.approx(0, abs=1e-12)


def test_specialisation_is_scikit_learns_mutual_information():
    counts = np.random.default_rng(0).multinomial(100, np.full(7, 1 / 7), size=7)
    nats = mutual_info_score(None, None, contingency=counts)
    assert specialisation(torch.from_numpy(counts / 100)[None, None]).item() == pytest.approx(nats / np.log(2))


def test_the_value_law_holds_in_real_models_and_knows_wrong_gradients():
    grouped = responsibilities(llama_gradients(torch.float64), resamples=10).frame
    residual = grouped[grouped["statistic"] == "value_law_residual"]
    assert len(residual) == 2 * 2
    assert residual["estimate"].max() < 1e-10
    model = build_model(TINY_MODEL, seed=1)
    result = responsibilities(extract_gradients(model, TINY_TASK.sample(9)), resamples=10)
    assert result.row("value_law_residual", layer=1, head=1)[["estimate", "null_init"]].max() < 1e-5
    assert result.row("value_law_residual", layer=1, head=1)["null_uniform"] > 1e-4
    pattern, u, v = causal(1), draw(2, 6, 5, 2, 3), draw(3, 6, 5, 2, 3)
    shuffled = with_value_gradient(head(pattern, u, v), draw(4, 6, 5, 2, 3))
    assert responsibilities(shuffled).value("value_law_residual", **PLACE) > 0.5


def test_prototypes_that_follow_their_users_align_and_a_shared_drift_is_the_null():
    pattern, u, v = causal(1, 50), draw(2, 50, 5, 2, 3), draw(3, 50, 5, 2, 3)
    gradient = torch.einsum("bhij, bihd -> bjhd", pattern, u)
    grads = with_value_gradient(head(pattern, u, v), gradient)
    follows = responsibilities(grads, values(v - 0.1 * gradient)).row("prototype_alignment", **PLACE)
    assert follows["estimate"] == pytest.approx(1)
    assert responsibilities(grads, values(v + gradient)).value("prototype_alignment", **PLACE) == pytest.approx(-1)
    drift = responsibilities(grads, values(v - gradient.mean(1, keepdim=True))).row("prototype_alignment", **PLACE)
    assert drift["estimate"] > 0.2
    assert drift["null_permutation"] == pytest.approx(drift["estimate"])
    with pytest.raises(ProbeError, match="use the same inputs"):
        responsibilities(grads, values(v[:, 1:]))


def planted_step(lr, sign=1.0):
    """A head that descends in the space of scores itself, and values that stay."""
    pattern, u, v = causal(5, 40, 1), draw(6, 40, 5, 1, 3), draw(7, 40, 5, 1, 3)
    b = torch.einsum("bihd, bjhd -> bhij", u, v)
    gradient = pattern * (b - (pattern * b).sum(-1, keepdim=True))
    logits = torch.zeros(40, 1, 2, dtype=torch.float64)
    cache = with_value_gradient(head(pattern, u, v), torch.einsum("bhij, bihd -> bjhd", pattern, u))
    stepped_pattern = (pattern.log() - sign * lr * gradient).softmax(-1)
    after = {"blocks.0.attn.hook_pattern": stepped_pattern, **values(v)}
    return Activations(cache, logits=logits), Activations(after, logits=logits), gradient


def test_descent_in_the_space_of_scores_is_predicted_exactly():
    before, after, gradient = planted_step(1e-4)
    target = torch.full((40, 1, 2), 0.5, dtype=torch.float64)
    result = first_order(before, after, target, 1e-4, linear=torch.full((40,), -2.0))
    assert result.value("attention_correlation", **PLACE) == pytest.approx(1, abs=1e-6)
    assert result.value("attention_slope", **PLACE) == pytest.approx(1, rel=1e-3)
    assert result.value("routing_correlation", **PLACE) == pytest.approx(1, abs=1e-6)
    assert result.value("routing_slope", **PLACE) == pytest.approx(1, rel=1e-3)
    expected = -1e-4 * gradient.square().sum((1, 2, 3)).mean().item()
    assert result.value("routing", **PLACE) == pytest.approx(expected, rel=1e-3)
    assert result.value("values", **PLACE) == 0
    assert result.value("loss_change") == 0
    assert result.value("linear_loss_change") == -2
    ascent = first_order(*planted_step(1e-4, sign=-1.0)[:2], target, 1e-4)
    assert ascent.value("attention_correlation", **PLACE) == pytest.approx(-1, abs=1e-6)


def test_correlations_are_those_of_scipy():
    before, _, gradient = planted_step(1e-4)
    other = causal(9, 40, 1)
    after = Activations({"blocks.0.attn.hook_pattern": other, **values(before["v", 0])}, logits=before.logits)
    result = first_order(before, after, torch.full((40, 1, 2), 0.5, dtype=torch.float64), 0.3)
    pattern = before["pattern", 0]
    mask = torch.ones(5, 5).tril().bool()
    moved = torch.where(mask, other.log() - pattern.log(), 0)
    routing, predicted = (gradient * moved).sum((1, 2, 3)), -0.3 * gradient.square().sum((1, 2, 3))
    assert result.value("routing_correlation", **PLACE) == pytest.approx(pearsonr(predicted, routing)[0])
    softmax_change = torch.func.jvp(lambda s: s.softmax(-1), (pattern.log(),), (-0.3 * gradient.nan_to_num(),))[1]
    entries = [t.nan_to_num().flatten().numpy() for t in (softmax_change, other - pattern)]
    assert result.value("attention_correlation", **PLACE) == pytest.approx(pearsonr(*entries)[0])


def test_a_small_step_of_the_weights_changes_the_loss_to_first_order():
    model, batch = build_model(ModelConfig(**{**TINY_MODEL.to_dict(), "init_std": 0.3})).double(), TINY_TASK.sample(16)
    gaps = []
    for lr in (1e-3, 1e-4):
        after, linear = stepped(model, batch, lambda m, lr=lr: [torch.optim.SGD(m.parameters(), lr=lr)])
        before = extract_gradients(model, batch, twin_seed=None)
        later = extract_gradients(after, batch, twin_seed=None)
        result = first_order(before, later, batch.posterior, lr, linear=linear)
        change, exact = result.value("loss_change"), result.value("linear_loss_change")
        assert exact < 0
        gaps.append(abs(change / exact - 1))
    assert gaps[1] < 1e-3
    assert gaps[0] / gaps[1] == pytest.approx(10, rel=0.1)  # what is left is of second order


def snapshots(attention, value, steps):
    """Patterns and values that move from one random state to another, by the fraction that is left at each step."""
    begin, end = causal(1, 16, 2), causal(2, 16, 2)
    start, stop = draw(3, 16, 5, 2, 3), draw(4, 16, 5, 2, 3)
    return {
        step: {
            "blocks.0.attn.hook_pattern": end + attention(step) * (begin - end),
            "blocks.0.attn.hook_v": stop + value(step) * (start - stop),
        }
        for step in steps
    }


def test_settling_finds_the_planted_half_lives():
    def reaches_half_at(when):
        return lambda step: float(np.interp(np.log2(1 + step), [0, np.log2(1 + when), 10], [1, 0.5, 0]))

    steps = [2**k - 1 for k in range(11)]
    result = settling(snapshots(reaches_half_at(15), reaches_half_at(127), steps))
    for h in (0, 1):
        assert result.value("attention", layer=0, head=h) == pytest.approx(15)
        assert result.value("values", layer=0, head=h) == pytest.approx(127)
        row = result.row("lag_values", layer=0, head=h)
        assert (row["low"], row["estimate"], row["high"]) == pytest.approx((3, 3, 3))


def test_turning_the_basis_of_values_unsettles_them_and_not_what_can_be_read_from_them():
    start, stop = draw(3, 16, 5, 1, 2), draw(4, 16, 5, 1, 2)
    turned = {}
    for k in range(5):
        angle = torch.tensor(np.pi * (1 - k / 4), dtype=torch.float64)
        rotation = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
        v = stop @ rotation if k else start
        turned[2**k - 1] = {"blocks.0.attn.hook_pattern": causal(k, 16, 1), "blocks.0.attn.hook_v": v}
    result = settling(turned)
    assert result.value("values_relative", **PLACE) < 1 < result.value("values", **PLACE)


def test_bad_input_is_named():
    before, after, _ = planted_step(0.1)
    target = torch.full((40, 1, 2), 0.5, dtype=torch.float64)
    with pytest.raises(ProbeError, match="lr must be positive"):
        first_order(before, after, target, 0.0)
    with pytest.raises(ProbeError, match="extract both from one batch"):
        first_order(before, replace(after, logits=None), target, 0.1)
    with pytest.raises(ProbeError, match="at least 4 snapshots of one run, got 2"):
        settling(snapshots(lambda s: 1.0, lambda s: 1.0, [0, 1]))
    with pytest.raises(ProbeError, match=r"between 0 and 1, got 1\.0"):
        settling(snapshots(lambda s: 1.0, lambda s: 1.0, range(4)), fraction=1.0)
