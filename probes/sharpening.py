"""Progressive query-key sharpening: does attention separate the evidence from the rest, ever more by layer?"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from .extract import as_activations
from .nulls import Bootstrap, Interval, require_finite
from .result import ProbeError, Result, rows, table

READING = (
    "A head reads the evidence where its attention mass lies above uniform attention and above the model at "
    "initialisation; sharpening is progressive only if the slope over layers is positive with its whole interval."
)
UNITS = {"margin": "bits", "attention_entropy": "of log2 n"}


def query_key_sharpening(
    acts: Mapping[str, Tensor],
    evidence: Bool[Tensor, "batch query pos"],
    position: Int64[Tensor, "batch query"] | None = None,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    """How attention at each query separates the positions that determine its answer from the others.

    Queries with at least one source of either kind count. Statistics per layer and head: ``margin``, the mean
    score over evidence minus that over the other sources, in bits (log2 odds); ``mass``, the attention on
    evidence (null: uniform attention, the fraction of sources that are evidence); ``attention_entropy``,
    divided by log2 of the number of sources. Per layer (mean over heads): ``mass_gain_with_evidence``, the
    change of ``mass`` minus its uniform null per doubling of the number of sources. Over all:
    ``margin_per_layer`` and ``mass_per_layer``, least-squares slopes over layers.

    Args:
        acts: activations that hold ``scores`` and ``pattern``.
        evidence: the positions that determine the answer at each query (``batch.evidence``).
        position: the supervised positions, by default those of the extraction.
        resamples: bootstrap resamples over sequences.
        level: coverage of the intervals.
        seed: seed of the resamples.

    Raises:
        ProbeError: when scores or patterns are missing, or no query has sources of both kinds.
    """
    acts = as_activations(acts)
    position = acts.position if position is None else position
    if position is None:
        raise ProbeError("query_key_sharpening needs the supervised positions; pass position=batch.position")
    counts = separable(evidence, position).double()
    usable = counts.any(1)
    if not usable.any():
        raise ProbeError(
            "no query has both evidence and other sources, so attention has nothing to separate; "
            "check the evidence mask or draw longer sequences"
        )
    source = torch.arange(evidence.shape[-1]) <= position[..., None]
    evidence = evidence & source
    masks = (position[usable], evidence[usable], source[usable], counts[usable])
    measured = _measure(acts.layers("scores"), acts.layers("pattern"), usable, *masks)
    twin = None
    if acts.twin is not None:
        twin = _measure(acts.twin.layers("scores"), acts.twin.layers("pattern"), usable, *masks)
    uniform = evidence[usable].sum(-1) / source[usable].sum(-1)
    null_uniform = {
        "margin": 0.0,
        "mass": float((uniform * masks[-1]).sum(1).div(masks[-1].sum(1)).mean()),
        "attention_entropy": 1.0,
    }

    bootstrap = Bootstrap(resamples, level, seed)
    weight = masks[-1]
    parts = []
    for statistic, null in null_uniform.items():
        init = None if twin is None else _per_sequence(twin[statistic], weight).mean(0)
        found = bootstrap.mean(_per_sequence(measured[statistic], weight))
        parts.append(rows(statistic, *found, axes=("layer", "head"), null_uniform=null, null_init=init))
    doubling = torch.log2(source[usable].sum(-1).double())
    found = _slope_over_evidence(measured["mass"], uniform, doubling, weight, bootstrap)
    init = None if twin is None else _slope_over_evidence(twin["mass"], uniform, doubling, weight, bootstrap)[0]
    parts.append(rows("mass_gain_with_evidence", *found, axes=("layer",), null_uniform=0.0, null_init=init))
    for statistic in ("margin", "mass"):
        found = bootstrap.mean(_slope_over_layers(measured[statistic], weight))
        init = None if twin is None else _slope_over_layers(twin[statistic], weight).mean()
        parts.append(rows(f"{statistic}_per_layer", *found, null_uniform=0.0, null_init=init))
    return Result("query_key_sharpening", table(*parts), READING, UNITS, level)


def separable(
    evidence: Bool[Tensor, "batch query pos"], position: Int64[Tensor, "batch query"]
) -> Bool[Tensor, "batch query"]:
    """Queries that may attend to evidence and to something else: where attention has a choice."""
    source = torch.arange(evidence.shape[-1]) <= position[..., None]
    return (evidence & source).any(-1) & (~evidence & source).any(-1)


def _measure(
    scores: list[Tensor],
    patterns: list[Tensor],
    usable: Bool[Tensor, " _"],
    position: Int64[Tensor, "batch query"],
    evidence: Bool[Tensor, "batch query pos"],
    source: Bool[Tensor, "batch query pos"],
    counts: Float64[Tensor, "batch query"],
) -> dict[str, Float64[np.ndarray, "batch query layer head"]]:
    """The three statistics at every query; 0 where a query does not count."""
    rest = source & ~evidence
    found: dict[str, list[Tensor]] = {"margin": [], "mass": [], "attention_entropy": []}
    for layer_scores, layer_pattern in zip(scores, patterns, strict=True):
        s, p = (_rows(t[usable], position).double() for t in (layer_scores, layer_pattern))
        require_finite("the attention pattern", p.numpy())
        s = s.masked_fill(~source[:, None], 0.0)
        require_finite("the attention scores", s.numpy())
        means = [(s * m[:, None]).sum(-1) / m.sum(-1).clamp_min(1)[:, None] for m in (evidence, rest)]
        entropy = torch.special.entr(p).sum(-1) / source.sum(-1).clamp_min(2).log()[:, None]
        mass = (p * evidence[:, None]).sum(-1)
        for name, value in (
            ("margin", (means[0] - means[1]) / np.log(2)),
            ("mass", mass),
            ("attention_entropy", entropy),
        ):
            found[name].append(rearrange(value * counts[:, None], "batch head query -> batch query head"))
    return {name: torch.stack(layers, 2).numpy() for name, layers in found.items()}


def _rows(
    attention: Float[Tensor, "batch head query_pos key_pos"], position: Int64[Tensor, "batch query"]
) -> Float[Tensor, "batch head query key_pos"]:
    index = position[:, None, :, None].expand(-1, attention.shape[1], -1, attention.shape[-1])
    return attention.gather(2, index)


def _per_sequence(values: np.ndarray, counts: Tensor) -> Float64[np.ndarray, "batch layer head"]:
    return values.sum(1) / counts.sum(1).numpy()[:, None, None]


def _slope_over_evidence(
    mass: Float64[np.ndarray, "batch query layer head"],
    uniform: Tensor,
    doubling: Tensor,
    counts: Float64[Tensor, "batch query"],
    bootstrap: Bootstrap,
) -> Interval:
    """Least-squares slope over log2 sources of (mass - uniform), pooled over queries, per layer."""
    w, x = counts.numpy(), doubling.numpy()
    y = mass.mean(-1) - (uniform.double() * counts).numpy()[..., None]
    moments = [np.broadcast_to((w * x**k).sum(1)[:, None], y[:, 0].shape) for k in (0, 1, 2)]
    products = [np.einsum("bq,bql->bl", x**k, y) for k in (0, 1)]

    def slope(weights: Float64[np.ndarray, "resample batch"]) -> Float64[np.ndarray, "resample layer"]:
        n, sx, sxx = (weights @ m for m in moments)
        sy, sxy = (weights @ p for p in products)
        return (n * sxy - sx * sy) / np.maximum(n * sxx - sx**2, 1e-12)

    return bootstrap.interval(slope, len(w))


def _slope_over_layers(
    values: Float64[np.ndarray, "batch query layer head"], counts: Float64[Tensor, "batch query"]
) -> Float64[np.ndarray, " batch"]:
    """Least-squares slope over layers of the mean over heads, in each sequence."""
    by_layer = _per_sequence(values, counts).mean(-1)
    layer = np.arange(by_layer.shape[1]) - (by_layer.shape[1] - 1) / 2
    return by_layer @ layer / max((layer**2).sum(), 1e-12)
