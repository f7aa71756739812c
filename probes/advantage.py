r"""Advantage: which sources would lower the loss if a query attended to them more? (paper II, section 3).

A head mixes values, z_i = sum_j alpha_ij v_j with alpha_i = softmax(s_i). With u_i = dL/dz_i,

    b_ij = u_i . v_j,    A_ij = b_ij - E_alpha_i[b],    dL/ds_ij = alpha_ij A_ij,

so that descent gives attention to sources of below-average b. The sources' gradient on the right is the product of a
forward and a backward record and needs no hook on the scores; where there is one, the two must agree, which
:func:`advantage` reports as ``law_residual``.

Recurrent models have no such law. Mamba, read as attention (Ali et al. 2024), is y_id = sum_j M_ijd x_jd with M_ijd
= C_i . exp(A_d (dt_{j+1} + ... + dt_i)) B_j dt_jd. These weights are not normalised over sources: they have either
sign and any sum. dL/dM_ijd = u_id x_jd then has no baseline, raising one weight takes from no other, and the
difference to any average would be a choice of ours and not a gradient that training follows. Content also enters
M_ij through every dt between j and i, so a source is never raised alone. The probe refuses such models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from .calibration import kl_bits
from .extract import SITES, Activations, as_activations
from .nulls import Bootstrap, Interval, require_finite
from .result import ProbeError, Result, rows, table

FORWARD, BACKWARD = ("v", "pattern"), ("z", "v", "scores")
"""Sites of which the activation, and of which the gradient, is recorded."""

Sums = Mapping[str, np.ndarray]
"""Sums by name: of each sequence (``batch layer head``), or over sequences (``... layer head``)."""

READING = (
    "A vanishing law_residual says that the numbers are the gradient that training follows. Positive routing_gain and "
    "attention_correlation, above the model at initialisation, say that the head already attends where it pays; a "
    "large advantage_rms says that it has yet to move."
)
UNITS = {"advantage_rms": "bits", "routing_gain": "bits"}


def extract_gradients(
    model: Any,
    batch: Any,
    target: Tensor | None = None,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = kl_bits,
    batch_size: int = 64,
    twin_seed: int | None = 0,
) -> Activations:
    """Record values, patterns and the gradients of the loss at every head, a few sequences at a time.

    The loss of a sequence is the mean of ``loss(target, output)`` over its queries; each sequence has the gradient of
    its own loss, so nothing depends on how many there are. Gradients are under the hook's name with ``_grad``, as
    in TransformerLens, and under the sites ``z_grad``, ``v_grad`` and ``scores_grad``.

    Args:
        model: any ``HookedRootModule`` with attention whose parameters require gradients.
        batch: a task's batch (``tokens``, ``position``, ``posterior`` are read), or a plain tensor of tokens.
        target: what the loss compares the output with, sequences first; by default ``batch.posterior``.
        loss: ``(target, output) -> batch query``; by default bits above the Bayes floor.
        batch_size: sequences per pass.
        twin_seed: seed of the untrained twin that is recorded too; None for none.

    Raises:
        ProbeError: when the model has no hooks or no attention weights, there is no target, or a hook stays silent.
    """
    if not hasattr(model, "hooks"):
        raise ProbeError(f"{type(model).__name__} has no hooks; expected a TransformerLens HookedRootModule")
    declared = dict(getattr(model, "sites", SITES))
    if not {*FORWARD, *BACKWARD} <= set(declared):
        raise ProbeError(
            f"{type(model).__name__} mixes positions without normalised attention weights, so there is no advantage; "
            f"it needs the sites v, pattern, z and scores and declares: {', '.join(declared)}"
        )
    tokens = batch if isinstance(batch, Tensor) else batch.tokens
    position = None if isinstance(batch, Tensor) else batch.position
    target = getattr(batch, "posterior", None) if target is None else target
    if target is None:
        raise ProbeError("plain tokens say nothing about the right answer; pass target= and the loss that reads it")
    cache, logits = _record(model, declared, tokens, position, target, loss, batch_size)
    twin = None
    if twin_seed is not None:
        from transformer_lens.tools.analysis import reinitialized

        untrained = reinitialized(model, twin_seed)
        twin = extract_gradients(untrained, batch, target, loss=loss, batch_size=batch_size, twin_seed=None)
    return as_gradients(Activations(cache, declared, tokens, position, logits, twin))


def as_gradients(acts: Mapping[str, Tensor]) -> Activations:
    """Activations, or a TransformerLens cache with gradients, whose sites name the gradients too."""
    acts = as_activations(acts)
    gradients = {f"{site}_grad": f"{acts.hook(site)}_grad" for site in BACKWARD}
    twin = None if acts.twin is None else as_gradients(acts.twin)
    return replace(acts, sites={**acts.sites, **gradients}, twin=twin)


def advantage(grads: Mapping[str, Tensor], *, resamples: int = 1000, level: float = 0.95, seed: int = 0) -> Result:
    """How far each head's attention is from where the loss would have it.

    Statistics per layer and head:

    - ``law_residual``: the self-check, the norm of alpha A - dL/ds over all sequences, relative to the larger of
      alpha b and dL/ds. ``null_no_baseline`` is the same for alpha b, without the baseline.
    - ``cancellation``: the norm of alpha b relative to that of dL/ds. Where sources agree about the loss, dL/ds is a
      small difference of large terms, and its own relative rounding error is so many times that of the terms.
    - ``advantage_rms``, in bits: the root mean over positions of E_alpha[A^2].
    - ``routing_gain``, in bits: what attending as the head does saves, to first order, over attending uniformly: the
      sum over positions of mean_j b_ij - E_alpha_i[b].
    - ``attention_correlation``: of alpha with -b over the sources of a query, pooled within queries.

    ``null_permutation`` is the expectation when b is permuted over the sources of each query (in closed form),
    ``null_init`` the twin at initialisation. Intervals come from whole sequences.

    Args:
        grads: from :func:`extract_gradients`, or a TransformerLens cache with gradients.
        resamples: bootstrap resamples over sequences.
        level: coverage of the intervals.
        seed: seed of the resamples.

    Raises:
        ProbeError: when values, patterns or gradients are missing or not finite.
    """
    grads = as_gradients(grads)
    sums = _sums(grads)
    total = {key: value.sum(0) for key, value in sums.items()}
    twin = None if grads.twin is None else {key: value.sum(0) for key, value in _sums(grads.twin).items()}
    nulls = {
        name: {"null_permutation": np.zeros_like(total["gain"])} for name in ("routing_gain", "attention_correlation")
    }
    nulls["advantage_rms"] = {"null_permutation": np.sqrt(total["permuted"] / total["positions"])}
    nulls["law_residual"] = {"null_no_baseline": np.sqrt(ratio(total["no_baseline"], _terms(total)))}
    bootstrap = Bootstrap(resamples, level, seed)
    parts = []
    for name, statistic in STATISTICS.items():
        init = None if twin is None else statistic(twin)
        found = pooled(bootstrap, statistic, sums)
        parts.append(rows(name, *found, axes=("layer", "head"), **nulls.get(name, {}), null_init=init))
    return Result("advantage", table(*parts), READING, UNITS, level)


def marginal_loss(
    u: Float[Tensor, "batch query_pos head d_head"], v: Float[Tensor, "batch key_pos _ d_head"]
) -> Float[Tensor, "batch head query_pos key_pos"]:
    """b_ij = u_i . v_j: the change of the loss per unit of attention from i to j; values may be shared by heads."""
    return einsum(u, per_head(v, u.shape[2]), "batch i head d, batch j head d -> batch head i j")


def advantages(
    pattern: Float[Tensor, "batch head query_pos key_pos"],
    u: Float[Tensor, "batch query_pos head d_head"],
    v: Float[Tensor, "batch key_pos _ d_head"],
) -> Float[Tensor, "batch head query_pos key_pos"]:
    """A_ij = b_ij - E_alpha_i[b]; times the pattern it is dL/ds."""
    b = marginal_loss(u, v)
    return b - (pattern * b).sum(-1, keepdim=True)


def per_head(v: Float[Tensor, "batch pos _ d_head"], heads: int) -> Float[Tensor, "batch pos head d_head"]:
    """The value that each query head reads: grouped-query attention shares one among consecutive heads."""
    if heads % v.shape[2]:
        raise ProbeError(f"{heads} query heads can't share {v.shape[2]} value heads evenly; check the hooks' axes")
    return v.repeat_interleave(heads // v.shape[2], 2)


def source_mask(pattern: Float[Tensor, "batch head query_pos key_pos"]) -> Bool[Tensor, "query_pos key_pos"]:
    """The sources that a query may attend to: the past and itself where attention is causal, else all."""
    mask = torch.ones(pattern.shape[-2:], dtype=torch.bool)
    return mask if pattern.triu(1).any() else mask.tril()


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Numerator over denominator; NaN where nothing was measured."""
    return np.divide(numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 0)


