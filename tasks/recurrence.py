"""Modular recurrence: is this sequence a program x' = a x + b mod p, and what comes next? ("construction boundary")."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float64, Int64
from scipy.special import expit

from .base import Batch, Task, TaskError


@dataclass(frozen=True)
class Recurrence(Task):
    r"""Sequences mod p, each either a program :math:`x_{t+1} = a x_t + b` with fresh a, b, x_1 or uniformly random.

    The answer is due at every x_t: the next symbol. After k symbols, of the p^2 equally likely programs c are
    consistent, and the odds of a program are

    .. math:: \frac{w}{1 - w} = \frac{m}{1 - m} \, c \, p^{k - 3}

    with m the ``mixture``. The predictive is w times that of the consistent programs plus (1 - w) / p.
    ``batch.belief`` is the posterior over (no program, then the programs in the order a p + b).

    There are p^2 programs and p^3 program sequences, 4,913 with p = 17: they can be memorised, so a claim that the
    rule was learnt needs programs held out of training, or a larger p (1,030,301 sequences with p = 101). With a
    ``horizon`` only the first answers of a sequence are asked for; the rest of it is read all the same.
    """

    modulus: int = 17
    """p, a prime: symbols are 0 .. p - 1."""
    steps: int = 16
    """Symbols in a sequence."""
    mixture: int | float = 0.5
    """Probability of a program."""
    horizon: int = 0
    """Answers asked for, from the start of the sequence; 0 asks for all."""

    name: ClassVar[str] = "recurrence"
    primitive: ClassVar[Literal["accumulation", "transport", "binding"]] = "accumulation"
    metric: ClassVar[Literal["mae_bits", "kl_bits", "accuracy"]] = "kl_bits"
    variants: ClassVar[dict[str, dict[str, Any]]] = {"no_horizon": {"horizon": 0}}

    def validate(self) -> None:
        """Raise :class:`TaskError` unless such sequences exist."""
        if self.modulus < 2 or any(self.modulus % d == 0 for d in range(2, math.isqrt(self.modulus) + 1)):
            raise TaskError(f"recurrence: modulus must be prime for a x + b to permute, got {self.modulus}")
        if self.steps < 1:
            raise TaskError(f"recurrence: steps must be at least 1, got {self.steps}")
        if not 0 <= self.mixture <= 1:
            raise TaskError(f"recurrence: mixture is the probability of a program, 0 to 1, got {self.mixture}")
        if not 0 <= self.horizon <= self.steps:
            raise TaskError(
                f"recurrence: horizon counts answers, 1 to steps={self.steps} or 0 for all, got {self.horizon}"
            )

    @property
    def d_vocab(self) -> int:
        """The residues."""
        return self.modulus

    @property
    def d_out(self) -> int:
        """The next residue."""
        return self.modulus

    @property
    def n_ctx(self) -> int:
        """One token a step."""
        return self.steps

    @property
    def n_uniforms(self) -> int:
        """Program or not, a, b, and the symbols of a random sequence, the first of which starts the program too."""
        return self.steps + 4

    def draw(self, u: Float64[np.ndarray, "batch draw"]) -> Batch:
        """Turn uniforms into sequences; see :class:`Recurrence` for the posterior."""
        is_program = u[:, 0] < self.mixture
        drawn = (u[:, 1:] * self.modulus).astype(np.int64)
        a, b, symbols = drawn[:, 0], drawn[:, 1], drawn[:, 2:]
        for t in range(1, self.steps + 1):
            symbols[:, t] = np.where(is_program, (a * symbols[:, t - 1] + b) % self.modulus, symbols[:, t])
        asked = self.horizon or self.steps
        evidence = np.tri(asked, self.steps, dtype=bool)
        targets = symbols[:, 1 : asked + 1].copy()
        return self._batch(symbols[:, :-1].copy(), np.arange(asked), targets, evidence)

    def infer(
        self, tokens: Int64[np.ndarray, "batch pos"]
    ) -> tuple[Float64[np.ndarray, "batch query state"], Float64[np.ndarray, "batch query d_out"]]:
        """The posterior over no program and every program, and the predictive of the next symbol.

        Raises:
            TaskError: if ``mixture`` is 1 and no program gives the tokens.
        """
        p, asked = self.modulus, self.horizon or self.steps
        tokens = tokens[:, :asked]
        consistent = self._consistent(tokens)
        count = consistent.sum((2, 3))
        with np.errstate(divide="ignore", invalid="ignore"):
            prior = np.log(self.mixture) - np.log1p(-self.mixture)
            weight = expit(prior + np.log(count) + (np.arange(asked) - 2) * np.log(p))
        if np.isnan(weight).any():
            raise TaskError("recurrence: mixture=1 allows programs only, and no program gives the given tokens")
        sequence, t, a, b = np.nonzero(consistent)
        after = (a * tokens[sequence, t] + b) % p
        cell = np.ravel_multi_index((sequence, t, after), (*tokens.shape, p))
        votes = np.bincount(cell, minlength=tokens.size * p).reshape(*tokens.shape, p)
        share = weight[..., None] / np.maximum(count, 1)[..., None]
        posterior = share * votes + (1 - weight[..., None]) / p
        programs = share * consistent.reshape(*tokens.shape, p * p)
        return np.concatenate([1 - weight[..., None], programs], 2), posterior

    def _consistent(self, tokens: Int64[np.ndarray, "batch query"]) -> Bool[np.ndarray, "batch query a b"]:
        """Which programs give the symbols up to each position."""
        p = self.modulus
        needed = (tokens[:, 1:, None] - np.arange(p) * tokens[:, :-1, None]) % p
        fits = np.ones((*tokens.shape, p, p), dtype=bool)
        fits[:, 1:] = needed[..., None] == np.arange(p)
        return np.logical_and.accumulate(fits, axis=1)
