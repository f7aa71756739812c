"""Is it entropy that the leading components follow, or what goes with it: position, length, frequency, the output?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Float64, Int64
from scipy.stats import rankdata
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, SplineTransformer
from torch import Tensor

from .extract import as_activations
from .held_out import points_at, principal_axes, r2
from .nulls import Bootstrap, require_finite
from .result import ProbeError, Result, rows, table

READING = (
    "The axis codes entropy only as far as R^2 stays above every null once position, length and frequency are taken "
    "out; what is left beyond the last few tokens and beyond the output itself is a belief that neither shows."
)
AGREEMENT = (
    "The output follows the exact posterior where the rank correlation is above the untrained model's and above "
    "chance, within a length too: over all lengths anything that changes with length correlates."
)
CATEGORIES = 24
"""A control with at most so many values gets a mean for each; another one a cubic spline."""


def entropy_beyond_controls(
    acts: Mapping[str, Tensor],
    entropy: Float[Tensor, "batch query"],
    controls: Mapping[str, Mapping[str, Tensor]],
    position: Int64[Tensor, "batch query"] | None = None,
    *,
    site: str = "v",
    components: int = 3,
    resamples: int = 500,
    permutations: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    """Held-out R^2 of entropy by the leading components, per layer, beyond ever more controls.

    Components, and the regressions of entropy and components on the controls, are fitted on one half of the sequences
    and everything is reported on the other. Statistics: ``entropy_r2``, without controls (``null_controls``: what the
    first set of controls gives alone); ``entropy_r2_beyond_NAME`` for each set, which includes the sets before it: R^2
    of what the controls leave of entropy, by what they leave of the components. Nulls: ``null_permutation`` shuffles
    whole sequences of that rest in both halves and refits; ``null_init`` is the twin at initialisation.

    Args:
        acts: activations that hold ``site``.
        entropy: bits at each query: of the exact posterior, or of the model's own predictive.
        controls: name of a set -> name of a control -> its values, ``batch query``.
        position: the supervised positions, by default those of the extraction.
        site: ``v``, or another site.
        components: number of leading components.
        resamples: bootstrap resamples over sequences.
        permutations: permutations of the sequences.
        level: coverage of the intervals.
        seed: seed of resamples and permutations.

    Raises:
        ProbeError: when shapes differ, values are not finite, or there are fewer than eight sequences.
    """
    acts = as_activations(acts)
    position = acts.position if position is None else position
    if position is None or len(entropy) < 8:
        raise ProbeError(f"entropy_beyond_controls needs positions and at least 8 sequences, got {len(entropy)}")
    h = np.asarray(entropy, dtype=float)
    require_finite("entropy", h)
    taken: list[np.ndarray] = []
    designs: dict[str, list[np.ndarray]] = {"": []}
    for name, group in controls.items():
        for control, values in group.items():
            if values.shape != entropy.shape:
                raise ProbeError(
                    f"control '{control}' has shape {tuple(values.shape)}, entropy {tuple(entropy.shape)}; "
                    "they must be equal"
                )
            taken = [*taken, np.asarray(values, dtype=float)]
        designs[f"_beyond_{name}"] = taken
    residuals = {name: _Residuals(columns, h) for name, columns in designs.items()}
    order = np.random.default_rng(seed).permuted(np.tile(np.arange(len(h) // 2), (permutations, 1)), axis=1)

    def measure(layers: list[Tensor], bootstrap: Bootstrap) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in residuals}
        for layer in layers:
            points = points_at(layer, position, site)
            mean, axes = principal_axes(points[::2].reshape(-1, points.shape[-1]), components)
            for name, rest in residuals.items():
                found[name].append(rest.r2((points - mean) @ axes, order, bootstrap))
        return found

    measured = measure(acts.layers(site), Bootstrap(resamples, level, seed))
    twin = None if acts.twin is None else measure(acts.twin.layers(site), Bootstrap(0))
    parts = []
    for name, layers in measured.items():
        columns = {key: [layer.get(key, np.nan) for layer in layers] for key in ("null_permutation", "p_value")}
        columns["null_init"] = [np.nan] * len(layers) if twin is None else [layer["estimate"] for layer in twin[name]]
        if not name and len(designs) > 1:
            first = list(residuals.values())[1]
            columns["null_controls"] = [first.explained] * len(layers)
        interval = [layer["low"] for layer in layers], [layer["high"] for layer in layers]
        estimate = [layer["estimate"] for layer in layers]
        parts.append(rows(f"entropy_r2{name}", estimate, interval, axes=("layer",), **columns))
    return Result(f"entropy_beyond_controls({site})", table(*parts), READING, {}, level)


class _Residuals:
    """What some controls leave of entropy and of components, with coefficients from the even sequences."""

    def __init__(self, controls: Sequence[np.ndarray], entropy: Float64[np.ndarray, "batch query"]) -> None:
        few = [i for i, values in enumerate(controls) if len(np.unique(values)) <= CATEGORIES]
        many = [i for i in range(len(controls)) if i not in few]
        coded = ColumnTransformer(
            [
                ("each", OneHotEncoder(handle_unknown="ignore"), few),
                ("smooth", SplineTransformer(extrapolation="linear"), many),
            ]
        )
        self.regression = make_pipeline(coded, LinearRegression()) if len(controls) else None
        self.controls = np.stack(controls, -1) if len(controls) else np.zeros((*entropy.shape, 0))
        self.entropy = self.rest(entropy[..., None])[..., 0]
        total = entropy[1::2] - entropy[::2].mean()
        self.explained = r2(total, self.entropy[1::2], Bootstrap(0))["estimate"]

    def rest(self, values: Float64[np.ndarray, "batch query feature"]) -> Float64[np.ndarray, "batch query feature"]:
        """Values minus their regression on the controls (on nothing: minus their mean)."""
        if self.regression is None:
            return values - values[::2].mean((0, 1))
        fit, x = self.controls[::2], self.controls
        self.regression.fit(fit.reshape(-1, x.shape[-1]), values[::2].reshape(-1, values.shape[-1]))
        return values - self.regression.predict(x.reshape(-1, x.shape[-1])).reshape(values.shape)

    def r2(
        self, scores: Float64[np.ndarray, "batch query feature"], order: np.ndarray, bootstrap: Bootstrap
    ) -> dict[str, Any]:
        """Held-out R^2 of the rest of entropy by the rest of the scores, with its permutation null."""
        x, y = self.rest(scores), self.entropy
        x_fit, x_held = x[::2].reshape(-1, x.shape[-1]), x[1::2]
        solve = np.linalg.pinv(x_fit)
        found = r2(y[1::2], y[1::2] - x_held @ (solve @ y[::2].ravel()), bootstrap)
        half = len(y) // 2
        fit, held = y[::2][:half][order], y[1::2][order]
        slopes = solve[:, : half * y.shape[1]] @ fit.reshape(len(order), -1).T
        error = ((held - np.einsum("bqf,fr->rbq", x_held, slopes)) ** 2).sum((1, 2))
        null = 1 - error / np.maximum((held**2).sum((1, 2)), np.finfo(float).tiny)
        if len(null) and np.isfinite(found["estimate"]):
            rank = (1 + (null >= found["estimate"]).sum()) / (1 + len(null))
            found |= {"null_permutation": null.mean(), "p_value": rank}
        return found


def entropy_agreement(
    measured: Float[Tensor, "batch query"],
    exact: Float[Tensor, "batch query"],
    strata: Mapping[str, Int64[Tensor, "batch query"]],
    *,
    twin: Float[Tensor, "batch query"] | None = None,
    resamples: int = 500,
    permutations: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    """Spearman correlation of a model's entropies with the exact ones, overall and within strata.

    Statistics: ``spearman``, and ``spearman_within_NAME``, of the ranks within each value of a stratum (its
    position, say, which is the length of the prompt so far). Nulls: ``null_permutation``, whole sequences shuffled (the
    mean of its size); ``null_init``, the twin.

    Args:
        measured: entropies of the model's answers.
        exact: entropies of the exact posterior.
        strata: name -> integer labels.
        twin: entropies of the untrained model.
        resamples: bootstrap resamples over sequences.
        permutations: permutations of the sequences.
        level: coverage of the intervals.
        seed: seed of resamples and permutations.

    Raises:
        ProbeError: when shapes differ or values are not finite.
    """
    values = {"measured": measured, "exact": exact, **({} if twin is None else {"twin": twin})}
    for name, given in values.items():
        if given.shape != exact.shape:
            raise ProbeError(f"{name} has shape {tuple(given.shape)}, exact {tuple(exact.shape)}; they must be equal")
        require_finite(name, np.asarray(given, dtype=float))
    bootstrap = Bootstrap(resamples, level, seed)
    order = np.random.default_rng(seed).permuted(np.tile(np.arange(len(exact)), (permutations, 1)), axis=1)
    parts = []
    for name, label in {"": np.zeros(exact.shape, dtype=int), **strata}.items():
        ranks = {key: _ranks(np.asarray(given, dtype=float), np.asarray(label)) for key, given in values.items()}
        estimate, interval = bootstrap.interval(_correlation(ranks["measured"], ranks["exact"]), len(exact))
        scale = np.sqrt((ranks["measured"] ** 2).sum() * (ranks["exact"] ** 2).sum())
        crossed = ranks["measured"] @ ranks["exact"].T / np.maximum(scale, np.finfo(float).tiny)
        null = np.abs(crossed[np.arange(len(exact)), order].sum(1))
        init = None if twin is None else _correlation(ranks["twin"], ranks["exact"])(np.ones((1, len(exact))))[0]
        parts.append(
            rows(
                f"spearman_within_{name}" if name else "spearman",
                estimate,
                interval,
                null_permutation=null.mean(),
                null_init=init,
                p_value=(1 + (null >= np.abs(estimate)).sum()) / (1 + len(null)),
            )
        )
    return Result("entropy_agreement", table(*parts), AGREEMENT, {}, level)


def _ranks(values: Float64[np.ndarray, "batch query"], label: np.ndarray) -> Float64[np.ndarray, "batch query"]:
    """Ranks within each label, centred there and scaled by its size."""
    ranks = np.zeros_like(values)
    for name in np.unique(label):
        r = rankdata(values[label == name])
        ranks[label == name] = (r - r.mean()) / len(r)
    return ranks


def _correlation(x: np.ndarray, y: np.ndarray) -> Any:
    """Correlation of centred ranks as a statistic of sequence weights."""
    products = np.stack([(x * x).sum(1), (y * y).sum(1), (x * y).sum(1)], 1)

    def statistic(weights: Float64[np.ndarray, "resample batch"]) -> Float64[np.ndarray, " resample"]:
        xx, yy, xy = (weights @ products).T
        return xy / np.sqrt(np.maximum(xx * yy, np.finfo(float).tiny))

    return statistic
