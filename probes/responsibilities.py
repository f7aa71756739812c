r"""Responsibilities: which queries does each value serve, and does it move where they need it? (paper II, section 4).

Attention read as the E-step of a mixture: alpha_ij is the responsibility of source j for query i, and the value moves
as a prototype does, against the errors of the queries that use it, dL/dv_j = sum_i alpha_ij u_i with u_i = dL/dz_i.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from einops import einsum, reduce
from jaxtyping import Float, Float64
from torch import Tensor

from .advantage import as_gradients, source_mask
from .extract import as_activations
from .nulls import Bootstrap, require_finite
from .result import ProbeError, Result, rows, table

READING = (
    "Specialisation above uniform attention and above initialisation means that queries divide the sources among "
    "them. Values act as prototypes where their actual step has a positive alignment that exceeds the permutation "
    "null, which keeps the movement that all values share."
)
UNITS = {"users": "queries", "specialisation": "bits"}


def responsibilities(
    grads: Mapping[str, Tensor],
    after: Mapping[str, Tensor] | None = None,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    """Who uses each value, and whether values move against the errors of their users.

    Statistics per layer and head:

    - ``users``: the effective number of queries that a value serves, (sum_i alpha_ij)^2 / sum_i alpha_ij^2, each
      value weighted by its load sum_i alpha_ij.
    - ``specialisation``, in bits: the mutual information of query and source when a query is drawn uniformly and a
      source by its attention; 0 when all queries read the same sources alike.
    - ``value_law_residual``, per value head, over all sequences: the norm of sum_i alpha_ij u_i - dL/dv_j relative to
      that of dL/dv: the self-check.
    - ``prototype_alignment``, per value head, if ``after`` is given: the cosine of the change of the values of a
      sequence with -dL/dv.

    ``null_uniform`` is uniform attention over the sources, ``null_permutation`` the alignment expected when gradients
    are permuted over positions, ``null_init`` the twin at initialisation.

    Args:
        grads: from :func:`probes.extract_gradients`, or a TransformerLens cache with gradients.
        after: values of a later model on the same inputs, e.g. of the next snapshot; its twin is compared with ours.
        resamples: bootstrap resamples over sequences.
        level: coverage of the intervals.
        seed: seed of the resamples.

    Raises:
        ProbeError: when activations are missing or not finite, or ``after`` belongs to other inputs.
    """
    grads = as_gradients(grads)
    bootstrap = Bootstrap(resamples, level, seed)
    patterns = [pattern.double() for pattern in grads.layers("pattern")]
    uniform = [source_mask(p).double().expand_as(p) / source_mask(p).sum(-1, keepdim=True) for p in patterns]
    parts = []
    for name, statistic in {"users": users, "specialisation": specialisation}.items():
        measured, null = (np.stack([statistic(p).numpy() for p in layers], 1) for layers in (patterns, uniform))
        init = None
        if grads.twin is not None:
            init = np.stack([statistic(p.double()).numpy().mean(0) for p in grads.twin.layers("pattern")])
        found = bootstrap.mean(measured)
        parts.append(rows(name, *found, axes=("layer", "head"), null_uniform=null.mean(0), null_init=init))
    twin = None if grads.twin is None else _value_residual(grads.twin)
    residual, null = _value_residual(grads), _value_residual(grads, uniform)
    parts.append(rows("value_law_residual", residual, axes=("layer", "head"), null_uniform=null, null_init=twin))
    if after is not None:
        after = as_activations(after)
        aligned, shared = _alignment(grads, after)
        init = None
        if grads.twin is not None and after.twin is not None:
            init = _alignment(grads.twin, after.twin)[0].mean(0)
        found, null = bootstrap.mean(aligned), shared.mean(0)
        parts.append(rows("prototype_alignment", *found, axes=("layer", "head"), null_permutation=null, null_init=init))
    return Result("responsibilities", table(*parts), READING, UNITS, level)


def users(pattern: Float[Tensor, "batch head query_pos key_pos"]) -> Float[Tensor, "batch head"]:
    """Effective number of queries per value, averaged with the values' loads as weights."""
    load, square = pattern.sum(-2), (pattern**2).sum(-2)
    return (load**3 / square.clamp_min(torch.finfo(square.dtype).tiny)).sum(-1) / load.sum(-1)


def specialisation(pattern: Float[Tensor, "batch head query_pos key_pos"]) -> Float[Tensor, "batch head"]:
    """Mutual information of query and source in bits: H(mean_i alpha_i) - mean_i H(alpha_i)."""
    marginal, conditional = (torch.special.entr(p).sum(-1) for p in (pattern.mean(-2), pattern))
    return (marginal - conditional.mean(-1)) / np.log(2)


def value_gradient(
    pattern: Float[Tensor, "batch head query_pos key_pos"],
    u: Float[Tensor, "batch query_pos head d_head"],
    value_heads: int,
) -> Float[Tensor, "batch key_pos _ d_head"]:
    """dL/dv_j = sum_i alpha_ij u_i, summed over the query heads that share a value head.

    Raises:
        ProbeError: when the heads can't be shared evenly.
    """
    if pattern.shape[1] % value_heads:
        raise ProbeError(f"{pattern.shape[1]} query heads can't share {value_heads} value heads evenly")
    by_head = einsum(pattern, u, "batch head i j, batch i head d -> batch j head d")
    return reduce(by_head, "batch j (head_v group) d -> batch j head_v d", "sum", head_v=value_heads)


def _value_residual(
    grads: Mapping[str, Tensor], patterns: list[Tensor] | None = None
) -> Float64[np.ndarray, "layer head"]:
    """Relative norm of the law's error in each value head, with the actual or other responsibilities."""
    grads = as_gradients(grads)
    residuals = []
    for pattern, u, gradient in zip(
        patterns or grads.layers("pattern"), grads.layers("z_grad"), grads.layers("v_grad"), strict=True
    ):
        require_finite("dL/dv", gradient.numpy())
        law = value_gradient(pattern.double(), u.double(), gradient.shape[2])
        error, scale = (t.square().sum((0, 1, 3)).sqrt() for t in (law - gradient, gradient.double()))
        residuals.append((error / scale).numpy())
    return np.stack(residuals)


def _alignment(
    grads: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> tuple[Float64[np.ndarray, "batch layer head"], Float64[np.ndarray, "batch layer head"]]:
    """Cosine of each sequence's change of values with -dL/dv, and its expectation over permuted positions."""
    grads, after = as_gradients(grads), as_activations(after)
    found: list[tuple[Tensor, Tensor]] = []
    for v, later, gradient in zip(grads.layers("v"), after.layers("v"), grads.layers("v_grad"), strict=True):
        if v.shape != later.shape:
            raise ProbeError(f"values are {tuple(v.shape)} before and {tuple(later.shape)} after; use the same inputs")
        change, against = later.double() - v.double(), -gradient.double()
        scale = (change.square().sum((1, 3)) * against.square().sum((1, 3))).sqrt()
        shared = v.shape[1] * (change.mean(1) * against.mean(1)).sum(-1)
        found.append(((change * against).sum((1, 3)) / scale, shared / scale))
    aligned, expected = (torch.stack(parts, 1).numpy() for parts in zip(*found, strict=True))
    return aligned, expected
