"""Nulls and intervals that the probes share: analytic expectations, bounds, and the bootstrap over sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int
from scipy.special import gammaln

from .result import ProbeError


def expected_abs_cos(d: int) -> float:
    r"""Mean \|cos\| of two independent isotropic vectors in ``d`` dimensions.

    :math:`\Gamma(d/2) / (\sqrt\pi\,\Gamma((d+1)/2))`, about :math:`\sqrt{2 / (\pi d)}`.
    """
    return float(np.exp(gammaln(d / 2) - gammaln((d + 1) / 2)) / np.sqrt(np.pi))


def welch_bound(n: int | Int[np.ndarray, ...], d: int) -> Float64[np.ndarray, ...]:
    r"""Least root-mean-square \|cos\| over pairs of ``n`` unit vectors in ``d`` dimensions (Welch 1974).

    :math:`\sqrt{(n - d) / (d (n - 1))}` for n > d, else 0.
    """
    count = np.asarray(n, dtype=float)
    return np.asarray(np.sqrt(np.maximum(count - d, 0) / (d * np.maximum(count - 1, 1))))


Interval = tuple[Float64[np.ndarray, "..."], tuple[Float64[np.ndarray, "..."], Float64[np.ndarray, "..."]]]
"""An estimate with its (low, high)."""


def cell(interval: Interval) -> dict[str, float]:
    """One estimate with its interval as plain numbers, under the names of a result's columns."""
    estimate, (low, high) = interval
    return {"estimate": float(estimate), "low": float(low), "high": float(high)}


@dataclass(frozen=True)
class Bootstrap:
    """Percentile bootstrap over whole sequences (Efron 1979): tokens of one sequence are never independent."""

    resamples: int = 1000
    """0 leaves intervals undefined."""
    level: float = 0.95
    seed: int = 0

    def interval(
        self,
        statistic: Callable[[Float64[np.ndarray, "resample batch"]], Float64[np.ndarray, "resample ..."]],
        n: int,
    ) -> Interval:
        """Estimate and interval of a statistic of ``n`` weighted sequences, evaluated for all resamples at once."""
        estimate = statistic(np.ones((1, n)))[0, ...]
        if self.resamples == 0:
            return estimate, (np.full_like(estimate, np.nan), np.full_like(estimate, np.nan))
        generator = np.random.default_rng(self.seed)
        weights = generator.multinomial(n, np.full(n, 1 / n), size=self.resamples).astype(float)
        tails = (1 - self.level) / 2, (1 + self.level) / 2
        quantiles = np.nanquantile(statistic(weights), tails, axis=0)
        return estimate, (quantiles[0, ...], quantiles[1, ...])

    def mean(self, values: Float[np.ndarray, "batch ..."]) -> Interval:
        """Mean over sequences, with an interval for every trailing index."""
        flat = values.reshape(len(values), -1).astype(float)

        def mean(weights: Float64[np.ndarray, "resample batch"]) -> Float64[np.ndarray, "resample ..."]:
            return (weights @ flat / weights.sum(1, keepdims=True)).reshape(len(weights), *values.shape[1:])

        return self.interval(mean, len(values))


def require_finite(what: str, values: Float[np.ndarray, ...]) -> None:
    """Raise :class:`ProbeError` when activations or beliefs hold NaN or infinities."""
    bad = ~np.isfinite(values)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ProbeError(
            f"{what} holds {int(bad.sum())} values that are not finite, the first at index {where}; "
            "check the model's weights and inputs"
        )
