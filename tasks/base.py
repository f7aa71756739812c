"""The contract that every wind tunnel keeps: parameters in, sequences with exact posteriors out."""

from __future__ import annotations

import difflib
import importlib
from abc import ABC, abstractmethod
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

REGISTRY = {
    "bijection": "bijection.Bijection",
    "hmm": "hmm.HMM",
    "markov": "markov.Markov",
    "mess3": "process.Mess3",
    "recall": "recall.Recall",
    "recurrence": "recurrence.Recurrence",
    "regression": "regression.Regression",
    "rrxor": "process.RRXOR",
}
"""Task name -> module and class, under ``tasks``."""


class TaskError(ValueError):
    """A task was asked for that can't exist; the message says what to change."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences, what must be answered where, and the exact answer.

    The axis ``query`` runs over the supervised positions of a sequence, in order. Entropies are in bits.
    """

    tokens: Int64[Tensor, "batch pos"] | Float32[Tensor, "batch pos d_in"]
    """What the model reads: token ids, or real vectors."""
    position: Int64[Tensor, "batch query"]
    """Index into ``pos`` of the token at which each answer is due (the supervised positions)."""
    targets: Int64[Tensor, "batch query"] | Float64[Tensor, "batch query"]
    """The sampled label, distributed as ``posterior`` given the tokens up to ``position``."""
    posterior: Float64[Tensor, "batch query d_out"]
    """Exact posterior predictive: class probabilities, or (mean, variance) of a Gaussian."""
    entropy: Float64[Tensor, "batch query"]
    """Entropy of ``posterior`` in bits (differential entropy for a Gaussian)."""
    belief: Float64[Tensor, "batch query state"]
    """Exact posterior over the latent that the answer is computed from (often ``posterior`` itself)."""
    hypothesis: Int64[Tensor, "batch pos"]
    """Which hypothesis the token at each position names, -1 where it names none."""
    evidence: Bool[Tensor, "batch query pos"]
    """Positions whose tokens determine the posterior at each query: the rest could be anything."""

    @property
    def supervised(self) -> Bool[Tensor, "batch pos"]:
        """Mask of the supervised positions."""
        mask = torch.zeros(self.tokens.shape[:2], dtype=torch.bool)
        return mask.scatter(1, self.position, True)

    def __len__(self) -> int:
        return self.tokens.shape[0]


