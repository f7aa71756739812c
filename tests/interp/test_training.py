import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY_MODEL, TINY_RUN, TINY_TASK
from safetensors.torch import load_file

from interp import InterpError, TrainConfig, build_model, load_checkpoint, train
from interp.checkpoint import LOG, STATE, WEIGHTS, snapshot_paths
from interp.recipe import excess_bits, make_optimizers, train_config
from interp.training import Run
from probes import calibration
from tasks import get_task

SCRIPT = """
import sys
sys.path.insert(0, "tests")
from conftest import TINY_MODEL, TINY_RUN, TINY_TASK
from interp import train
from dataclasses import replace
train(TINY_TASK, TINY_MODEL, replace(TINY_RUN, steps=400), sys.argv[1], resume="--resume" in sys.argv, progress=False)
"""


def weights(folder):
    return load_file(folder / WEIGHTS)


def log(folder):
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_killed_at_any_moment_ends_bit_for_bit_like_one_that_was_not(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    subprocess.run([sys.executable, "-c", SCRIPT, straight], check=True)
    kills = 0
    arguments = [sys.executable, "-c", SCRIPT, killed]
    for delay in (0.1, 0.45, 0.8):
        process = subprocess.Popen(arguments)
        deadline = time.monotonic() + 60
        while process.poll() is None and not (killed / LOG).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(delay)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
        if not (killed / STATE).exists():
            break
        arguments = [sys.executable, "-c", SCRIPT, killed, "--resume"]
    if (killed / STATE).exists():
        subprocess.run(arguments, check=True)
    assert kills, "the run was never killed: make it longer"
    assert same(weights(straight), weights(killed))
    assert [line["step"] for line in log(killed)] == [line["step"] for line in log(straight)]
    assert [line["loss_bits"] for line in log(killed)] == [line["loss_bits"] for line in log(straight)]


def test_a_run_learns_and_leaves_a_whole_folder(tmp_path):
    folder = train(TINY_TASK, TINY_MODEL, replace(TINY_RUN, steps=300), tmp_path / "run", progress=False)
    curve = log(folder)
    assert curve[-1]["kl_bits"] < 0.5 * curve[0]["kl_bits"]
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        ["README.md", "config.json", "model.safetensors", "snapshots", "training.jsonl"]
    )
    assert min(snapshot_paths(folder)) == 0
    assert max(snapshot_paths(folder)) == 300


def test_the_objectives_have_the_same_expectation():
    task = get_task("bijection", symbols=4, pairs=3)
    batch = task.sample(50_000, seed=3)
    torch.manual_seed(0)
    output = torch.randn(1, 3, 4).expand(len(batch), 3, 4)
    posterior, labels = (excess_bits(output, batch, objective, "categorical") for objective in ("posterior", "labels"))
    exact = calibration(output, batch.posterior, resamples=0).value("kl_bits")
    assert posterior.item() == pytest.approx(exact, rel=1e-4)
    spread = float(np.log2(np.e)) * output.log_softmax(-1).std().item() / np.sqrt(3 * len(batch))
    assert labels.item() == pytest.approx(exact, abs=5 * spread)


def test_muon_gets_the_matrices_of_the_blocks_and_adamw_the_rest():
    model = build_model(TINY_MODEL)
    adamw, muon = make_optimizers(model, TINY_RUN)
    names = {id(p): name for name, p in model.named_parameters()}
    in_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    in_adamw = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert in_muon == {n for n in names.values() if n.startswith("blocks.") and "norm" not in n}
    assert in_muon | in_adamw == set(names.values())
    assert not in_muon & in_adamw


def test_the_schedule_rises_stays_and_falls_to_zero():
    config = TrainConfig(steps=100, warmup=9, decay=0.5)
    values = [config.schedule(step) for step in range(101)]
    assert values[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert values[10:50] == pytest.approx([1.0] * 40)
    assert values[75] == pytest.approx(0.5)
    assert values[100] == 0


def test_a_diverging_loss_stops_and_keeps_the_last_good_weights(tmp_path, monkeypatch):
    good = {}
    update = Run.update

    def spoil(run):
        if run.step == 10:
            with torch.no_grad():
                run.module.unembed.weight.fill_(torch.nan)
        loss = update(run)
        if run.step == 7:
            good.update({name: t.clone() for name, t in run.module.state_dict().items()})
        return loss

    monkeypatch.setattr(Run, "update", spoil)
    with pytest.raises(InterpError, match=r"became nan at step 11; the weights of step 8 are kept .* lower --lr"):
        train(TINY_TASK, TINY_MODEL, TINY_RUN, tmp_path / "run", progress=False)
    model, _ = load_checkpoint(tmp_path / "run")
    assert same(dict(model.state_dict()), good)
    assert [line["step"] for line in log(tmp_path / "run")] == [4, 8]


def test_a_loss_that_explodes_without_overflowing_is_divergence_too(tmp_path):
    wild = replace(TINY_RUN, optimizer="adamw", lr=1e3, clip=1e9, warmup=0)
    with pytest.raises(InterpError, match=r"the loss became .* at step"):
        train(TINY_TASK, TINY_MODEL, wild, tmp_path / "run", progress=False)
    model, _ = load_checkpoint(tmp_path / "run")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_bad_settings_are_named(tmp_path, tiny):
    with pytest.raises(InterpError, match=r"not empty: pass --resume"):
        train(TINY_TASK, TINY_MODEL, TINY_RUN, tiny, progress=False)
    with pytest.raises(InterpError, match="no unfinished run"):
        train(TINY_TASK, TINY_MODEL, TINY_RUN, tmp_path / "none", resume=True, progress=False)
    with pytest.raises(InterpError, match="steps must be at least 1, got 0"):
        TrainConfig(steps=0)
    with pytest.raises(InterpError, match="unknown training setting 'optimiser': did you mean 'optimizer'"):
        train_config(optimiser="muon")


def test_resuming_with_other_settings_is_refused(tmp_path):
    run = Run(TINY_TASK, TINY_MODEL, TINY_RUN, tmp_path / "run", TINY_TASK, "")
    run.start(resume=False)
    with pytest.raises(InterpError, match="has training steps=12, you asked for 13"):
        train(
            TINY_TASK,
            TINY_MODEL,
            replace(TINY_RUN, steps=13),
            tmp_path / "run",
            training_task=TINY_TASK,
            resume=True,
        )


def test_two_processes_train_like_one(tmp_path):
    settings = ["symbols=5", "pairs=4"], ["d_model=16", "n_layers=1", "n_heads=2"]
    config = ["optimizer=adamw", "batch_size=8", "eval_every=10", "eval_sequences=16"]
    options = [f"--set={s}" for s in settings[0]] + [f"--model-set={s}" for s in settings[1]]
    options += [f"--config={s}" for s in config] + ["--steps=20"]
    command = [str(Path(sys.executable).with_name("windtunnel")), "train", "bijection", "transformer", *options]
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    subprocess.run([*command, f"--out={tmp_path / 'one'}"], check=True, capture_output=True)
    together = [*torchrun, *command, f"--out={tmp_path / 'two'}"]
    subprocess.run(together, check=True, capture_output=True, env=environment)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)
    losses = [[line["loss_bits"] for line in log(tmp_path / name)] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
