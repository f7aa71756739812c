"""The commands that train models and compare what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from interp.console import Json, Seed, Sequences, Settings, command_line, lists, parse, show_json, show_table, status


def train(
    task_name: Annotated[str, typer.Argument(metavar="TASK", help="See `windtunnel tasks`.")],
    model_name: Annotated[str, typer.Argument(metavar="MODEL", help="transformer, mamba, lstm or mlp.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and data.")] = 0,
    objective: Annotated[str, typer.Option(help="posterior (label integrated out) or labels (sampled).")] = "posterior",
    size: Annotated[str, typer.Option(help="Preset: small or paper.")] = "small",
    out: Annotated[Path | None, typer.Option(help="Checkpoint folder to write.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an unfinished run.")] = False,
    monitor: Annotated[str | None, typer.Option(help="advantage: log every head's gradient law as it learns.")] = None,
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
        monitor=monitor,
        command=command_line(),
    )
    if not PartialState().is_main_process:
        return
    model, task = load_checkpoint(folder)
    if as_json:
        show_json({**evaluation(model, task), "name": folder.name, "folder": str(folder)})
    else:
        typer.echo(f"{folder} written: `windtunnel report {folder}` looks inside")


def sweep(
    tunnels: Annotated[str, typer.Option("--tasks", help="Names, comma-separated, or all (the zoo).")] = "all",
    models: Annotated[str, typer.Option(help="Architectures, comma-separated, or all.")] = "all",
    seeds: Annotated[str, typer.Option(help="Comma-separated.")] = "0",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps; by default the zoo's.")] = None,
    objective: Annotated[str, typer.Option(help="posterior (label integrated out) or labels (sampled).")] = "posterior",
    size: Annotated[str, typer.Option(help="Preset: small or paper.")] = "small",
    out: Annotated[Path, typer.Option(help="Folder of the sweep; the same again goes on with it.")] = Path(
        "runs/sweep"
    ),
    backend: Annotated[str, typer.Option(help="local processes, or a ray cluster.")] = "local",
    jobs: Annotated[int, typer.Option(min=1, help="Cells that run at a time.")] = 2,
    settings: Settings = None,
    config: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Change a training setting of all cells.")
    ] = None,
    vary: Annotated[
        list[str] | None, typer.Option(metavar="KEY=A,B", help="Train every cell with each of these settings.")
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="Choose this setting by short runs, once a task and architecture."),
    ] = None,
    search_config: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Settings of the short runs [default: steps=150].")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train tasks x architectures x seeds; resumable, and one failed cell loses no other."""
    with status("importing"):
        from interp.models.base import ARCHITECTURES
        from interp.sweep import RESULTS, grid
        from interp.sweep import search as search_first
        from interp.sweep import sweep as run_sweep
        from interp.zoo import ZOO
    given = {"objective": objective, **({"steps": steps} if steps else {}), **parse(config)}
    cells = grid(
        list(ZOO) if tunnels == "all" else tunnels.split(","),
        list(ARCHITECTURES) if models == "all" else models.split(","),
        [parse([f"seed={seed}"])["seed"] for seed in seeds.split(",")],
        size=size,
        settings=parse(settings),
        training=given,
        vary=lists(vary),
    )
    options: dict[str, Any] = {"backend": backend, "jobs": jobs, "command": command_line()}
    if search:
        cells = search_first(cells, out / "search", lists(search), parse(search_config) or {"steps": 150}, **options)
    results = run_sweep(cells, out, **options)
    lines = results[["name", "status", "mae_bits", "kl_bits", "accuracy", "error"]].to_dict("records")
    if as_json:
        show_json(results.to_dict("records"))
    else:
        show_table(lines)
        typer.echo(f"{out / RESULTS} written; each cell is a checkpoint folder beside it")


def table(
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME|FOLDER]...", help="All shipped, if none.")
    ] = None,
    sequences: Sequences = 512,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Which architecture realises which inference primitive, beside trivial predictors and the papers' claims."""
    with status("importing"):
        from interp.table import RULE, primitives
    with status("measuring"):
        found = primitives(sources, sequences=sequences, seed=seed)
    if as_json:
        show_json(found)
        return
    show_table([shown(row) for row in found])
    others = [
        {"cell": row["name"], "variant": name, **dict.fromkeys(("mae_bits", "kl_bits", "accuracy")), **figures}
        for row in found
        for name, figures in row["variants"].items()
    ]
    if others:
        show_table(others)
    typer.echo(RULE)


def ship(
    sources: Annotated[list[str], typer.Argument(metavar="FOLDER...", help="Checkpoints, e.g. of a sweep.")],
    to: Annotated[Path, typer.Option(help="Folder of checkpoints to copy to.")] = Path("checkpoints"),
    as_json: Json = False,
) -> None:
    """Copy checkpoints, in half precision where that leaves their figures as they are."""
    from interp.ship import ship as ship_one

    lines = [ship_one(source, to) for source in sources]
    show_json(lines) if as_json else show_table(lines)


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table in short: estimate over interval, seeds over steps."""
    from interp.evaluate import with_interval

    return {
        "cell": f"{row['name']}\n{row['primitive']}",
        "seeds": f"{row['seeds']}\nx {max(row['steps'])}",
        "entropy MAE": with_interval(row, "mae_bits", "\n"),
        "KL bits": with_interval(row, "kl_bits", "\n"),
        "accuracy": with_interval(row, "accuracy", "\n"),
        "best trivial": f"{row['trivial']}\n{row['trivial_kl_bits']:.3g}",
        "relative": with_interval(row, "relative", "\n"),
        "nearest": row["nearest"],
        "verdict": row["verdict"] + ("\nnot converged" if row["converged"] is False else ""),
        "papers": row["claim"] + ("" if row["agree"] else "\n(we disagree)"),
    }
