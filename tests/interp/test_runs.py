"""Every architecture trains, resumes exactly, and leaves a checkpoint that loads, on tasks of every kind."""

from dataclasses import replace

import pytest
import torch
from conftest import TINY_RUN

from interp import diagnose, load_checkpoint, preset, train
from interp.training import Run
from tasks import get_task

RUNS = {
    "hmm-mamba": (
        "hmm",
        "mamba",
        {"states": 2, "symbols": 2, "steps": 4},
        {"d_model": 16, "n_layers": 1, "d_state": 4},
    ),
    "recall-lstm": ("recall", "lstm", {"pairs": 3, "keys": 8, "values": 8}, {"d_model": 16, "n_layers": 2}),
    "regression-mlp": ("regression", "mlp", {"dimensions": 2, "pairs": 4}, {"d_model": 16, "n_layers": 2}),
    "regression-transformer": ("regression", "transformer", {"dimensions": 2}, {"d_model": 16, "n_layers": 1}),
    "hmm-mlp": ("hmm", "mlp", {"states": 2, "symbols": 2, "steps": 4}, {"d_model": 16, "n_layers": 1, "window": 3}),
}


@pytest.mark.parametrize("key", RUNS)
@pytest.mark.parametrize("objective", ["posterior", "labels"])
def test_a_run_interrupted_and_resumed_is_the_straight_run(key, objective, tmp_path, monkeypatch):
    task_name, architecture, parameters, settings = RUNS[key]
    task = get_task(task_name, **parameters)
    model_config = preset(architecture, "small", task, **settings)
    config = replace(TINY_RUN, objective=objective)
    straight = train(task, model_config, config, tmp_path / "straight", progress=False)

    update = Run.update

    def interrupt(run):
        if run.step == 6:
            raise KeyboardInterrupt
        return update(run)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "update", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(task, model_config, config, tmp_path / "resumed", progress=False)
    resumed = train(task, model_config, config, tmp_path / "resumed", resume=True, progress=False)

    (first, _), (second, loaded) = load_checkpoint(straight), load_checkpoint(resumed)
    assert loaded == task
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    results = diagnose(second, task, sequences=16).results
    assert {result.probe for result in results.values()} >= {"calibration", "value_manifold(resid_post)"}
