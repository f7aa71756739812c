"""Bijection elimination: which value does a key map to, given the pairs seen so far? (paper I, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from einops import rearrange
from jaxtyping import Bool, Float64, Int64

from .base import Batch, Task, TaskError


@dataclass(frozen=True)
class Bijection(Task):
    r"""A fresh bijection of ``symbols`` keys onto as many values, shown as pairs ``k1 v1 k2 v2 ... kL vL``.

    The value ``v_i`` is due at the position of ``k_i``. The prior over the V! bijections is uniform, so the
    exact posterior is the value seen with the key if the key was seen, and uniform over the values not yet
    seen otherwise; on keys that do not repeat its entropy is :math:`\log_2(V - i + 1)` bits at pair i.

    With V = 20 there are 20! = 2.4e18 bijections (times the order of the keys): they can't be memorised.

    Keys are tokens ``0 .. V-1``, values ``V .. 2V-1``; classes are values, counted from 0.
    """

    symbols: int = 20
    """V, the number of keys and of values."""
    pairs: int = 19
    """L, the pairs in a sequence."""
    repeats: int | float = 0.0
    """Fraction of sequences whose keys are drawn with replacement; in the rest no key repeats."""

    name: ClassVar[str] = "bijection"
    primitive: ClassVar[Literal["accumulation", "transport", "binding"]] = "accumulation"
    variants: ClassVar[dict[str, dict[str, Any]]] = {"repeated_keys": {"repeats": 1.0}}
    training: ClassVar[dict[str, Any]] = {"repeats": 0.5}

    def validate(self) -> None:
        """Raise :class:`TaskError` unless such sequences exist."""
        if self.symbols < 2:
            raise TaskError(f"bijection: symbols must be at least 2 for a posterior to move, got {self.symbols}")
        if self.pairs < 1:
            raise TaskError(f"bijection: pairs must be at least 1, got {self.pairs}")
        if not 0 <= self.repeats <= 1:
            raise TaskError(f"bijection: repeats is a fraction of sequences, 0 to 1, got {self.repeats}")
        if self.repeats < 1 and self.pairs > self.symbols:
            raise TaskError(
                f"bijection: {self.pairs} pairs need {self.pairs} different keys but there are {self.symbols}; "
                f"lower pairs to {self.symbols}, or set repeats=1 to draw keys with replacement"
            )

    @property
    def d_vocab(self) -> int:
        """Keys and values."""
        return 2 * self.symbols

    @property
    def d_out(self) -> int:
        """One class a value."""
        return self.symbols

    @property
    def n_ctx(self) -> int:
        """Two tokens a pair."""
        return 2 * self.pairs

    @property
    def n_uniforms(self) -> int:
        """The bijection, keys without and with replacement, and the choice between the two."""
        return 2 * self.symbols + self.pairs + 1

    def draw(self, u: Float64[np.ndarray, "batch draw"]) -> Batch:
        """Turn uniforms into sequences; see :class:`Bijection` for the posterior."""
        symbols, pairs = self.symbols, self.pairs
        bijection = u[:, :symbols].argsort(1)
        distinct = u[:, symbols : 2 * symbols].argsort(1)[:, :pairs]
        replaced = (u[:, 2 * symbols : -1] * symbols).astype(np.int64)
        keys = replaced if pairs > symbols else np.where(u[:, -1:] < self.repeats, replaced, distinct)
        values = np.take_along_axis(bijection, keys, 1)
        tokens = rearrange([keys, values + symbols], "pair batch query -> batch (query pair)")
        same_pair = self._same_pair(keys)
        evidence = np.zeros((len(u), pairs, 2 * pairs), dtype=bool)
        evidence[..., 1::2] = np.where(same_pair.any(2, keepdims=True), same_pair, np.tri(pairs, k=-1, dtype=bool))
        hypothesis = np.where(tokens >= symbols, tokens - symbols, -1)
        return self._batch(tokens, np.arange(0, 2 * pairs, 2), values, evidence, hypothesis)

    def infer(
        self, tokens: Int64[np.ndarray, "batch pos"]
    ) -> tuple[Float64[np.ndarray, "batch query d_out"], Float64[np.ndarray, "batch query d_out"]]:
        """The posterior over the value due, twice: it is also the belief."""
        keys, values = tokens[:, ::2], tokens[:, 1::2] - self.symbols
        if not (
            (tokens >= 0) & (tokens < self.d_vocab) & ((tokens >= self.symbols) == (np.arange(self.n_ctx) % 2))
        ).all():
            raise TaskError(f"bijection: tokens must alternate keys below {self.symbols} and values from there up")
        same_pair = self._same_pair(keys)
        if (same_pair != self._same_pair(values)).any():
            raise TaskError("bijection: no bijection gives one key two values, or two keys one value")
        shown = np.eye(self.symbols, dtype=bool)[values]
        value_seen = np.zeros_like(shown)
        np.logical_or.accumulate(shown[:, :-1], axis=1, out=value_seen[:, 1:])
        possible = np.where(same_pair.any(2, keepdims=True), shown, ~value_seen)
        posterior = possible / possible.sum(-1, keepdims=True)
        return posterior, posterior

    def _same_pair(self, symbols: Int64[np.ndarray, "batch query"]) -> Bool[np.ndarray, "batch query query"]:
        """Which earlier pairs hold the same key, or the same value."""
        return (symbols[:, :, None] == symbols[:, None, :]) & np.tri(self.pairs, k=-1, dtype=bool)

    @property
    def vocabulary(self) -> list[str]:
        """Keys k0, k1, ... and values v0, v1, ..."""
        return [f"{kind}{i}" for kind in "kv" for i in range(self.symbols)]
