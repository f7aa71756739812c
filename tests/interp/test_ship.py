"""A checkpoint is shipped in half precision only where its figures stay."""

import json

import pytest
import torch

from interp import InterpError, build_model, load_checkpoint, preset, save_checkpoint
from interp.checkpoint import CARD, LOG, WEIGHTS, load_tensors, read_checkpoint
from interp.evaluate import evaluation
from interp.ship import ship
from tasks.base import get_task

TASK = get_task("bijection", pairs=3, symbols=4)


def checkpoint(folder, scale=1.0):
    config = preset("mlp", "small", TASK, d_model=16, n_layers=1)
    weights = build_model(config, 0).state_dict()
    last = [name for name in weights if "unembed" in name][-1]
    weights[last] = torch.full_like(weights[last], scale) + weights[last]
    save_checkpoint(folder, weights, TASK, config, training={"steps_done": 1}, metrics={})
    (folder / LOG).write_text(json.dumps({"step": 1}) + "\n")
    return folder


def test_half_precision_where_it_changes_nothing(tmp_path):
    source = checkpoint(tmp_path / "a-mlp", scale=0.0)
    row = ship(source, tmp_path / "shipped")
    copy = tmp_path / "shipped" / "a-mlp"
    assert (row["weights"], row["name"]) == ("half", "a-mlp")
    for name, tensor in load_tensors(copy / WEIGHTS).items():
        assert torch.equal(tensor, load_tensors(source / WEIGHTS)[name].half())
    assert (copy / LOG).read_text() == (source / LOG).read_text()
    measured = evaluation(*load_checkpoint(copy))
    assert read_checkpoint(copy).metrics["kl_bits"] == pytest.approx(measured["kl_bits"], rel=1e-6)
    assert "half precision" in (copy / CARD).read_text()


def test_full_precision_where_rounding_would_show(tmp_path):
    """Weights near 2048, whose neighbours in half precision are 2 apart, differ by what the answer depends on."""
    source = checkpoint(tmp_path / "a-mlp", scale=2048.0)
    row = ship(source, tmp_path / "shipped")
    assert row["weights"] == "full"
    assert row["change"] > 0.02
    for name, tensor in load_tensors(tmp_path / "shipped" / "a-mlp" / WEIGHTS).items():
        assert torch.equal(tensor, load_tensors(source / WEIGHTS)[name])


def test_a_shipped_checkpoint_is_not_overwritten(tmp_path):
    source = checkpoint(tmp_path / "a-mlp")
    ship(source, tmp_path / "shipped")
    with pytest.raises(InterpError, match="delete it first"):
        ship(source, tmp_path / "shipped")
