"""Signatures of Bayesian inference, each a statistic that must leave every null on a stated side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from probes.result import Result


@dataclass(frozen=True)
class Signature:
    """One claim about geometry or behaviour, and the statistic that decides it."""

    claim: str
    section: str
    """Title, up to the comma, of the results that measure it."""
    statistic: str
    above: bool = True
    """Whether the statistic must be above every null, or below."""


SIGNATURES = (
    Signature("predictions follow the posterior", "calibration", "kl_bits", above=False),
    Signature("entropy follows its entropy at equal position", "entropy agreement", "spearman_within_position"),
    Signature("keys are orthogonal", "key orthogonality", "mean_abs_cos", above=False),
    Signature("keys are orthogonal about their mean", "key orthogonality", "mean_abs_cos_centred", above=False),
    Signature("attention is on the evidence", "query-key sharpening", "mass"),
    Signature("scores favour the evidence", "query-key sharpening", "margin"),
    Signature("scores sharpen with depth", "query-key sharpening", "margin_per_layer"),
    Signature("values lie along one axis", "value manifold", "pc1_variance"),
    Signature("values code entropy at equal position", "value manifold", "entropy_r2_within_position"),
    Signature("values code entropy beyond the controls", "entropy axis", "entropy_r2_beyond_controls"),
    Signature("values code entropy beyond the last tokens", "entropy axis", "entropy_r2_beyond_suffix"),
    Signature("one domain spans fewer dimensions", "domain restriction", "participation_fall"),
)
CHANCE = 0.05
"""Largest share of places at which a signature may be found by luck, and still count as absent."""
RULE = (
    "A place (a layer, a head, or the whole) shows a signature when its interval lies beyond every null on the claimed "
    "side. Present: at more than half of the places; absent: at no more than one in twenty; in part: else. The figures "
    "are those of the median place by distance to the nearest null, so none was chosen by looking; the effect is that "
    "distance, positive on the claimed side."
)


def signature_table(results: Mapping[str, Result]) -> list[dict[str, Any]]:
    """One row a signature and prompt family (or wind tunnel) on which it was measured.

    Returns:
        Rows with ``signature``, ``on``, ``statistic``, ``verdict``, ``shown`` and ``places``, and of the median place
        its ``estimate``, ``low``, ``high``, ``null`` (the nearest on the claimed side) with ``null_name``, and
        ``effect``.
    """
    lines = []
    for signature in SIGNATURES:
        for title, result in results.items():
            section, _, on = title.partition(", ")
            if section == signature.section and (result.frame["statistic"] == signature.statistic).any():
                lines.append({"signature": signature.claim, "on": on, **measure(result, signature)})
    return lines


def measure(result: Result, signature: Signature) -> dict[str, Any]:
    """Whether one result shows a signature, and by how much over its nulls."""
    part = result.overall(signature.statistic)
    sign = 1 if signature.above else -1
    nulls = sign * part[result.nulls()].to_numpy(float)
    nearest = np.where(np.isnan(nulls), -np.inf, nulls).argmax(1)
    null = nulls[np.arange(len(part)), nearest]
    effect = sign * part["estimate"].to_numpy(float) - null
    edge = sign * part["low" if signature.above else "high"].to_numpy(float)
    shown = int((edge > null).sum())
    middle = np.argsort(effect)[len(effect) // 2]
    row = part.iloc[middle]
    return {
        "statistic": signature.statistic,
        "verdict": verdict(shown, len(part)),
        "shown": shown,
        "places": len(part),
        "estimate": float(row["estimate"]),
        "low": float(row["low"]),
        "high": float(row["high"]),
        "null": float(sign * null[middle]),
        "null_name": result.nulls()[nearest[middle]].removeprefix("null_"),
        "effect": float(effect[middle]),
    }


def verdict(shown: int, places: int) -> str:
    """The word for a signature found at ``shown`` of ``places``."""
    return "present" if 2 * shown > places else "absent" if shown <= CHANCE * places else "in part"


def in_words(line: dict[str, Any]) -> dict[str, str]:
    """A row of the signature table as a reader sees it."""
    return {
        "signature": line["signature"],
        "on": line["on"],
        "verdict": line["verdict"],
        "places": f"{line['shown']} of {line['places']}",
        "median place": f"{line['estimate']:.3g} [{line['low']:.3g}, {line['high']:.3g}]",
        "null": f"{line['null']:.3g} ({line['null_name']})",
        "effect": f"{line['effect']:+.3g}",
    }
