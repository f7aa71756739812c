"""HMM filtering: which hidden state is the chain in, given the observations so far? (paper I, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from einops import rearrange, repeat
from jaxtyping import Float64, Int64
from torch import Tensor

from .base import Batch, Task, TaskError, categorical, dirichlet
from .filtering import filtered, transported, windowed

Parameters = tuple[Float64[np.ndarray, "batch state state"], Float64[np.ndarray, "batch state symbol"]]


@dataclass(frozen=True)
class HMM(Task):
    r"""A chain of hidden ``states`` seen through ``symbols``; its parameters are stated in a header, or fixed.

    With the header, each sequence draws its own transition T and emission E (Dirichlet(1) rows above a floor, on
    the grid of hundredths, rows exactly 1) and reads ``[T] S*S probabilities [E] S*O probabilities [SEP]``, then
    ``[OBS] o_t`` K times. Without it, T and E are those of ``parameters_seed`` for all sequences, nothing states
    them, and a sequence is ``o_1 .. o_K`` alone. The answer is due at every o_t. The start is uniform, and the
    posterior over states is the normalised forward recursion

    .. math:: p(s_t | o_{\le t}) \propto E[s_t, o_t] \sum_{s} T[s, s_t] \, p(s | o_{<t}).

    A row of five hundredths above 0.05 that sum to 1 is one of C(79, 4) = 1.5e6, so there are 5.9e61 default headers:
    they can't be memorised. Without a header T and E are meant to be learnt, and only the 5^20 = 9.5e13 observation
    sequences can't be memorised.

    The default barely needs memory: the filter that sees two observations is within 0.012 bits. Transport is
    needed with ``stickiness``, or without a header. See :meth:`windowed_posterior`.

    Token ids: probabilities from the floor to 1.00 in hundredths (from 0.00 if ``stickiness`` is not 0, since
    sticky rows go below the floor), then [T], [E], [SEP], [OBS], then symbols; without a header symbols alone.
    """

    states: int = 5
    """S, hidden states."""
    symbols: int = 5
    """O, different observations."""
    steps: int = 20
    """K, observations in a sequence."""
    stickiness: int | float = 0.0
    """e in T = e I + (1 - e) T', T' with Dirichlet rows above the floor, T on the grid; 0 is the authors' task."""
    floor: int | float = 0.05
    """Smallest probability in T' and E, a whole number of hundredths."""
    header: bool = True
    """Whether each sequence has its own T and E and states them."""
    target: str = "state"
    """``state``: the filtering posterior of s_t; ``next``: the predictive of o_{t+1}."""
    parameters_seed: int = 0
    """Which T and E, without a header."""

    name: ClassVar[str] = "hmm"
    primitive: ClassVar[Literal["accumulation", "transport", "binding"]] = "transport"
    metric: ClassVar[Literal["mae_bits", "kl_bits", "accuracy"]] = "kl_bits"
    variants: ClassVar[dict[str, dict[str, Any]]] = {"K=30": {"steps": 30}, "K=50": {"steps": 50}}

    def validate(self) -> None:
        """Raise :class:`TaskError` unless such chains exist."""
        for key, least in (("states", 2), ("symbols", 2), ("steps", 1), ("parameters_seed", 0)):
            if getattr(self, key) < least:
                raise TaskError(f"hmm: {key} must be at least {least}, got {getattr(self, key)}")
        if not 0 <= self.stickiness <= 1:
            raise TaskError(f"hmm: stickiness is a probability, 0 to 1, got {self.stickiness}")
        if not self.floor >= 0 or abs(100 * self.floor - round(100 * self.floor)) > 1e-9:
            raise TaskError(f"hmm: floor must be a whole number of hundredths such as 0.05, got {self.floor}")
        for key in ("states", "symbols"):
            if getattr(self, key) * round(100 * self.floor) > 100:
                raise TaskError(
                    f"hmm: {getattr(self, key)} {key} at probability {self.floor} or more sum to over 1; "
                    f"lower floor to {100 // getattr(self, key) / 100} or less"
                )
        if self.target not in ("state", "next"):
            raise TaskError(f"hmm: target is 'state' or 'next', got '{self.target}'")

    @property
    def d_vocab(self) -> int:
        """Probability tokens, four markers and symbols; without a header symbols alone."""
        return 101 - self._lowest + 4 + self.symbols if self.header else self.symbols

    @property
    def d_out(self) -> int:
        """One class a state, or a symbol."""
        return self.states if self.target == "state" else self.symbols

    @property
    def n_ctx(self) -> int:
        """Header and two tokens a step; without a header one token a step."""
        return self._header_length + 2 * self.steps if self.header else self.steps

    @property
    def n_uniforms(self) -> int:
        """T and E where they are drawn afresh, then the state and the symbol of each step."""
        return self.header * self.states * (self.states + self.symbols) + 2 * self._drawn

    @property
    def vocabulary(self) -> list[str]:
        """Probabilities, markers, and symbols as o0, o1, ..."""
        probabilities = [f"{hundredths / 100:.2f}" for hundredths in range(self._lowest, 101)]
        symbols = [f"o{symbol}" for symbol in range(self.symbols)]
        return [*probabilities, "[T]", "[E]", "[SEP]", "[OBS]", *symbols] if self.header else symbols

    @property
    def _lowest(self) -> int:
        return 0 if self.stickiness else round(100 * self.floor)

    @property
    def _header_length(self) -> int:
        return self.states * (self.states + self.symbols) + 3

    @property
    def _drawn(self) -> int:
        return self.steps + (self.target == "next")

    @property
    def _places(self) -> tuple[slice, slice, slice]:
        """Positions of T, of E and of the observations."""
        if not self.header:
            return slice(0), slice(0), slice(None)
        square, length = self.states**2, self._header_length
        return slice(1, square + 1), slice(square + 2, length - 1), slice(length + 1, None, 2)

    def draw(self, u: Float64[np.ndarray, "batch draw"]) -> Batch:
        """Turn uniforms into sequences; see :class:`HMM` for the posterior."""
        n = len(u)
        walk, emit = u[:, -2 * self._drawn : -self._drawn], u[:, -self._drawn :]
        if self.header:
            transition, emission = self._from_uniforms(u[:, : -2 * self._drawn])
        else:
            transition, emission = self._repeated(n)
        sequence, leave, show = np.arange(n), transition.cumsum(-1), emission.cumsum(-1)
        states = np.empty((n, self._drawn), dtype=np.int64)
        states[:, 0] = walk[:, 0] * self.states
        for t in range(1, self._drawn):
            states[:, t] = categorical(walk[:, t], leave[sequence, states[:, t - 1]])
        symbols = categorical(emit, show[sequence[:, None], states])

        for_t, for_e, observed = self._places
        tokens = symbols[:, : self.steps]
        if self.header:
            markers = 101 - self._lowest
            tokens = np.full((n, self.n_ctx), markers + 3)
            tokens[:, 0], tokens[:, for_t.stop], tokens[:, for_e.stop] = markers + np.arange(3)
            for place, matrix in ((for_t, transition), (for_e, emission)):
                tokens[:, place] = np.rint(100 * matrix).reshape(n, -1) - self._lowest
            tokens[:, observed] = markers + 4 + symbols[:, : self.steps]
        evidence = np.zeros((self.steps, self.n_ctx), dtype=bool)
        evidence[:, for_t] = evidence[:, for_e] = True
        evidence[:, observed] = np.tri(self.steps, dtype=bool)
        targets = states if self.target == "state" else symbols[:, 1:]
        return self._batch(tokens, np.arange(self.n_ctx)[observed], targets, evidence)

    def infer(
        self, tokens: Int64[np.ndarray, "batch pos"]
    ) -> tuple[Float64[np.ndarray, "batch query state"], Float64[np.ndarray, "batch query d_out"]]:
        """The filtering posterior over states, and the answer that it implies."""
        (transition, emission), likelihood = self._read(tokens)
        start = np.full((len(tokens), self.states), 1 / self.states)
        belief = filtered(start, transition, likelihood)
        return belief, self._answer(belief, transition, emission)

    def windowed_posterior(
        self, tokens: Int64[Tensor, "batch pos"], window: int, restart: Literal["uniform", "marginal"] | None = None
    ) -> Float64[Tensor, "batch query d_out"]:
        """The answer of a filter that knows T and E but sees only the last ``window`` observations.

        Args:
            tokens: sequences in the layout of the task.
            window: observations seen; 0 gives the restart distribution, ``steps`` or more the exact posterior.
            restart: what is believed before the first observation in the window. ``marginal``: the marginal of
                the state at that step, which makes the answer exact given T, E and the window (default without a
                header). ``uniform``: the authors' rule (default with a header), which scores worse.

        Raises:
            TaskError: if ``window`` is negative.
        """
        if window < 0:
            raise TaskError(f"hmm: window must not be negative, got {window}")
        restart = restart or ("uniform" if self.header else "marginal")
        (transition, emission), likelihood = self._read(tokens.numpy())
        prior = np.full_like(likelihood, 1 / self.states)
        if restart == "marginal":
            for t in range(1, self.steps):
                prior[:, t] = transported(prior[:, t - 1], transition)
        belief = windowed(prior, transition, likelihood, window)
        return torch.from_numpy(self._answer(belief, transition, emission))

    def baselines(self, batch: Batch) -> dict[str, Float64[Tensor, "batch query d_out"]]:
        """Uniform, and filters that see the last 1 (memoryless), 2 or 3 observations."""
        windows = {f"window {w}": self.windowed_posterior(batch.tokens, w) for w in (1, 2, 3)}
        return {**super().baselines(batch), **windows}

    def parameters_of(self, tokens: Int64[np.ndarray, "batch pos"]) -> Parameters:
        """Transition and emission of each sequence, read from its header where it has one."""
        if not self.header:
            return self._repeated(len(tokens))
        transition, emission = (
            rearrange(tokens[:, place] + self._lowest, "batch (state to) -> batch state to", state=self.states) / 100
            for place in self._places[:2]
        )
        return transition, emission

    @cached_property
    def _fixed(self) -> Parameters:
        """T and E of ``parameters_seed``; another generator than that of the sequences keeps them independent."""
        u = np.random.default_rng(self.parameters_seed).random((1, self.states * (self.states + self.symbols)))
        return self._from_uniforms(u)

    def _repeated(self, batch: int) -> Parameters:
        transition, emission = (repeat(p, "1 state to -> batch state to", batch=batch) for p in self._fixed)
        return transition, emission

    def _from_uniforms(self, u: Float64[np.ndarray, "batch draw"]) -> Parameters:
        u = rearrange(u, "batch (state to) -> batch state to", state=self.states)
        transition, emission = (floored(dirichlet(part), self.floor) for part in np.split(u, [self.states], -1))
        if self.stickiness:
            transition = self.stickiness * np.eye(self.states) + (1 - self.stickiness) * transition
        return on_grid(transition), on_grid(emission)

    def _read(self, tokens: Int64[np.ndarray, "batch pos"]) -> tuple[Parameters, Float64[np.ndarray, "batch step _"]]:
        """T and E, and the likelihood of each state at each step."""
        transition, emission = self.parameters_of(tokens)
        if not all(np.allclose(np.einsum("...i->...", rows), 1) for rows in (transition, emission)):
            raise TaskError("hmm: every row of T and of E that a header states must sum to 1")
        symbols = tokens[:, self._places[2]] - (self.d_vocab - self.symbols)
        if symbols.min() < 0:
            raise TaskError("hmm: every [OBS] must be followed by a symbol, one of the last tokens of the vocabulary")
        return (transition, emission), emission[np.arange(len(tokens))[:, None], :, symbols]

    def _answer(
        self,
        belief: Float64[np.ndarray, "batch step state"],
        transition: Float64[np.ndarray, "batch state state"],
        emission: Float64[np.ndarray, "batch state symbol"],
    ) -> Float64[np.ndarray, "batch step d_out"]:
        return belief if self.target == "state" else belief @ (transition @ emission)


def floored(p: Float64[np.ndarray, "*axes state"], floor: int | float) -> Float64[np.ndarray, "*axes state"]:
    """Rows clipped to ``floor`` from below, what is above the floor scaled so that they sum to 1."""
    above = np.maximum(p - floor, 0)
    room = 1 - p.shape[-1] * floor
    return floor + max(room, 0) * above / above.sum(-1, keepdims=True)


def on_grid(p: Float64[np.ndarray, "*axes state"]) -> Float64[np.ndarray, "*axes state"]:
    """Rows in hundredths that sum to 1 exactly, by rounding their cumulative sums: no entry moves by a hundredth.

    An entry of at least n hundredths, n whole, stays so.
    """
    return np.diff(np.floor(100 * p.cumsum(-1) + 0.5), prepend=0) / 100
