"""Belief geometry: is the belief simplex linearly embedded in the activations (Shai et al. 2024), beyond n-grams?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64, Int64
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.linear_model import RidgeCV
from sklearn.metrics import adjusted_mutual_info_score, silhouette_samples
from torch import Tensor

from .calibration import kl_bits
from .extract import as_activations
from .held_out import points_at, r2
from .interventions import partners
from .nulls import Bootstrap, cell
from .result import ProbeError, Result, table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

READING = (
    "Activations hold the belief where its held-out R^2 exceeds that of the last few observations, which alone reach "
    "0.99 on processes of short memory. Clusters are those of the latent state only where their mutual information "
    "with it exceeds the observed symbol's."
)
COMPONENTS = 256
"""Principal components of the activations that are read and clustered, where there are more features."""
FLOOR = 1e-3
"""Least probability of a regressed belief after projection, so that its error in bits is finite."""
LARGEST = 2000
"""Points of which distances are computed for the silhouette."""


@dataclass(frozen=True, eq=False)
class BeliefResult(Result):
    """A result that also holds the regressed and the exact beliefs of held-out points."""

    points: pd.DataFrame | None = None
    """``layer``, ``regressed_i`` and ``belief_i`` for every state i."""

    def figures(self) -> list[Figure]:
        """The simplex, and the panels of the table."""
        return [self.simplex(), self.figure()]

    def simplex(self, layer: int | None = None) -> Figure:
        """Exact beliefs beside those regressed from one layer (by default the last), coloured by the exact belief."""
        from .plotting import belief_simplex

        assert self.points is not None
        return belief_simplex(self.points, layer)


def belief_geometry(
    acts: Mapping[str, Tensor],
    belief: Float64[Tensor, "batch query state"],
    observed: Int64[Tensor, "_ _"],
    position: Int64[Tensor, "batch query"] | None = None,
    *,
    site: str = "belief",
    predictors: Mapping[str, Float64[Tensor, "batch query state"]] | None = None,
    resamples: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> BeliefResult:
    """Read the belief off activations, and cluster them, per layer.

    Fitted on the even sequences, reported on the odd ones. ``belief_r2``: R^2 of the belief vector by ridge regression
    (strength by leave-one-out; on the leading principal components where there are many features).
    ``belief_kl_bits``: KL(belief || regressed), after projection to the simplex with no probability below 0.001.
    ``ami``: adjusted mutual information of k-means clusters, as many as states, with the most likely state.
    ``silhouette`` of those clusters, ``silhouette_fewer`` and ``silhouette_more`` with one cluster less and more.

    Nulls: ``null_last_n``, regression on which of all strings the last n observations are; ``null_shuffled``, the
    beliefs of other sequences; ``null_init``, the twin at initialisation; ``null_symbol`` for ``ami``, the observed
    symbols in place of clusters.

    Args:
        acts: activations that hold ``site``.
        belief: exact posterior over the latent state (``batch.belief``).
        observed: symbol observed at each supervised position, in order.
        position: the supervised positions, by default those of the extraction.
        predictors: beliefs of lesser observers, scored as they are; needed where each sequence has parameters of its
            own, which a string of symbols can't know.
        site: ``belief`` (residual stream, Mamba's state, LSTM's cell), or another site with one vector a position.
        resamples: bootstrap resamples over sequences.
        level: coverage of the intervals.
        seed: seed of all draws.

    Raises:
        ProbeError: when shapes differ or there are fewer than eight sequences.
    """
    acts = as_activations(acts)
    position = acts.position if position is None else position
    if position is None or position.shape != observed.shape or belief.shape[:2] != observed.shape:
        raise ProbeError(
            f"belief has shape {tuple(belief.shape)}, observed {tuple(observed.shape)}, position "
            f"{None if position is None else tuple(position.shape)}; the first two axes are (batch, query) in all"
        )
    if len(belief) < 8:
        raise ProbeError(f"belief_geometry splits the sequences in two halves and needs at least 8, got {len(belief)}")
    y, x = belief.numpy(), observed.numpy()
    bootstrap = Bootstrap(resamples, level, seed)
    lesser = {f"last_{n}": _read(_strings(x, n), y) for n in (1, 2, 3)}
    lesser |= {name.replace(" ", "_"): other[1::2].numpy() for name, other in (predictors or {}).items()}
    known = {name: _nulls(score, y[1::2], lesser) for name, score in SCORES.items()}
    shuffled = partners(len(y), seed).numpy()
    twins = [None] * len(acts.layers(site)) if acts.twin is None else acts.twin.layers(site)
    cells: dict[str, list[dict[str, Any]]] = {}
    clouds = []
    for i, (layer, twin) in enumerate(zip(acts.layers(site), twins, strict=True)):
        points = _compressed(points_at(layer, position, site))
        read, others = _read(points, y), {"shuffled": _read(points, y[shuffled])}
        clusters = _clusters(points, y, x, bootstrap, seed)
        if twin is not None:
            untrained = _compressed(points_at(twin, position, site))
            others["init"] = _read(untrained, y)
            for name, start in _clusters(untrained, y, x, Bootstrap(0), seed).items():
                clusters[name]["null_init"] = start["estimate"]
        measured = {
            name: {**score(y[1::2], read, bootstrap), **known[name], **_nulls(score, y[1::2], others)}
            for name, score in SCORES.items()
        }
        for name, found in {**measured, **clusters}.items():
            cells.setdefault(name, []).append(found)
        flat = np.concatenate([_project(read), y[1::2]], -1).reshape(-1, 2 * y.shape[-1])
        names = [f"{kind}_{state}" for kind in ("regressed", "belief") for state in range(y.shape[-1])]
        clouds.append(pd.DataFrame(flat, columns=names).assign(layer=i))
    parts = [pd.DataFrame(found).assign(statistic=name, layer=np.arange(len(found))) for name, found in cells.items()]
    units = {"belief_kl_bits": "bits"}
    cloud = pd.concat(clouds, ignore_index=True)
    return BeliefResult(f"belief_geometry({site})", table(*parts), READING, units, level, cloud)


def _compressed(points: np.ndarray) -> np.ndarray:
    """The leading principal components of the even sequences, where there are many features."""
    fit = points[::2].reshape(-1, points.shape[-1])
    if min(fit.shape) <= COMPONENTS:
        return points
    pca = PCA(COMPONENTS, svd_solver="randomized", random_state=0).fit(fit)
    return pca.transform(points.reshape(-1, points.shape[-1])).reshape(*points.shape[:2], COMPONENTS)


def _read(points: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The belief of the odd sequences, by a ridge regression fitted on the even ones."""
    fit, held = (points[half].reshape(-1, points.shape[-1]) for half in (slice(0, None, 2), slice(1, None, 2)))
    alphas = np.logspace(-9, 1, 11) * fit.var(0).sum() * len(fit) + np.finfo(float).tiny
    model = RidgeCV(alphas).fit(fit, y[::2].reshape(-1, y.shape[-1]))
    return model.predict(held).reshape(y[1::2].shape)


