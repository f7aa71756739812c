"""The value manifold: do activations lie on a low-dimensional curve that posterior entropy parameterises?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Float64, Int64
from scipy.stats import rankdata
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from .extract import as_activations
from .held_out import points_at, position_mean, principal_axes, r2, regress
from .nulls import Bootstrap, cell, require_finite
from .result import ProbeError, Result, rows, table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

READING = (
    "Believe 'PC1 encodes entropy' only from the within-position statistics: where entropy is a function of position, "
    "any code for position, a random one too, gives the plain correlation. A manifold that training made shows as "
    "variance on PC1 and dimension far from the model at initialisation."
)


@dataclass(frozen=True, eq=False)
class ManifoldResult(Result):
    """A result that also holds the points, projected on their leading components."""

    points: pd.DataFrame | None = None
    """Held-out points: ``layer``, ``PC1`` to ``PC3``, ``entropy_bits``, ``position``."""

    def figures(self) -> list[Figure]:
        """The scatter, and the panels of the table."""
        return [self.scatter(), self.figure()]

    def scatter(self, layer: int | None = None) -> Figure:
        """The points of one layer (by default the last) in three dimensions, coloured by posterior entropy."""
        from .plotting import manifold_scatter

        assert self.points is not None
        return manifold_scatter(self.points, layer)


def value_manifold(
    acts: Mapping[str, Tensor],
    entropy: Float[Tensor, "batch query"],
    position: Int64[Tensor, "_ _"] | None = None,
    *,
    site: str = "v",
    components: int = 3,
    resamples: int = 200,
    permutations: int = 500,
    level: float = 0.95,
    seed: int = 0,
) -> ManifoldResult:
    r"""PCA of activations at the supervised positions, against the posterior entropy, per layer.

    Components are fitted on one half of the sequences and everything is reported on the other. Statistics:

    - ``pc1_variance``: share of the variance along PC1.
    - ``participation_ratio``: :math:`(\sum\lambda)^2 / \sum\lambda^2` of the covariance.
    - ``two_nn_dimension``: intrinsic dimension from two nearest neighbours (Facco et al. 2017); duplicate
      points are merged first.
    - ``spearman``: \|Spearman\| of PC1 with entropy, over all points. Its permutation null shuffles whole
      sequences, which keeps what position explains.
    - ``spearman_within_position``: the same of ranks within each position: what position can't explain.
    - ``entropy_r2``: held-out R^2 of entropy, by linear regression on the leading ``components``.
    - ``entropy_r2_within_position``: the same after subtracting the means of each position.

    Where entropy does not vary within any position, the within-position statistics are undefined (NaN).
    ``null_position`` is what position alone (its one-hot code) gives; ``null_init`` the twin at initialisation.

    Args:
        acts: activations that hold ``site``, from :func:`probes.extract` or a TransformerLens cache.
        entropy: exact posterior entropy in bits (``batch.entropy``).
        position: the supervised positions (``batch.position``), by default those of the extraction.
        site: ``v``, ``z``, ``attn_out``, ``resid_post``, or another site that the model declares.
        components: number of leading components in the regression.
        resamples: bootstrap resamples over sequences.
        permutations: permutations of the sequences.
        level: coverage of the intervals.
        seed: seed of resamples and permutations.

    Raises:
        ProbeError: when the site is missing, values are not finite, shapes differ, or there are fewer than
            eight sequences.
    """
    acts = as_activations(acts)
    position = acts.position if position is None else position
    if position is None:
        raise ProbeError("value_manifold needs the supervised positions; pass position=batch.position")
    if position.shape != entropy.shape:
        raise ProbeError(
            f"entropy has shape {tuple(entropy.shape)}, position {tuple(position.shape)}; both are (batch, query)"
        )
    if len(entropy) < 8:
        raise ProbeError(f"value_manifold splits the sequences in two halves and needs at least 8, got {len(entropy)}")
    h, where = np.asarray(entropy, dtype=float), np.asarray(position)
    require_finite("entropy", h)
    order = np.random.default_rng(seed).permuted(np.tile(np.arange(len(h) // 2), (permutations, 1)), axis=1)

    def measure(layers: list[Tensor], bootstrap: Bootstrap) -> list[dict[str, Any]]:
        return [_layer(points_at(layer, position, site), h, where, components, order, bootstrap) for layer in layers]

    found = measure(acts.layers(site), Bootstrap(resamples, level, seed))
    twin: list[dict[str, Any]] = [{} for _ in found]
    if acts.twin is not None:
        twin = measure(acts.twin.layers(site), Bootstrap(0))

    nulls = ("null_permutation", "null_position", "p_value")
    parts = []
    for statistic in STATISTICS:
        cells = [layer[statistic] for layer in found]
        parts.append(
            rows(
                statistic,
                [cell["estimate"] for cell in cells],
                ([cell["low"] for cell in cells], [cell["high"] for cell in cells]),
                axes=("layer",),
                null_init=[layer.get(statistic, {}).get("estimate", np.nan) for layer in twin],
                **{name: [cell.get(name, np.nan) for cell in cells] for name in nulls},
            )
        )
    points = pd.concat([layer["points"].assign(layer=i) for i, layer in enumerate(found)], ignore_index=True)
    return ManifoldResult(f"value_manifold({site})", table(*parts), READING, {}, level, points)


STATISTICS = (
    "pc1_variance",
    "participation_ratio",
    "two_nn_dimension",
    "spearman",
    "spearman_within_position",
    "entropy_r2",
    "entropy_r2_within_position",
)


def _layer(
    points: Float64[np.ndarray, "batch query feature"],
    entropy: Float64[np.ndarray, "batch query"],
    position: Int64[np.ndarray, "batch query"],
    components: int,
    order: Int64[np.ndarray, "resample half"],
    bootstrap: Bootstrap,
) -> dict[str, Any]:
    """All statistics of one layer: components from the even sequences, figures from the odd ones."""
    fit, held = points[::2], points[1::2]
    h_fit, h = entropy[::2], entropy[1::2]
    at_fit, at = position[::2], position[1::2]
    mean, axes = principal_axes(fit.reshape(-1, fit.shape[-1]), max(components, 3))
    scores_fit, scores = (fit - mean) @ axes, (held - mean) @ axes
    found: dict[str, Any] = {**_spread(held, axes[:, 0], bootstrap), "two_nn_dimension": _two_nn(held, bootstrap)}

    pc1 = scores[..., 0]
    by_place = position_mean(h_fit, at_fit, at)
    ranks = {"pc1": pc1, "entropy": h, "position": by_place}
    plain = {name: _standard(rankdata(values).reshape(values.shape)) for name, values in ranks.items()}
    found["spearman"] = _correlation(plain["pc1"], plain["entropy"], order, bootstrap)
    by_position = _correlation(plain["position"], plain["entropy"], order, Bootstrap(0))
    found["spearman"]["null_position"] = by_position["estimate"]
    within = _standard(_ranks_within(pc1, at)), _standard(_ranks_within(h, at))
    found["spearman_within_position"] = _correlation(*within, order, bootstrap)

    x_fit, x = scores_fit[..., :components], scores[..., :components]
    found["entropy_r2"] = r2(h - h_fit.mean(), h - regress(x_fit, h_fit, x), bootstrap)
    by_position = r2(h - h_fit.mean(), h - by_place, Bootstrap(0))
    found["entropy_r2"]["null_position"] = by_position["estimate"]
    x_fit, x = (
        values - np.stack([position_mean(scores_fit[..., i], at_fit, where) for i in range(values.shape[-1])], -1)
        for values, where in ((x_fit, at_fit), (x, at))
    )
    r_fit, r = h_fit - position_mean(h_fit, at_fit, at_fit), h - by_place
    found["entropy_r2_within_position"] = r2(r, r - regress(x_fit, r_fit, x), bootstrap)

    flat = scores[..., :3].reshape(-1, min(3, scores.shape[-1]))
    named = {f"PC{i + 1}": column for i, column in enumerate(flat.T)}
    found["points"] = pd.DataFrame({**named, "entropy_bits": h.ravel(), "position": at.ravel()})
    return found


def _spread(held: np.ndarray, axis: np.ndarray, bootstrap: Bootstrap) -> dict[str, dict[str, Any]]:
    """PC1's share of the variance, and the participation ratio, from per-sequence moments."""
    n, q, d = held.shape
    centred = held - held.mean((0, 1))
    first = centred.mean(1)
    second = np.einsum("bqi,bqj->bij", centred, centred, optimize=True).reshape(n, d * d) / q

    def statistic(weights: np.ndarray) -> np.ndarray:
        shares = weights / weights.sum(1, keepdims=True)
        mean = shares @ first
        covariance = (shares @ second).reshape(-1, d, d) - mean[:, :, None] * mean[:, None, :]
        total = np.trace(covariance, axis1=1, axis2=2)
        along = np.einsum("rij,i,j->r", covariance, axis, axis, optimize=True)
        squares = (covariance**2).sum((1, 2))
        tiny = np.finfo(float).tiny
        return np.stack([along / np.maximum(total, tiny), total**2 / np.maximum(squares, tiny)], 1)

    estimate, (low, high) = bootstrap.interval(statistic, n)
    names = ("pc1_variance", "participation_ratio")
    return {name: {"estimate": estimate[i], "low": low[i], "high": high[i]} for i, name in enumerate(names)}


