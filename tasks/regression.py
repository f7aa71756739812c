"""Bayesian linear regression in context: what is y at this x, given the pairs so far? (paper I; Garg et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from .base import Batch, Task, TaskError, gaussians


@dataclass(frozen=True)
class Regression(Task):
    r"""y = w . x + noise with a fresh w ~ N(0, prior^2 I), x ~ N(0, I), shown as x_1 y_1 x_2 y_2 ... x_L y_L.

    The answer is due at x_i: the Gaussian predictive of y_i, noise included. With m and :math:`\Sigma` the mean
    and covariance of w given the pairs before i, which follow from one rank-1 (Kalman) update a pair,

    .. math:: y_i \sim N(m \cdot x_i, \; \sigma^2 + x_i^T \Sigma x_i).

    ``batch.posterior`` holds its mean and variance, ``batch.belief`` m, ``batch.entropy`` the differential entropy in
    bits. The weights are a continuum, drawn afresh for each sequence: they can't be memorised.

    Vectors read, in the style of Garg et al.: (x, 0, 0) for x_i and (0, y, 1) for y_i, the last coordinate being a
    flag. They are float32; the posterior is that of the float32 values.
    """

    dimensions: int = 8
    """d, the length of x and w."""
    pairs: int = 17
    """L, the pairs in a sequence: 2 d + 1, as in Garg et al."""
    noise: int | float = 0.5
    """Standard deviation of y around w . x."""
    prior: int | float = 1.0
    """Standard deviation of each weight."""

    name: ClassVar[str] = "regression"
    primitive: ClassVar[Literal["accumulation", "transport", "binding"]] = "accumulation"
    readin: ClassVar[Literal["tokens", "vectors"]] = "vectors"
    readout: ClassVar[Literal["categorical", "gaussian"]] = "gaussian"
    metric: ClassVar[Literal["mae_bits", "kl_bits", "accuracy"]] = "kl_bits"

    def validate(self) -> None:
        """Raise :class:`TaskError` unless the model and its entropy exist."""
        for key in ("dimensions", "pairs"):
            if getattr(self, key) < 1:
                raise TaskError(f"regression: {key} must be at least 1, got {getattr(self, key)}")
        for key in ("noise", "prior"):
            if not getattr(self, key) > 0:
                raise TaskError(
                    f"regression: {key} is a standard deviation and must be positive, got {getattr(self, key)}"
                )

    @property
    def d_vocab(self) -> int:
        """Width of the vectors read: x, y and a flag."""
        return self.dimensions + 2

    @property
    def d_out(self) -> int:
        """Mean and variance (of a model: log-variance)."""
        return 2

    @property
    def n_ctx(self) -> int:
        """Two vectors a pair."""
        return 2 * self.pairs

    @property
    def n_uniforms(self) -> int:
        """The weights, the inputs and the noise."""
        return self.dimensions + self.pairs * (self.dimensions + 1)

    @property
    def vocabulary(self) -> list[str]:
        """The coordinates x0, x1, ..., then y and the flag."""
        return [*(f"x{i}" for i in range(self.dimensions)), "y", "is y"]

    def draw(self, u: Float64[np.ndarray, "batch draw"]) -> Batch:
        """Turn uniforms into sequences; see :class:`Regression` for the posterior."""
        normals = gaussians(u)
        weights = self.prior * normals[:, : self.dimensions]
        noise = self.noise * normals[:, self.dimensions : self.dimensions + self.pairs]
        tokens = np.zeros((len(u), self.pairs, 2, self.d_vocab), dtype=np.float32)
        tokens[:, :, 0, :-2] = normals[:, self.dimensions + self.pairs :].reshape(len(u), self.pairs, self.dimensions)
        x = tokens[:, :, 0, :-2].astype(np.float64)
        tokens[:, :, 1, -2] = np.einsum("bpd,bd->bp", x, weights) + noise
        tokens[:, :, 1, -1] = 1
        targets = tokens[:, :, 1, -2].astype(np.float64)
        position = np.arange(0, self.n_ctx, 2)
        evidence = np.tri(self.n_ctx, dtype=bool)[position]
        return self._batch(tokens.reshape(len(u), self.n_ctx, self.d_vocab), position, targets, evidence)

    def infer(
        self, tokens: Float32[np.ndarray, "batch pos d_in"]
    ) -> tuple[Float64[np.ndarray, "batch query state"], Float64[np.ndarray, "batch query d_out"]]:
        """The posterior mean of w before each pair, and the predictive mean and variance of its y."""
        x, y = tokens[:, 0::2, :-2].astype(np.float64), tokens[:, 1::2, -2].astype(np.float64)
        mean = np.zeros((len(x), self.dimensions))
        covariance = np.broadcast_to(self.prior**2 * np.eye(self.dimensions), (len(x), *[self.dimensions] * 2)).copy()
        belief, posterior = np.empty_like(x), np.empty((*x.shape[:2], 2))
        for i in range(self.pairs):
            shared = np.einsum("bde,be->bd", covariance, x[:, i])
            expected = (mean * x[:, i]).sum(1)
            variance = self.noise**2 + (shared * x[:, i]).sum(1)
            belief[:, i], posterior[:, i, 0], posterior[:, i, 1] = mean, expected, variance
            gain = shared / variance[:, None]
            mean = mean + gain * (y[:, i] - expected)[:, None]
            covariance -= gain[:, :, None] * shared[:, None, :]
        return belief, posterior

    def baselines(self, batch: Batch) -> dict[str, Float64[Tensor, "batch query d_out"]]:
        """The prior predictive, which sees x_i and no pair."""
        squares = batch.tokens[:, 0::2, :-2].double().square().sum(-1)
        prior = torch.stack([torch.zeros_like(squares), self.noise**2 + self.prior**2 * squares], -1)
        return {**super().baselines(batch), "prior": prior}
