"""Domain restriction: do prompts of one domain lie on fewer dimensions than as many mixed prompts? (paper III)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float64, Int64
from scipy.stats import norm
from torch import Tensor

from .extract import as_activations
from .held_out import points_at
from .result import ProbeError, Result, rows, table

READING = (
    "Restricting the domain lowers the dimension where the participation ratio falls, or PC1's share rises, by more "
    "than between groups of the same sizes drawn without regard to domain, and more than in the untrained model."
)
STATISTICS = {"participation_fall": 1.0, "pc1_rise": -1.0}
"""Statistic -> sign: a smaller domain has a lower participation ratio and a larger first share."""
SIGNS = np.array(list(STATISTICS.values()))


def domain_restriction(
    acts: Mapping[str, Tensor],
    domain: Sequence[str],
    position: Int64[Tensor, "batch query"] | None = None,
    *,
    site: str = "v",
    permutations: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    r"""Spread of last-layer activations at the last query, in groups of one domain against groups mixed from all.

    Mixed groups are the domains after shuffling which prompt belongs to which: they match in size, on which both
    statistics depend. ``participation_fall`` is the participation ratio :math:`(\sum\lambda)^2 / \sum\lambda^2` of
    mixed groups minus that of the domains, ``pc1_rise`` PC1's share of the variance in the domains minus that in mixed
    groups; both are means over groups. Nulls: ``null_permutation``, one shuffle against the others (0 on average;
    ``p_value`` is the rank among them); ``null_init``, the twin at initialisation. Intervals are normal, with the
    standard error of the jackknife that leaves out one prompt of a domain at a time (a bootstrap would draw prompts
    twice, which lowers the dimension of small groups by itself); they err on the wide side.

    Args:
        acts: activations that hold ``site``.
        domain: what each sequence is about.
        position: the supervised positions, by default those of the extraction; the last is read.
        site: ``v``, or another site.
        permutations: shuffles of the domains, at least 2.
        level: coverage of the interval.
        seed: seed of the shuffles.

    Raises:
        ProbeError: when there are fewer than two domains of at least four prompts.
    """
    acts = as_activations(acts)
    position = acts.position if position is None else position
    names, label, counts = np.unique(np.asarray(domain), return_inverse=True, return_counts=True)
    if position is None or len(names) < 2 or counts.min() < 4:
        found = dict(zip(names.tolist(), counts.tolist(), strict=True))
        raise ProbeError(f"domain_restriction needs positions and two domains of at least 4 prompts, got {found}")
    last = position[:, -1:]
    generator = np.random.default_rng(seed)
    shuffled = [generator.permutation(label) for _ in range(permutations)]

    def fall(layer: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The statistics, those of each shuffle, and the points they come from."""
        points = points_at(layer, last, site)[:, 0]
        mixed = np.stack([_spread(points, other) for other in shuffled])
        return (mixed.mean(0) - _spread(points, label)) * SIGNS, (mixed.mean(0) - mixed) * SIGNS, points

    estimate, null, points = fall(acts.layers(site)[-1])
    init = np.full(2, np.nan) if acts.twin is None else fall(acts.twin.layers(site)[-1])[0]
    mixed = np.mean([_leave_one_out(points, other) for other in shuffled[:JACKKNIFED]], 0)
    left_out = mixed - _leave_one_out(points, label)
    deviation = np.zeros_like(left_out)
    for i, count in enumerate(counts):
        own = left_out[label == i]
        deviation[label == i] = (own - own.mean(0)) * np.sqrt((count - 1) / count)
    margin = norm.ppf((1 + level) / 2) * np.sqrt((deviation**2).sum(0))
    parts = [
        rows(
            name,
            estimate[i],
            (estimate[i] - margin[i], estimate[i] + margin[i]),
            null_permutation=null[:, i].mean(),
            null_init=init[i],
            p_value=(1 + (null[:, i] >= estimate[i]).sum()) / (1 + len(null)),
        )
        for i, name in enumerate(STATISTICS)
    ]
    return Result(f"domain_restriction({site})", table(*parts), READING, {}, level)


JACKKNIFED = 20
"""Shuffles over which the jackknife averages."""


def _spread(
    points: Float64[np.ndarray, "point feature"], label: Int64[np.ndarray, " point"]
) -> Float64[np.ndarray, " component"]:
    """Participation ratio and PC1's share, means over groups."""
    return np.mean([_of_group(points[at]) for at in _members(label)], 0)


def _leave_one_out(
    points: Float64[np.ndarray, "point feature"], label: Int64[np.ndarray, " point"]
) -> Float64[np.ndarray, "point component"]:
    """The spread when each point in turn is left out."""
    groups = _members(label)
    found = np.tile(_spread(points, label), (len(label), 1))
    for at in groups:
        rest = np.array([np.delete(at, i) for i in range(len(at))])
        found[at] += (_of_group(points[rest]) - _of_group(points[at])) / len(groups)
    return found


def _members(label: Int64[np.ndarray, " point"]) -> list[np.ndarray]:
    return [np.flatnonzero(label == group) for group in np.unique(label)]


def _of_group(points: Float64[np.ndarray, "*batch point feature"]) -> Float64[np.ndarray, "*batch component"]:
    """Participation ratio and PC1's share, from the smaller of the two products of the centred points."""
    centred = points - points.mean(-2, keepdims=True)
    turned = np.swapaxes(centred, -1, -2)
    gram = centred @ turned if points.shape[-2] < points.shape[-1] else turned @ centred
    total = np.maximum(np.trace(gram, axis1=-2, axis2=-1), np.finfo(float).tiny)
    squares = np.maximum((gram**2).sum((-2, -1)), np.finfo(float).tiny)
    return np.stack([total**2 / squares, np.linalg.eigvalsh(gram)[..., -1] / total], -1)
