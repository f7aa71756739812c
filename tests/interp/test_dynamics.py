"""Training dynamics of a tiny run: the last snapshot is the checkpoint, and the slider holds every snapshot."""

from dataclasses import replace

import pytest
from conftest import TINY_MODEL, TINY_RUN, TINY_TASK

from interp import load_checkpoint
from interp.dynamics import dynamics
from interp.errors import CheckpointError
from interp.evaluate import measure
from interp.training import train
from probes import extract, key_orthogonality


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    run = replace(TINY_RUN, snapshots=5)
    return train(TINY_TASK, TINY_MODEL, run, tmp_path_factory.mktemp("runs") / "snapshots", progress=False)


@pytest.fixture(scope="module")
def found(folder):
    return dynamics(folder, sequences=32)


def test_the_last_snapshot_is_the_checkpoint_itself(found, folder):
    model, task = load_checkpoint(folder)  # snapshots are in half precision
    batch = task.for_training().sample(32, seed=0)
    frame = found.to_frame()
    last = frame[frame["step"] == frame["step"].max()].set_index("statistic")
    assert last.loc["kl_bits", "estimate"] == pytest.approx(measure(model, batch, "categorical")["kl_bits"], rel=1e-3)
    keys = key_orthogonality(extract(model, batch, ["k"]), batch.hypothesis).frame
    per_layer = keys[keys["statistic"] == "mean_abs_cos"].groupby("layer")["estimate"].mean()
    assert list(last.loc["mean_abs_cos", "estimate"]) == pytest.approx(list(per_layer), rel=1e-3)


def test_every_snapshot_is_a_frame_and_a_stop_of_the_slider(found):
    figure = found.animation()
    steps = [str(step) for step in found.results]
    assert len(steps) >= 4
    assert [frame.name for frame in figure.frames] == steps
    assert [step.label for step in figure.layout.sliders[0].steps] == steps
    assert len(found.figure().data) > 4


def test_checkpoints_without_snapshots_say_so():
    with pytest.raises(CheckpointError, match="snapshots"):
        dynamics("bijection-mlp")
