"""Edits of activations during a forward pass, and what a model answers under them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from .calibration import Readout, kl_bits
from .extract import SITES, Activations, at_position, device_of, read_tokens
from .result import ProbeError

Intervention = Callable[[Tensor, Tensor], Tensor]
"""TransformerLens's: (base, source), both ``point feature``, to the new base; e.g. its ``SubspaceInterchange``."""
Replacement = Literal["zero", "mean", "resample"]
"""What an ablated activation becomes: zeros, its mean over sequences, or that of another sequence."""


@dataclass(frozen=True, eq=False)
class Edit:
    """One intervention at one hook: trailing axes of the activation are flattened to features."""

    hook: str
    """Full hook name; its activation is ``batch pos ...``."""
    intervention: Intervention
    source: Float[Tensor, "_ query feature"]
    """What the intervention takes from, for every sequence or (length 1) for all; at ``at`` if it is given."""
    at: Int64[Tensor, "batch query"] | None = None
    """Positions that are edited; all by default."""

    def on(self, rows: slice) -> tuple[str, Callable[..., Tensor]]:
        """The TransformerLens hook that makes this edit for some sequences of the batch."""
        source = self.source if len(self.source) == 1 else self.source[rows]
        at = None if self.at is None else self.at[rows]

        def edit(activation: Tensor, hook: Any) -> Tensor:
            flat = activation.flatten(2)
            base = flat if at is None else at_position(flat, at.to(flat.device))
            taken = source.to(flat).expand_as(base)
            new = self.intervention(base.flatten(0, 1), taken.flatten(0, 1)).reshape(base.shape)
            if at is not None:
                new = flat.scatter(1, at.to(flat.device)[..., None].expand_as(base), new)
            return new.reshape(activation.shape)

        return self.hook, edit


@dataclass(frozen=True, eq=False)
class Subject:
    """A hooked model and the batch on which it is tested.

    The batch is a task's, or one of prompts with a known posterior; the latter's ``answer_logits`` are used.
    """

    model: Any
    batch: Any
    readout: Readout = "categorical"
    batch_size: int = 64
    """Sequences per forward pass."""
    tokens: Tensor = field(init=False)
    """What the model reads; padding is -1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", read_tokens(self.batch))

    def hook(self, site: str, layer: int) -> str:
        """Full hook name of a site in a layer; the site's activations must be ``batch pos ...``."""
        sites = dict(getattr(self.model, "sites", SITES))
        if site not in sites or site in ("scores", "pattern"):
            known = ", ".join(name for name in sites if name not in ("scores", "pattern"))
            raise ProbeError(f"can't edit site '{site}'; sites of this model with one vector a position: {known}")
        return f"blocks.{layer}.{sites[site]}"

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return int(self.model.cfg.n_layers)

    def record(self, site: str, edits: Sequence[Edit] = ()) -> Activations:
        """Activations of a site in every layer while the edits are made."""
        names = [self.hook(site, layer) for layer in range(self.n_layers)]
        parts: dict[str, list[Tensor]] = {name: [] for name in names}

        def store(activation: Tensor, hook: Any) -> None:
            parts[hook.name].append(activation.detach().cpu())

        logits = self._run([*(edit.on for edit in edits), *((lambda _, n=name: (n, store)) for name in names)])
        return Activations(
            cache={name: torch.cat(found) for name, found in parts.items()},
            sites=dict(getattr(self.model, "sites", SITES)),
            tokens=self.tokens,
            position=self.batch.position,
            logits=logits,
        )

    def output(self, edits: Sequence[Edit] = ()) -> Float64[Tensor, "batch query d_out"]:
        """The answers' logits (or mean and log-variance) while the edits are made, first to last."""
        logits = self._run([edit.on for edit in edits])
        return (self.batch.answer_logits(logits) if hasattr(self.batch, "answer_logits") else logits).double()

    def errors(
        self, edits: Sequence[Edit] = (), posterior: Float64[Tensor, "batch query d_out"] | None = None
    ) -> Float64[Tensor, "batch query"]:
        """KL(posterior || model) in bits under the edits, by default from the batch's exact posterior."""
        return kl_bits(self.batch.posterior if posterior is None else posterior, self.output(edits), self.readout)

    @torch.no_grad()
    def _run(self, hooks: Sequence[Callable[[slice], tuple[str, Callable[..., Any]]]]) -> Tensor:
        device = device_of(self.model)
        parts = []
        for start in range(0, len(self.tokens), self.batch_size):
            rows = slice(start, start + self.batch_size)
            with self.model.hooks(fwd_hooks=[hook(rows) for hook in hooks]):
                found = self.model(self.tokens[rows].to(device), self.batch.position[rows].to(device))
            parts.append(found.cpu())
        return torch.cat(parts)


def replacement(
    activation: Float[Tensor, "batch query feature"], by: Replacement, seed: int = 0
) -> Float[Tensor, "_ query feature"]:
    """What stands for an ablated activation: see ``Replacement``. No sequence is resampled from itself."""
    if by == "zero":
        return torch.zeros_like(activation[:1])
    if by == "mean":
        return activation.mean(0, keepdim=True)
    return activation[partners(len(activation), seed)]


def placebos(used: Intervention, count: int, seed: int) -> list[Intervention]:
    """Moves as far as those of a TransformerLens ``SubspaceInterchange``, in random subspaces of its dimension."""
    from transformer_lens.tools.analysis import NormMatchedPlacebo, SubspaceInterchange, random_basis

    assert isinstance(used, SubspaceInterchange)
    assert isinstance(used.basis, Tensor)
    width, rank = used.basis.shape
    return [NormMatchedPlacebo(used, random_basis(width, rank, seed + i)) for i in range(count)]


def partners(count: int, seed: int) -> Int64[Tensor, " batch"]:
    """Another sequence for each: one random cycle through all of them.

    Raises:
        ProbeError: when there is only one sequence.
    """
    if count < 2:
        raise ProbeError(f"swaps need at least 2 sequences, got {count}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    found = torch.empty_like(order)
    found[order] = order.roll(1)
    return found
