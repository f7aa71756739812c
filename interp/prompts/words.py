"""In-context bijection with words: which value goes with a key, given the pairs in the prompt so far?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64, Int64

from tasks.bijection import Bijection

from .base import PromptBatch, PromptError, Prompts, choose_single

KEYS = "river chair apple stone cloud garden window bread silver music paper forest summer bridge winter engine"
VALUES = "red blue green seven north dog king gold coffee paris horse moon doctor train tiger glass"
SUFFIXES = (1, 2, 4)
"""Pairs that the suffix baselines see."""


@dataclass(frozen=True)
class WordBijection(Prompts):
    """The wind tunnel :class:`tasks.Bijection` in words: pairs `` key = value,`` after a list of the values.

    A fresh bijection of keys onto values is drawn uniformly; keys with replacement. The value is due at every ``=``:
    the one seen with the key if it was seen, else uniform over the values that no pair has shown. Baselines
    ``suffix_j`` see the last j pairs.
    """

    symbols: int = 6
    """Keys, and values."""
    pairs: int = 8
    """Pairs in a prompt."""

    name: ClassVar[str] = "word bijection"

    def __post_init__(self) -> None:
        if not 2 <= self.symbols <= len(KEYS.split()):
            raise PromptError(f"word bijection: symbols must be 2 to {len(KEYS.split())}, got {self.symbols}")
        if self.pairs < 1:
            raise PromptError(f"word bijection: pairs must be at least 1, got {self.pairs}")

    @property
    def tunnel(self) -> Bijection:
        """The wind tunnel that draws the pairs and knows their posterior."""
        return Bijection(symbols=self.symbols, pairs=self.pairs, repeats=1)

    @property
    def n_uniforms(self) -> int:
        """The wind tunnel's."""
        return self.tunnel.n_uniforms

    def draw(self, u: Float64[np.ndarray, "batch draw"], tokenizer: Any) -> PromptBatch:
        """Turn uniforms into prompts."""
        keys = choose_single(tokenizer, "keys", KEYS.split(), self.symbols)
        values = choose_single(tokenizer, "values", VALUES.split(), self.symbols)
        drawn = self.tunnel.draw(u)
        codes = np.full((len(u), 4 * self.pairs), 2 * self.symbols)
        hypothesis = np.full_like(codes, -1)
        codes[:, ::4], codes[:, 2::4], codes[:, 3::4] = drawn.tokens[:, ::2], drawn.tokens[:, 1::2], codes[0, 0] + 1
        hypothesis[:, 2::4] = drawn.hypothesis[:, 1::2]
        evidence = np.zeros((len(u), self.pairs, codes.shape[1]), dtype=bool)
        evidence[:, :, 2::4] = drawn.evidence[:, :, 1::2]
        return self._batch(
            f"Values:{','.join(values)}. Pairs:",
            [*keys, *values, " =", ","],
            codes[:, :-2],
            tokenizer,
            answers=values,
            position=4 * np.arange(self.pairs) + 1,
            targets=drawn.targets.numpy(),
            belief=drawn.belief.numpy(),
            posterior=drawn.posterior.numpy(),
            evidence=evidence[:, :, :-2],
            hypothesis=hypothesis[:, :-2],
            baselines={
                f"suffix_{j}": self.suffix(drawn.tokens.numpy()[:, ::2], drawn.targets.numpy(), j)
                for j in SUFFIXES
                if j < self.pairs
            },
        )

    def suffix(
        self, keys: Int64[np.ndarray, "batch query"], values: Int64[np.ndarray, "batch query"], window: int
    ) -> Float64[np.ndarray, "batch query d_out"]:
        """The exact posterior from the last ``window`` pairs alone."""
        lag = np.subtract.outer(np.arange(self.pairs), np.arange(self.pairs))
        recent = (lag > 0) & (lag <= window)
        shown = np.eye(self.symbols)[values]
        match = np.einsum("bij,bjv->biv", recent & (keys[:, :, None] == keys[:, None, :]), shown) > 0
        unseen = ~(np.einsum("ij,bjv->biv", recent.astype(float), shown) > 0)
        weights = np.where(match.any(-1, keepdims=True), match, unseen).astype(float)
        return weights / weights.sum(-1, keepdims=True)
