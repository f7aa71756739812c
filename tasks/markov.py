"""Sticky Markov chain seen through Gaussian prototypes: which symbol comes next? (paper II, section 6)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float32, Float64
from scipy.linalg import circulant
from torch import Tensor

from .base import Batch, Task, TaskError, categorical, entropy_bits, gaussians
from .filtering import filtered, windowed


@dataclass(frozen=True)
class Markov(Task):
    r"""Symbols on a circle that tend to stay; the input at step t is a noisy prototype of the last symbol.

    y_t keeps the value of y_{t-1} with probability ``self_transition`` and goes to any other with a probability
    proportional to 1 / (distance on the circle). The model reads x_t = mu[y_{t-1}] + N(0, noise^2 I) and answers
    y_t. The prototypes mu ~ N(0, I) are fixed by ``parameters_seed``, so the exact answer filters y_{t-1} from all
    of x_1 .. x_t (Gaussian emissions, uniform start, which is stationary) and takes one step; the entropy of a step,
    :attr:`entropy_floor`, is what it would have if y_{t-1} itself were shown.

    The authors state a self-transition of 0.3 and renormalise twice, which makes it 0.35: 0.3 here is 0.3, and
    ``self_transition=0.35`` is theirs.

    One chain and one set of prototypes: they are meant to be learnt. The inputs are real vectors and the 8^64 =
    6e57 symbol sequences can't be memorised.
    """

    symbols: int = 8
    """Symbols on the circle."""
    steps: int = 64
    """Inputs, and answers, in a sequence."""
    self_transition: int | float = 0.3
    """Probability of staying."""
    dimensions: int = 20
    """Width of the inputs."""
    noise: int | float = 1.0
    """Standard deviation of each coordinate around its prototype."""
    parameters_seed: int = 0
    """Which prototypes."""

    name: ClassVar[str] = "markov"
    primitive: ClassVar[Literal["accumulation", "transport", "binding"]] = "transport"
    readin: ClassVar[Literal["tokens", "vectors"]] = "vectors"
    metric: ClassVar[Literal["mae_bits", "kl_bits", "accuracy"]] = "kl_bits"

    def validate(self) -> None:
        """Raise :class:`TaskError` unless such chains exist."""
        for key, least in (("symbols", 2), ("steps", 1), ("dimensions", 1), ("parameters_seed", 0)):
            if getattr(self, key) < least:
                raise TaskError(f"markov: {key} must be at least {least}, got {getattr(self, key)}")
        if not 0 <= self.self_transition <= 1:
            raise TaskError(f"markov: self_transition is a probability, 0 to 1, got {self.self_transition}")
        if not self.noise > 0:
            raise TaskError(f"markov: noise is a standard deviation and must be positive, got {self.noise}")

    @property
    def d_vocab(self) -> int:
        """Width of the vectors read."""
        return self.dimensions

    @property
    def d_out(self) -> int:
        """The next symbol."""
        return self.symbols

    @property
    def n_ctx(self) -> int:
        """One vector a step."""
        return self.steps

    @property
    def n_uniforms(self) -> int:
        """The symbols y_0 .. y_K and the noise of every coordinate."""
        return self.steps + 1 + self.steps * self.dimensions

    @cached_property
    def transition(self) -> Float64[np.ndarray, "symbol symbol"]:
        """Circulant: row i holds the probabilities of the symbol after i."""
        offset = np.arange(1, self.symbols)
        weight = 1 / np.minimum(offset, self.symbols - offset)
        return circulant([self.self_transition, *(1 - self.self_transition) * weight / weight.sum()])

    @cached_property
    def prototypes(self) -> Float64[np.ndarray, "symbol d_in"]:
        """The vectors mu; another generator than that of the sequences keeps them independent."""
        return np.random.default_rng(self.parameters_seed).standard_normal((self.symbols, self.dimensions))

    @property
    def entropy_floor(self) -> float:
        """H(y_t | y_{t-1}) in bits: no answer is better on average."""
        return float(entropy_bits(self.transition)[0])

    def draw(self, u: Float64[np.ndarray, "batch draw"]) -> Batch:
        """Turn uniforms into sequences; see :class:`Markov` for the posterior."""
        leave = self.transition.cumsum(1)
        symbols = np.empty((len(u), self.steps + 1), dtype=np.int64)
        symbols[:, 0] = u[:, 0] * self.symbols
        for t in range(1, self.steps + 1):
            symbols[:, t] = categorical(u[:, t], leave[symbols[:, t - 1]])
        noise = gaussians(u[:, self.steps + 1 :]).reshape(len(u), self.steps, self.dimensions)
        last = symbols[:, :-1].copy()
        tokens = (self.prototypes[last] + self.noise * noise).astype(np.float32)
        evidence = np.tri(self.steps, dtype=bool)
        return self._batch(tokens, np.arange(self.steps), symbols[:, 1:].copy(), evidence, last)

    def infer(
        self, tokens: Float32[np.ndarray, "batch pos d_in"]
    ) -> tuple[Float64[np.ndarray, "batch query state"], Float64[np.ndarray, "batch query d_out"]]:
        """The filtering posterior over y_{t-1}, and the predictive of y_t."""
        transition, likelihood = self._read(tokens)
        start = np.full((len(tokens), self.symbols), 1 / self.symbols)
        belief = filtered(start, transition, likelihood)
        return belief, belief @ self.transition

    def baselines(self, batch: Batch) -> dict[str, Float64[Tensor, "batch query d_out"]]:
        """Uniform, and the exact predictive given the last input alone."""
        transition, likelihood = self._read(batch.tokens.numpy())
        belief = windowed(np.full_like(likelihood, 1 / self.symbols), transition, likelihood, 1)
        return {**super().baselines(batch), "window 1": torch.from_numpy(belief @ self.transition)}

    def _read(
        self, tokens: Float32[np.ndarray, "batch pos d_in"]
    ) -> tuple[Float64[np.ndarray, "batch symbol symbol"], Float64[np.ndarray, "batch pos symbol"]]:
        """The transition once a sequence, and the likelihood of each symbol, up to a factor a step."""
        x, mu = tokens.astype(np.float64), self.prototypes
        log_likelihood = (x @ mu.T - (mu**2).sum(1) / 2) / self.noise**2
        likelihood = np.exp(log_likelihood - log_likelihood.max(-1, keepdims=True))
        return np.broadcast_to(self.transition, (len(x), *self.transition.shape)), likelihood
