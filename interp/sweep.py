"""Sweep tunnels x architectures x seeds x settings through joblib: resumable, and one failure loses no other cell."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from joblib import Parallel, delayed, parallel_config
from rich.console import Console
from rich.live import Live
from rich.table import Table

from interp.checkpoint import CONFIG, LOG, PLAN, read_checkpoint
from interp.errors import InterpError, TrainingError
from interp.evaluate import FIGURES
from interp.files import write_text
from interp.models.base import ModelConfig, choose, preset
from interp.recipe import TrainConfig, train_config
from interp.training import train
from interp.zoo import tunnel, tunnel_task
from tasks.base import Task

RESULTS = "results.csv"
"""The tidy table that a sweep leaves in its folder: one row a cell."""
BACKENDS = ("local", "ray")


@dataclass(frozen=True)
class Cell:
    """One training run of a sweep: its own checkpoint folder in the sweep's."""

    name: str
    tunnel: str
    task: Task
    model: ModelConfig
    training: TrainConfig
    search: tuple[dict[str, Any], ...] = ()
    """Settings that a search tried for this task and architecture, with the error of each: kept in the checkpoint."""

    def run(self, folder: Path, command: str) -> dict[str, Any]:
        """Train the cell, or go on with it, or read it where it is finished; whatever fails becomes its row."""
        torch.set_num_threads(1)
        path, failed = folder / self.name, folder / f"{self.name}.error"
        try:
            if not (path / CONFIG).is_file():
                train(
                    self.task,
                    self.model,
                    self.training,
                    path,
                    resume=(path / PLAN).is_file(),
                    command=command,
                    progress=False,
                    record={"search": list(self.search)} if self.search else None,
                )
            failed.unlink(missing_ok=True)
            return self.row(path)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            write_text(failed, message + "\n")
            return {**self.place(), "status": "failed", "error": message}

    def place(self) -> dict[str, Any]:
        """The columns that say which cell a row belongs to."""
        settings = {key: value for key, value in asdict(self.training).items() if key != "seed"}
        architecture = self.model.architecture
        return {"name": self.name, "tunnel": self.tunnel, "model": architecture, "seed": self.training.seed, **settings}

    def row(self, path: Path) -> dict[str, Any]:
        """The row of a finished cell.

        Raises:
            TrainingError: when the folder holds a run with other settings.
        """
        found = read_checkpoint(path)
        asked = (self.task, self.model, asdict(self.training))
        if asked != (found.task, found.model, {key: found.training.get(key) for key in asdict(self.training)}):
            raise TrainingError(f"{path} holds a run with other settings; choose another --out, or delete it")
        figures = {key: found.metrics.get(key) for key in FIGURES}
        return {**self.place(), "status": found.training["status"], **figures, "error": ""}


def grid(
    tunnels: Sequence[str],
    architectures: Sequence[str],
    seeds: Sequence[int] = (0,),
    *,
    size: str = "small",
    settings: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
) -> list[Cell]:
    """Every combination, one cell each; ``vary`` gives training settings several values.

    Args:
        tunnels: names of the zoo, or of tasks.
        architectures: names.
        seeds: seeds of weights and data.
        size: preset.
        settings: task parameters to change.
        training: training settings to change; ``steps`` is by default the tunnel's.
        vary: training setting -> its values.

    Raises:
        ModelError: for an unknown name, with the closest match.
    """
    cells = []
    keys, values = list(vary or {}), list((vary or {}).values())
    for name, architecture, seed, chosen in itertools.product(
        tunnels, architectures, seeds, itertools.product(*values)
    ):
        task = tunnel_task(name, **settings or {})
        varied = dict(zip(keys, chosen, strict=True))
        config = train_config(**{"steps": tunnel(name).steps, **(training or {}), **varied, "seed": seed})
        parts = [name, architecture, _suffix(varied), f"seed{seed}" if seed else ""]
        cells.append(Cell("-".join(filter(None, parts)), name, task, preset(architecture, size, task), config))
    return cells


