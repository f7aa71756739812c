"""Subspaces of an activation space that are claimed to mean something, fitted to activations and beliefs."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Float64
from sklearn.linear_model import RidgeCV
from torch import Tensor

from .held_out import principal_axes
from .result import ProbeError


def encoding_subspace(
    points: Float64[np.ndarray, "point feature"], belief: Float64[np.ndarray, "point d_out"], rank: int
) -> Float[Tensor, "feature component"]:
    """The ``rank`` directions along which activations move most as a belief changes.

    Activations are regressed on the belief (its entropy, its probabilities, one-hot hypotheses); the directions are the
    leading left singular vectors of what the regression predicts, so no more than the belief has.

    Raises:
        ProbeError: when ``rank`` exceeds what the belief spans.
    """
    known = belief - belief.mean(0)
    slope, _, spanned, _ = np.linalg.lstsq(known, points - points.mean(0), rcond=1e-8)
    if not 0 < rank <= spanned:
        raise ProbeError(f"the belief spans {spanned} directions; rank must be from 1 to that, got {rank}")
    predicted = np.linalg.qr(known, mode="r") @ slope
    return _basis(np.linalg.svd(predicted, full_matrices=False)[2][:rank].T)


def decoding_axis(
    points: Float64[np.ndarray, "point feature"], target: Float64[np.ndarray, " point"]
) -> Float[Tensor, "feature component"]:
    """The direction on which a ridge regression (strength by leave-one-out) reads a number off activations."""
    slope = RidgeCV(alphas=np.logspace(-4, 4, 9) * points.var() * len(points)).fit(points, target).coef_
    norm = np.linalg.norm(slope)
    if norm == 0:
        raise ProbeError("the target does not vary with the activations, so no axis decodes it")
    return _basis(slope[:, None] / norm)


def principal_subspace(points: Float64[np.ndarray, "point feature"], rank: int) -> Float[Tensor, "feature component"]:
    """The leading principal axes."""
    return _basis(principal_axes(points, rank)[1])


def _basis(columns: np.ndarray) -> Float[Tensor, "feature component"]:
    return torch.from_numpy(np.ascontiguousarray(columns)).float()
