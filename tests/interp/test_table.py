"""The table: what is resampled, what the verdicts say of planted answers, and which checkpoints are one cell."""

import json

import numpy as np
import pytest

from interp import InterpError, build_model, preset, save_checkpoint
from interp import table as module
from interp.checkpoint import LOG, load_checkpoint
from interp.evaluate import evaluation
from interp.table import crossed, primitives, verdict
from probes.nulls import Bootstrap
from tasks.base import get_task

TASK = get_task("bijection", pairs=3, symbols=4, repeats=0.5)
CHAIN = get_task("hmm", header=False, states=3, symbols=3, steps=6, stickiness=0.9)


def checkpoint(folder, name, seed=0, task=TASK, architecture="mlp", curve=(1.0, 1.0)):
    config = preset(architecture, "small", task, d_model=16, n_layers=1)
    path = folder / name
    save_checkpoint(path, build_model(config, seed).state_dict(), task, config, training={"steps_done": 20}, metrics={})
    lines = [{"step": step, "kl_bits": kl} for step, kl in zip((18, 20), curve, strict=True)]
    (path / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def answers(monkeypatch):
    """Replace what models answer by a function of the batch."""

    def plant(function):
        monkeypatch.setattr(module, "predict", lambda model, batch: function(batch).clamp_min(1e-30).log().float())

    return plant


def test_seeds_and_sequences_are_both_resampled():
    """Of additive effects, the variance is that of the seeds over their number plus that of the sequences."""
    generator = np.random.default_rng(0)
    runs, sequences = generator.normal(size=12), generator.normal(size=400)
    estimate, (low, high) = crossed(runs[:, None] + sequences, Bootstrap(4000))
    assert estimate == pytest.approx(runs.mean() + sequences.mean())
    assert (high - low) / 2 == pytest.approx(1.96 * np.sqrt(runs.var() / 12 + sequences.var() / 400), rel=0.06)


def test_one_seed_leaves_the_bootstrap_over_sequences():
    values = np.random.default_rng(1).exponential(size=(1, 300))
    _, interval = crossed(values, Bootstrap(2000))
    half = 1.96 * values.std() / np.sqrt(300)
    assert np.ptp(interval) / 2 == pytest.approx(half, rel=0.08)


def test_a_ratio_of_equals_is_one_whatever_is_drawn():
    values = np.random.default_rng(2).exponential(size=(1, 50))
    assert crossed(values, Bootstrap(200), over=values[0]) == (pytest.approx(1), (pytest.approx(1), pytest.approx(1)))


@pytest.mark.parametrize(("high", "word"), [(0.05, "realised"), (0.1, "partial"), (0.89, "partial"), (0.9, "not")])
def test_the_verdict_is_that_of_the_upper_end(high, word):
    assert verdict(high) == word


def test_exact_answers_realise_the_primitive(tmp_path, answers):
    answers(lambda batch: batch.posterior)
    (row,) = primitives([checkpoint(tmp_path, "chain-lstm", task=CHAIN, architecture="lstm")], sequences=64)
    assert (row["verdict"], row["nearest"], row["primitive"]) == ("realised", "Bayes", "transport")
    assert (row["claim"], row["agree"]) == ("no", False)
    assert row["kl_bits"] == pytest.approx(0, abs=1e-6)


def test_a_windowed_answer_is_not_transport_and_is_recognised(tmp_path, answers):
    answers(lambda batch: CHAIN.baselines(batch)["window 2"])
    (row,) = primitives([checkpoint(tmp_path, "chain-mlp", task=CHAIN)], sequences=64)
    assert row["nearest"] == "window 2"
    assert row["kl_bits"] > row["trivial_kl_bits"]
    assert (row["verdict"], row["agree"]) == ("not", True)


def test_halfway_to_bayes_is_partial(tmp_path, answers):
    answers(lambda batch: (batch.posterior + CHAIN.baselines(batch)["window 3"]) / 2)
    (row,) = primitives([checkpoint(tmp_path, "chain-mlp", task=CHAIN)], sequences=64)
    assert row["verdict"] == "partial"


def test_seeds_make_one_row_of_the_mean_figures(tmp_path):
    paths = [checkpoint(tmp_path, name, seed) for seed, name in enumerate(["bijection-mlp", "bijection-mlp-seed1"])]
    (row,) = primitives(paths, sequences=64)
    single = [evaluation(*load_checkpoint(path), sequences=64) for path in paths]
    assert row["seeds"] == 2
    for figure in ("mae_bits", "kl_bits", "tv", "accuracy", "curve_mae_bits"):
        assert row[figure] == pytest.approx(np.mean([found[figure] for found in single]), rel=1e-5)
    low, high = row["kl_bits_ci"]
    assert low < row["kl_bits"] < high


def test_seeds_of_different_tasks_are_refused(tmp_path):
    paths = [checkpoint(tmp_path, "a-mlp"), checkpoint(tmp_path, "a-mlp-seed1", task=TASK.replace(repeats=1.0))]
    with pytest.raises(InterpError, match="differ in task or model"):
        primitives(paths, sequences=16)


def test_no_checkpoint_is_said():
    with pytest.raises(InterpError, match="no checkpoint"):
        primitives([])


@pytest.mark.parametrize(("curve", "flat"), [((0.5, 0.49), True), ((0.5, 0.3), False), ((5e-4, 2e-4), True)])
def test_a_run_that_still_falls_has_not_converged(tmp_path, answers, curve, flat):
    answers(lambda batch: batch.posterior)
    (row,) = primitives([checkpoint(tmp_path, "a-mlp", curve=curve)], sequences=16)
    assert row["converged"] is flat


def test_without_a_log_nothing_is_said_of_convergence(tmp_path, answers):
    answers(lambda batch: batch.posterior)
    path = checkpoint(tmp_path, "a-mlp")
    (path / LOG).unlink()
    (row,) = primitives([path], sequences=16)
    assert row["converged"] is None
