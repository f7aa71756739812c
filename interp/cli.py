"""The ``windtunnel`` command. Heavy imports happen inside the commands, so that ``--help`` is instant."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    name="windtunnel",
    help="Look inside sequence models that do Bayesian inference, and check what you see.",
    epilog="--debug, anywhere, shows the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on standard output, and nothing else.")]
Source = Annotated[str, typer.Argument(metavar="NAME|FOLDER", help="A shipped checkpoint, a folder, or a hub id.")]
Sequences = Annotated[int, typer.Option(min=8, help="Held-out sequences to draw.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the sequences.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a task parameter.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="The page to write.")]


@app.command()
def report(
    source: Source,
    output: Output = Path("report.html"),
    sequences: Sequences = 256,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Diagnose a checkpoint and write one interactive, self-contained page."""
    with status("importing"):
        from interp.checkpoint import load_checkpoint
        from interp.diagnose import diagnose

        model, task = load_checkpoint(source)
    with status("probing"):
        diagnosis = diagnose(model, task, name=Path(source).name, sequences=sequences, seed=seed)
        diagnosis.to_html(output)
    if as_json:
        show_json({**diagnosis.to_dict(), "output": str(output)})
    else:
        typer.echo(f"{output} written: open it in a browser")


@app.command()
def evaluate(
    source: Source,
    sequences: Sequences = 1024,
    seed: Seed = 0,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Measure a checkpoint's predictive distribution against the exact posterior, in bits."""
    with status("evaluating"):
        from interp.checkpoint import load_checkpoint
        from interp.evaluate import FIGURES, evaluation

        model, task = load_checkpoint(source)
        found = evaluation(model, task.replace(**parse(settings)), sequences=sequences, seed=seed)
        found["name"] = Path(source).name
    if as_json:
        show_json(found)
        return
    lines = {"": found, **found.get("variants", {})}
    rows = []
    for name, line in lines.items():
        rows.append({"on": name or task.name, "predictor": "model", **{c: line[c] for c in FIGURES}})
        for trivial, figures in line["baselines"].items():
            rows.append({"on": "", "predictor": trivial, **{c: figures.get(c) for c in FIGURES}})
    show_table(rows)


@app.command()
def train(
    task_name: Annotated[str, typer.Argument(metavar="TASK", help="See `windtunnel tasks`.")],
    model_name: Annotated[str, typer.Argument(metavar="MODEL", help="transformer, mamba, lstm or mlp.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and data.")] = 0,
    objective: Annotated[str, typer.Option(help="posterior (label integrated out) or labels (sampled).")] = "posterior",
    size: Annotated[str, typer.Option(help="Preset: small or paper.")] = "small",
    out: Annotated[Path | None, typer.Option(help="Checkpoint folder to write.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an unfinished run.")] = False,
    settings: Settings = None,
    train_set: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Change a task parameter in training only.")
    ] = None,
    model_set: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Change a model setting.")] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Change a training setting: optimizer, lr, batch_size, snapshots, ..."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model on a wind tunnel and write a checkpoint folder."""
    with status("importing"):
        from accelerate import PartialState

        from interp.checkpoint import load_checkpoint
        from interp.evaluate import evaluation
        from interp.models.base import preset
        from interp.recipe import train_config
        from interp.training import train as run_training
        from tasks.base import get_task
    task = get_task(task_name, **parse(settings))
    model_config = preset(model_name, size, task, **parse(model_set))
    given = {"seed": seed, "objective": objective, **({"steps": steps} if steps else {}), **parse(config)}
    folder = out or Path("runs") / f"{task_name}-{model_name}-seed{seed}"
    run_training(
        task,
        model_config,
        train_config(**given),
        folder,
        training_task=task.for_training().replace(**parse(train_set)),
        resume=resume,
        command="windtunnel " + " ".join(arg for arg in sys.argv[1:] if arg not in ("--resume", "--json")),
    )
    if not PartialState().is_main_process:
        return
    model, task = load_checkpoint(folder)
    if as_json:
        show_json({**evaluation(model, task), "name": folder.name, "folder": str(folder)})
    else:
        typer.echo(f"{folder} written: `windtunnel report {folder}` looks inside")


@app.command("list")
def list_checkpoints(as_json: Json = False) -> None:
    """List the checkpoints that can be loaded by name."""
    from interp.checkpoint import checkpoint_names, read_checkpoint

    lines = []
    for name in checkpoint_names():
        checkpoint = read_checkpoint(name)
        line = {"name": name, "task": checkpoint.task.name, "model": checkpoint.model.architecture}
        lines.append(line | {key: checkpoint.metrics.get(key) for key in ("mae_bits", "kl_bits", "accuracy")})
    show_json(lines) if as_json else show_table(lines)


@app.command()
def tasks(as_json: Json = False) -> None:
    """List the wind tunnels, the primitive that each needs, and its parameters."""
    from tasks.base import get_task, task_names

    lines = []
    for name in task_names():
        task = get_task(name)
        line = {"name": name, "primitive": task.primitive, "readin": task.readin, "readout": task.readout}
        lines.append(line | {"positions": task.n_ctx, "parameters": task.parameters()})
    show_json(lines) if as_json else show_table(lines)


@app.command()
def show(
    task_name: Annotated[str, typer.Argument(metavar="TASK", help="See `windtunnel tasks`.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write.")] = Path("sequence.html"),
    index: Annotated[int, typer.Option(min=0, help="Which sequence of the stream.")] = 0,
    seed: Seed = 0,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Draw one sequence of a wind tunnel with its exact posterior, as an interactive figure."""
    from interp.figures import sequence_figure
    from interp.files import write_text
    from tasks.base import get_task

    task = get_task(task_name, **parse(settings))
    write_text(output, sequence_figure(task, seed=seed, index=index).to_html())
    batch = task.sample(1, seed=seed, start=index)
    if as_json:
        fields = ("tokens", "position", "targets", "posterior", "entropy")
        drawn = {field: getattr(batch, field)[0].tolist() for field in fields}
        show_json({"task": task_name, "parameters": task.parameters(), **drawn, "output": str(output)})
    else:
        typer.echo(f"{output} written: open it in a browser")


def parse(settings: list[str] | None) -> dict[str, Any]:
    """``["a=1", "b=x"]`` as ``{"a": 1, "b": "x"}``."""
    parsed: dict[str, Any] = {}
    for setting in settings or []:
        key, separator, value = setting.partition("=")
        if not separator or not key:
            raise typer.BadParameter(f"'{setting}' is not a setting; expected KEY=VALUE, e.g. pairs=10")
        try:
            parsed[key] = json.loads(value)
        except json.JSONDecodeError:
            parsed[key] = value
    return parsed


def status(what: str) -> Any:
    """A spinner on standard error while something runs."""
    return Console(stderr=True).status(what)


def show_json(value: Any) -> None:
    """Print one JSON value; NaN, which JSON lacks, becomes null."""
    typer.echo(json.dumps(_finite(value), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value != value else value


def show_table(lines: list[dict[str, Any]]) -> None:
    """Print rows as a table."""
    table = Table()
    for column in lines[0] if lines else ["nothing"]:
        table.add_column(column, overflow="fold")
    for line in lines:
        table.add_row(*(f"{v:.5g}" if isinstance(v, float) else "" if v is None else str(v) for v in line.values()))
    Console().print(table)


def fail(message: str, code: int) -> NoReturn:
    """One line on standard error, and an exit status."""
    sys.stderr.write("windtunnel: " + " ".join(message.split()) + "\n")
    sys.exit(code)


def main() -> None:
    """Run the command: status 0 when it worked, 2 for bad usage or input, 1 for anything else."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        sys.exit(app(args=arguments, standalone_mode=False) or 0)
    except (typer.Abort, KeyboardInterrupt):
        fail("interrupted", 1)
    except Exception as error:
        if debug:
            traceback.print_exc()
        fail(*_verdict(error))


def _verdict(error: Exception) -> tuple[str, int]:
    """What to say about an error, and the exit status: the user's input, or ours."""
    if hasattr(error, "format_message"):
        return error.format_message() or "say what to do; `windtunnel --help` lists the commands", 2
    expected = {"TaskError", "ProbeError", "InterpError"}
    if expected & {kind.__name__ for kind in type(error).__mro__}:
        return str(error), 2
    return f"internal error: {type(error).__name__}: {error} (--debug shows where)", 1
