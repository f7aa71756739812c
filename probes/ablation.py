"""Which heads and layers carry the posterior? Ablations, one at a time and together, in bits of calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from .extract import SITES
from .interventions import Edit, Replacement, Subject, replacement
from .interventions import placebos as matched
from .nulls import Bootstrap
from .result import ProbeError, Result, rows, table

READING = (
    "A head carries the posterior where ablating it costs bits, and more than moving its output as far in random "
    "directions. Believe a cost only when it stands for mean and for resample ablation: zeros are far from anything "
    "that a later layer has seen."
)
UNITS = {"kl_increase_bits": "bits", "kl_bits": "bits"}
WRITES = ("attn_out", "mixer_out", "lstm_out", "mlp_out")
"""Sites of what a layer adds to the residual stream, by architecture."""
Head = tuple[int, int]
"""Layer and head."""


def head_ablation(
    subject: Subject,
    *,
    by: Replacement = "mean",
    placebos: int = 4,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    """The cost of ablating each attention head alone, at all positions.

    ``kl_increase_bits`` is KL(Bayes || model) per answer with the head's output ``z`` replaced, minus without.
    ``null_random``: the mean over ``placebos`` random subspaces of the layer's heads, each of one head's
    dimension and moved as far.

    Args:
        subject: the model and what it reads.
        by: what the output becomes: ``mean`` over sequences, ``resample``, or ``zero``.
        placebos: random subspaces a head.
        resamples: bootstrap resamples over sequences.
        level: coverage of the intervals.
        seed: seed of all draws.

    Raises:
        ProbeError: when the model has no attention heads.
    """
    heads = Heads(subject, by, seed)
    base = subject.errors()
    cost = np.empty((subject.n_layers, heads.count, len(base)))
    null = np.full(cost.shape[:2], np.nan)
    for layer, head in np.ndindex(*null.shape):
        edit = heads.edit(layer, head)
        cost[layer, head] = (subject.errors([edit]) - base).mean(1)
        others = matched(edit.intervention, placebos, seed)
        moved = [subject.errors([replace(edit, intervention=other)]) - base for other in others]
        null[layer, head] = float(torch.stack(moved).mean()) if moved else np.nan
    estimate, interval = Bootstrap(resamples, level, seed).mean(np.moveaxis(cost, -1, 0))
    part = rows("kl_increase_bits", estimate, interval, axes=("layer", "head"), null_random=null)
    return Result(f"head_ablation({by})", table(part), READING, UNITS, level)


def layer_ablation(
    subject: Subject,
    site: str | None = None,
    *,
    by: Replacement = "mean",
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    """The cost of ablating what each layer's mixer writes, or what is at another ``site``, at all positions.

    Raises:
        ProbeError: when the model lacks the site, or declares nothing that a mixer writes.
    """
    if site is None:
        declared = getattr(subject.model, "sites", SITES)
        site = next((name for name in WRITES if name in declared), "attn_out")
    acts = subject.record(site)
    base = subject.errors()
    costs = []
    for layer, activation in enumerate(acts.layers(site)):
        edit = Edit(subject.hook(site, layer), _take, replacement(activation.flatten(2), by, seed))
        costs.append((subject.errors([edit]) - base).mean(1).numpy())
    estimate, interval = Bootstrap(resamples, level, seed).mean(np.stack(costs, 1))
    part = rows("kl_increase_bits", estimate, interval, axes=("layer",), null_unedited=0.0)
    return Result(f"layer_ablation({site}, {by})", table(part), READING, UNITS, level)


def head_removal(
    subject: Subject,
    *,
    order: Literal["greedy", "cumulative"] = "greedy",
    by: Replacement = "mean",
    heads: Sequence[Head] | None = None,
    steps: int | None = None,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    """Remove heads one after another, the least needed first, and keep them removed.

    Which head goes next is decided on the even sequences and ``kl_bits`` reported on the odd ones. ``greedy`` ablates
    every remaining head on top of those already gone and removes the cheapest, which finds heads that stand in for
    each other; ``cumulative`` keeps the order of their single costs. The table's rows are in order of removal (column
    ``removed`` counts them), ``null_unedited`` is the error with all heads in place.

    Args:
        subject: the model and what it reads.
        order: ``greedy`` (quadratic in the number of heads) or ``cumulative``.
        by: what a removed head's output becomes.
        heads: candidates; all by default.
        steps: how many to remove; all by default.
        resamples: bootstrap resamples over sequences.
        level: coverage of the intervals.
        seed: seed of all draws.

    Raises:
        ProbeError: when the model has no attention heads, or lacks a candidate.
    """
    all_heads = Heads(subject, by, seed)
    every = [(layer, head) for layer in range(subject.n_layers) for head in range(all_heads.count)]
    left = list(every if heads is None else heads)
    if unknown := set(left) - set(every):
        raise ProbeError(f"no head {sorted(unknown)[0]}; this model has {subject.n_layers} x {all_heads.count} heads")

    def cost(removed: Sequence[Head]) -> Float64[Tensor, " batch"]:
        return subject.errors([all_heads.edit(*head) for head in removed]).mean(1)

    left.sort(key=lambda head: float(cost([head])[::2].mean()))
    removed: list[Head] = []
    errors = []
    for _ in range(len(left) if steps is None else min(steps, len(left))):
        tried = [cost([*removed, head]) for head in (left if order == "greedy" else left[:1])]
        cheapest = min(range(len(tried)), key=lambda i: float(tried[i][::2].mean()))
        errors.append(tried[cheapest][1::2])
        removed.append(left.pop(cheapest))
    base = float(cost([])[1::2].mean())
    estimate, interval = Bootstrap(resamples, level, seed).mean(torch.stack(errors, 1).numpy())
    part = rows("kl_bits", estimate, interval, axes=("removed",), null_unedited=base)
    part["removed"] += 1
    part["layer"], part["head"] = np.array(removed).T
    return Result(f"head_removal({order}, {by})", table(part), READING, UNITS, level)


class Heads:
    """The heads of a subject, and what ablates each."""

    def __init__(self, subject: Subject, by: Replacement, seed: int) -> None:
        if "z" not in getattr(subject.model, "sites", {"z"}):
            raise ProbeError("the model has no attention heads ('z'); layer_ablation fits it")
        layers = subject.record("z").layers("z")
        self.subject = subject
        self.count, self.d_head = layers[0].shape[2:]
        self.source = [replacement(layer.flatten(2), by, seed) for layer in layers]

    def edit(self, layer: int, head: int) -> Edit:
        """Replace one head's output: an interchange in its coordinates."""
        from transformer_lens.tools.analysis import SubspaceInterchange, neuron_basis

        own = range(head * self.d_head, (head + 1) * self.d_head)
        basis = neuron_basis(self.count * self.d_head, list(own))
        return Edit(self.subject.hook("z", layer), SubspaceInterchange(basis), self.source[layer])


def _take(base: Tensor, source: Tensor) -> Tensor:
    """The source in place of the base."""
    return source
