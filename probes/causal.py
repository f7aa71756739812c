"""Is a subspace used? Ablate it, steer along it, and swap it between sequences, beside matched random subspaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from .calibration import entropy_bits, kl_bits
from .extract import at_position
from .interventions import Edit, Intervention, Replacement, Subject, partners, replacement
from .interventions import placebos as matched
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

    places = _places(subject, bases, site)
    unedited = subject.errors()
    bootstrap = Bootstrap(resamples, level, seed)

    def cost(edit: Edit) -> Float64[np.ndarray, " batch"]:
        return (subject.errors([edit]) - unedited).mean(1).numpy()

    whole, single, null, null_single, p_value = [], [], [], [], []
    other: list[float] = []
    for layer, place in places.items():
        source, used = replacement(place.points, by, seed), SubspaceInterchange(place.basis)
        random = matched(used, placebos, seed)
        whole.append(cost(place.edit(used, source)))
        costs = [cost(place.edit(placebo, source)).mean() for placebo in random]
        null.append(np.mean(costs))
        p_value.append((1 + np.sum(np.array(costs) >= whole[-1].mean())) / (1 + len(costs)))
        fake = None if shuffled is None else SubspaceInterchange(shuffled[layer])
        other.append(np.nan if fake is None else cost(place.edit(fake, source)).mean())
        if per_position:
            single.append([cost(edit) for edit in place.single(used, source)])
            null_single.append([cost(edit).mean() for edit in place.single(random[0], source)])
    estimate, interval = bootstrap.mean(np.stack(whole, 1))
    nulls = {"null_random": np.array(null), "null_shuffled": np.array(other), "p_value": np.array(p_value)}
    parts = [rows("kl_increase_bits", estimate, interval, axes=("layer",), **nulls)]
    if per_position:
        estimate, interval = bootstrap.mean(np.moveaxis(np.array(single), -1, 0))
        parts.append(rows("kl_increase_bits", estimate, interval, axes=("layer", "query"), null_random=null_single))
    return _result(f"subspace_ablation({site}, {by})", parts, list(places), level)


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

    places = _places(subject, bases, site)
    partner = partners(len(subject.batch.position), seed) if partner is None else partner
    target = subject.batch.posterior[partner] if target is None else target
    wrong = target[partner]
    unedited = subject.output()
    before = {"target": kl_bits(target, unedited, subject.readout), "wrong": kl_bits(wrong, unedited, subject.readout)}
    bootstrap = Bootstrap(resamples, level, seed)
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("swap", "random", "wrong_state", "mean", "shuffled")}
    single: list[np.ndarray] = []
    null_single: list[np.ndarray] = []

    def distance(edit: Edit) -> Float64[np.ndarray, " batch"]:
        return kl_bits(target, subject.output([edit]), subject.readout).mean(1).numpy()

    for layer, place in places.items():
        source, used = place.points[partner], SubspaceInterchange(place.basis)
        random = matched(used, placebos, seed)
        swapped = subject.output([place.edit(used, source)])
        found["swap"].append(kl_bits(target, swapped, subject.readout).mean(1).numpy())
        found["wrong_state"].append((before["wrong"] - kl_bits(wrong, swapped, subject.readout)).mean(1).numpy())
        found["random"].append(np.mean([distance(place.edit(placebo, source)) for placebo in random], 0))
        found["mean"].append(distance(place.edit(used, place.points.mean(0, keepdim=True))))
        if shuffled is not None:
            found["shuffled"].append(distance(place.edit(SubspaceInterchange(shuffled[layer]), source)))
        if per_position:
            for intervention, kept in ((used, single), (random[0], null_single)):
                outputs = [subject.output([edit])[:, q] for q, edit in enumerate(place.single(intervention, source))]
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
    return _result(f"subspace_swap({site})", parts, list(places), level)


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

    places = _places(subject, axes, site)
    ranks = [place.basis.shape[1] for place in places.values()]
    if set(ranks) != {1}:
        raise ProbeError(f"steering needs one direction a layer, got ranks {ranks}")
    unedited = subject.errors()

    def pushed(place: _Place, along: Tensor, distance: float) -> tuple[Tensor, Tensor]:
        ends = [
            subject.output([place.edit(SubspaceInterchange(along), place.points + sign * distance * along[:, 0])])
            for sign in (1, -1)
        ]
        up, down = (entropy_bits(end, subject.readout) for end in ends)
        errors = [kl_bits(subject.batch.posterior, end, subject.readout) for end in ends]
        return (up - down).mean(1), (sum(errors) / 2 - unedited).mean(1)

    shift, cost, null_shift, null_cost = [], [], [], []
    for place in places.values():
        distance = amount * float((place.points @ place.basis).std())
        moved, worse = pushed(place, place.basis, distance)
        shift.append(moved.numpy())
        cost.append(worse.numpy())
        random = [pushed(place, random_basis(len(place.basis), 1, seed + i), distance) for i in range(placebos)]
        null_shift.append(np.mean([abs(float(end.mean())) for end, _ in random]))
        null_cost.append(np.mean([float(end.mean()) for _, end in random]))
    bootstrap = Bootstrap(resamples, level, seed)
    parts = [
        rows("entropy_shift", *bootstrap.mean(np.stack(shift, 1)), axes=("layer",), null_random=null_shift),
        rows("kl_increase_bits", *bootstrap.mean(np.stack(cost, 1)), axes=("layer",), null_random=null_cost),
    ]
    return _result(f"steering({site})", parts, list(places), level)


@dataclass(frozen=True, eq=False)
class _Place:
    """One layer at which a subspace is tested."""

    hook: str
    at: Int64[Tensor, "batch query"]
    points: Float[Tensor, "batch query feature"]
    """Unedited activations at the supervised positions."""
    basis: Float[Tensor, "feature component"]

    def edit(self, intervention: Intervention, source: Tensor) -> Edit:
        """At all supervised positions."""
        return Edit(self.hook, intervention, source, self.at)

    def single(self, intervention: Intervention, source: Tensor) -> list[Edit]:
        """At each supervised position alone."""
        places = range(self.at.shape[1])
        return [Edit(self.hook, intervention, source[:, [q]], self.at[:, [q]]) for q in places]


def _places(subject: Subject, bases: Subspaces, site: str) -> dict[int, _Place]:
    """Layer -> where its subspace is tested."""
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
    return {layer: _Place(subject.hook(site, layer), at, layers[layer], basis) for layer, basis in given.items()}


def _result(name: str, parts: list[pd.DataFrame], layers: Sequence[int], level: float) -> Result:
    """A result whose rows carry the numbers of the layers that were edited."""
    frame = table(*parts)
    frame["layer"] = frame["layer"].map(dict(enumerate(layers))).astype("Int64")
    return Result(name, frame, READING, UNITS, level)
