"""Domain restriction: do prompts of one domain lie on fewer dimensions than as many mixed prompts? (paper III)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float64, Int64
from torch import Tensor

from .extract import as_activations
from .held_out import points_at
from .result import ProbeError, Result, rows, table

READING = (
    "Restricting the domain lowers the dimension where the participation ratio falls, or PC1's share rises, by more "
    "than between groups of the same sizes drawn without regard to domain, and more than in the untrained model."
)


def domain_restriction(
    acts: Mapping[str, Tensor],
    domain: Sequence[str],
    position: Int64[Tensor, "batch query"] | None = None,
    *,
    site: str = "v",
    resamples: int = 200,
    permutations: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    r"""Spread of last-layer activations at the last query, in groups of one domain against groups mixed from all.

    Mixed groups are the domains after shuffling which prompt belongs to which: they match in size, on which both
    statistics depend. ``participation_fall`` is the participation ratio :math:`(\sum\lambda)^2 / \sum\lambda^2` of
    mixed groups minus that of the domains, ``pc1_rise`` PC1's share of the variance in the domains minus that in mixed
    groups; both are means over groups. Nulls: ``null_permutation``, one shuffle against the others (0 on average;
    ``p_value`` is the rank among them); ``null_init``, the twin at initialisation. Intervals weight prompts within each
    domain by a bootstrap, in both kinds of group alike.

    Args:
        acts: activations that hold ``site``.
        domain: what each sequence is about.
        position: the supervised positions, by default those of the extraction; the last is read.
        site: ``v``, or another site.
        resamples: bootstrap resamples of the prompts.
        permutations: shuffles of the domains, at least 2.
        level: coverage of the interval.
        seed: seed of shuffles and resamples.

    Raises:
        ProbeError: when there are fewer than two domains of at least four prompts.
    """
    acts = as_activations(acts)
    position = acts.position if position is None else position
    names, label, counts = np.unique(np.asarray(domain), return_inverse=True, return_counts=True)
    if position is None or len(names) < 2 or counts.min() < 4:
        found = dict(zip(names.tolist(), counts.tolist(), strict=True))
        raise ProbeError(f"domain_restriction needs positions and two domains of at least 4 prompts, got {found}")
    generator = np.random.default_rng(seed)
    shuffled = [generator.permutation(label) for _ in range(permutations)]
    weights = np.zeros((resamples, len(label)))
    for i, count in enumerate(counts):
        weights[:, label == i] = generator.multinomial(count, np.full(count, 1 / count), size=resamples)

    gram = _gram(points_at(acts.layers(site)[-1], position[:, -1:], site)[:, 0])
    plain = np.ones(len(label))
    mixed = np.stack([_spread(gram, other, plain) for other in shuffled])
    estimate = (mixed.mean(0) - _spread(gram, label, plain)) * SIGNS
    null = (mixed.mean(0) - mixed) * SIGNS
    drawn = np.stack(
        [
            (_spread(gram, shuffled[i % permutations], w) - _spread(gram, label, w)) * SIGNS
            for i, w in enumerate(weights)
        ]
    )
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0)
    init = np.full(2, np.nan)
    if acts.twin is not None:
        untrained = _gram(points_at(acts.twin.layers(site)[-1], position[:, -1:], site)[:, 0])
        against = np.mean([_spread(untrained, other, plain) for other in shuffled], axis=0)
        init = (against - _spread(untrained, label, plain)) * SIGNS
    parts = [
        rows(
            name,
            estimate[i],
            (low[i], high[i]),
            null_permutation=null[:, i].mean(),
            null_init=init[i],
            p_value=(1 + (null[:, i] >= estimate[i]).sum()) / (1 + len(null)),
        )
        for i, name in enumerate(("participation_fall", "pc1_rise"))
    ]
    return Result(f"domain_restriction({site})", table(*parts), READING, {}, level)


SIGNS = np.array([1.0, -1.0])
"""A smaller domain has a lower participation ratio and a larger first share."""


def _gram(points: Float64[np.ndarray, "point feature"]) -> Float64[np.ndarray, "point point"]:
    centred = points - points.mean(0)
    return centred @ centred.T


def _spread(
    gram: Float64[np.ndarray, "point point"],
    label: Int64[np.ndarray, " point"],
    weights: Float64[np.ndarray, " point"],
) -> Float64[np.ndarray, " component"]:
    """Participation ratio and PC1's share, means over groups, from inner products of weighted points."""
    found = []
    for group in np.unique(label):
        members = label == group
        p = weights[members] / weights[members].sum()
        inner = gram[np.ix_(members, members)]
        centre = inner @ p
        scaled = np.sqrt(np.outer(p, p)) * (inner - centre[:, None] - centre + p @ centre)
        total = max(np.trace(scaled), np.finfo(float).tiny)
        found.append((total**2 / max((scaled**2).sum(), np.finfo(float).tiny), np.linalg.eigvalsh(scaled)[-1] / total))
    return np.mean(found, axis=0)