def pooled(bootstrap: Bootstrap, statistic: Callable[[Sums], np.ndarray], sums: Sums) -> Interval:
    """Estimate and interval of a function of sums over sequences, from the sums of each sequence."""

    def weighted(weights: Float64[np.ndarray, "resample batch"]) -> Float64[np.ndarray, "resample ..."]:
        return statistic({key: np.tensordot(weights, value, 1) for key, value in sums.items()})

    return bootstrap.interval(weighted, len(next(iter(sums.values()))))


def _terms(s: Sums) -> np.ndarray:
    return np.maximum(s["weighted"], s["gradient"])


STATISTICS: dict[str, Callable[[Sums], np.ndarray]] = {
    "law_residual": lambda s: np.sqrt(ratio(s["error"], _terms(s))),
    "cancellation": lambda s: np.sqrt(ratio(s["weighted"], s["gradient"])),
    "advantage_rms": lambda s: np.sqrt(s["square"] / s["positions"]),
    "routing_gain": lambda s: s["gain"] / s["sequences"],
    "attention_correlation": lambda s: -ratio(s["product"], np.sqrt(s["pattern"] * s["b"])),
}
"""Each statistic as a function of sums over sequences."""


def _sums(grads: Activations) -> dict[str, Float64[np.ndarray, "batch layer head"]]:
    """Per sequence, layer and head, the sums from which every statistic is made."""
    sites = [grads.layers(site) for site in ("pattern", "z_grad", "v", "scores_grad")]
    layers = [_layer_sums(*(t.double() for t in layer)) for layer in zip(*sites, strict=True)]
    return {name: np.stack([layer[name] for layer in layers], 1) for name in layers[0]}


