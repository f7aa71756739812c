r"""First order: does a step move attention and loss as the advantage says it should? (paper II, section 3).

The law gives the gradient in the space of scores. Descent there would change the scores by -lr dL/ds, the attention by

    dalpha_ij = alpha_ij (ds_ij - E_alpha_i[ds]),

and the loss by -lr |dL/ds|^2 through each head. An optimiser steps in the space of weights instead, which all
positions share, and may rescale or orthogonalise: whether its step resembles the prediction is an empirical question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from .advantage import Sums, advantages, as_gradients, pooled, ratio
from .calibration import kl_bits
from .extract import Activations, as_activations
from .nulls import Bootstrap, require_finite
from .result import ProbeError, Result, rows, table

READING = (
    "An attention_correlation near 1 means that the step moves attention as the advantage predicts, near 0 that the "
    "prediction says nothing about this optimiser. Where loss_change departs from linear_loss_change, the step was too "
    "long for gradients to say what it does."
)
UNITS = dict.fromkeys(("routing", "values", "loss_change", "linear_loss_change"), "bits")


def first_order(
    before: Activations,
    after: Activations,
    target: Tensor,
    lr: float,
    *,
    linear: Float[Tensor, " batch"] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = kl_bits,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    """Predicted and actual change of attention and loss in one step, on the same sequences.

    Statistics per layer and head:

    - ``attention_correlation``: of the predicted with the actual change of attention, over all queries and sources.
    - ``attention_slope``: least-squares slope of the actual on the predicted change: 1 if weights could move every
      score by itself, and otherwise of a scale that goes with the learning rates.
    - ``routing`` and ``values``, in bits: the change of the loss that the step brings to first order through the
      head's scores, sum dL/ds ds, and through its values, sum dL/dv dv (per value head). What a layer causes in a later
      one counts in both: they don't add up to the whole.
    - ``routing_correlation``, ``routing_slope``: over sequences, of ``routing`` with its prediction -lr |dL/ds|^2.

    Over all, in bits: ``loss_change``, what the step did to the loss, and ``linear_loss_change``, what the gradient
    of the weights said that it would do.

    ``null_permutation`` is the expectation when b is permuted over the sources of each query: the predicted change
    then averages to zero. ``null_init`` is the same step of the twin at initialisation.

    Args:
        before: from :func:`probes.extract_gradients`.
        after: ``pattern`` and ``v`` of the model after the step, from :func:`probes.extract` on the same batch.
        target: what the loss compares the output with.
        lr: learning rate in the space of scores; it scales slopes only.
        linear: the gradient of each sequence's loss times the step of the weights.
        loss: the loss of the extraction.
        resamples: bootstrap resamples over sequences.
        level: coverage of the intervals.
        seed: seed of the resamples.

    Raises:
        ProbeError: when the learning rate is not positive, or records are missing or belong to different inputs.
    """
    if not lr > 0:
        raise ProbeError(f"lr must be positive for a step to have a direction, got {lr}")
    before = as_gradients(before)
    outputs = [acts.logits for acts in (before, after) if acts.logits is not None]
    if len(outputs) < 2 or outputs[0].shape != outputs[1].shape:
        shapes = " and ".join(str(tuple(output.shape)) for output in outputs) or "no outputs"
        raise ProbeError(f"first_order compares outputs before and after, got {shapes}; extract both from one batch")
    sums = _sums(before, after, lr)
    twin = None
    if before.twin is not None and after.twin is not None:
        twin = {key: value.sum(0) for key, value in _sums(as_gradients(before.twin), after.twin, lr).items()}
    bootstrap = Bootstrap(resamples, level, seed)
    parts = []
    for name, statistic in STATISTICS.items():
        found = pooled(bootstrap, statistic, sums)
        null, init = 0.0 if name.startswith("attention") else None, None if twin is None else statistic(twin)
        parts.append(rows(name, *found, axes=("layer", "head"), null_permutation=null, null_init=init))
    losses = [loss(target, output.double()).flatten(1).mean(1) for output in outputs]
    for name, values in {"loss_change": losses[1] - losses[0], "linear_loss_change": linear}.items():
        if values is not None:
            parts.append(rows(name, *bootstrap.mean(values.double().numpy())))
    return Result("first_order", table(*parts), READING, UNITS, level)


def _correlation(s: Sums) -> np.ndarray:
    """Pearson correlation over sequences of routing with its prediction, from moments."""
    n = s["sequences"]
    covariance = s["routing_predicted"] / n - s["routing"] * s["predicted"] / n**2
    variances = (s[f"{name}_squared"] / n - (s[name] / n) ** 2 for name in ("routing", "predicted"))
    return ratio(covariance, np.sqrt(np.prod([np.maximum(v, 0) for v in variances], 0)))


STATISTICS: dict[str, Callable[[Sums], np.ndarray]] = {
    "attention_correlation": lambda s: ratio(s["product"], np.sqrt(s["expected"] * s["actual"])),
    "attention_slope": lambda s: ratio(s["product"], s["expected"]),
    "routing": lambda s: s["routing"] / s["sequences"],
    "values": lambda s: s["values"] / s["value_sequences"],
    "routing_correlation": _correlation,
    "routing_slope": lambda s: ratio(s["routing_predicted"], s["predicted_squared"]),
}
"""Each statistic as a function of sums over sequences."""


def _sums(
    before: Activations, after: Mapping[str, Tensor], lr: float
) -> dict[str, Float64[np.ndarray, "batch layer _"]]:
    sites = [before.layers(site) for site in ("pattern", "z_grad", "v", "v_grad")]
    later = [as_activations(after).layers(site) for site in ("pattern", "v")]
    layers = [_layer_sums(lr, *(t.double() for t in layer)) for layer in zip(*sites, *later, strict=True)]
    return {name: np.stack([layer[name] for layer in layers], 1) for name in layers[0]}


def _layer_sums(
    lr: float,
    pattern: Float64[Tensor, "batch head query_pos key_pos"],
    u: Float64[Tensor, "batch query_pos head d_head"],
    v: Float64[Tensor, "batch key_pos _ d_head"],
    v_gradient: Float64[Tensor, "batch key_pos _ d_head"],
    later_pattern: Float64[Tensor, "batch head query_pos key_pos"],
    later_v: Float64[Tensor, "batch key_pos _ d_head"],
) -> dict[str, Float64[np.ndarray, "batch _"]]:
    """The sums of one layer. Scores are compared as log attention: a constant per query is nothing to dL/ds."""
    for what, tensor in (("the pattern after the step", later_pattern), ("the values after the step", later_v)):
        require_finite(what, tensor.numpy())
    gradient = pattern * advantages(pattern, u, v)
    expected = -lr * pattern * (gradient - (pattern * gradient).sum(-1, keepdim=True))
    actual = later_pattern - pattern
    used = (pattern > 0) & (later_pattern > 0)
    moved = torch.where(used, later_pattern.log() - pattern.log(), 0.0)
    routing = (gradient * moved).sum((-2, -1))
    predicted = -lr * gradient.square().sum((-2, -1))
    values = (v_gradient * (later_v - v)).sum((1, 3))
    totals = {
        "product": (expected * actual).sum((-2, -1)),
        "expected": expected.square().sum((-2, -1)),
        "actual": actual.square().sum((-2, -1)),
        "routing": routing,
        "predicted": predicted,
        "routing_squared": routing.square(),
        "predicted_squared": predicted.square(),
        "routing_predicted": routing * predicted,
        "sequences": torch.ones_like(routing),
        "values": values,
        "value_sequences": torch.ones_like(values),
    }
    return {name: total.numpy() for name, total in totals.items()}
