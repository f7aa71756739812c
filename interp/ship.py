"""Ship a checkpoint: copy it, its weights in half precision where that leaves its figures as they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from interp.checkpoint import CONFIG, LOG, WEIGHTS, load_checkpoint, read_checkpoint, save_checkpoint
from interp.errors import CheckpointError
from interp.evaluate import metrics

TOLERANCE = 0.02
"""Largest change of a figure, relative to it, that still counts as none."""
FLOOR = 1e-6
"""Bits, or a fraction, below which a change does not count."""


def ship(source: str | Path, to: Path | str, *, sequences: int = 1024, tolerance: float = TOLERANCE) -> dict[str, Any]:
    """Copy a checkpoint into the folder ``to`` under its own name, with its log and snapshots.

    The weights are stored in half precision if neither the entropy MAE, nor KL(Bayes || model), nor the accuracy, on
    the task and on its variants, changes by more than ``tolerance``; the card has the figures of the rounded weights.

    Args:
        source: a checkpoint.
        to: folder of checkpoints.
        sequences: held-out sequences that the figures are measured on.
        tolerance: largest relative change.

    Returns:
        ``name``, ``weights`` (``half`` or ``full``), ``change`` (the largest, relative), ``mae_bits``, ``kl_bits`` and
        ``bytes`` of the copy.

    Raises:
        CheckpointError: when there is a checkpoint of that name already.
    """
    checkpoint = read_checkpoint(source)
    assert checkpoint.folder is not None
    folder = Path(to) / checkpoint.name
    if (folder / CONFIG).exists():
        raise CheckpointError(f"{folder} is a checkpoint already; delete it first, or choose another folder")
    model, task = load_checkpoint(source)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    full = metrics(model, task, sequences=sequences)
    half = {name: tensor.half() for name, tensor in weights.items()}
    model.load_state_dict({name: tensor.float() for name, tensor in half.items()})
    rounded = metrics(model, task, sequences=sequences)
    change = _largest_change(full, rounded)
    kept, figures, note = (half, rounded, "half") if change <= tolerance else (weights, full, "full")
    training = checkpoint.training | {"weights": f"{note} precision"}
    for part in (LOG, "snapshots"):
        _copy(checkpoint.folder / part, folder / part)
    save_checkpoint(folder, kept, task, checkpoint.model, training=training, metrics=figures)
    size = (folder / WEIGHTS).stat().st_size
    shown = {key: figures[key] for key in ("mae_bits", "kl_bits")}
    return {"name": checkpoint.name, "weights": note, "change": change, **shown, "bytes": size}


def _largest_change(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Largest relative change of a figure, over the task and its variants."""
    parts = [(before, after)]
    parts += [(before["variants"][name], after["variants"][name]) for name in before.get("variants", {})]
    pairs = [(a[key], b[key]) for a, b in parts for key in ("mae_bits", "kl_bits", "accuracy") if a[key] is not None]
    return max(abs(b - a) / abs(a) if abs(b - a) > FLOOR else 0.0 for a, b in pairs)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    elif source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