def uniforms(seed: int, start: int, batch: int, width: int) -> Float64[np.ndarray, "batch draw"]:
    """Uniforms in [0, 1), row ``i`` a function of ``(seed, start + i)`` alone.

    Philox is counter-based and yields four draws a counter value, so each sequence owns a block of counters.
    """
    counters = -(-width // 4)
    generator = np.random.Philox(np.random.SeedSequence(seed))
    generator.advance(start * counters)
    return np.random.Generator(generator).random((batch, 4 * counters))[:, :width]


def entropy_bits(probabilities: Float64[np.ndarray, "*axes d_out"]) -> Float64[np.ndarray, "*axes"]:
    """Shannon entropy in bits over the last axis, with 0 log 0 = 0."""
    from scipy.special import entr

    return np.maximum(np.einsum("...i->...", entr(probabilities)) / np.log(2), 0.0)


def gaussian_entropy_bits(variance: Float64[np.ndarray, "*axes"]) -> Float64[np.ndarray, "*axes"]:
    """Differential entropy in bits of Gaussians, log2(2 pi e variance) / 2: negative where they are narrow."""
    return np.log2(2 * np.pi * np.e * variance) / 2


def categorical(
    u: Float64[np.ndarray, "*axes"], cumulative: Float64[np.ndarray, "*axes state"]
) -> Int64[np.ndarray, "*axes"]:
    """One draw from each distribution, given by its cumulative sums over the last axis (inverse CDF)."""
    return (u[..., None] >= cumulative[..., :-1]).sum(-1)


def gaussians(u: Float64[np.ndarray, "*axes"]) -> Float64[np.ndarray, "*axes"]:
    """Standard normals by inverse CDF; a uniform of exactly 0 counts as 2^-53."""
    from scipy.special import ndtri

    return ndtri(np.maximum(u, 2.0**-53))


def dirichlet(u: Float64[np.ndarray, "*axes state"]) -> Float64[np.ndarray, "*axes state"]:
    """Uniform draws from the simplex (Dirichlet(1)): exponentials over their sum."""
    exponentials = -np.log1p(-u)
    return exponentials / exponentials.sum(-1, keepdims=True)


@dataclass(frozen=True)
class Task(ABC):
    """A family of sequences with a known posterior. The fields of a subclass are its parameters."""

    name: ClassVar[str]
    primitive: ClassVar[Literal["accumulation", "transport", "binding"]]
    """The inference primitive that the task needs (paper I)."""
    readin: ClassVar[Literal["tokens", "vectors"]] = "tokens"
    readout: ClassVar[Literal["categorical", "gaussian"]] = "categorical"
    metric: ClassVar[Literal["mae_bits", "kl_bits", "accuracy"]] = "mae_bits"
    """The natural figure of merit, beside the ones that all tasks share."""
    variants: ClassVar[dict[str, dict[str, Any]]] = {}
    """Named parameter changes under which a trained model is also evaluated."""

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check_type(field.name, getattr(self, field.name), field.default)
        self.validate()

    @abstractmethod
    def validate(self) -> None:
        """Raise :class:`TaskError` for parameters under which the task does not exist."""

    @property
    @abstractmethod
    def d_vocab(self) -> int:
        """Number of token ids (or the width of the real vectors read)."""

    @property
    @abstractmethod
    def d_out(self) -> int:
        """Number of classes in the answer (2 for a Gaussian: mean and log-variance)."""

    @property
    @abstractmethod
    def n_ctx(self) -> int:
        """Length of a sequence."""

    @property
    @abstractmethod
    def n_uniforms(self) -> int:
        """Uniforms that one sequence consumes."""

    @abstractmethod
    def draw(self, u: Float64[np.ndarray, "batch draw"]) -> Batch:
        """Turn uniforms, one row a sequence, into sequences with posteriors."""

    def sample(self, batch: int, seed: int = 0, start: int = 0) -> Batch:
        """Draw sequences ``start .. start + batch - 1`` of the stream ``seed``.

        The same ``(seed, index)`` gives the same sequence whatever the batch size or the process.

        Raises:
            TaskError: if ``batch`` is below 1, or ``seed`` or ``start`` negative.
        """
        for what, value, least in (("batch", batch, 1), ("seed", seed, 0), ("start", start, 0)):
            if value < least:
                raise TaskError(f"{what} must be at least {least}, got {value}")
        return self.draw(uniforms(seed, start, batch, self.n_uniforms))

    def for_training(self) -> Task:
        """The distribution to train on, where one wider than the task serves its variants too."""
        return self

    @abstractmethod
    def infer(
        self, tokens: Int64[np.ndarray, "batch pos"] | Float32[np.ndarray, "batch pos d_in"]
    ) -> tuple[Float64[np.ndarray, "batch query state"], Float64[np.ndarray, "batch query d_out"]]:
        """Exact belief and posterior at the supervised positions, from the tokens alone."""

    def posterior(
        self, tokens: Int64[Tensor, "batch pos"] | Float32[Tensor, "batch pos d_in"]
    ) -> Float64[Tensor, "batch query d_out"]:
        """Exact posterior of given sequences in this task's layout: edited ones give counterfactual posteriors.

        Raises:
            TaskError: if the task can't produce the sequences.
        """
        if tokens.shape[1] != self.n_ctx:
            raise TaskError(f"{self.name}: a sequence has {self.n_ctx} positions, got {tokens.shape[1]}")
        if self.readin == "tokens" and not 0 <= tokens.min() <= tokens.max() < self.d_vocab:
            raise TaskError(
                f"{self.name}: token ids run from 0 to {self.d_vocab - 1}, got {tokens.min()} to {tokens.max()}"
            )
        return torch.from_numpy(self.infer(tokens.numpy())[1])

    def baselines(self, batch: Batch) -> dict[str, Float64[Tensor, "batch query d_out"]]:
        """Trivial predictors by name, in the form of ``batch.posterior``: what no understanding would score."""
        if self.readout == "gaussian":
            return {}
        return {"uniform": torch.full_like(batch.posterior, 1 / self.d_out)}

    @property
    def vocabulary(self) -> list[str]:
        """What each token id (or each coordinate of the vectors read) stands for, for figures."""
        return [str(i) for i in range(self.d_vocab)]

    def _batch(
        self,
        tokens: Int64[np.ndarray, "batch pos"] | Float32[np.ndarray, "batch pos d_in"],
        position: Int64[np.ndarray, " query"],
        targets: Int64[np.ndarray, "batch query"] | Float64[np.ndarray, "batch query"],
        evidence: Bool[np.ndarray, "*batch query pos"],
        named: Int64[np.ndarray, "batch pos"] | None = None,
        solution: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    ) -> Batch:
        """A batch whose ``position`` is the same in all sequences; ``named`` are the hypotheses, if any.

        ``solution`` is (belief, posterior, entropy) where drawing gives them at less cost than :meth:`infer`.
        """
        if solution is None:
            belief, posterior = self.infer(tokens)
            gaussian = self.readout == "gaussian"
            entropy = gaussian_entropy_bits(posterior[..., 1]) if gaussian else entropy_bits(posterior)
        else:
            belief, posterior, entropy = solution
        return Batch(
            tokens=torch.from_numpy(tokens),
            position=torch.from_numpy(position).expand(len(tokens), -1),
            targets=torch.from_numpy(targets),
            posterior=torch.from_numpy(posterior),
            entropy=torch.from_numpy(entropy),
            belief=torch.from_numpy(belief),
            hypothesis=torch.tensor(-1).expand(tokens.shape[:2]) if named is None else torch.from_numpy(named),
            evidence=torch.from_numpy(evidence).expand(len(tokens), -1, -1),
        )

    def replace(self, **changes: Any) -> Task:
        """The same task with some parameters changed; unknown names raise :class:`TaskError`."""
        known = [field.name for field in fields(self)]
        for key in changes:
            if key not in known:
                raise TaskError(unknown(f"parameter of {self.name}", key, known))
        return replace(self, **changes)

    def parameters(self) -> dict[str, Any]:
        """The parameters as plain values, for a config file."""
        return asdict(self)

    def _check_type(self, key: str, value: Any, default: Any) -> None:
        if default is MISSING:
            return
        kind = type(default)
        accepted = (int, float) if kind is float else kind
        wrong_bool = isinstance(value, bool) and kind is not bool
        if not isinstance(value, accepted) or wrong_bool:
            raise TaskError(f"{self.name}: {key} must be {_KIND[kind]}, got {value!r}")


_KIND = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def task_names() -> list[str]:
    """Names under which :func:`get_task` finds tasks."""
    return list(REGISTRY)


def get_task(name: str, **parameters: Any) -> Task:
    """The task called ``name``, with its defaults or the given parameters.

    Raises:
        TaskError: for an unknown name (with the closest match), an unknown or an impossible parameter.
    """
    if name not in REGISTRY:
        raise TaskError(unknown("task", name, task_names()))
    module, task_class = REGISTRY[name].split(".")
    return getattr(importlib.import_module(f"tasks.{module}"), task_class)().replace(**parameters)


def unknown(what: str, name: str, known: list[str]) -> str:
    """The one line that answers an unknown name: the closest match, then all that is known."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"unknown {what} '{name}': {hint}known: {', '.join(known)}"
