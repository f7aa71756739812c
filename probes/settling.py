"""Settling: which is done first in training, where attention looks or what it finds there? (papers I and II)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from .extract import as_activations
from .nulls import Bootstrap, require_finite
from .result import ProbeError, Result, rows, table

READING = (
    "A lag whose whole interval lies above 0 says that attention had settled, by the same measure of distance, in so "
    "many halvings of the training time before values had; judge by values_relative, which no turning of the head's "
    "basis can move."
)
SITES = ("attention", "values", "values_relative")
"""What settles."""
UNITS = dict.fromkeys(SITES, "steps") | {f"lag_{name}": "doublings of training time" for name in SITES[1:]}


def settling(
    snapshots: Mapping[int, Mapping[str, Tensor]],
    *,
    fraction: float = 0.5,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    """The training step at which attention and values have come most of the way to where they end.

    Each is measured by the root-mean-square distance from the last snapshot, relative to that of the first one. It has
    settled at the first step from which on the distance stays below ``fraction``, interpolated in log step.

    Statistics per layer and head: ``attention``, the settling step of the pattern; ``values``, of the value vectors;
    ``values_relative``, of the cosines between the values of a sequence, which say what a reader of the values can
    tell apart in any basis; ``lag_values`` and ``lag_values_relative``, log2 of their settling steps over attention's.
    ``null_together`` is a lag of 0.

    Values are those of heads, shared where the model groups queries; attention is then averaged over each group.

    Args:
        snapshots: training step -> ``pattern`` and ``v`` of the model at that step, on the same inputs.
        fraction: what is left of the initial distance when settled.
        resamples: bootstrap resamples over sequences.
        level: coverage of the intervals.
        seed: seed of the resamples.

    Raises:
        ProbeError: for fewer than 4 snapshots, or a fraction outside (0, 1).
    """
    steps = sorted(snapshots)
    if len(steps) < 4:
        raise ProbeError(f"settling needs at least 4 snapshots of one run, got {len(steps)}; train with snapshots=12")
    if not 0 < fraction < 1:
        raise ProbeError(f"fraction is what is left of the initial distance, between 0 and 1, got {fraction}")
    squares = _squares([snapshots[step] for step in steps])
    times = np.log2(1 + np.array(steps, dtype=float))

    def settled(weights: Float64[np.ndarray, "resample batch"]) -> Float64[np.ndarray, "resample _ layer head"]:
        distance = np.sqrt(np.tensordot(weights, squares, 1))  # resample site snapshot layer head
        return _crossing(np.moveaxis(distance / distance[:, :, :1], 2, -1), times, fraction)

    def lag(weights: Float64[np.ndarray, "resample batch"]) -> Float64[np.ndarray, "resample _ layer head"]:
        when = settled(weights)
        return when[:, 1:] - when[:, :1]

    bootstrap, axes = Bootstrap(resamples, level, seed), ("layer", "head")
    when, (low, high) = bootstrap.interval(settled, len(squares))
    gap, (least, most) = bootstrap.interval(lag, len(squares))
    parts = []
    for i, name in enumerate(SITES):
        parts.append(rows(name, 2 ** when[i] - 1, (2 ** low[i] - 1, 2 ** high[i] - 1), axes=axes))
    for i, name in enumerate(SITES[1:]):
        parts.append(rows(f"lag_{name}", gap[i], (least[i], most[i]), axes=axes, null_together=0.0))
    return Result("settling", table(*parts), READING, UNITS, level)


def _squares(
    snapshots: list[Mapping[str, Tensor]],
) -> Float64[np.ndarray, "batch _ _ layer head"]:
    """Squared distance of each snapshot from the last, by sequence."""
    records = [_record(snapshot) for snapshot in snapshots]
    squares = [
        [
            torch.stack([(a - b).square().sum((-2, -1)) for a, b in zip(layers, last, strict=True)], 1)
            for layers, last in zip(record, records[-1], strict=True)
        ]
        for record in records
    ]
    return torch.stack([torch.stack(sites, 1) for sites in squares], 2).double().numpy()


def _record(snapshot: Mapping[str, Tensor]) -> list[list[Float[Tensor, "batch head _ _"]]]:
    """Pattern, values and their cosines of every layer, all with the value heads as heads."""
    acts = as_activations(snapshot)
    patterns, values = acts.layers("pattern"), [v.movedim(2, 1) for v in acts.layers("v")]
    for what, tensor in (("the patterns", patterns[0]), ("the values", values[0])):
        require_finite(what, tensor.numpy())
    unit = [torch.nn.functional.normalize(v, dim=-1) for v in values]
    grouped = [p.unflatten(1, (v.shape[1], -1)).mean(2) for p, v in zip(patterns, values, strict=True)]
    return [grouped, values, [u @ u.mT for u in unit]]


def _crossing(
    distance: Float64[np.ndarray, "*axes _"], times: Float64[np.ndarray, " _"], fraction: float
) -> Float64[np.ndarray, "*axes"]:
    """The time from which on the distance stays below the fraction, linear between snapshots."""
    above = np.where(distance >= fraction, np.arange(len(times)), 0).max(-1)
    before, after = (np.take_along_axis(distance, i[..., None], -1)[..., 0] for i in (above, above + 1))
    return times[above] + (before - fraction) / (before - after) * (times[above + 1] - times[above])
