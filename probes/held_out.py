"""What is fitted on some sequences and scored on others: points, their principal axes, regressions and R^2."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from sklearn.linear_model import LinearRegression
from torch import Tensor

from .extract import at_position
from .nulls import Bootstrap, cell, require_finite


def points_at(
    activation: Tensor, position: Int64[Tensor, "batch query"], site: str
) -> Float64[np.ndarray, "batch query feature"]:
    """Activations of a site at the supervised positions, all but the first two axes flattened to features."""
    points = at_position(activation, position).flatten(2).double().numpy()
    require_finite(f"site '{site}'", points)
    return points


def principal_axes(points: Float64[np.ndarray, "point feature"], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and leading principal axes (columns), by decreasing variance."""
    mean = points.mean(0)
    _, vectors = np.linalg.eigh(np.cov(points.T).reshape(points.shape[1], points.shape[1]))
    return mean, vectors[:, ::-1][:, :k]


def r2(target: np.ndarray, residual: np.ndarray, bootstrap: Bootstrap) -> dict[str, Any]:
    """Held-out R^2 with its interval; undefined where the target does not vary."""
    total, error = (target**2).sum(1), (residual**2).sum(1)
    if total.sum() < 1e-12 * max(target.size, 1):
        return {"estimate": np.nan, "low": np.nan, "high": np.nan}

    def statistic(weights: np.ndarray) -> np.ndarray:
        return 1 - (weights @ error) / np.maximum(weights @ total, np.finfo(float).tiny)

    return cell(bootstrap.interval(statistic, len(total)))


def regress(x_fit: np.ndarray, y_fit: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Predict at ``x`` by least squares on the fitted half; features last."""
    model = LinearRegression().fit(x_fit.reshape(-1, x_fit.shape[-1]), y_fit.ravel())
    return model.predict(x.reshape(-1, x.shape[-1])).reshape(x.shape[:-1])


def position_mean(values: np.ndarray, position: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Mean of ``values`` at each position, looked up for the ``wanted`` positions (overall mean if unseen)."""
    size = int(max(position.max(), wanted.max())) + 1
    count = np.bincount(position.ravel(), minlength=size)
    total = np.bincount(position.ravel(), weights=values.ravel(), minlength=size)
    means = np.where(count > 0, total / np.maximum(count, 1), values.mean())
    return means[wanted]
