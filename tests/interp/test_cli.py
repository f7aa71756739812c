import json
import subprocess
import sys
from pathlib import Path

import pytest

WINDTUNNEL = str(Path(sys.executable).with_name("windtunnel"))


def run(*arguments, **options):
    return subprocess.run([WINDTUNNEL, *map(str, arguments)], capture_output=True, text=True, **options)


def one_json(*arguments):
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_help_and_the_packages_load_nothing_heavy():
    heavy = "{'torch', 'transformer_lens', 'pandas'} & set(sys.modules)"
    assert python(f"import sys, tasks, probes, interp, interp.cli; print({heavy})").stdout.strip() == "set()"
    assert run("--help").returncode == 0


def test_evaluate_keeps_its_contract(tiny):
    found = one_json("evaluate", tiny, "--sequences", 64, "--seed", 3, "--set", "repeats=1")
    assert set(found) >= {
        "mae_bits",
        "mae_bits_ci",
        "curve_mae_bits",
        "kl_bits",
        "tv",
        "accuracy",
        "sequences",
        "task",
        "model",
    }
    assert found["sequences"] == 64
    assert (found["task"], found["model"], found["name"]) == ("bijection", "transformer", "tiny")
    assert found["parameters"]["repeats"] == 1
    for figure in ("mae_bits", "curve_mae_bits", "kl_bits", "tv", "accuracy"):
        low, high = found[f"{figure}_ci"]
        assert low <= found[figure] <= high, figure


def test_lists_have_names():
    assert "bijection" in {line["name"] for line in one_json("tasks")}
    assert "bijection-transformer" in {line["name"] for line in one_json("list")}


def test_train_writes_a_checkpoint_that_evaluate_reads(tmp_path):
    small = [
        "--set",
        "symbols=5",
        "--set",
        "pairs=4",
        "--model-set",
        "d_model=16",
        "--model-set",
        "n_layers=1",
    ]
    short = [
        "--steps",
        5,
        "--config",
        "batch_size=4",
        "--config",
        "eval_sequences=8",
        "--out",
        tmp_path / "run",
    ]
    found = one_json("train", "bijection", "transformer", *small, *short)
    assert found["folder"] == str(tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["training"]["steps"] == 5
    assert config["model"]["d_model"] == 16
    again = one_json("evaluate", tmp_path / "run")
    assert again["mae_bits"] == pytest.approx(found["mae_bits"])


def test_more_pairs_than_symbols_can_be_trained_with_repeated_keys(tmp_path):
    task = ["--set", "symbols=3", "--set", "pairs=5", "--set", "repeats=1"]
    short = ["--steps", 2, "--config", "batch_size=4", "--config", "eval_sequences=8", "--out", tmp_path / "run"]
    model = ["--model-set", "d_model=16", "--model-set", "n_layers=1"]
    assert one_json("train", "bijection", "transformer", *task, *model, *short)["parameters"]["repeats"] == 1
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["training"]["training_task"]["repeats"] == 1


def test_report_is_one_page_that_works_offline(tiny, tmp_path):
    found = one_json("report", tiny, "-o", tmp_path / "page.html", "--sequences", 32)
    assert found["name"] == "tiny"
    page = (tmp_path / "page.html").read_text()
    assert "https://cdn" not in page.split("<body>")[1]
    assert page.count("Plotly.newPlot") >= 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluat"], "No such command 'evaluat'"),
        (["evaluate"], "Missing argument"),
        (["evaluate", "bijection-transfomer"], "did you mean 'bijection-transformer'"),
        (["evaluate", "bijection-transformer", "--sequences", "0"], "Invalid value for '--sequences'"),
        (["evaluate", "bijection-transformer", "--set", "symbols"], "expected KEY=VALUE"),
        (["evaluate", "bijection-transformer", "--set", "symbols=1"], "symbols must be at least 2"),
        (["evaluate", "bijection-transformer", "--set", "pairs=25"], "set repeats=1"),
        (["evaluate", "bijection-transformer", "--set", "symbols=30"], "the model reads 40 symbols"),
        (["train", "bijektion", "transformer"], "did you mean 'bijection'"),
        (["train", "bijection", "transformr"], "did you mean 'transformer'"),
        (["train", "bijection", "transformer", "--size", "smal"], "did you mean 'small'"),
        (["train", "bijection", "transformer", "--objective", "label"], "did you mean 'labels'"),
        (["train", "bijection", "transformer", "--config", "lr=-1"], "lr must be positive"),
        (
            ["report", "bijection-transformer", "-o", "/proc/nowhere/x.html"],
            "could not write /proc/nowhere/x.html",
        ),
    ],
)
def test_bad_usage_is_one_line_and_status_2(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("windtunnel: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_debug_shows_the_traceback():
    assert "Traceback" in run("--debug", "evaluate", "nothing").stderr


def test_anything_else_is_status_1():
    broken = "import interp.checkpoint as c, interp.cli, sys; c.checkpoint_names = lambda: 1 / 0"
    done = python(f"{broken}; sys.argv = ['windtunnel', 'list']; interp.cli.main()")
    assert done.returncode == 1
    assert "internal error: ZeroDivisionError" in done.stderr
