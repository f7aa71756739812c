"""Bijection elimination: which value does a key map to, given the pairs seen so far? (paper I, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float64, Int16, Int64

from .base import Batch, Task, TaskError


@dataclass(frozen=True)
class Bijection(Task):
    r"""A fresh bijection of ``symbols`` keys onto as many values, shown as pairs ``k1 v1 k2 v2 ... kL vL``.

    The value ``v_i`` is due at the position of ``k_i``. The prior over the V! bijections is uniform, so the
    exact posterior is the value seen with the key if the key was seen, and uniform over the values not yet
    seen otherwise; on keys that do not repeat its entropy is :math:`\log_2(V - i + 1)` bits at pair i.

    With V = 20 there are 20! = 2.4e18 bijections (times the order of the keys): they can't be memorised.

    Keys are tokens ``0 .. V-1``, values ``V .. 2V-1``; classes are values, counted from 0. Evidence are the values
    that, given the keys, determine the answer: those of the same key if it was seen, else all shown so far.
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
        """The bijection and distinct keys; keys drawn with replacement, and the choice, where there is one."""
        return 2 * self.symbols + (self.pairs + 1 if self.repeats else 0)

    def for_training(self) -> Task:
        """Half of the sequences with repeated keys, unless ``repeats`` is set already."""
        return self if self.repeats else self.replace(repeats=0.5)

    def draw(self, u: Float64[np.ndarray, "batch draw"]) -> Batch:
        """Turn uniforms into sequences; see :class:`Bijection` for the posterior."""
        symbols, pairs = self.symbols, self.pairs
        bijection = u[:, :symbols].argsort(1)
        keys = u[:, symbols : 2 * symbols].argsort(1)[:, :pairs]
        if self.repeats:
            replaced = (u[:, 2 * symbols : -1] * symbols).astype(np.int64)
            keys = replaced if pairs > symbols else np.where(u[:, -1:] < self.repeats, replaced, keys)
        values = np.take_along_axis(bijection, keys, 1)
        tokens, hypothesis = np.full((2, len(u), 2 * pairs), -1)
        tokens[:, ::2], tokens[:, 1::2], hypothesis[:, 1::2] = keys, values + symbols, values

        first, repeated = self._first(keys)
        shown = np.empty_like(first)
        np.put_along_axis(shown, bijection, first, 1)
        unseen = self._unseen(repeated)
        posterior = self._posterior(shown, values, repeated, unseen)
        entropy = np.where(repeated, 0.0, np.log2(unseen))

        earlier = np.tri(pairs, k=-1, dtype=bool)
        evidence = np.kron(earlier, [False, True])
        sequence, query = np.nonzero(repeated)
        if len(query):
            evidence = np.tile(evidence, (len(u), 1, 1))
            evidence[sequence, query, 1::2] = earlier[query] & (keys[sequence] == keys[sequence, query, None])
        solution = posterior, posterior, entropy
        return self._batch(tokens, np.arange(0, 2 * pairs, 2), values, evidence, hypothesis, solution)

    def infer(
        self, tokens: Int64[np.ndarray, "batch pos"]
    ) -> tuple[Float64[np.ndarray, "batch query d_out"], Float64[np.ndarray, "batch query d_out"]]:
        """The posterior over the value due, twice: it is also the belief."""
        keys, values = tokens[:, ::2], tokens[:, 1::2] - self.symbols
        if keys.min() < 0 or keys.max() >= self.symbols or values.min() < 0 or values.max() >= self.symbols:
            raise TaskError(f"bijection: tokens must alternate keys below {self.symbols} and values from there up")
        first, repeated = self._first(keys)
        shown, _ = self._first(values)
        if (np.take_along_axis(first, keys, 1) != np.take_along_axis(shown, values, 1)).any():
            raise TaskError("bijection: no bijection gives one key two values, or two keys one value")
        posterior = self._posterior(shown, values, repeated, self._unseen(repeated))
        return posterior, posterior

    def _posterior(
        self,
        shown: Int16[np.ndarray, "batch d_out"],
        values: Int64[np.ndarray, "batch query"],
        repeated: Bool[np.ndarray, "batch query"],
        unseen: Int64[np.ndarray, "batch query"],
    ) -> Float64[np.ndarray, "batch query d_out"]:
        """Certainty where the pair repeats, else uniform over values ``shown`` first by a later pair, or by none."""
        posterior = np.empty((*values.shape, self.symbols))
        pair = np.arange(self.pairs, dtype=shown.dtype)[:, None]
        np.greater_equal(shown[:, None, :], pair, out=posterior, casting="unsafe")
        posterior *= (1 / unseen)[..., None]
        posterior[repeated] = np.eye(self.symbols)[values[repeated]]
        return posterior

    def _first(
        self, symbols: Int64[np.ndarray, "batch query"]
    ) -> tuple[Int16[np.ndarray, "batch d_out"], Bool[np.ndarray, "batch query"]]:
        """The pair that shows each symbol first (L if none does), and whether each pair repeats an earlier one."""
        first = np.full((len(symbols), self.symbols), self.pairs, dtype=np.int16)
        sequence = np.arange(len(symbols))
        for pair in reversed(range(self.pairs)):
            first[sequence, symbols[:, pair]] = pair
        return first, np.take_along_axis(first, symbols, 1) < np.arange(self.pairs)

    def _unseen(self, repeated: Bool[np.ndarray, "batch query"]) -> Int64[np.ndarray, "batch query"]:
        """How many values no earlier pair has shown (at least 1, which a repeat does not need)."""
        new = np.cumsum(~repeated, axis=1)
        return np.maximum(self.symbols - new + ~repeated, 1)

    @property
    def vocabulary(self) -> list[str]:
        """Keys k0, k1, ... and values v0, v1, ..."""
        return [f"{kind}{i}" for kind in "kv" for i in range(self.symbols)]