def sweep(
    cells: Sequence[Cell],
    folder: Path | str,
    *,
    backend: str = "local",
    jobs: int = 2,
    command: str = "interp.sweep.sweep(...)",
    progress: bool = True,
) -> pd.DataFrame:
    """Train all cells, each in its own folder; those that are finished are not trained again.

    Args:
        cells: what to train (:func:`grid`).
        folder: where; ``results.csv`` in it is written at the end, the folder of a cell as the cell goes on.
        backend: ``local`` (processes) or ``ray`` (the cluster of ``ray.init``, or a local one).
        jobs: cells that run at a time.
        command: the command line, for the model cards.
        progress: show a live table on standard error.

    Returns:
        One row a cell, in the order of ``cells``; a cell that failed has its ``error``.

    Raises:
        InterpError: when the backend is unknown or not installed.
    """
    choose("backend", backend, list(BACKENDS))
    folder = Path(folder).resolve()
    live = Live(
        get_renderable=lambda: _standing(cells, folder),
        refresh_per_second=1,
        console=Console(stderr=True, quiet=not progress),
    )
    with live, parallel_config(_joblib_backend(backend, jobs), n_jobs=jobs):
        rows = Parallel()(delayed(cell.run)(folder, command) for cell in cells)
    table = pd.DataFrame(rows)
    write_text(folder / RESULTS, table.to_csv(index=False))
    return table


def search(
    cells: Sequence[Cell],
    folder: Path | str,
    values: Mapping[str, Sequence[Any]],
    short: Mapping[str, Any],
    **options: Any,
) -> list[Cell]:
    """The cells with the settings that did best in short runs of the same tunnel and architecture, seed 0.

    Args:
        cells: what will be trained.
        folder: where the short runs go, as a sweep of their own.
        values: training setting -> the values to try, all combinations.
        short: training settings of the short runs, e.g. ``{"steps": 150}``.
        options: as for :func:`sweep`.

    Raises:
        TrainingError: when every run for a tunnel and architecture failed.
    """
    combinations = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    first = {(cell.tunnel, cell.model.architecture): cell for cell in reversed(cells)}
    trials = [
        replace(
            cell,
            name=f"{cell.tunnel}-{cell.model.architecture}-{_suffix(chosen)}",
            training=replace(cell.training, **short, **chosen, seed=0, snapshots=0),
        )
        for cell in first.values()
        for chosen in combinations
    ]
    table = sweep(trials, folder, **options)
    best: dict[tuple[str, str], tuple[dict[str, Any], ...]] = {}
    for place in first:
        part = table[(table["tunnel"] == place[0]) & (table["model"] == place[1]) & (table["error"] == "")]
        if part.empty:
            raise TrainingError(
                f"every run of the search for {place[0]} {place[1]} failed; see {Path(folder) / RESULTS}"
            )
        found = part.sort_values("kl_bits")[[*values, *short, "kl_bits"]]
        best[place] = tuple(found.to_dict("records"))
    return [
        replace(cell, search=trail, training=replace(cell.training, **{key: trail[0][key] for key in values}))
        for cell in cells
        if (trail := best[cell.tunnel, cell.model.architecture])
    ]


def _suffix(chosen: Mapping[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in chosen.items())


def _joblib_backend(backend: str, jobs: int) -> str:
    """Name of the joblib backend, registered."""
    if backend == "local":
        return "loky"
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError as error:
        raise InterpError("the ray backend needs Ray: pip install 'windtunnel[cluster]'") from error
    if not ray.is_initialized():
        ray.init(num_cpus=None if "RAY_ADDRESS" in os.environ else jobs, include_dashboard=False, log_to_driver=False)
    register_ray()
    return "ray"


def _standing(cells: Sequence[Cell], folder: Path) -> Table:
    """Where each cell stands, read from its folder: the same on every backend."""
    table = Table("cell", "step", "loss bits", "MAE bits", "state")
    for cell in cells:
        path = folder / cell.name
        last = _last_line(path / LOG)
        state = "waiting"
        if (path / CONFIG).is_file():
            state = "done"
        elif (folder / f"{cell.name}.error").is_file():
            state = "failed"
        elif (path / PLAN).is_file():
            state = "running"
        figures = (f"{last[key]:.4f}" if key in last else "" for key in ("loss_bits", "mae_bits"))
        table.add_row(cell.name, f"{last.get('step', 0)}/{cell.training.steps}", *figures, state)
    return table


def _last_line(log: Path) -> dict[str, Any]:
    """The last whole line of a training log."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    return next((json.loads(line) for line in reversed(lines) if line.endswith("}")), {})
