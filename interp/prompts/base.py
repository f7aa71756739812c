"""The contract of a prompt family: a tokenizer in, token ids with exact posteriors over single-token answers out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from interp.errors import InterpError
from tasks.base import Batch, entropy_bits, uniforms


class PromptError(InterpError):
    """A prompt that can't be written with these parameters or this tokenizer; the message says what to change."""


@dataclass(frozen=True, eq=False)
class PromptBatch(Batch):
    """A batch that a language model reads. Its classes are single tokens, so that the answer is one logit each.

    Tokens are padded on the right with -1, as language models expect here. Where no exact posterior is known
    (:class:`~interp.prompts.Natural`), ``d_out`` is 0 and ``entropy`` is NaN.
    """

    answers: Int64[Tensor, " d_out"]
    """Token id of each class of the answer."""
    text: list[str]
    """The prompts as they read."""
    domain: list[str]
    """What each prompt is about; the family's name where it has one theme."""
    baselines: Mapping[str, Float64[Tensor, "batch query d_out"]] = field(default_factory=dict)
    """What a predictor would answer that sees less than the whole prompt, by name."""

    @property
    def attention_mask(self) -> Bool[Tensor, "batch pos"]:
        """False on padding."""
        return self.tokens >= 0

    @property
    def length(self) -> Int64[Tensor, " batch"]:
        """Tokens of each prompt."""
        return self.attention_mask.sum(1)

    def answer_logits(self, logits: Float[Tensor, "batch query d_vocab"]) -> Float[Tensor, "batch query d_out"]:
        """The answers' logits: their softmax is the model's predictive, renormalised over the answers."""
        return logits[..., self.answers.to(logits.device)]


@dataclass(frozen=True)
class Prompts(ABC):
    """A family of prompts. The fields of a subclass are its parameters."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def n_uniforms(self) -> int:
        """Uniforms that one prompt consumes."""

    @abstractmethod
    def draw(self, u: Float64[np.ndarray, "batch draw"], tokenizer: Any) -> PromptBatch:
        """Turn uniforms, one row a prompt, into prompts with posteriors."""

    def sample(self, tokenizer: Any, batch: int, seed: int = 0, start: int = 0) -> PromptBatch:
        """Draw prompts ``start .. start + batch - 1`` of the stream ``seed``, written with ``tokenizer``.

        The same ``(seed, index)`` gives the same prompt whatever the batch size or the process.

        Raises:
            PromptError: when ``batch`` is below 1, ``seed`` or ``start`` negative, or the tokenizer splits a word
                that must be one token.
        """
        for what, value, least in (("batch", batch, 1), ("seed", seed, 0), ("start", start, 0)):
            if value < least:
                raise PromptError(f"{what} must be at least {least}, got {value}")
        return self.draw(uniforms(seed, start, batch, self.n_uniforms), tokenizer)

    def _batch(
        self,
        header: str,
        pieces: Sequence[str],
        codes: Int64[np.ndarray, "batch pos"],
        tokenizer: Any,
        *,
        answers: Sequence[str],
        position: Int64[np.ndarray, " query"],
        targets: Int64[np.ndarray, "batch query"],
        belief: Float64[np.ndarray, "batch query state"],
        posterior: Float64[np.ndarray, "batch query d_out"],
        evidence: Bool[np.ndarray, "batch query pos"],
        hypothesis: Int64[np.ndarray, "batch pos"],
        baselines: Mapping[str, Float64[np.ndarray, "batch query d_out"]],
    ) -> PromptBatch:
        """A batch of equally long prompts: a header, then ``codes``, each naming one of ``pieces``, a token each.

        Positions count from the end of the header, whose last token is -1.
        """
        prefix = encode(tokenizer, header, special=True)
        table = np.array([single_token(tokenizer, piece) for piece in pieces])
        n, width = codes.shape[0], len(prefix)
        tokens = np.concatenate([np.tile(prefix, (n, 1)), table[codes]], 1)
        lead = ((0, 0), (width, 0))
        written = np.array(pieces, dtype=object)[codes]
        return PromptBatch(
            tokens=torch.from_numpy(tokens),
            position=torch.from_numpy(position + width).expand(n, -1),
            targets=torch.from_numpy(targets),
            posterior=torch.from_numpy(posterior),
            entropy=torch.from_numpy(entropy_bits(posterior)),
            belief=torch.from_numpy(belief),
            hypothesis=torch.from_numpy(np.pad(hypothesis, lead, constant_values=-1)),
            evidence=torch.from_numpy(np.pad(evidence, ((0, 0), *lead))),
            answers=torch.tensor([single_token(tokenizer, answer) for answer in answers]),
            text=[header + "".join(row) for row in written],
            domain=[self.name] * n,
            baselines={name: torch.from_numpy(predictive) for name, predictive in baselines.items()},
        )


def encode(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """Token ids of a text, with the tokens that every input starts with if ``special``."""
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def is_single(tokenizer: Any, piece: str) -> bool:
    """Whether a piece (with its leading space, if any) is one token when it follows a word."""
    before, after = encode(tokenizer, "a"), encode(tokenizer, "a" + piece)
    return len(after) == len(before) + 1 and after[:-1] == before


def single_token(tokenizer: Any, piece: str) -> int:
    """The one token of a piece; :class:`PromptError` when there are several."""
    if not is_single(tokenizer, piece):
        parts = len(encode(tokenizer, "a" + piece)) - len(encode(tokenizer, "a"))
        raise PromptError(f"'{piece}' must be one token, this tokenizer makes {parts} of it; choose another word")
    return encode(tokenizer, "a" + piece)[-1]


def choose_single(tokenizer: Any, what: str, words: Sequence[str], count: int) -> list[str]:
    """The first ``count`` words that are one token after a space, with that space.

    Raises:
        PromptError: when there are fewer.
    """
    found = [f" {word}" for word in words if is_single(tokenizer, f" {word}")][:count]
    if len(found) < count:
        raise PromptError(
            f"{count} {what} must be single tokens, but of {len(words)} candidates this tokenizer keeps {len(found)} "
            "whole; ask for fewer, or use a tokenizer with a larger vocabulary"
        )
    return found