def _strings(observed: np.ndarray, n: int) -> np.ndarray:
    """One-hot code of the last n observations; before the first there is a symbol of its own."""
    size = int(observed.max()) + 2
    padded = np.pad(observed + 1, ((0, 0), (n - 1, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, n, axis=1)
    _, code = np.unique(windows @ size ** np.arange(n), return_inverse=True)
    return np.eye(code.max() + 1)[code.reshape(observed.shape)]


def _r2(y: np.ndarray, read: np.ndarray, bootstrap: Bootstrap) -> dict[str, Any]:
    centred, residual = ((y - other).reshape(len(y), -1) for other in (y.mean((0, 1)), read))
    return r2(centred, residual, bootstrap)


def _kl(y: np.ndarray, read: np.ndarray, bootstrap: Bootstrap) -> dict[str, Any]:
    regressed = torch.from_numpy(np.maximum(_project(read), FLOOR)).log()
    return cell(bootstrap.mean(kl_bits(torch.from_numpy(y), regressed).mean(1).numpy()))


SCORES = {"belief_r2": _r2, "belief_kl_bits": _kl}


def _nulls(score: Callable[..., dict[str, Any]], y: np.ndarray, read: Mapping[str, np.ndarray]) -> dict[str, float]:
    return {f"null_{name}": score(y, belief, Bootstrap(0))["estimate"] for name, belief in read.items()}


def _project(points: np.ndarray) -> np.ndarray:
    """The nearest point of the probability simplex (Held, Wolfe and Crowder 1974)."""
    descending = -np.sort(-points, -1)
    excess = (descending.cumsum(-1) - 1) / np.arange(1, points.shape[-1] + 1)
    kept = (descending > excess).sum(-1, keepdims=True)
    return np.maximum(points - np.take_along_axis(excess, kept - 1, -1), 0)


def _clusters(
    points: np.ndarray, y: np.ndarray, observed: np.ndarray, bootstrap: Bootstrap, seed: int
) -> dict[str, dict[str, Any]]:
    """k-means, fitted on the even sequences, against the most likely state of the odd ones."""
    fit, held = points[::2].reshape(-1, points.shape[-1]), points[1::2]
    state, symbol = y[1::2].argmax(-1), observed[1::2]
    found: dict[str, dict[str, Any]] = {}
    for name, k in (("", 0), ("_fewer", -1), ("_more", 1)):
        model = KMeans(y.shape[-1] + k, n_init=4, random_state=seed).fit(fit)
        label = model.predict(held.reshape(-1, held.shape[-1])).reshape(state.shape)
        if not k:
            found["ami"] = _mutual_information(label, state, symbol, bootstrap, seed)
        rows_used = slice(0, max(2, LARGEST // held.shape[1]))
        some, of = held[rows_used], label[rows_used]
        value = np.full(of.shape, np.nan)
        if len(np.unique(of)) > 1:
            value = silhouette_samples(some.reshape(-1, some.shape[-1]), of.ravel()).reshape(of.shape)
        found[f"silhouette{name}"] = cell(bootstrap.mean(value.mean(1)))
    return found


def _mutual_information(
    label: np.ndarray, state: np.ndarray, symbol: np.ndarray, bootstrap: Bootstrap, seed: int
) -> dict[str, Any]:
    def ami(a: np.ndarray, b: np.ndarray) -> float:
        return float(adjusted_mutual_info_score(a.ravel(), b.ravel()))

    generator = np.random.default_rng(seed)
    draws = generator.integers(len(label), size=(min(bootstrap.resamples, 100), len(label)))
    spread = [ami(label[draw], state[draw]) for draw in draws]
    tails = (1 - bootstrap.level) / 2, (1 + bootstrap.level) / 2
    low, high = np.quantile(spread, tails) if spread else (np.nan, np.nan)
    return {
        "estimate": ami(label, state),
        "low": low,
        "high": high,
        "null_symbol": ami(symbol, state),
        "null_shuffled": ami(label, generator.permuted(state, axis=0)),
    }
