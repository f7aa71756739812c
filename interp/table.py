"""The table of inference primitives: every trained model beside trivial predictors, with a verdict by stated rules."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from interp.checkpoint import Checkpoint, checkpoint_names, load_checkpoint, read_checkpoint
from interp.errors import CheckpointError
from interp.evaluate import predict
from interp.models.base import ARCHITECTURES
from probes.calibration import as_output, entropy_bits, kl_bits, per_sequence, trivial_predictors
from probes.nulls import Bootstrap
from tasks.base import Batch, Task

REALISED, PARTIAL = 0.1, 0.9
"""Largest KL(Bayes || model), relative to that of the best trivial predictor, of a primitive realised and in part."""
RULE = (
    "relative: KL(Bayes || model) over that of the task's best trivial predictor (uniform, position alone, a filter of "
    f"the last 1 to 3 observations); realised: its interval lies below {REALISED}, partial: below {PARTIAL}, not: else"
)
CLAIMS = {
    "accumulation": {"transformer": "yes", "mamba": "yes", "lstm": "yes", "mlp": "no"},
    "transport": {"transformer": "yes", "mamba": "yes", "lstm": "no", "mlp": "no"},
    "binding": {"transformer": "yes", "mamba": "struggles", "lstm": "no", "mlp": "no"},
}
"""What the papers claim: primitive -> architecture -> whether it realises the primitive."""
MEANS = {"realised": "yes", "partial": "struggles", "not": "no"}
"""Verdict -> the claim that it confirms."""
FLAT = 0.1
"""A run has converged if its held-out KL fell by less than this fraction over the last tenth of its steps."""


def primitives(
    sources: Sequence[str | Path] | None = None,
    *,
    sequences: int = 512,
    seed: int = 0,
    resamples: int = 1000,
    level: float = 0.95,
) -> list[dict[str, Any]]:
    """One row a cell: a task and an architecture, over all seeds that were trained.

    Checkpoints whose names differ by ``-seedN`` alone are seeds of one cell. All are measured on the same sequences,
    and the intervals are over seeds and sequences together: both are resampled (crossed bootstrap, Owen 2007).
    With one seed the interval says nothing about training luck, and with three little.

    Args:
        sources: checkpoints; by default all that can be loaded by name.
        sequences: held-out sequences.
        seed: seed of the sequences.
        resamples: bootstrap resamples.
        level: coverage of the intervals.

    Returns:
        Rows with ``name``, ``task``, ``model``, ``primitive``, ``seeds``, ``steps``, the figures in bits with
        ``*_ci``, ``trivial`` (name of the best trivial predictor) and its ``trivial_kl_bits``, ``relative`` and
        ``relative_ci``, ``nearest`` (the windowed filter, or Bayes, nearest to the model), ``verdict``, the papers'
        ``claim``, whether we ``agree``, whether the runs have ``converged`` (None: no log was kept), and figures on
        the task's ``variants``.

    Raises:
        CheckpointError: when there is none, or the seeds of a cell were trained on different tasks.
    """
    cells: dict[str, list[Checkpoint]] = defaultdict(list)
    for source in sources if sources is not None else checkpoint_names():
        checkpoint = read_checkpoint(source)
        cells[re.sub(r"-seed\d+$", "", checkpoint.name)].append(checkpoint)
    if not cells:
        raise CheckpointError("there is no checkpoint to put in the table; train some, or set WINDTUNNEL_CHECKPOINTS")
    bootstrap = Bootstrap(resamples, level, seed)
    found = [_row(name, members, sequences, seed, bootstrap) for name, members in cells.items()]
    order = list(ARCHITECTURES)
    return sorted(
        found,
        key=lambda row: (
            list(CLAIMS).index(row["primitive"]),
            row["name"].rsplit("-", 1)[0],
            order.index(row["model"]),
        ),
    )


def verdict(relative_high: float) -> str:
    """The word for the upper end of the interval of the relative KL."""
    return "realised" if relative_high < REALISED else "partial" if relative_high < PARTIAL else "not"


def _row(name: str, members: list[Checkpoint], sequences: int, seed: int, bootstrap: Bootstrap) -> dict[str, Any]:
    task, architecture = members[0].task, members[0].model.architecture
    for member in members:
        if (member.task, member.model) != (task, members[0].model):
            raise CheckpointError(
                f"{member.name} and {members[0].name} are named as seeds of one cell but differ in task or model; "
                "rename one"
            )
    batch = task.sample(sequences, seed=seed)
    exact = as_output(batch.posterior, task.readout)
    outputs = [predict(load_checkpoint(member.folder or member.name)[0], batch).double() for member in members]
    errors = [per_sequence(batch.posterior, exact, output, batch.targets, task.readout) for output in outputs]
    figures = {key: np.stack([error[key].mean(1) for error in errors]) for key in errors[0]}
    trivial = {**trivial_predictors(batch.posterior, task.readout), **task.baselines(batch)}
    kl_of = {
        other: kl_bits(batch.posterior, as_output(predictive, task.readout), task.readout).mean(1).numpy()
        for other, predictive in trivial.items()
    }
    best = min(kl_of, key=lambda other: kl_of[other].mean())
    relative, relative_ci = crossed(figures["kl_bits"], bootstrap, over=kl_of[best])
    found = {key: crossed(values, bootstrap) for key, values in figures.items()}
    claim = CLAIMS[task.primitive][architecture]
    return {
        "name": name,
        "task": task.name,
        "parameters": task.parameters(),
        "model": architecture,
        "primitive": task.primitive,
        "seeds": len(members),
        "steps": [member.training.get("steps_done") for member in members],
        **{key: estimate for key, (estimate, _) in found.items()},
        **{f"{key}_ci": list(interval) for key, (_, interval) in found.items()},
        "curve_mae_bits": float(np.mean([curve_mae_bits(output, batch, task) for output in outputs])),
        "sequences": sequences,
        "trivial": best,
        "trivial_kl_bits": float(kl_of[best].mean()),
        "relative": relative,
        "relative_ci": list(relative_ci),
        "nearest": min(filters := filter_distances(outputs, batch, task), key=filters.__getitem__),
        "verdict": verdict(relative_ci[1]),
        "claim": claim,
        "agree": MEANS[verdict(relative_ci[1])] == claim,
        "converged": None if None in (flat := [converged(member) for member in members]) else all(flat),
        "variants": variants(members),
    }


def crossed(
    values: Float64[np.ndarray, "_ batch"], bootstrap: Bootstrap, over: Float64[np.ndarray, " batch"] | None = None
) -> tuple[float, tuple[float, float]]:
    """Mean over seeds and sequences (relative to that of ``over``), and its interval when both are resampled."""
    runs = len(values)
    generator = np.random.default_rng(bootstrap.seed + 1)
    drawn = generator.multinomial(runs, np.full(runs, 1 / runs), size=max(bootstrap.resamples, 1)) / runs

    def statistic(weights: Float64[np.ndarray, "resample batch"]) -> Float64[np.ndarray, " resample"]:
        by_run = weights @ values.T
        mean = by_run.mean(1) if len(weights) == 1 else (drawn * by_run).sum(1)
        return mean / (weights.sum(1) if over is None else weights @ over)

    estimate, (low, high) = bootstrap.interval(statistic, values.shape[1])
    return float(estimate), (float(low), float(high))


def curve_mae_bits(output: Float64[Tensor, "batch query d_out"], batch: Batch, task: Task) -> float:
    """Error of the entropies once averaged over sequences, as published figures have it: it hides what cancels."""
    return float((entropy_bits(output, task.readout) - batch.entropy).mean(0).abs().mean())


def filter_distances(
    outputs: Sequence[Float64[Tensor, "batch query d_out"]], batch: Batch, task: Task
) -> dict[str, float]:
    """How far models are from the exact filter and from each truncated one: mean KL(filter || model) in bits."""
    filters = {"Bayes": batch.posterior, **task.baselines(batch)}
    return {
        name: float(np.mean([kl_bits(predictive, output, task.readout).mean() for output in outputs]))
        for name, predictive in filters.items()
    }


def converged(checkpoint: Checkpoint) -> bool | None:
    """Whether the training log had become flat, or had nothing left to gain; None where there is no log."""
    log = checkpoint.log()
    if not log:
        return None
    late = next(line for line in log if line["step"] >= 0.9 * log[-1]["step"])
    return log[-1]["kl_bits"] > (1 - FLAT) * late["kl_bits"] or log[-1]["kl_bits"] < 1e-3


def variants(members: list[Checkpoint]) -> dict[str, dict[str, float]]:
    """Figures on the task's variants that the checkpoints recorded, such as longer chains: means over seeds."""
    recorded = [member.metrics.get("variants", {}) for member in members]
    return {
        name: {
            key: float(np.mean([found[name][key] for found in recorded]))
            for key in ("mae_bits", "kl_bits", "accuracy")
            if recorded[0][name].get(key) is not None
        }
        for name in recorded[0]
    }
