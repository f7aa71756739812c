"""What the commands of ``windtunnel`` share: options, settings, and how they print."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on standard output, and nothing else.")]
Source = Annotated[str, typer.Argument(metavar="NAME|FOLDER", help="A shipped checkpoint, a folder, or a hub id.")]
Sequences = Annotated[int, typer.Option(min=8, help="Held-out sequences to draw.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the sequences.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a task parameter.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="The page to write.")]


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


def lists(settings: list[str] | None) -> dict[str, list[Any]]:
    """``["a=1,2"]`` as ``{"a": [1, 2]}``."""
    return {
        key: [parse([f"{key}={item}"])[key] for item in str(value).split(",")] for key, value in parse(settings).items()
    }


def command_line() -> str:
    """What was typed, for the model card."""
    return "windtunnel " + " ".join(arg for arg in sys.argv[1:] if arg not in ("--resume", "--json"))


def status(what: str) -> Any:
    """A spinner on standard error while something runs."""
    return Console(stderr=True).status(what)


def show_json(value: Any) -> None:
    """Print one JSON value; numbers that JSON lacks become null."""
    typer.echo(json.dumps(_finite(value), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show_table(lines: list[dict[str, Any]], title: str | None = None) -> None:
    """Print rows as a table: folded to a terminal's width, at its own width elsewhere."""
    table = Table(title=title, title_justify="left")
    for column in lines[0] if lines else ["nothing"]:
        table.add_column(column, overflow="fold")
    for line in lines:
        table.add_row(*(f"{v:.5g}" if isinstance(v, float) else "" if v is None else str(v) for v in line.values()))
    Console(width=None if sys.stdout.isatty() else WIDEST).print(table)


WIDEST = 400
"""Columns that a table may take in a file or pipe."""
