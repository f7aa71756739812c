"""Key orthogonality: do distinct hypotheses get near-orthogonal keys? (paper I, "hypothesis frame")."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .extract import as_activations
from .nulls import Bootstrap, expected_abs_cos, require_finite, welch_bound
from .result import ProbeError, Result, rows, table

READING = (
    "Keys form a frame of hypotheses only where the mean |cos| lies below both random vectors and the same model at "
    "initialisation; near the random line, 'near-orthogonal' says no more than that d_head is large."
)


def key_orthogonality(
    acts: Mapping[str, Tensor],
    hypothesis: Int[Tensor, "batch pos"] | None = None,
    *,
    site: str = "k",
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    r"""Mean \|cos\| between the keys of distinct hypotheses of one sequence, per layer and head.

    Of each hypothesis the first occurrence in a sequence counts. Statistics: ``mean_abs_cos``;
    ``mean_abs_cos_centred``, after subtracting the mean key of the head (a shared offset makes all cosines
    large); ``rms_cos``, which n > d_head vectors can't push below the Welch bound.

    Nulls: ``null_random``, the expectation for isotropic vectors; ``null_init``, the twin at initialisation.

    Args:
        acts: activations that hold ``site``, from :func:`probes.extract` or a TransformerLens cache.
        hypothesis: which hypothesis the token at each position names, -1 for none; by default its token id.
        site: which vectors to compare.
        resamples: bootstrap resamples over sequences.
        level: coverage of the intervals.
        seed: seed of the resamples.

    Raises:
        ProbeError: when keys are missing or not finite, or no sequence names two distinct hypotheses.
    """
    acts = as_activations(acts)
    labels = acts.tokens if hypothesis is None else hypothesis
    if labels is None or labels.is_floating_point():
        raise ProbeError(
            "key_orthogonality needs to know which hypothesis each position names; pass hypothesis=batch.hypothesis"
        )
    pairs = _distinct_pairs(labels)
    usable = pairs.flatten(1).any(1)
    if not usable.any():
        raise ProbeError("no sequence names two distinct hypotheses, so there is no pair of keys to compare")
    pairs, count = pairs[usable], _frame_size(labels[usable])
    keys = [_by_head(layer)[usable] for layer in acts.layers(site)]
    measured = _stack([_cosines(layer, pairs, site) for layer in keys])
    twin = None
    if acts.twin is not None:
        twin = _stack([_cosines(_by_head(layer)[usable], pairs, site) for layer in acts.twin.layers(site)])

    d_head = keys[0].shape[-1]
    bound = float(np.sqrt((welch_bound(count, d_head) ** 2).mean()))
    random = {"mean_abs_cos": expected_abs_cos(d_head), "mean_abs_cos_centred": expected_abs_cos(d_head)}
    random["rms_cos"] = d_head**-0.5
    axes = ("layer", "head")
    parts = []
    for statistic, values in measured.items():
        estimate, interval = Bootstrap(resamples, level, seed).mean(values)
        null_init = None if twin is None else twin[statistic].mean(0)
        if statistic == "rms_cos":
            estimate, interval = np.sqrt(estimate), (np.sqrt(interval[0]), np.sqrt(interval[1]))
            null_init = None if null_init is None else np.sqrt(null_init)
        parts.append(
            rows(
                statistic,
                estimate,
                interval,
                axes=axes,
                null_random=random[statistic],
                null_init=null_init,
                bound_welch=bound if statistic == "rms_cos" else None,
            )
        )
    return Result("key_orthogonality", table(*parts), READING, {}, level)


def _by_head(keys: Float[Tensor, "batch pos ..."]) -> Float[Tensor, "batch pos head d_head"]:
    """Keys that have no head axis (Mamba's B) are those of one head."""
    return keys if keys.ndim == 4 else keys[:, :, None]


def _distinct_pairs(labels: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch query_pos key_pos"]:
    """Pairs i < j of first occurrences of two different hypotheses."""
    same = labels[:, :, None] == labels[:, None, :]
    first = (labels >= 0) & ~same.tril(-1).any(-1)
    return (first[:, :, None] & first[:, None, :] & ~same).triu(1)


def _frame_size(labels: Int[Tensor, "batch pos"]) -> Int[np.ndarray, " batch"]:
    same = labels[:, :, None] == labels[:, None, :]
    return ((labels >= 0) & ~same.tril(-1).any(-1)).sum(1).numpy()


def _cosines(
    keys: Float[Tensor, "batch pos head d_head"], pairs: Bool[Tensor, "batch query_pos key_pos"], site: str
) -> dict[str, Float[np.ndarray, "batch head"]]:
    """Per-sequence means over pairs; ``rms_cos`` still squared."""
    keys = keys.double()
    require_finite(f"site '{site}'", keys.numpy())
    named = pairs.any(1) | pairs.any(2)
    centre = keys[named].mean(0)
    found = {}
    for name, vectors in (("raw", keys), ("centred", keys - centre)):
        unit = torch.nn.functional.normalize(vectors, dim=-1)
        cosine = torch.einsum("bihd, bjhd -> bhij", unit, unit) * pairs[:, None]
        found[name] = cosine.abs().sum((-2, -1)), (cosine**2).sum((-2, -1))
    count = pairs.sum((-2, -1))[:, None]
    return {
        "mean_abs_cos": (found["raw"][0] / count).numpy(),
        "mean_abs_cos_centred": (found["centred"][0] / count).numpy(),
        "rms_cos": (found["raw"][1] / count).numpy(),
    }


def _stack(layers: list[dict[str, np.ndarray]]) -> dict[str, Float[np.ndarray, "batch layer head"]]:
    return {statistic: np.stack([layer[statistic] for layer in layers], 1) for statistic in layers[0]}