def _two_nn(held: Float64[np.ndarray, "batch query feature"], bootstrap: Bootstrap) -> dict[str, Any]:
    """TwoNN: slope through the origin of -log(1 - F(mu)) over log mu, without the largest tenth of mu."""
    points, first = np.unique(held.reshape(-1, held.shape[-1]), axis=0, return_index=True)
    if len(points) < 10:
        return {"estimate": np.nan, "low": np.nan, "high": np.nan}
    distance = NearestNeighbors(n_neighbors=3).fit(points).kneighbors(points)[0][:, 1:]
    log_mu = np.log(distance[:, 1] / np.maximum(distance[:, 0], np.finfo(float).tiny))
    order = np.argsort(log_mu)
    x, sequence = log_mu[order], (first // held.shape[1])[order]

    def statistic(weights: np.ndarray) -> np.ndarray:
        w = weights[:, sequence]
        below = np.cumsum(w, 1) / (w.sum(1, keepdims=True) + 1)
        w = np.where(below < 0.9, w, 0.0)
        y = -np.log1p(-below)
        return (w * x * y).sum(1) / np.maximum((w * x * x).sum(1), np.finfo(float).tiny)

    return cell(bootstrap.interval(statistic, len(held)))


def _correlation(
    x: Float64[np.ndarray, "batch query"],
    y: Float64[np.ndarray, "batch query"],
    order: np.ndarray,
    bootstrap: Bootstrap,
) -> dict[str, Any]:
    """Absolute correlation of standardised ranks, its interval, and its permutation null over sequences.

    A code without variation correlates with nothing (0); a target without variation leaves it undefined.
    """
    if not y.any():
        return {"estimate": np.nan, "low": np.nan, "high": np.nan}
    products = np.stack([(x * x).sum(1), (y * y).sum(1), (x * y).sum(1)], 1)

    def statistic(weights: np.ndarray) -> np.ndarray:
        xx, yy, xy = (weights @ products).T
        return np.abs(xy) / np.sqrt(np.maximum(xx * yy, np.finfo(float).tiny))

    estimate, (low, high) = bootstrap.interval(statistic, len(x))
    scale = np.sqrt(max((x * x).sum() * (y * y).sum(), np.finfo(float).tiny))
    crossed = x @ y.T
    null = np.abs(crossed[np.arange(len(x)), order].sum(1)) / scale
    p_value = (1 + (null >= estimate - 1e-12).sum()) / (1 + len(null))
    return {
        "estimate": float(estimate),
        "low": low,
        "high": high,
        "null_permutation": null.mean(),
        "p_value": p_value,
    }


def _standard(ranks: np.ndarray) -> np.ndarray:
    """Centre over all points; exact zeros where nothing varies."""
    centred = ranks - ranks.mean()
    return np.where(np.abs(centred) < 1e-9, 0.0, centred)


def _ranks_within(values: Float64[np.ndarray, "batch query"], position: np.ndarray) -> np.ndarray:
    """Ranks within each position, centred there and scaled by the number of sequences that have it."""
    ranks = np.zeros_like(values)
    for place in np.unique(position):
        here = position == place
        r = rankdata(values[here])
        ranks[here] = (r - r.mean()) / len(r)
    return ranks
