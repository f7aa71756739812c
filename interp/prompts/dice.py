"""Coin flips and dice: the next outcome of a die of unknown bias, under a Dirichlet prior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64
from scipy.special import gammaincinv

from tasks.base import categorical

from .base import PromptBatch, PromptError, Prompts, choose_single

OUTCOMES = {2: ("heads", "tails"), 6: ("one", "two", "three", "four", "five", "six")}
HEADERS = {2: "Flips of a coin:", 6: "Rolls of a die:"}
SUFFIXES = (1, 2, 4)
"""Outcomes that the suffix baselines see."""


@dataclass(frozen=True)
class Dice(Prompts):
    r"""Outcomes `` heads, tails, ...`` of one coin (or die) whose probabilities are drawn from Dirichlet(a, ..., a).

    The next outcome is due after the header and after every comma. After n outcomes, :math:`n_i` of them i, the
    posterior predictive is :math:`(n_i + a) / (n + a\,sides)`, which is also the posterior mean of the bias: the
    belief. Baselines ``suffix_j`` see the last j outcomes.
    """

    sides: int = 2
    """2, a coin, or 6, a die."""
    rolls: int = 12
    """Outcomes in a prompt; as many are predicted, and one more."""
    a: int | float = 1.0
    """Concentration of the prior: 1 is uniform, below that dice are loaded."""

    name: ClassVar[str] = "dice"

    def __post_init__(self) -> None:
        if self.sides not in OUTCOMES:
            raise PromptError(f"dice: sides must be 2 or 6, got {self.sides}")
        if self.rolls < 1:
            raise PromptError(f"dice: rolls must be at least 1, got {self.rolls}")
        if not self.a > 0:
            raise PromptError(f"dice: a must be above 0, got {self.a}")

    @property
    def n_uniforms(self) -> int:
        """The bias, and each roll; one beyond the prompt is the last label."""
        return self.sides + self.rolls + 1

    def draw(self, u: Float64[np.ndarray, "batch draw"], tokenizer: Any) -> PromptBatch:
        """Turn uniforms into prompts."""
        outcomes = choose_single(tokenizer, "outcomes", OUTCOMES[self.sides], self.sides)
        bias = np.maximum(gammaincinv(self.a, u[:, : self.sides]), np.finfo(float).tiny)
        cumulative = (bias / bias.sum(1, keepdims=True)).cumsum(1)
        rolls = categorical(u[:, self.sides :], np.tile(cumulative[:, None], (1, self.rolls + 1, 1)))
        seen = np.eye(self.sides)[rolls].cumsum(1)
        counts = np.concatenate([np.zeros_like(seen[:, :1]), seen[:, :-1]], 1)
        codes = np.full((len(u), 2 * self.rolls), self.sides)
        codes[:, ::2] = rolls[:, :-1]
        query = 2 * np.arange(self.rolls + 1) - 1
        is_roll = np.arange(codes.shape[1]) % 2 == 0
        evidence = is_roll & (np.arange(codes.shape[1]) < query[:, None])
        posterior = self.predictive(counts)
        return self._batch(
            HEADERS[self.sides],
            [*outcomes, ","],
            codes,
            tokenizer,
            answers=outcomes,
            position=query,
            targets=rolls,
            belief=posterior,
            posterior=posterior,
            evidence=np.tile(evidence, (len(u), 1, 1)),
            hypothesis=np.where(is_roll, codes, -1),
            baselines={
                f"suffix_{j}": self.predictive(counts - np.pad(counts, ((0, 0), (j, 0), (0, 0)))[:, :-j])
                for j in SUFFIXES
                if j < self.rolls
            },
        )

    def predictive(self, counts: Float64[np.ndarray, "batch query d_out"]) -> Float64[np.ndarray, "batch query d_out"]:
        """The posterior predictive, from how often each outcome was seen."""
        smoothed = counts + self.a
        return smoothed / smoothed.sum(-1, keepdims=True)
