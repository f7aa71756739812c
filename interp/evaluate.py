"""Evaluate a model against the exact posterior: the figures of ``windtunnel evaluate`` and of the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from interp.errors import ModelError
from interp.models.base import SequenceModel
from probes.calibration import Readout, calibration, entropy_bits, kl_bits
from probes.result import Result
from tasks.base import Batch, Task

FIGURES = ("mae_bits", "curve_mae_bits", "kl_bits", "tv", "accuracy")
"""The figures over all positions; what a Gaussian readout lacks is None."""


@torch.no_grad()
def predict(model: nn.Module, batch: Batch, batch_size: int = 256) -> Float[Tensor, "batch query d_out"]:
    """The model's output at the supervised positions, a few sequences at a time, on the CPU."""
    device = next(model.parameters()).device
    parts = [
        model(
            batch.tokens[start : start + batch_size].to(device),
            batch.position[start : start + batch_size].to(device),
        )
        for start in range(0, len(batch), batch_size)
    ]
    return torch.cat([part.cpu() for part in parts])


def measure(model: SequenceModel, batch: Batch, readout: Readout) -> dict[str, float]:
    """Per-sequence entropy MAE and KL(Bayes || model), in bits: the two figures of the training log."""
    output = predict(model, batch).double()
    error = (entropy_bits(output, readout) - batch.entropy).abs()
    return {
        "mae_bits": float(error.mean()),
        "kl_bits": float(kl_bits(batch.posterior, output, readout).mean()),
    }


def calibrate(
    model: SequenceModel, task: Task, *, sequences: int = 1024, seed: int = 0, resamples: int = 1000
) -> Result:
    """Calibration of a model on freshly drawn sequences, beside the task's trivial predictors."""
    batch = task.sample(sequences, seed=seed)
    return calibration(
        predict(model, batch),
        batch.posterior,
        batch.targets,
        baselines=task.baselines(batch),
        readout=task.readout,
        resamples=resamples,
    )


def metrics(model: SequenceModel, task: Task, *, sequences: int = 1024, seed: int = 0) -> dict[str, Any]:
    """The figures of one task as plain values, and those of its variants under their names."""
    found = headline(calibrate(model, task, sequences=sequences, seed=seed))
    variants = {
        name: headline(calibrate(model, task.replace(**changes), sequences=sequences, seed=seed))
        for name, changes in task.variants.items()
        if fits(model, task.replace(**changes))
    }
    return {**found, "sequences": sequences, "seed": seed, **({"variants": variants} if variants else {})}


def evaluation(model: SequenceModel, task: Task, *, sequences: int = 1024, seed: int = 0) -> dict[str, Any]:
    """The object that ``windtunnel evaluate --json`` prints, less the checkpoint's name.

    Raises:
        ModelError: when the model can't read the task.
    """
    require_fit(model, task)
    found = metrics(model, task, sequences=sequences, seed=seed)
    return {"task": task.name, "model": model.cfg.architecture, "parameters": task.parameters(), **found}


def headline(result: Result) -> dict[str, Any]:
    """The figures over all positions of a calibration result with their intervals, and those of trivial predictors."""
    found: dict[str, Any] = dict.fromkeys(key for figure in FIGURES for key in (figure, f"{figure}_ci"))
    trivial: dict[str, dict[str, float]] = {name.removeprefix("null_"): {} for name in result.nulls()}
    for figure in set(FIGURES) & set(result.frame["statistic"]):
        row = result.row(figure)
        found[figure] = float(row["estimate"])
        found[f"{figure}_ci"] = [float(row["low"]), float(row["high"])]
        for name, figures in trivial.items():
            figures[figure] = float(row[f"null_{name}"])
    return {**found, "baselines": trivial}


def figure_lines(figures: Mapping[str, Any], name: str, *, between: str = " ") -> list[dict[str, str | None]]:
    """Figures as a reader sees them: the model's with intervals, its variants', and the trivial predictors' below each.

    Args:
        figures: what :func:`metrics` returns.
        name: the task's.
        between: what stands between estimate and interval.
    """
    lines = []
    for on, found in {name: figures, **figures.get("variants", {})}.items():
        shown = {figure: with_interval(found, figure, between) for figure in FIGURES}
        lines.append({"on": on, "predictor": "model", **shown})
        for trivial, values in found.get("baselines", {}).items():
            shown = {figure: f"{values[figure]:.3g}" if figure in values else None for figure in FIGURES}
            lines.append({"on": on, "predictor": trivial, **shown})
    return lines


def with_interval(figures: Mapping[str, Any], figure: str, between: str = " ") -> str | None:
    """An estimate, and its interval where there is one, in words; None where the readout lacks the figure."""
    estimate, interval = figures.get(figure), figures.get(f"{figure}_ci")
    if estimate is None:
        return None
    return f"{estimate:.3g}" + (f"{between}[{interval[0]:.3g}, {interval[1]:.3g}]" if interval else "")


def require_fit(model: SequenceModel, task: Task) -> None:
    """Raise :class:`ModelError` unless the model can read the task."""
    if not fits(model, task):
        cfg = model.cfg
        raise ModelError(
            f"the model reads {cfg.d_vocab} symbols over {cfg.n_ctx} positions and answers {cfg.d_out} classes; "
            f"{task.name} needs {task.d_vocab}, {task.n_ctx} and {task.d_out}: load a checkpoint of this task"
        )


def fits(model: SequenceModel, task: Task) -> bool:
    """Whether the model can read the task's sequences: vocabulary, answers and length."""
    cfg = model.cfg
    long_enough = task.n_ctx <= cfg.n_ctx or cfg.positions != "learned"
    return (cfg.d_vocab, cfg.d_out, cfg.readin) == (task.d_vocab, task.d_out, task.readin) and long_enough
