"""The causal probes on what a model is said to represent: the entropy axis, and the frame that holds the belief."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from probes.causal import steering, subspace_ablation, subspace_swap
from probes.held_out import points_at, r2
from probes.interventions import Subject
from probes.nulls import Bootstrap
from probes.result import Result, rows, table
from probes.subspaces import decoding_axis, encoding_subspace, principal_subspace

NAMES = ("decoded entropy axis", "encoded entropy axis", "first principal axis", "belief frame")
"""The direction on which ridge regression reads the posterior's entropy; the one along which activations move with it;
the papers' entropy axis; and the subspace in which they move with the posterior's probabilities."""


def causal_battery(
    subject: Subject,
    fit: Any,
    *,
    site: str = "resid_post",
    layers: Sequence[int] | None = None,
    rank: int | None = None,
    per_position: bool = False,
    placebos: int = 8,
    seed: int = 0,
) -> dict[str, Result]:
    """Fit each subspace of ``NAMES`` on one batch; ablate, swap and steer it on another.

    Args:
        subject: the model and the batch that it is tested on.
        fit: another batch of the same task, on which the subspaces are fitted.
        site: where; one vector a position.
        layers: which layers; all by default.
        rank: dimension of the belief frame, by default all that the posterior spans (one less than the answers).
        per_position: also edit each supervised position alone.
        placebos: random subspaces a layer.
        seed: seed of all draws.

    Returns:
        Title -> result: ``"decodability"`` (held-out R^2 of the entropy read on the decoded axis, per layer), and
        ``"ablation, NAME"``, ``"swap, NAME"``, and for the axes ``"steering, NAME"``.
    """
    learnt = Subject(subject.model, fit, subject.readout, subject.batch_size)
    order = torch.randperm(len(fit.posterior), generator=torch.Generator().manual_seed(seed))
    points = layer_points(learnt, site)
    chosen = range(subject.n_layers) if layers is None else layers
    true = {layer: entropy_axes(points[layer], fit.posterior, fit.entropy, rank) for layer in chosen}
    fake = {layer: entropy_axes(points[layer], fit.posterior[order], fit.entropy[order], rank) for layer in chosen}
    held = layer_points(subject, site)
    results = {"decodability": _decodability(points, held, true, fit.entropy, subject.batch.entropy)}
    for name in NAMES:
        bases = {layer: found[name] for layer, found in true.items()}
        options: dict[str, Any] = {"site": site, "placebos": placebos, "seed": seed}
        both = {**options, "per_position": per_position}
        if name != "first principal axis":
            both["shuffled"] = {layer: found[name] for layer, found in fake.items()}
        results[f"ablation, {name}"] = subspace_ablation(subject, bases, **both)
        results[f"swap, {name}"] = subspace_swap(subject, bases, **both)
        if name != "belief frame":
            results[f"steering, {name}"] = steering(subject, bases, **options)
    return results


def entropy_axes(
    points: Float64[np.ndarray, "point feature"],
    posterior: Float64[Tensor, "batch query d_out"],
    entropy: Float[Tensor, "batch query"],
    rank: int | None = None,
) -> dict[str, Tensor]:
    """Name -> basis, for each of ``NAMES``, fitted to the activations of one layer (:func:`layer_points`).

    Args:
        points: activations at the supervised positions, sequence after sequence.
        posterior: the exact posterior there; that of other sequences makes the control of shuffled labels.
        entropy: its entropy.
        rank: dimension of the belief frame, by default all that the posterior spans.
    """
    h = entropy.double().flatten().numpy()
    rank = posterior.shape[-1] - 1 if rank is None else rank
    bases = (
        decoding_axis(points, h),
        encoding_subspace(points, h[:, None], 1),
        principal_subspace(points, 1),
        encoding_subspace(points, posterior.flatten(0, 1).numpy(), rank),
    )
    return dict(zip(NAMES, bases, strict=True))


def layer_points(subject: Subject, site: str) -> list[Float64[np.ndarray, "point feature"]]:
    """Activations at the supervised positions, a matrix a layer."""
    at = subject.batch.position
    return [points_at(layer, at, site).reshape(at.numel(), -1) for layer in subject.record(site).layers(site)]


def causal_table(results: dict[str, Result]) -> list[dict[str, Any]]:
    """One row a test and layer: the estimate, its interval, and every control."""
    headline = {"ablation": "kl_increase_bits", "swap": "redirected_bits", "steering": "entropy_shift"}
    lines = []
    for title, result in results.items():
        test, _, name = title.partition(", ")
        statistic = headline.get(test, "entropy_r2")
        for _, row in result.overall(statistic).iterrows():
            controls = {control: row.get(f"null_{control}") for control in CONTROLS}
            shown = {key: "" if x is None or np.isnan(x) else f"{x:.3g}" for key, x in controls.items()}
            measured = f"{row['estimate']:.3g} [{row['low']:.3g}, {row['high']:.3g}]"
            line = {"subspace": name, "test": test, "layer": int(row["layer"]), "statistic": statistic}
            lines.append({**line, "measured": measured, **shown})
    return lines


CONTROLS = ("random", "shuffled", "wrong_state", "mean")


def _decodability(
    x_fit: list[np.ndarray], x: list[np.ndarray], bases: dict[int, dict[str, Tensor]], h_fit: Tensor, h: Tensor
) -> Result:
    """Held-out R^2 of entropy by a line on each axis."""
    parts = []
    known, y = h_fit.double().flatten().numpy(), h.double().numpy()
    for layer, found in bases.items():
        axis = found[NAMES[0]].double().numpy()[:, 0]
        line = np.polyfit(x_fit[layer] @ axis, known, 1)
        cell = r2(y - known.mean(), y - np.polyval(line, (x[layer] @ axis).reshape(y.shape)), Bootstrap())
        part = rows("entropy_r2", [cell["estimate"]], ([cell["low"]], [cell["high"]]), axes=("layer",), null_mean=0.0)
        parts.append(part.assign(layer=layer))
    reading = "How well the entropy can be read off the axis; whether the model reads it there is what the tests ask."
    return Result("decodability", table(*parts), reading, {})
