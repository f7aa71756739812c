"""Associative recall: which value was stored with this key, if any? (paper I, section 3.4; Arora et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from .base import Batch, Task, TaskError

FILLERS = 16
"""Different filler tokens."""


@dataclass(frozen=True)
class Recall(Task):
    """Pairs are stored, filler passes, and keys are queried: ``STORE k SEP v`` a pair, filler, ``QUERY k`` a query.

    The answer is due at the queried k. Keys and values of the pairs are distinct. A query asks for a uniformly
    chosen stored key, whose value is certain, or with probability ``absent`` for a key never stored, whose value is
    then any of the values not in use, each equally likely: log2(values - pairs) bits.

    The default binds 64 of 256 keys to 64 of 256 values, (256! / 192!)^2 / 64! = 6e215 stores: they can't be
    memorised. It is the published size, 288 positions. On one CPU core, ``pairs=8, keys=16, values=16, filler=4``
    has 52 positions and (16! / 8!)^2 / 8! = 7e12 stores.

    Token ids: keys, values, STORE, SEP, QUERY, then 16 fillers. Classes are values, counted from 0.
    """

    pairs: int = 64
    """Pairs stored."""
    keys: int = 256
    """Different keys."""
    values: int = 256
    """Different values."""
    filler: int = 16
    """Random filler tokens between the store and the queries."""
    queries: int = 8
    """Keys asked for."""
    absent: int | float = 0.25
    """Probability that a query is for a key never stored."""

    name: ClassVar[str] = "recall"
    primitive: ClassVar[Literal["accumulation", "transport", "binding"]] = "binding"
    metric: ClassVar[Literal["mae_bits", "kl_bits", "accuracy"]] = "accuracy"
    variants: ClassVar[dict[str, dict[str, Any]]] = {"stored_keys": {"absent": 0.0}}

    def validate(self) -> None:
        """Raise :class:`TaskError` unless such sequences exist."""
        for key, least in (("pairs", 1), ("keys", 2), ("values", 2), ("filler", 0), ("queries", 1)):
            if getattr(self, key) < least:
                raise TaskError(f"recall: {key} must be at least {least}, got {getattr(self, key)}")
        if not 0 <= self.absent <= 1:
            raise TaskError(f"recall: absent is the probability of a key never stored, 0 to 1, got {self.absent}")
        for key in ("keys", "values"):
            needed = self.pairs + (self.absent > 0)
            if getattr(self, key) < needed:
                spare = " and one spare for absent keys" if self.absent else ""
                raise TaskError(
                    f"recall: {self.pairs} pairs need {self.pairs} different {key}{spare}, got {key}="
                    f"{getattr(self, key)}; raise it to {needed} or lower pairs"
                )

    @property
    def d_vocab(self) -> int:
        """Keys, values, three markers and fillers."""
        return self.keys + self.values + 3 + FILLERS

    @property
    def d_out(self) -> int:
        """One class a value."""
        return self.values

    @property
    def n_ctx(self) -> int:
        """Four tokens a pair, the filler, two tokens a query."""
        return 4 * self.pairs + self.filler + 2 * self.queries

    @property
    def n_uniforms(self) -> int:
        """An order of the keys, one of the values, the filler; per query whether absent, which key, which value."""
        return self.keys + self.values + self.filler + 3 * self.queries

    @property
    def vocabulary(self) -> list[str]:
        """Keys k0, k1, ..., values v0, v1, ..., markers, fillers."""
        numbered = [f"{kind}{i}" for kind, count in (("k", self.keys), ("v", self.values)) for i in range(count)]
        return [*numbered, "STORE", "SEP", "QUERY", *(f"~{i}" for i in range(FILLERS))]

    def draw(self, u: Float64[np.ndarray, "batch draw"]) -> Batch:
        """Turn uniforms into sequences; see :class:`Recall` for the posterior."""
        n, pairs = len(u), self.pairs
        widths = (self.keys, self.values, self.filler, self.queries, self.queries)
        by_key, by_value, filler, absence, which, label = np.split(u, np.cumsum(widths), 1)
        keys, values = by_key.argsort(1), by_value.argsort(1)
        absent = absence < self.absent
        asked = np.where(absent, pairs + which * (self.keys - pairs), which * pairs).astype(np.int64)
        answer = np.where(absent, pairs + label * (self.values - pairs), asked).astype(np.int64)

        store, separator, query = self.keys + self.values + np.arange(3)
        tokens = np.empty((n, self.n_ctx), dtype=np.int64)
        stored, rest, queries = np.split(tokens, [4 * pairs, 4 * pairs + self.filler], 1)
        stored[:, 0::4], stored[:, 1::4] = store, keys[:, :pairs]
        stored[:, 2::4], stored[:, 3::4] = separator, self.keys + values[:, :pairs]
        rest[:] = query + 1 + (filler * FILLERS).astype(np.int64)
        queries[:, 0::2], queries[:, 1::2] = query, np.take_along_axis(keys, asked, 1)

        position = np.arange(4 * pairs + self.filler + 1, self.n_ctx, 2)
        evidence = np.zeros((n, self.queries, self.n_ctx), dtype=bool)
        pair = absent[:, :, None] | (asked[:, :, None] == np.arange(pairs))
        evidence[:, :, 1 : 4 * pairs : 4] = evidence[:, :, 3 : 4 * pairs : 4] = pair
        evidence[:, np.arange(self.queries), position] = True
        named = (tokens >= self.keys) & (tokens < store)
        hypothesis = np.where(named, tokens - self.keys, -1)
        return self._batch(tokens, position, np.take_along_axis(values, answer, 1), evidence, hypothesis)

    def infer(
        self, tokens: Int64[np.ndarray, "batch pos"]
    ) -> tuple[Float64[np.ndarray, "batch query state"], Float64[np.ndarray, "batch query d_out"]]:
        """The posterior over values, which is the belief too."""
        keys, values, asked = self._read(tokens)
        match = asked[:, :, None] == keys[:, None, :]
        used = self._used(values)
        if (match.sum(2) > 1).any() or (used.sum(1) < self.pairs).any():
            raise TaskError("recall: no store holds a key twice, or a value twice")
        bound = np.take_along_axis(values, match.argmax(2), 1)
        possible = np.repeat(~used[:, None], self.queries, 1)
        found, query = np.nonzero(match.any(2))
        possible[found, query] = False
        possible[found, query, bound[found, query]] = True
        posterior = possible / possible.sum(-1, keepdims=True)
        return posterior, posterior

    def baselines(self, batch: Batch) -> dict[str, Float64[Tensor, "batch query d_out"]]:
        """Uniform, and what is known without binding: which values are in use, and how often keys are absent."""
        used = torch.from_numpy(self._used(self._read(batch.tokens.numpy())[1])).double()
        free = self.absent * (1 - used) / max(self.values - self.pairs, 1)
        unbound = ((1 - self.absent) * used / self.pairs + free)[:, None].expand_as(batch.posterior)
        return {**super().baselines(batch), "no binding": unbound}

    def _read(
        self, tokens: Int64[np.ndarray, "batch pos"]
    ) -> tuple[Int64[np.ndarray, "batch pair"], Int64[np.ndarray, "batch pair"], Int64[np.ndarray, "batch query"]]:
        """Stored keys, their values, and the keys asked for."""
        end = 4 * self.pairs
        keys, values, asked = tokens[:, 1:end:4], tokens[:, 3:end:4] - self.keys, tokens[:, end + self.filler + 1 :: 2]
        if max(keys.max(), asked.max()) >= self.keys or values.min() < 0 or values.max() >= self.values:
            raise TaskError("recall: STORE and QUERY must be followed by a key, SEP by a value")
        return keys, values, asked

    def _used(self, values: Int64[np.ndarray, "batch pair"]) -> np.ndarray:
        """Which values are stored, [batch, value]."""
        used = np.zeros((len(values), self.values), dtype=bool)
        np.put_along_axis(used, values, True, 1)
        return used
