"""Activations of a hooked model by layer and site, with those of its untrained twin."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int64
from torch import Tensor

from .result import ProbeError
from .streaming import recording

SITES = {
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "z": "attn.hook_z",
    "scores": "attn.hook_attn_scores",
    "pattern": "attn.hook_pattern",
    "attn_out": "hook_attn_out",
    "resid_pre": "hook_resid_pre",
    "resid_mid": "hook_resid_mid",
    "resid_post": "hook_resid_post",
}
"""TransformerLens's hook of each site within a block, for models that declare no ``sites`` of their own."""

DEFAULT = ("q", "k", "v", "z", "scores", "pattern", "attn_out", "resid_pre", "resid_post")


@dataclass(frozen=True, eq=False)
class Activations(Mapping[str, Tensor]):
    """Activations by full hook name (``acts["blocks.0.attn.hook_k"]``) or by site and layer (``acts["k", 0]``).

    Axes are TransformerLens's: q, k, v, z are ``batch pos head d_head``; scores and pattern
    ``batch head query_pos key_pos``; residuals ``batch pos d_model``.
    """

    cache: Mapping[str, Tensor]
    """Hook name -> activation, on the CPU."""
    sites: Mapping[str, str] = field(default_factory=lambda: dict(SITES))
    """Site -> hook name within a block, as the model declares it."""
    tokens: Tensor | None = None
    """What the model read."""
    position: Int64[Tensor, "batch query"] | None = None
    """The supervised positions."""
    logits: Tensor | None = None
    """The model's output, at the supervised positions if there are any: ``batch query d_out``."""
    twin: Activations | None = None
    """The same activations of the same architecture at initialisation, on the same inputs."""

    def __getitem__(self, key: str | tuple[str, int]) -> Tensor:
        if isinstance(key, str):
            return self.cache[key]
        site, layer = key
        return self.cache[f"blocks.{layer}.{self.hook(site)}"]

    def __iter__(self) -> Iterator[str]:
        return iter(self.cache)

    def __len__(self) -> int:
        return len(self.cache)

    def hook(self, site: str) -> str:
        """Hook name of a site within a block."""
        if site not in self.sites:
            raise ProbeError(f"unknown site '{site}'; this model declares: {', '.join(self.sites)}")
        return self.sites[site]

    def holds(self, site: str) -> bool:
        """Whether the site was extracted."""
        return site in self.sites and any(name.endswith("." + self.sites[site]) for name in self.cache)

    def layers(self, site: str) -> list[Tensor]:
        """The activations of a site, first layer first.

        Raises:
            ProbeError: when the site was not extracted.
        """
        pattern = re.compile(rf"blocks\.(\d+)\.{re.escape(self.hook(site))}$")
        found = {int(match[1]): name for name in self.cache if (match := pattern.match(name))}
        if not found:
            raise ProbeError(
                f"these activations hold no '{site}' (blocks.*.{self.hook(site)}); "
                f"extract(model, batch, sites=['{site}']) records it"
            )
        return [self.cache[found[layer]] for layer in sorted(found)]


@runtime_checkable
class Cache(Protocol):
    """Tensors by hook name: :class:`Activations`, a dict, or TransformerLens's ``ActivationCache``."""

    def __getitem__(self, key: str, /) -> Tensor: ...

    def items(self) -> Iterable[tuple[str, Tensor]]:
        """Names and tensors."""
        ...


def as_activations(acts: Cache) -> Activations:
    """Activations as they are, or a plain cache of TransformerLens hook names wrapped as such."""
    if isinstance(acts, Activations):
        return acts
    return Activations(cache={name: tensor.detach().cpu() for name, tensor in acts.items()})


def at_position(
    activation: Tensor,  # batch pos ...
    position: Int64[Tensor, "batch query"],
) -> Tensor:
    """Select positions: ``batch pos ...`` becomes ``batch query ...``."""
    index = position.reshape(*position.shape, *[1] * (activation.ndim - 2))
    return activation.gather(1, index.expand(*position.shape, *activation.shape[2:]))


