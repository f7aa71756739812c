"""The live monitor: what it writes, that it changes nothing, and that a resumed run writes the same."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import TINY_MODEL, TINY_RUN, TINY_TASK
from safetensors.torch import load_file
from typer.testing import CliRunner

from interp import InterpError, ModelConfig, load_checkpoint, train
from interp.checkpoint import WEIGHTS
from interp.cli import app
from interp.monitor import MONITOR, SEQUENCES, Monitor, monitor_result
from interp.training import Run
from interp.trajectory import snapshot_models, step_response
from probes import advantage, extract, extract_gradients


def lines(folder):
    return [json.loads(line) for line in (folder / MONITOR).read_text().splitlines()]


@pytest.fixture(scope="module")
def monitored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "monitored"
    return train(TINY_TASK, TINY_MODEL, TINY_RUN, folder, progress=False, monitor="advantage")


def test_watching_changes_nothing(monitored, tiny):
    watched, plain = (load_file(folder / WEIGHTS) for folder in (monitored, tiny))
    assert watched.keys() == plain.keys()
    assert all(torch.equal(watched[name], plain[name]) for name in plain)
    assert not (tiny / MONITOR).exists()


def test_every_log_line_and_snapshot_has_a_record(monitored):
    assert [line["step"] for line in lines(monitored)] == sorted({0, 4, 8, 12} | TINY_RUN.snapshot_steps())


def test_a_record_is_what_the_probe_finds(monitored):
    model, task = load_checkpoint(monitored)
    eval_seed = int(np.random.SeedSequence(TINY_RUN.seed).generate_state(3, np.uint64)[2])
    batch = task.sample(SEQUENCES, seed=eval_seed)
    found = advantage(extract_gradients(model, batch, twin_seed=None))
    last = lines(monitored)[-1]
    for statistic in ("advantage_rms", "routing_gain"):
        for layer, head in ((0, 1), (1, 0)):
            assert last[statistic][layer][head] == pytest.approx(found.value(statistic, layer=layer, head=head))
    assert np.max(last["law_residual"]) < 1e-5


def test_changes_are_those_between_snapshots(tmp_path):
    run = replace(TINY_RUN, steps=300, eval_every=300, snapshots=3)
    folder = train(TINY_TASK, TINY_MODEL, run, tmp_path / "run", progress=False, monitor="advantage")
    eval_seed = int(np.random.SeedSequence(run.seed).generate_state(3, np.uint64)[2])
    tokens = TINY_TASK.sample(SEQUENCES, seed=eval_seed)
    models = snapshot_models(folder)
    steps = [line["step"] for line in lines(folder)]
    assert steps == list(models)
    first, last = (extract(models[step], tokens, ["pattern", "v"], twin_seed=None) for step in steps[-2:])
    variation = (last["pattern", 1] - first["pattern", 1]).abs().sum(-1).mean((0, 2)) / 2
    assert lines(folder)[-1]["routing_change"][1] == pytest.approx(variation.tolist(), rel=1e-2)  # half precision
    relative = (last["v", 0] - first["v", 0])[:, :, 1].norm() / first["v", 0][:, :, 1].norm()
    assert lines(folder)[-1]["value_change"][0][1] == pytest.approx(relative.item(), rel=1e-2)


def test_a_resumed_run_writes_what_an_unbroken_one_does(monitored, tmp_path, monkeypatch):
    update = Run.update

    def stop(run):
        if run.step == 7:
            raise KeyboardInterrupt
        return update(run)

    monkeypatch.setattr(Run, "update", stop)
    options = {"progress": False, "monitor": "advantage"}
    with pytest.raises(KeyboardInterrupt):
        train(TINY_TASK, TINY_MODEL, TINY_RUN, tmp_path / "run", **options)
    with open(tmp_path / "run" / MONITOR, "a") as file:
        file.write('{"step": 6, "law_re')
    monkeypatch.setattr(Run, "update", update)
    train(TINY_TASK, TINY_MODEL, TINY_RUN, tmp_path / "run", resume=True, **options)
    assert lines(tmp_path / "run") == lines(monitored)


def test_the_report_draws_every_record(monitored, tmp_path):
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(monitored), "-o", str(page), "--sequences", "16", "--json"])
    assert done.exit_code == 0, done.output
    assert "heads during training" in page.read_text()
    result = monitor_result(monitored)
    written = [line["advantage_rms"][1][0] for line in lines(monitored)]
    assert result.value("advantage_rms", layer=1, head=0) == written[-1]
    assert result.row("advantage_rms", layer=1, head=0)["null_init"] == written[0]
    drawn = [[float(y) for y in trace.y] for trace in result.figure().data]
    assert written in drawn


def test_step_response_of_sgd_moves_attention_down_the_gradient():
    torch.manual_seed(0)
    model, task = load_checkpoint("bijection-transformer")
    batch = task.sample(16)
    result = step_response(model, batch, lambda m: [torch.optim.SGD(m.parameters(), lr=0.01)], 0.01, resamples=10)
    assert result.value("linear_loss_change") < 0
    assert result.value("loss_change") == pytest.approx(result.value("linear_loss_change"), rel=0.3)
    assert np.isfinite(result.row("attention_correlation", layer=2, head=1)["null_init"])


def test_bad_input_is_named(tiny, tmp_path):
    model, task = load_checkpoint(tiny)
    with pytest.raises(InterpError, match="unknown monitor 'advantge'; known: advantage"):
        Monitor("advantge", model, task.sample(2), task.readout, tmp_path)
    lstm = ModelConfig(architecture="lstm", d_vocab=10, d_out=5, n_ctx=8, n_layers=1, d_model=16, positions="none")
    with pytest.raises(InterpError, match="the lstm has no attention weights"):
        train(TINY_TASK, lstm, TINY_RUN, tmp_path / "lstm", progress=False, monitor="advantage")
    assert not (tmp_path / "lstm").exists()
    (tmp_path / MONITOR).write_text('{"step": 1, "advantage_rms": "none"}\n')
    with pytest.raises(InterpError, match="is not a monitor's file"):
        monitor_result(tmp_path)
    assert monitor_result(tiny) is None
