"""Is a subspace used? Ablate it, steer along it, and swap it between sequences, beside matched random subspaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from .calibration import entropy_bits, kl_bits
from .extract import at_position
from .interventions import Edit, Replacement, Subject, partners, replacement
from .nulls import Bootstrap
from .result import ProbeError, Result, rows, table

READING = (
    "A subspace is used where ablating it costs more bits than moving the activation as far in random subspaces of the "
    "same dimension, and carries a belief where swapping it takes the answer to the other sequence's posterior. What "
    "can be decoded but costs nothing is inert."
)
UNITS = {"kl_increase_bits": "bits", "redirected_bits": "bits", "kl_to_target_bits": "bits", "entropy_shift": "bits"}
Subspaces = Sequence[Float[Tensor, "feature component"]] | Mapping[int, Float[Tensor, "feature component"]]
"""An orthonormal basis for each layer, or for some layers by number."""


def subspace_ablation(
    subject: Subject,
    bases: Subspaces,
    *,
    site: str = "resid_post",
    by: Replacement = "mean",
    shuffled: Subspaces | None = None,
    per_position: bool = False,
    placebos: int = 8,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    """What it costs to replace the coordinates inside a subspace, layer by layer, at the supervised positions.

    ``kl_increase_bits`` is KL(Bayes || model) per answer with the edit, minus without. Nulls: ``null_random``, the
    mean over norm-matched moves in random subspaces of the same dimension (``p_value`` is the rank among them), and
    ``null_shuffled``, a subspace fitted to shuffled beliefs.

    Args:
        subject: the model and what it reads; not the sequences that the subspace was fitted on.
        bases: an orthonormal basis for each layer, or for some layers by number.
        site: ``resid_post``, ``v``, or another site with one vector a position.
        by: what the coordinates become: ``mean`` over sequences, ``resample`` (another sequence's), or ``zero``.
        shuffled: subspaces fitted in the same way to shuffled beliefs.
        per_position: also edit each supervised position alone; the cost is still over all answers.
        placebos: random subspaces a layer.
        resamples: bootstrap resamples over sequences.
        level: coverage of the intervals.
        seed: seed of all draws.

    Raises:
        ProbeError: when the site can't be edited or the bases don't fit it.
    """
    from transformer_lens.tools.analysis import SubspaceInterchange

    layers, at = _recorded(subject, bases, site), subject.batch.position
    unedited = subject.errors()
    bootstrap = Bootstrap(resamples, level, seed)

    def cost(edit: Edit) -> Float64[np.ndarray, " batch"]:
        return (subject.errors([edit]) - unedited).mean(1).numpy()

    whole, single, null, null_single, p_value = [], [], [], [], []
    other: list[float] = []
    for layer, (points, basis) in layers.items():
        hook, source = subject.hook(site, layer), replacement(points, by, seed)
        used = SubspaceInterchange(basis)
        random = _placebos(used, placebos, seed)
        whole.append(cost(Edit(hook, used, source, at)))
        costs = [cost(Edit(hook, placebo, source, at)).mean() for placebo in random]
        null.append(np.mean(costs))
        p_value.append((1 + np.sum(np.array(costs) >= whole[-1].mean())) / (1 + len(costs)))
        fake = None if shuffled is None else SubspaceInterchange(shuffled[layer])
        other.append(np.nan if fake is None else cost(Edit(hook, fake, source, at)).mean())
        if per_position:
            places = range(at.shape[1])
            single.append([cost(Edit(hook, used, source[:, [q]], at[:, [q]])) for q in places])
            null_single.append([cost(Edit(hook, random[0], source[:, [q]], at[:, [q]])).mean() for q in places])
    estimate, interval = bootstrap.mean(np.stack(whole, 1))
    nulls = {"null_random": np.array(null), "null_shuffled": np.array(other), "p_value": np.array(p_value)}
    parts = [rows("kl_increase_bits", estimate, interval, axes=("layer",), **nulls)]
    if per_position:
        estimate, interval = bootstrap.mean(np.moveaxis(np.array(single), -1, 0))
        parts.append(rows("kl_increase_bits", estimate, interval, axes=("layer", "query"), null_random=null_single))
    return _result(f"subspace_ablation({site}, {by})", parts, list(layers), level)


def subspace_swap(
    subject: Subject,
    bases: Subspaces,
    *,
    site: str = "resid_post",
    partner: Int64[Tensor, " batch"] | None = None,
    target: Float64[Tensor, "batch query d_out"] | None = None,
    shuffled: Subspaces | None = None,
    per_position: bool = False,
    placebos: int = 8,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    """Take a subspace's coordinates from another sequence: does the answer become what it should?

    ``kl_to_target_bits`` is KL(target || model) under the swap, where the target is the exact posterior that the swap
    should produce, by default the other sequence's at the same answer. ``redirected_bits`` is how far that fell from
    its value without the swap, 0 where nothing moved. Nulls: ``null_random``, norm-matched moves in random subspaces;
    ``null_wrong_state``, the same swap scored against the posterior of a third sequence; ``null_mean``, the mean of all
    sequences as the source; ``null_shuffled``, a subspace fitted to shuffled beliefs; for ``kl_to_target_bits`` also
    ``null_unedited``.

    Args:
        subject: the model and what it reads; not the sequences that the subspace was fitted on.
        bases: an orthonormal basis for each layer, or for some layers by number.
        site: ``resid_post``, ``v``, or another site with one vector a position.
        partner: whose coordinates each sequence gets; by default a random cycle.
        target: the posterior that the swap should produce.
        shuffled: subspaces fitted in the same way to shuffled beliefs.
        per_position: also swap each supervised position alone; scored at that answer.
        placebos: random subspaces a layer.
        resamples: bootstrap resamples over sequences.
        level: coverage of the intervals.
        seed: seed of all draws.

    Raises:
        ProbeError: when the site can't be edited or the bases don't fit it.
    """
    from transformer_lens.tools.analysis import SubspaceInterchange

    layers, at = _recorded(subject, bases, site), subject.batch.position
    partner = partners(len(at), seed) if partner is None else partner
    target = subject.batch.posterior[partner] if target is None else target
    wrong = target[partner]
    unedited = subject.output()
    before = {"target": kl_bits(target, unedited, subject.readout), "wrong": kl_bits(wrong, unedited, subject.readout)}
    bootstrap = Bootstrap(resamples, level, seed)
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("swap", "random", "wrong_state", "mean", "shuffled")}
    single: list[np.ndarray] = []
    null_single: list[np.ndarray] = []
    for layer, (points, basis) in layers.items():
        hook, source = subject.hook(site, layer), points[partner]
        used = SubspaceInterchange(basis)
        random = _placebos(used, placebos, seed)

        def after(intervention: object, taken: Tensor, hook: str = hook) -> Float64[Tensor, "batch query d_out"]:
            return subject.output([Edit(hook, intervention, taken, at)])  # type: ignore[arg-type]

        def distance(output: Tensor) -> Float64[np.ndarray, " batch"]:
            return kl_bits(target, output, subject.readout).mean(1).numpy()

        swapped = after(used, source)
        found["swap"].append(distance(swapped))
        found["wrong_state"].append((before["wrong"] - kl_bits(wrong, swapped, subject.readout)).mean(1).numpy())
        found["random"].append(np.mean([distance(after(placebo, source)) for placebo in random], 0))
        found["mean"].append(distance(after(used, points.mean(0, keepdim=True))))
        if shuffled is not None:
            found["shuffled"].append(distance(after(SubspaceInterchange(shuffled[layer]), source)))
        if per_position:
            for intervention, kept in ((used, single), (random[0], null_single)):
                edits = [Edit(hook, intervention, source[:, [q]], at[:, [q]]) for q in range(at.shape[1])]
                outputs = [subject.output([edit])[:, q] for q, edit in enumerate(edits)]
                moved = before["target"] - kl_bits(target, torch.stack(outputs, 1), subject.readout)
                kept.append(moved.numpy())
    start = before["target"].mean(1).numpy()
    distances = {name: np.stack(values, 1) for name, values in found.items() if values}
    scored = {name: distances[name] for name in ("random", "mean", "shuffled") if name in distances}
    nulls = {f"null_{name}": values.mean(0) for name, values in scored.items()}
    redirected = {name: start.mean() - values for name, values in nulls.items()}
    parts = [
        rows(
            "redirected_bits",
            *bootstrap.mean(start[:, None] - distances["swap"]),
            axes=("layer",),
            null_wrong_state=distances["wrong_state"].mean(0),
            **redirected,
        ),
        rows(
            "kl_to_target_bits",
            *bootstrap.mean(distances["swap"]),
            axes=("layer",),
            null_unedited=start.mean(),
            **nulls,
        ),
    ]
    if per_position:
        estimate, interval = bootstrap.mean(np.stack(single, 1))
        null_random = np.stack(null_single, 1).mean(0)
        parts.append(rows("redirected_bits", estimate, interval, axes=("layer", "query"), null_random=null_random))
    return _result(f"subspace_swap({site})", parts, list(layers), level)


def steering(
    subject: Subject,
    axes: Subspaces,
    *,
    site: str = "resid_post",
    amount: int | float = 1.0,
    placebos: int = 8,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    """Push activations along an axis: how far does the entropy of the answer go?

    ``entropy_shift`` is the model's entropy with ``amount`` standard deviations added along the axis, minus that with
    as much taken away, in bits per answer; ``null_random`` its mean magnitude along random axes, pushed as far.
    ``kl_increase_bits`` is the mean cost of the two pushes.

    Raises:
        ProbeError: when the site can't be edited, or a basis is not one direction.
    """
    from transformer_lens.tools.analysis import SubspaceInterchange, random_basis

    layers, at = _recorded(subject, axes, site), subject.batch.position
    ranks = [axis.shape[1] for _, axis in layers.values()]
    if set(ranks) != {1}:
        raise ProbeError(f"steering needs one direction a layer, got ranks {ranks}")
    unedited = subject.errors()
    shift, cost, null_shift, null_cost = [], [], [], []
    for layer, (points, axis) in layers.items():
        distance = amount * float((points @ axis).std())

        def pushed(
            along: Tensor, points: Tensor = points, hook: str = subject.hook(site, layer), distance: float = distance
        ) -> tuple[Tensor, Tensor]:
            ends = [
                subject.output([Edit(hook, SubspaceInterchange(along), points + sign * distance * along[:, 0], at)])
                for sign in (1, -1)
            ]
            up, down = (entropy_bits(end, subject.readout) for end in ends)
            errors = [kl_bits(subject.batch.posterior, end, subject.readout) for end in ends]
            return (up - down).mean(1), (sum(errors) / 2 - unedited).mean(1)

        moved, worse = pushed(axis)
        shift.append(moved.numpy())
        cost.append(worse.numpy())
        random = [pushed(random_basis(len(axis), 1, seed + i)) for i in range(placebos)]
        null_shift.append(np.mean([abs(float(end.mean())) for end, _ in random]))
        null_cost.append(np.mean([float(end.mean()) for _, end in random]))
    bootstrap = Bootstrap(resamples, level, seed)
    parts = [
        rows("entropy_shift", *bootstrap.mean(np.stack(shift, 1)), axes=("layer",), null_random=null_shift),
        rows("kl_increase_bits", *bootstrap.mean(np.stack(cost, 1)), axes=("layer",), null_random=null_cost),
    ]
    return _result(f"steering({site})", parts, list(layers), level)


def _recorded(subject: Subject, bases: Subspaces, site: str) -> dict[int, tuple[Tensor, Tensor]]:
    """Layer -> unedited activations at the supervised positions (``batch query feature``), and its basis."""
    at = subject.batch.position
    layers = [at_position(layer.flatten(2), at).float() for layer in subject.record(site).layers(site)]
    given = dict(bases) if isinstance(bases, Mapping) else dict(enumerate(bases))
    whole = isinstance(bases, Mapping) or len(given) == len(layers)
    if not whole or any(n not in range(len(layers)) or len(b) != layers[n].shape[-1] for n, b in given.items()):
        shapes = {layer: tuple(basis.shape) for layer, basis in given.items()}
        raise ProbeError(
            f"bases have shapes {shapes}; '{site}' has {len(layers)} layers of width {layers[0].shape[-1]}: give one "
            "a layer, or some by number"
        )
    return {layer: (layers[layer], basis) for layer, basis in given.items()}


def _result(name: str, parts: list[pd.DataFrame], layers: Sequence[int], level: float) -> Result:
    """A result whose rows carry the numbers of the layers that were edited."""
    frame = table(*parts)
    frame["layer"] = frame["layer"].map(dict(enumerate(layers))).astype("Int64")
    return Result(name, frame, READING, UNITS, level)


def _placebos(used: object, count: int, seed: int) -> list:
    """Moves as far as those of an interchange, in random subspaces of its dimension."""
    from transformer_lens.tools.analysis import NormMatchedPlacebo, SubspaceInterchange, random_basis

    assert isinstance(used, SubspaceInterchange)
    assert isinstance(used.basis, Tensor)
    width, rank = used.basis.shape
    return [NormMatchedPlacebo(used, random_basis(width, rank, seed + i)) for i in range(count)]