def extract(
    model: Any,
    batch: Any,
    sites: Sequence[str] | None = None,
    *,
    batch_size: int = 64,
    twin_seed: int | None = 0,
    to: Path | str | None = None,
) -> Activations:
    """Record activations of a hooked model, a few sequences at a time.

    Args:
        model: any ``HookedRootModule``; its ``sites`` (or TransformerLens's names) say which hook is which.
        batch: a task's batch (``tokens`` and ``position`` are read), or a plain tensor of tokens. Where a batch has an
            ``attention_mask``, tokens that it leaves out become -1, which marks padding.
        sites: which to record, of the sites that the model declares; by default those that the probes read.
        batch_size: sequences per forward pass: what bounds memory beside the result.
        twin_seed: seed of the untrained twin that is recorded too (``acts.twin``); None for none.
        to: folder that activations stream to, one ``.npy`` file a hook (the twin's in ``untrained``); the tensors
            returned are then memory-mapped, and memory is bounded by ``batch_size``. By default all stays in memory.

    Raises:
        ProbeError: when the model has no hooks, a site is unknown, a hook did not fire, or the folder can't be written.
    """
    if not hasattr(model, "run_with_cache"):
        raise ProbeError(
            f"{type(model).__name__} has no run_with_cache; expected a TransformerLens HookedRootModule "
            "(interp.load_checkpoint gives one)"
        )
    declared = dict(getattr(model, "sites", SITES))
    chosen = list(sites) if sites is not None else [site for site in DEFAULT if site in declared]
    tokens = batch if isinstance(batch, Tensor) else read_tokens(batch)
    position = None if isinstance(batch, Tensor) else batch.position
    shell = Activations(cache={}, sites=declared, tokens=tokens, position=position)
    names = [f"blocks.{layer}.{shell.hook(site)}" for layer in range(model.cfg.n_layers) for site in chosen]
    folder = None if to is None else Path(to)
    cache, logits = _record(model, tokens, position, names, batch_size, folder)
    twin = None
    if twin_seed is not None:
        beside = None if folder is None else folder / "untrained"
        twin = extract(untrained(model, twin_seed), shell, chosen, batch_size=batch_size, twin_seed=None, to=beside)
    return replace(shell, cache=cache, logits=logits, twin=twin)


def read_tokens(batch: Any) -> Tensor:
    """What a model reads of a batch: its tokens, -1 where its ``attention_mask`` leaves them out."""
    mask = getattr(batch, "attention_mask", None)
    return batch.tokens if mask is None else batch.tokens.masked_fill(mask == 0, -1)


def device_of(model: Any) -> torch.device:
    """Where a model's tokens go."""
    return getattr(model, "device", None) or next(model.parameters()).device


def untrained(model: Any, seed: int) -> Any:
    """The model's architecture at initialisation: by its own ``reinitialized``, or by TransformerLens's."""
    if hasattr(model, "reinitialized"):
        return model.reinitialized(seed)
    from transformer_lens.tools.analysis import reinitialized

    return reinitialized(model, seed)


@torch.no_grad()
def _record(
    model: Any, tokens: Tensor, position: Tensor | None, names: list[str], batch_size: int, folder: Path | None
) -> tuple[dict[str, Tensor], Tensor]:
    device = device_of(model)
    with recording(len(tokens), folder) as parts:
        for start in range(0, len(tokens), batch_size):
            rows = slice(start, start + batch_size)
            inputs = [tokens[rows].to(device)] + ([] if position is None else [position[rows].to(device)])
            output, cache = model.run_with_cache(*inputs, names_filter=names)
            for name in names:
                if name not in cache:
                    raise ProbeError(f"hook '{name}' did not fire; the model has: {', '.join(model.hook_dict)}")
                parts.append(name, cache[name], start)
            parts.append("logits", output if isinstance(output, Tensor) else output.logits, start)
    logits = parts.tensors.pop("logits")
    return parts.tensors, logits
