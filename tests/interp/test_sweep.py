"""A sweep trains each cell once, whatever fails or is killed, and gives the same rows on every backend."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from interp import InterpError, load_checkpoint
from interp.checkpoint import CONFIG, LOG, read_checkpoint
from interp.sweep import grid, search, sweep
from interp.zoo import ZOO, tunnel_task

SHORT = {"steps": 2, "batch_size": 4, "eval_sequences": 8}
SMALL = {"pairs": 3, "symbols": 4}


def cells(architectures=("mlp", "lstm"), **changes):
    return grid(["bijection"], architectures, settings=SMALL, training=SHORT, **changes)


def test_a_grid_is_every_combination_with_a_folder_each():
    found = grid(["mess3", "hmm-sticky"], ["mlp", "lstm"], [0, 1], training=SHORT, vary={"muon_lr": [0.01, 0.02]})
    assert len({cell.name for cell in found}) == len(found) == 2 * 2 * 2 * 2
    sticky = next(cell for cell in found if cell.name == "hmm-sticky-lstm-muon_lr=0.02-seed1")
    assert sticky.task.stickiness == 0.9
    assert (sticky.training.muon_lr, sticky.training.seed) == (0.02, 1)


def test_every_tunnel_of_the_zoo_is_read_by_every_architecture_at_equal_size():
    for name in ZOO:
        sizes = [cell.model for cell in grid([name], ["transformer", "mamba", "lstm", "mlp"])]
        assert {model.n_ctx for model in sizes} == {tunnel_task(name).n_ctx}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["bijektion"], ["mlp"]), "bijection"),
        ((["bijection"], ["mamb"]), "mamba"),
    ],
)
def test_an_unknown_name_is_answered_with_the_closest(arguments, message):
    with pytest.raises(InterpError, match=message):
        grid(*arguments)


def test_one_failed_cell_loses_no_other_and_is_tried_again(tmp_path):
    (tmp_path / "bijection-mlp").mkdir()
    obstacle = tmp_path / "bijection-mlp" / "notes.txt"
    obstacle.write_text("mine")
    table = sweep(cells(), tmp_path, jobs=2, progress=False).set_index("name")
    assert table.loc["bijection-mlp", "status"] == "failed"
    assert "not empty" in table.loc["bijection-mlp", "error"]
    assert table.loc["bijection-lstm", "status"] == "finished"
    assert "not empty" in (tmp_path / "bijection-mlp.error").read_text()
    written = pd.read_csv(tmp_path / "results.csv").set_index("name")
    assert written.loc["bijection-lstm", "kl_bits"] == pytest.approx(table.loc["bijection-lstm", "kl_bits"])
    trained = (tmp_path / "bijection-lstm" / CONFIG).stat().st_mtime_ns

    obstacle.unlink()
    again = sweep(cells(), tmp_path, jobs=1, progress=False).set_index("name")
    assert set(again["status"]) == {"finished"}
    assert not (tmp_path / "bijection-mlp.error").exists()
    assert (tmp_path / "bijection-lstm" / CONFIG).stat().st_mtime_ns == trained
    model, task = load_checkpoint(tmp_path / "bijection-mlp")
    assert (model.cfg.architecture, task.pairs) == ("mlp", 3)


def test_other_settings_under_the_same_name_are_refused(tmp_path):
    sweep(cells(["mlp"]), tmp_path, jobs=1, progress=False)
    other = grid(["bijection"], ["mlp"], settings=SMALL, training={**SHORT, "lr": 1e-3})
    assert "other settings" in sweep(other, tmp_path, jobs=1, progress=False)["error"][0]


def test_the_search_takes_the_setting_that_learns_and_the_checkpoint_says_so(tmp_path):
    asked = cells(["mlp", "lstm"], seeds=[0, 1])
    still = {"lr": [1e-12, 3e-3], "muon_lr": [1e-12]}
    chosen = search(asked, tmp_path / "search", still, {"steps": 30, "batch_size": 16}, jobs=2, progress=False)
    assert [cell.training.lr for cell in chosen] == [3e-3] * 4
    assert [cell.training.steps for cell in chosen] == [2] * 4
    sweep(chosen, tmp_path, jobs=2, progress=False)
    kept = read_checkpoint(tmp_path / "bijection-lstm-seed1").training["search"]
    assert [trial["lr"] for trial in kept] == [3e-3, 1e-12]
    assert kept[0]["kl_bits"] < kept[1]["kl_bits"]


def test_two_ray_workers_give_the_rows_of_the_local_backend(tmp_path):
    local = sweep(cells(seeds=[0, 1]), tmp_path / "local", jobs=2, progress=False)
    ray = sweep(cells(seeds=[0, 1]), tmp_path / "ray", backend="ray", jobs=2, progress=False)
    pd.testing.assert_frame_equal(local, ray, check_exact=True)


def test_a_killed_sweep_is_completed_without_repeating_finished_cells(tmp_path):
    windtunnel = str(Path(sys.executable).with_name("windtunnel"))
    command = [windtunnel, "sweep", "--tasks", "bijection", "--models", "mlp,lstm"]
    for setting in ("pairs=3", "symbols=4"):
        command += ["--set", setting]
    for setting in ("batch_size=4", "eval_sequences=8", "eval_every=20"):
        command += ["--config", setting]
    command += ["--steps", "120", "--jobs", "1", "--json", "--out"]
    first, last = tmp_path / "killed" / "bijection-mlp", tmp_path / "killed" / "bijection-lstm"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    sweeping = subprocess.Popen([*command, str(tmp_path / "killed")], start_new_session=True, env=environment)
    deadline = time.monotonic() + 240
    while not ((first / CONFIG).is_file() and (last / LOG).is_file()) and time.monotonic() < deadline:
        assert sweeping.poll() is None, "the sweep ended by itself"
        time.sleep(0.02)
    os.killpg(sweeping.pid, signal.SIGKILL)
    sweeping.wait()
    assert not (last / CONFIG).is_file(), "the kill came too late to test anything"
    finished = (first / CONFIG).stat().st_mtime_ns

    rows = {}
    for name in ("killed", "straight"):
        done = subprocess.run([*command, str(tmp_path / name)], capture_output=True, check=True, env=environment)
        rows[name] = json.loads(done.stdout)
    assert rows["killed"] == rows["straight"]
    assert (first / CONFIG).stat().st_mtime_ns == finished
    assert [row["status"] for row in rows["killed"]] == ["finished"] * 2


def test_bad_input_is_named(tmp_path):
    with pytest.raises(InterpError, match="local"):
        sweep(cells(), tmp_path, backend="slurm")
