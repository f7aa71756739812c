"""The ``windtunnel`` command. Heavy imports happen inside the commands, so that ``--help`` is instant."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from interp.cli_training import ship, sweep, table, train
from interp.console import Json, Output, Seed, Sequences, Settings, Source, parse, show_json, show_table, status

app = typer.Typer(
    name="windtunnel",
    help="Look inside sequence models that do Bayesian inference, and check what you see.",
    epilog="--debug, anywhere, shows the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
        from interp.checkpoint import find_checkpoint, load_checkpoint
        from interp.diagnose import diagnose
        from interp.monitor import monitor_result

        model, task = load_checkpoint(source)
        monitored = monitor_result(find_checkpoint(source))
    with status("probing"):
        diagnosis = diagnose(model, task, name=Path(source).name, sequences=sequences, seed=seed)
        if monitored is not None:
            diagnosis.results["heads during training"] = monitored
        diagnosis.to_html(output)
    if as_json:
        show_json({**diagnosis.to_dict(), "output": str(output)})
    else:
        typer.echo(f"{output} written: open it in a browser")


@app.command()
def compare(
    sources: Annotated[
        list[str], typer.Argument(metavar="A B...", help="Checkpoints, or language models: smollm2, folder, hub id.")
    ],
    output: Output = Path("compare.html"),
    sequences: Sequences = 64,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Put wind tunnels and pretrained language models side by side under the same probes, on one page."""
    with status("importing"):
        from interp.compare import compare as compare_models
        from interp.signatures import RULE, in_words
    with status("probing"):
        comparison = compare_models(sources, sequences=sequences, seed=seed)
        comparison.to_html(output)
    if as_json:
        show_json({**comparison.to_dict(), "output": str(output)})
        return
    found = comparison.signatures()
    for name in comparison.results:
        show_table([in_words(line) for line in found if line["model"] == name], title=name)
    typer.echo(RULE)
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
        from interp.evaluate import evaluation, figure_lines

        model, task = load_checkpoint(source)
        found = evaluation(model, task.replace(**parse(settings)), sequences=sequences, seed=seed)
        found["name"] = Path(source).name
    if as_json:
        show_json(found)
        return
    show_table(figure_lines(found, task.name, between="\n"))


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


def fail(message: str, code: int) -> NoReturn:
    """One line on standard error, and an exit status."""
    sys.stderr.write("windtunnel: " + " ".join(message.split()) + "\n")
    sys.exit(code)


for command in (train, sweep, table, ship):
    app.command()(command)


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