def _layer_sums(
    pattern: Float64[Tensor, "batch head query_pos key_pos"],
    u: Float64[Tensor, "batch query_pos head d_head"],
    v: Float64[Tensor, "batch key_pos _ d_head"],
    gradient: Float64[Tensor, "batch head query_pos key_pos"],
) -> dict[str, Float64[np.ndarray, "batch head"]]:
    """The sums of one layer; those over sources run over the sources of a query alone."""
    for what, tensor in (("the pattern", pattern), ("dL/dz", u), ("the values", v), ("dL/dscores", gradient)):
        require_finite(what, tensor.numpy())
    b = marginal_loss(u, v)
    a = b - (pattern * b).sum(-1, keepdim=True)
    mask = source_mask(pattern).double()
    n = mask.sum(-1)
    centred_b = (b - (b * mask).sum(-1, keepdim=True) / n[:, None]) * mask
    centred_pattern = (pattern - 1 / n[:, None]) * mask
    ss_b, ss_pattern = (centred_b**2).sum(-1), (centred_pattern**2).sum(-1)
    product = (centred_pattern * centred_b).sum(-1)
    # The expectation over permutations of E_alpha[b^2] - E_alpha[b]^2 (Hoeffding 1951).
    permuted = ss_b / n - ss_b * ss_pattern / (n - 1).clamp_min(1)
    ones = torch.ones(*pattern.shape[:2], dtype=torch.float64)
    totals = {
        "error": ((pattern * a - gradient) ** 2).sum((-2, -1)),
        "no_baseline": ((pattern * b - gradient) ** 2).sum((-2, -1)),
        "gradient": (gradient**2).sum((-2, -1)),
        "weighted": ((pattern * b) ** 2).sum((-2, -1)),
        "square": (pattern * a**2).sum((-2, -1)),
        "permuted": permuted.sum(-1),
        "gain": -product.sum(-1),
        "product": product.sum(-1),
        "pattern": ss_pattern.sum(-1),
        "b": ss_b.sum(-1),
        "positions": pattern.shape[-2] * ones,
        "sequences": ones,
    }
    return {name: total.numpy() for name, total in totals.items()}


def _record(
    model: Any,
    declared: Mapping[str, str],
    tokens: Tensor,
    position: Tensor | None,
    target: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    batch_size: int,
) -> tuple[dict[str, Tensor], Tensor]:
    """Forward and backward passes with hooks in both directions; no parameter's ``grad`` is touched."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ProbeError("no parameter requires a gradient, so none flows to the heads; call model.requires_grad_()")
    forward, backward = (
        [f"blocks.{layer}.{declared[site]}" for layer in range(model.cfg.n_layers) for site in sites]
        for sites in (FORWARD, BACKWARD)
    )
    for name in {*forward, *backward} - set(model.hook_dict):
        raise ProbeError(f"hook '{name}' does not exist; the model has: {', '.join(model.hook_dict)}")
    parts: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(tensor: Tensor, hook: Any) -> None:
            parts.setdefault(name, []).append(tensor.detach().cpu().clone())

        return hook

    hooks = [(name, keep(name)) for name in forward], [(name, keep(f"{name}_grad")) for name in backward]
    outputs, device = [], parameters[0].device
    with torch.enable_grad(), model.hooks(*hooks):
        for start in range(0, len(tokens), batch_size):
            part = slice(start, start + batch_size)
            inputs = [t[part].to(device) for t in (tokens, position) if t is not None]
            output = model(*inputs)
            output = output if isinstance(output, Tensor) else output.logits
            total = rearrange(loss(target[part].to(device), output), "batch ... -> batch (...)").mean(1).sum()
            torch.autograd.grad(total, parameters, allow_unused=True)
            outputs.append(output.detach().cpu())
    for name in (*forward, *(f"{name}_grad" for name in backward)):
        if len(parts.get(name, ())) != len(outputs):
            raise ProbeError(f"hook '{name}' did not fire once a pass; is the model compiled, or its attention fused?")
    return {name: torch.cat(part) for name, part in parts.items()}, torch.cat(outputs)
