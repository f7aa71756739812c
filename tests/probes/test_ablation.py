"""Ablations find the heads that a planted model depends on, at the costs that follow from its construction."""

import numpy as np
import pytest
import torch
from toy import HEADS, LAYERS, Toy, kl

from interp import load_checkpoint
from interp.models.base import build_model, preset
from probes import ProbeError, Subject, head_ablation, head_removal, layer_ablation
from probes.interventions import partners
from tasks import get_task


def costs(batch, by, seed=0):
    """KL when the log-odds become what the ablation leaves, by hand."""
    p = batch.posterior
    if by == "zero":
        return kl(p, torch.full_like(p, 0.5))
    if by == "resample":
        return kl(p, p[partners(len(p), seed)])
    log_odds = (p[..., 0] / p[..., 1]).log().mean(0)
    q = torch.stack([log_odds.sigmoid(), 1 - log_odds.sigmoid()], -1)
    return kl(p, q.expand_as(p))


@pytest.mark.parametrize("by", ["zero", "mean", "resample"])
def test_the_one_head_that_carries_the_task_is_found_at_its_exact_cost(by):
    model = Toy((1, 2))
    batch = model.batch()
    found = head_ablation(Subject(model, batch), by=by)
    for layer, head in np.ndindex(LAYERS, HEADS):
        row = found.row("kl_increase_bits", layer=layer, head=head)
        if (layer, head) == (1, 2):
            assert row["estimate"] == pytest.approx(float(costs(batch, by).mean()), rel=1e-5)
            assert row["low"] > row["null_random"] > 0
        else:
            assert row["estimate"] == pytest.approx(0, abs=1e-9)


def test_what_a_layer_writes_is_ablated_whole():
    model = Toy((1, 2))
    batch = model.batch()
    found = layer_ablation(Subject(model, batch), by="zero")
    assert found.value("kl_increase_bits", layer=0) == pytest.approx(0, abs=1e-9)
    assert found.value("kl_increase_bits", layer=1) == pytest.approx(float(costs(batch, "zero").mean()), rel=1e-5)


def test_greedy_removal_keeps_one_of_two_heads_that_stand_in_for_each_other():
    model = Toy((0, 1), (1, 0))
    subject = Subject(model, model.batch())
    single = head_ablation(subject, by="zero", placebos=1).frame["estimate"]
    assert single.abs().max() < 1e-9  # either alone costs nothing
    frame = head_removal(subject, by="zero").frame
    assert list(frame["removed"]) == [1, 2, 3, 4, 5, 6]
    assert frame["estimate"][:5].abs().max() < 1e-9
    last = tuple(frame[["layer", "head"]].iloc[5])
    assert last in {(0, 1), (1, 0)}
    held_out = kl(subject.batch.posterior, torch.tensor(0.5)).mean(1)[1::2].mean()
    assert frame["estimate"][5] == pytest.approx(float(held_out), rel=1e-5)


def test_cumulative_removal_follows_single_costs():
    model = Toy((0, 1))
    frame = head_removal(Subject(model, model.batch()), order="cumulative", by="zero").frame
    assert tuple(frame[["layer", "head"]].iloc[5]) == (0, 1)
    assert frame["estimate"][:5].abs().max() < 1e-9


def test_removal_of_some_heads_stops_where_told():
    model = Toy((0, 1))
    found = head_removal(Subject(model, model.batch()), heads=[(0, 0), (0, 1), (1, 1)], steps=2).frame
    assert set(zip(found["layer"], found["head"], strict=True)) == {(0, 0), (1, 1)}
    with pytest.raises(ProbeError, match=r"no head \(2, 0\); this model has 2 x 3"):
        head_removal(Subject(model, model.batch()), heads=[(2, 0)])


def test_one_sequence_has_no_other_to_resample():
    model = Toy((0, 0))
    with pytest.raises(ProbeError, match="at least 2 sequences"):
        head_ablation(Subject(model, model.batch(1)), by="resample")


def test_models_without_heads_are_pointed_at_their_mixer():
    task = get_task("bijection", symbols=4, pairs=3)
    subject = Subject(build_model(preset("lstm", "small", task, n_layers=2, d_model=8), 0), task.sample(4, seed=0))
    with pytest.raises(ProbeError, match="layer_ablation fits it"):
        head_ablation(subject)
    assert len(layer_ablation(subject).frame) == 2


def test_edits_of_half_the_batches_are_those_of_the_whole():
    model, task = load_checkpoint("bijection-transformer")
    batch = task.sample(6, seed=0)
    whole, halves = (head_ablation(Subject(model, batch, batch_size=n), by="resample", placebos=1) for n in (6, 4))
    np.testing.assert_allclose(whole.frame["estimate"], halves.frame["estimate"], rtol=1e-4, atol=1e-7)
