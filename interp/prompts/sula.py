"""SULA: two nonsense labels for two word classes, learnt from noisy examples in the prompt (paper III)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64, Int64
from scipy.special import expit
from scipy.stats import binom

from tasks.base import entropy_bits

from .base import PromptBatch, PromptError, Prompts, choose_single

LABELS = ("dax", "wug", "blick", "toma", "fep", "gor", "lum", "pel", "vor", "tor", "quo", "foo", "bar")
"""Nonsense words; the first two that are single tokens become the labels."""
NEUTRAL = " none"
"""What a line shows that says nothing about its class."""
CLASSES = {
    "animals": "dog cat horse cow wolf bear lion tiger sheep goat mouse rabbit fox deer frog pig",
    "tools": "hammer knife saw drill shovel spoon axe rope nail ladder brush pen fork wrench needle chain",
}
SUFFIXES = (1, 2, 4)
"""Lines that the suffix baselines see."""


@dataclass(frozen=True)
class Sula(Prompts):
    r"""Lines `` word = label,``; which label does the class of the last word have?

    Generative model: a fair coin says which of two labels goes with which of two classes. Each line draws a class by a
    fair coin and a word of it, and shows its label, flipped with probability ``flip``. If ``fillers``, each prompt
    draws a rate from U(0, 1) and each line shows, at that rate and whatever its class, the neutral word instead: so
    the number k of examples varies at one length, where without fillers it is the number of the line. With n1
    examples for one pairing and n2 for the other, :math:`p = \sigma((n_1 - n_2) \ln((1 - flip) / flip))`; at flip
    0.1, ln 9.

    The label is due at every ``=``. ``targets`` and ``posterior`` are about the class's own label (examples are
    flipped, the answer is not); the belief is over the two pairings.

    Baselines: ``suffix_j``, the exact posterior from the last j lines; ``shown``, the predictive of the label that the
    line shows, 0.1 + 0.8 p; ``k_only``, the expected entropy given k, and no idea which label.
    """

    shots: int = 8
    """Lines before the last."""
    flip: int | float = 0.1
    """Probability that an example shows the wrong label."""
    fillers: bool = True
    """Replace examples by neutral lines, so that k is not the length."""
    words: int = 8
    """Words of a class."""

    name: ClassVar[str] = "sula"

    def __post_init__(self) -> None:
        if self.shots < 1:
            raise PromptError(f"sula: shots must be at least 1, got {self.shots}")
        if not 0 < self.flip < 0.5:
            raise PromptError(f"sula: flip is a probability above 0 and below 0.5, got {self.flip}")
        if not 1 <= self.words <= 16:
            raise PromptError(f"sula: words must be 1 to 16, got {self.words}")

    @property
    def n_uniforms(self) -> int:
        """The pairing, the rate of fillers; class, word, flip and filler of each line."""
        return 2 + 4 * (self.shots + 1)

    def draw(self, u: Float64[np.ndarray, "batch draw"], tokenizer: Any) -> PromptBatch:
        """Turn uniforms into prompts; see :class:`Sula` for the posterior."""
        labels = choose_single(tokenizer, "nonsense labels", LABELS, 2)
        words = [
            word
            for name, known in CLASSES.items()
            for word in choose_single(tokenizer, name, known.split(), self.words)
        ]
        of_class, word, flipped, filler = u[:, 2:].reshape(len(u), 4, -1).swapaxes(0, 1)
        cls = (of_class < 0.5).astype(np.int64)
        own = cls ^ (u[:, :1] < 0.5)
        label = own ^ (flipped < self.flip)
        example = filler >= u[:, 1:2] if self.fillers else np.ones_like(cls, dtype=bool)
        vote = np.where(example, np.where(label == cls, 1, -1), 0)
        p = self.pairing(before(vote))

        pieces = [*labels, NEUTRAL, " =", ",", *words]
        lines = np.stack(
            [
                5 + cls * self.words + (word * self.words).astype(np.int64),
                np.full_like(cls, 3),
                np.where(example, label, 2),
                np.full_like(cls, 4),
            ],
            -1,
        )
        codes = lines.reshape(len(u), -1)[:, :-2]
        query = 4 * np.arange(self.shots + 1) + 1
        shows = np.zeros(codes.shape, dtype=bool)
        shows[:, 2::4] = example[:, :-1]
        posterior = _about(p, cls)
        baselines = {f"suffix_{j}": _about(self.pairing(before(vote, j)), cls) for j in SUFFIXES if j < self.shots}
        baselines["shown"] = self.flip + (1 - 2 * self.flip) * posterior
        baselines["k_only"] = _with_entropy(self.expected_entropy()[before(example.astype(np.int64))])
        return self._batch(
            "Labels:",
            pieces,
            codes,
            tokenizer,
            answers=labels,
            position=query,
            targets=own,
            belief=np.stack([p, 1 - p], -1),
            posterior=posterior,
            evidence=shows[:, None] & (np.arange(codes.shape[1]) < query[:, None]),
            hypothesis=np.where(shows, codes, -1),
            baselines=baselines,
        )

    def pairing(self, votes: Int64[np.ndarray, "batch query"]) -> Float64[np.ndarray, "batch query"]:
        """Probability that label 0 goes with class 0, from the examples for it minus those against."""
        return expit(votes * np.log((1 - self.flip) / self.flip))

    def expected_entropy(self) -> Float64[np.ndarray, " shot"]:
        """Posterior entropy in bits that k examples leave on average, for k = 0 to ``shots``."""
        k = np.arange(self.shots + 1)
        p = self.pairing(2 * k - k[:, None])
        return (binom.pmf(k, k[:, None], 1 - self.flip) * entropy_bits(np.stack([p, 1 - p], -1))).sum(1)


def before(values: Int64[np.ndarray, "batch query"], window: int | None = None) -> Int64[np.ndarray, "batch query"]:
    """Sum over the earlier lines: all, or the last ``window``."""
    total = np.pad(values.cumsum(1), ((0, 0), (1, 0)))[:, :-1]
    return total if window is None else total - np.pad(total, ((0, 0), (window, 0)))[:, :-window]


def _about(
    p: Float64[np.ndarray, "batch query"], cls: Int64[np.ndarray, "batch query"]
) -> Float64[np.ndarray, "batch query d_out"]:
    """Label probabilities of words of a class, from the pairing's."""
    first = np.where(cls == 0, p, 1 - p)
    return np.stack([first, 1 - first], -1)


def _with_entropy(bits: Float64[np.ndarray, "batch query"]) -> Float64[np.ndarray, "batch query d_out"]:
    """Two probabilities of a given entropy, the larger first (on a grid of 1e-4)."""
    p = np.linspace(1, 0.5, 5001)
    larger = np.interp(bits, entropy_bits(np.stack([p, 1 - p], -1)), p)
    return np.stack([larger, 1 - larger], -1)
