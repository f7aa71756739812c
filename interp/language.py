"""Run the probes on a language model, on prompts whose posterior is known and on natural ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Float64
from torch import Tensor

from interp.prompts import Dice, Natural, PromptBatch, Sula, WordBijection
from probes.calibration import Readout, as_output, calibration, entropy_bits
from probes.confounds import entropy_agreement, entropy_beyond_controls
from probes.domains import domain_restriction
from probes.extract import Activations, extract
from probes.manifold import value_manifold
from probes.orthogonality import key_orthogonality
from probes.result import Result
from probes.sharpening import query_key_sharpening, separable
from tasks.base import Batch

SUFFIXES = (1, 2, 4)
"""Tokens that a suffix shows."""
BATCH = 32
"""Sequences per forward pass."""


def probe_language_model(model: Any, *, sequences: int = 128, seed: int = 0, twin_seed: int = 0) -> dict[str, Result]:
    """Section title, with what it was measured on, -> result.

    Keys, attention and values are read on word bijections and SULA, whose evidence and entropy are known exactly;
    the entropy axis on natural prompts too, where entropy is the model's own predictive entropy. Calibration is that of
    the answer renormalised over the possible answers.

    Args:
        model: a hooked language model with a ``tokenizer`` (:func:`interp.pretrained.load_pretrained`).
        sequences: prompts of each family; natural prompts are all used.
        seed: seed of the prompts.
        twin_seed: seed of the untrained twin.

    Raises:
        PromptError: when the tokenizer splits words that must be one token.
        ModelError: when the model has no tokenizer.
    """
    twin = model.reinitialized(twin_seed)
    results: dict[str, Result] = {}
    for family in (Sula(), WordBijection()):
        batch = family.sample(model.tokenizer, sequences, seed)
        held = [site for site in ("k", "v", "scores", "pattern") if site in model.sites]
        acts = record(model, twin, batch, held)
        assert acts.logits is not None
        assert acts.twin is not None
        assert acts.twin.logits is not None
        outputs = batch.answer_logits(acts.logits), batch.answer_logits(acts.twin.logits)
        results |= known_posterior(acts, batch, outputs, batch.baselines, family.name, strata=_shots(batch))
    for dice in (Dice(), Dice(sides=6)):
        batch = dice.sample(model.tokenizer, sequences, seed)
        outputs = answers(model, batch), answers(twin, batch)
        results[f"calibration, {'coin' if dice.sides == 2 else 'die'}"] = _calibrate(*outputs, batch)
    batch = Natural().sample(model.tokenizer, len(Natural().available), seed)
    if "v" in model.sites:
        acts = record(model, twin, batch, ["v"])
        results |= natural(acts, batch, suffix_entropy(model, batch))
    return results


def record(model: Any, twin: Any, batch: PromptBatch, sites: list[str]) -> Activations:
    """Activations of a model and of its twin."""
    acts, untrained = (extract(m, batch, sites, batch_size=BATCH, twin_seed=None) for m in (model, twin))
    return replace(acts, twin=untrained)


def known_posterior(
    acts: Activations,
    batch: Batch,
    outputs: tuple[Tensor, Tensor],
    baselines: Mapping[str, Tensor],
    name: str,
    *,
    strata: Mapping[str, Tensor] | None = None,
    readout: Readout = "categorical",
) -> dict[str, Result]:
    """All that applies where the posterior of every query is exact, for a wind tunnel or a language model.

    Args:
        acts: activations; each probe runs that finds its site.
        batch: what was read, with its posterior.
        outputs: logits of the answers (or mean and log-variance), of the model and of its twin at initialisation.
        baselines: predictors that see less; those named ``suffix`` or ``window`` serve as controls too.
        name: what the titles say after the comma.
        strata: strata beside the position, within which entropies are compared.
        readout: the form of the outputs.
    """
    measured, init = (entropy_bits(output.double(), readout) for output in outputs)
    position = {"position": batch.position}
    seen = {
        key: entropy_bits(as_output(p, readout), readout)
        for key, p in baselines.items()
        if key.startswith(("suffix", "window"))
    }
    results = {
        f"calibration, {name}": calibration(
            outputs[0], batch.posterior, batch.targets, baselines=baselines, twin=outputs[1], readout=readout
        ),
        f"entropy agreement, {name}": entropy_agreement(
            measured, batch.entropy, {**position, **(strata or {})}, twin=init
        ),
    }
    if acts.holds("k") and (batch.hypothesis >= 0).any():
        results[f"key orthogonality, {name}"] = key_orthogonality(acts, batch.hypothesis)
    if acts.holds("scores") and separable(batch.evidence, batch.position).any():
        results[f"query-key sharpening, {name}"] = query_key_sharpening(acts, batch.evidence)
    if acts.holds("v"):
        controls = {"controls": position, "suffix": seen, "output": {"answer entropy": measured}}
        results[f"value manifold, {name}"] = value_manifold(acts, batch.entropy)
        results[f"entropy axis, {name}"] = entropy_beyond_controls(
            acts, batch.entropy, {key: group for key, group in controls.items() if group}
        )
    return results


def natural(acts: Activations, batch: PromptBatch, suffix: Mapping[str, Tensor]) -> dict[str, Result]:
    """The value manifold against predictive entropy, its confounds, and the domains."""
    assert acts.logits is not None
    entropy, top = predictive(acts.logits)
    controls = {"controls": surface(batch), "suffix": suffix, "output": {"top probability": top}}
    return {
        "value manifold, natural": value_manifold(acts, entropy),
        "entropy axis, natural": entropy_beyond_controls(acts, entropy, controls),
        "domain restriction, natural": domain_restriction(acts, batch.domain),
    }


def predictive(
    logits: Float[Tensor, "batch query d_vocab"],
) -> tuple[Float64[Tensor, "batch query"], Float64[Tensor, "batch query"]]:
    """Entropy in bits and log2 of the largest probability of next-token predictions, a few sequences at a time."""
    parts = [part.log_softmax(-1).double() for part in logits.split(BATCH)]
    top = torch.cat([part.amax(-1) for part in parts]) / torch.log(torch.tensor(2.0))
    return torch.cat([entropy_bits(part) for part in parts]), top


def surface(batch: PromptBatch) -> dict[str, Float64[Tensor, "batch query"]]:
    """What is known of a query without reading it: position, prompt length, and the token's frequency rank.

    Byte-pair and unigram vocabularies list frequent tokens first, so the id stands for the rank.
    """
    return {
        "position": batch.position.double(),
        "prompt length": batch.length[:, None].expand_as(batch.position).double(),
        "log2 token rank": (1 + batch.tokens.gather(1, batch.position)).double().log2(),
    }


@torch.no_grad()
def suffix_entropy(model: Any, batch: PromptBatch) -> dict[str, Float64[Tensor, "batch query"]]:
    """Predictive entropy of the model when it reads only the last few tokens before each prediction."""
    found = {}
    for width in SUFFIXES:
        index = batch.position[..., None] + torch.arange(1 - width, 1)
        windows = rearrange(
            batch.tokens.gather(1, index.flatten(1)), "batch (window width) -> (batch window) width", width=width
        )
        last = torch.full((len(windows), 1), width - 1)
        parts = [
            entropy_bits(model(w.to(model.device), at.to(model.device)).cpu().double())
            for w, at in zip(windows.split(BATCH), last.split(BATCH), strict=True)
        ]
        found[f"suffix_{width}"] = torch.cat(parts).reshape(batch.position.shape)
    return found


@torch.no_grad()
def answers(model: Any, batch: PromptBatch) -> Float[Tensor, "batch query d_out"]:
    """Logits of the answers alone, a few sequences at a time."""
    parts = zip(batch.tokens.split(BATCH), batch.position.split(BATCH), strict=True)
    return torch.cat([batch.answer_logits(model(t.to(model.device), p.to(model.device))).cpu() for t, p in parts])


def _calibrate(output: Tensor, untrained: Tensor, batch: PromptBatch) -> Result:
    return calibration(output, batch.posterior, batch.targets, baselines=batch.baselines, twin=untrained)


def _shots(batch: PromptBatch) -> dict[str, Tensor]:
    """Strata of equal position and equally many examples, where their number is not the position."""
    count = batch.evidence.sum(-1)
    if (count == count[:1]).all():
        return {}
    return {"position_and_shots": batch.position * (1 + int(count.max())) + count}
