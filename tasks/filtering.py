"""Belief recursions over hidden states, shared by the tasks with dynamics: exact, and cut off after a few steps."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from .base import TaskError


def normalised(joint: Float64[np.ndarray, "*axes state"]) -> Float64[np.ndarray, "*axes state"]:
    """Joint probabilities over states, divided by their sum.

    Raises:
        TaskError: where the sum is 0: the observation is impossible.
    """
    total = np.einsum("...i->...", joint)[..., None]
    if not (total > 0).all():
        raise TaskError("the given tokens have probability 0 under the task, so nothing follows from them")
    return joint / total


def transported(
    belief: Float64[np.ndarray, "*axes state"], transition: Float64[np.ndarray, "*axes state state"]
) -> Float64[np.ndarray, "*axes state"]:
    """Beliefs carried through one transition."""
    return np.einsum("...i,...ij->...j", belief, transition)


def filtered(
    start: Float64[np.ndarray, "batch state"],
    transition: Float64[np.ndarray, "batch state state"],
    likelihood: Float64[np.ndarray, "batch step state"],
) -> Float64[np.ndarray, "batch step state"]:
    """p(s_t | o_1 .. o_t) by the normalised forward recursion, ``start`` being p(s_1)."""
    belief = np.empty_like(likelihood)
    expected = start
    for t in range(likelihood.shape[1]):
        belief[:, t] = normalised(expected * likelihood[:, t])
        expected = transported(belief[:, t], transition)
    return belief


def windowed(
    restart: Float64[np.ndarray, "batch step state"],
    transition: Float64[np.ndarray, "batch state state"],
    likelihood: Float64[np.ndarray, "batch step state"],
    window: int,
) -> Float64[np.ndarray, "batch step state"]:
    """p(s_t | the last ``window`` observations), all t at once, ``restart[t]`` being believed of s_t before o_t."""
    steps = likelihood.shape[1]
    window = min(window, steps)
    belief = restart[:, np.maximum(np.arange(steps) - max(window - 1, 0), 0)]
    for age in reversed(range(window)):
        if age < window - 1:
            belief[:, age + 1 :] = belief[:, age + 1 :] @ transition
        belief[:, age:] = normalised(belief[:, age:] * likelihood[:, : steps - age])
    return belief
