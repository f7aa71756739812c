"""Natural prompts: sentences of five domains, cut before an informative word, whose entropies spread widely."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, ClassVar

import numpy as np
import torch

from .base import PromptBatch, PromptError, encode


@cache
def sentences() -> dict[str, list[str]]:
    """Domain -> its prompts, from ``natural.txt``, which was written for this project (CC0 1.0)."""
    found: dict[str, list[str]] = {}
    for line in files("interp.prompts").joinpath("natural.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            found[line.strip("[]")] = domain = []
        elif line and not line.startswith("#"):
            domain.append(line)
    return found


@dataclass(frozen=True)
class Natural:
    """Distinct sentences in a random order, of one domain or mixed from all; the last tokens of each are queried.

    No exact posterior is known: the measure is the model's own predictive entropy. Targets are the tokens that
    follow, -1 for the word that was cut off.
    """

    domain: str = "mixed"
    """One of the domains, or ``mixed``: all of them."""
    queries: int = 4
    """Tokens at the end of a prompt that are queried."""

    name: ClassVar[str] = "natural"

    def __post_init__(self) -> None:
        known = [*sentences(), "mixed"]
        if self.domain not in known:
            raise PromptError(f"natural: unknown domain '{self.domain}'; known: {', '.join(known)}")
        if not 1 <= self.queries <= 8:
            raise PromptError(f"natural: queries must be 1 to 8, the least number of words, got {self.queries}")

    @property
    def available(self) -> list[tuple[str, str]]:
        """All (domain, sentence) that may be drawn."""
        chosen = sentences() if self.domain == "mixed" else {self.domain: sentences()[self.domain]}
        return [(domain, line) for domain, lines in chosen.items() for line in lines]

    def sample(self, tokenizer: Any, batch: int, seed: int = 0, start: int = 0) -> PromptBatch:
        """Prompts ``start .. start + batch - 1`` of the list that ``seed`` shuffles; no prompt comes twice."""
        available = self.available
        if not 1 <= batch <= len(available) - start or start < 0:
            raise PromptError(
                f"natural: there are {len(available)} prompts of domain '{self.domain}', asked for {start} to "
                f"{start + batch - 1}; ask for fewer"
            )
        order = np.random.default_rng(seed).permutation(len(available))[start : start + batch]
        chosen = [available[i] for i in order]
        ids = [torch.tensor(encode(tokenizer, line, special=True)) for _, line in chosen]
        length = torch.tensor([len(row) for row in ids])
        tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1)
        position = length[:, None] + torch.arange(-self.queries, 0)
        following = torch.cat([tokens.gather(1, position[:, 1:]), torch.full((len(ids), 1), -1)], 1)
        nothing = torch.zeros(*position.shape, 0, dtype=torch.float64)
        return PromptBatch(
            tokens=tokens,
            position=position,
            targets=following,
            posterior=nothing,
            entropy=torch.full(position.shape, torch.nan, dtype=torch.float64),
            belief=nothing,
            hypothesis=torch.full(tokens.shape, -1),
            evidence=torch.zeros(*position.shape, tokens.shape[1], dtype=torch.bool),
            answers=torch.empty(0, dtype=torch.long),
            text=[line for _, line in chosen],
            domain=[domain for domain, _ in chosen],
        )
