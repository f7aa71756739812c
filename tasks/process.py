"""Fixed hidden processes that nothing states: Mess3 and RRXOR, with beliefs over their minimal machines."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from .base import Batch, Task, TaskError, categorical
from .filtering import normalised, transported


@dataclass(frozen=True)
class Process(Task):
    r"""A stationary process given by ``kernels[x, i, j]``, the probability of emitting x and going from i to j.

    A sequence is x_1 .. x_K, the answer at every x_t is the predictive of x_{t+1}, and ``batch.belief`` is the
    posterior over the state of the minimal machine (Shai et al. 2024, section 2)

    .. math:: b_t \propto b_{t-1} \, T^{(x_t)}, \qquad b_0 = \text{the stationary distribution}.
    """

    steps: int = 12
    """K, tokens in a sequence."""

    primitive: ClassVar[Literal["accumulation", "transport", "binding"]] = "transport"
    metric: ClassVar[Literal["mae_bits", "kl_bits", "accuracy"]] = "kl_bits"

    @property
    @abstractmethod
    def kernels(self) -> Float64[np.ndarray, "symbol state state"]:
        """Labelled transition matrices; their sum over symbols is stochastic."""

    @cached_property
    def stationary(self) -> Float64[np.ndarray, " state"]:
        """The distribution over states that a step leaves alone."""
        step = self.kernels.sum(0)
        equations = np.vstack([step.T - np.eye(len(step)), np.ones(len(step))])
        return np.linalg.lstsq(equations, np.eye(len(step) + 1)[-1])[0]

    @property
    def entropy_floor(self) -> float:
        """H(x_{t+1} | s_t) in bits: no answer is better on average."""
        emission = self.kernels.sum(2).T
        return float(-(self.stationary[:, None] * emission * np.log2(np.where(emission, emission, 1))).sum())

    def validate(self) -> None:
        """Raise :class:`TaskError` unless such sequences exist."""
        if self.steps < 1:
            raise TaskError(f"{self.name}: steps must be at least 1, got {self.steps}")

    @property
    def d_vocab(self) -> int:
        """The symbols."""
        return len(self.kernels)

    @property
    def d_out(self) -> int:
        """The next symbol."""
        return len(self.kernels)

    @property
    def n_ctx(self) -> int:
        """One token a step."""
        return self.steps

    @property
    def n_uniforms(self) -> int:
        """The first state, then symbol and state together at every step and the one after."""
        return self.steps + 2

    def draw(self, u: Float64[np.ndarray, "batch draw"]) -> Batch:
        """Turn uniforms into sequences; see :class:`Process` for the posterior."""
        n_symbols, n_states, _ = self.kernels.shape
        edges = self.kernels.transpose(1, 0, 2).reshape(n_states, n_symbols * n_states).cumsum(1)
        state = categorical(u[:, 0], np.broadcast_to(self.stationary.cumsum(), (len(u), n_states)))
        symbols = np.empty((len(u), self.steps + 1), dtype=np.int64)
        for t in range(self.steps + 1):
            symbols[:, t], state = np.divmod(categorical(u[:, t + 1], edges[state]), n_states)
        evidence = np.tri(self.steps, dtype=bool)
        return self._batch(symbols[:, :-1].copy(), np.arange(self.steps), symbols[:, 1:].copy(), evidence)

    def infer(
        self, tokens: Int64[np.ndarray, "batch pos"]
    ) -> tuple[Float64[np.ndarray, "batch query state"], Float64[np.ndarray, "batch query d_out"]]:
        """The belief over states after each token, and the predictive of the next."""
        belief = self._belief(tokens, self.steps)
        return belief, belief @ self.kernels.sum(2).T

    def windowed_posterior(
        self, tokens: Int64[Tensor, "batch pos"], window: int
    ) -> Float64[Tensor, "batch query d_out"]:
        """The exact predictive of the next token given only the last ``window`` tokens: the best n-gram.

        Raises:
            TaskError: if ``window`` is negative.
        """
        if window < 0:
            raise TaskError(f"{self.name}: window must not be negative, got {window}")
        return torch.from_numpy(self._belief(tokens.numpy(), window) @ self.kernels.sum(2).T)

    def baselines(self, batch: Batch) -> dict[str, Float64[Tensor, "batch query d_out"]]:
        """Uniform, and the exact predictives given the last 1, 2 or 3 tokens."""
        windows = {f"window {w}": self.windowed_posterior(batch.tokens, w) for w in (1, 2, 3)}
        return {**super().baselines(batch), **windows}

    def _belief(self, tokens: Int64[np.ndarray, "batch pos"], window: int) -> Float64[np.ndarray, "batch pos state"]:
        """Beliefs after the last ``window`` tokens, all positions at once, from the stationary distribution."""
        belief = np.broadcast_to(self.stationary, (*tokens.shape, len(self.stationary))).copy()
        if window >= self.steps:
            for t in range(self.steps):
                before = belief[:, t - 1 if t else 0]
                belief[:, t] = normalised(transported(before, self.kernels[tokens[:, t]]))
            return belief
        for age in reversed(range(window)):
            seen = tokens[:, : self.steps - age]
            belief[:, age:] = normalised(transported(belief[:, age:], self.kernels[seen]))
        return belief


@dataclass(frozen=True)
class Mess3(Process):
    """Three states, three symbols, and beliefs that fill a fractal in the triangle (Marzen and Crutchfield 2017).

    The next state is the present one with probability 1 - 2 x and each other with x; the symbol names the next
    state with probability a and each other with (1 - a) / 2. One process: it is meant to be learnt from sequences,
    of which there are 3^12 = 531,441 at the default length, so that a long run can see them all. Lengthen it with
    ``steps`` where look-up must be ruled out.
    """

    x: int | float = 0.15
    """Probability of going to each other state."""
    a: int | float = 0.6
    """Probability that the symbol names the state gone to."""

    name: ClassVar[str] = "mess3"

    def validate(self) -> None:
        """Raise :class:`TaskError` unless the process exists and has one stationary distribution."""
        super().validate()
        if not 0 < self.x <= 0.5:
            raise TaskError(f"mess3: x must lie above 0 and not above 0.5, got {self.x}")
        if not 0 <= self.a <= 1:
            raise TaskError(f"mess3: a is a probability, 0 to 1, got {self.a}")

    @cached_property
    def kernels(self) -> Float64[np.ndarray, "symbol state state"]:
        """T^(x)_ij = P(j | i) P(x | j)."""
        same = np.eye(3)
        move = np.where(same, 1 - 2 * self.x, self.x)
        name = np.where(same, self.a, (1 - self.a) / 2)
        return move[None] * name[:, None, :]


@dataclass(frozen=True)
class RRXOR(Process):
    """Two random bits, then their exclusive or, over and over; the reader does not know where in the triple it is.

    The minimal machine has five states: S (next: the first bit), 0 and 1 (the first bit was so), T and F (the
    exclusive or will be 1 or 0). One process: it is meant to be learnt from sequences; fewer than 2^12 = 4,096 have
    positive probability at the default length, so look-up is possible. Lengthen it with ``steps`` where it must be
    ruled out.
    """

    name: ClassVar[str] = "rrxor"

    @cached_property
    def kernels(self) -> Float64[np.ndarray, "symbol state state"]:
        """Edges of the machine, states in the order S, 0, 1, T, F."""
        start, zero, one, true, false = range(5)
        kernels = np.zeros((2, 5, 5))
        for bit, i, j, p in (
            (0, start, zero, 0.5),
            (1, start, one, 0.5),
            (0, zero, false, 0.5),
            (1, zero, true, 0.5),
            (0, one, true, 0.5),
            (1, one, false, 0.5),
            (1, true, start, 1.0),
            (0, false, start, 1.0),
        ):
            kernels[bit, i, j] = p
        return kernels
