"""Calibration: how far, in bits, is the model's predictive distribution from the exact posterior?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from .nulls import Bootstrap, Interval, require_finite
from .result import ProbeError, Result, rows, table

Readout = Literal["categorical", "gaussian"]
LN2 = float(np.log(2))

READING = (
    "Per-sequence error near zero and far below every trivial predictor means that the model computes the posterior; "
    "the averaged curve can look perfect when single sequences are wrong."
)
UNITS = {"mae_bits": "bits", "curve_mae_bits": "bits", "kl_bits": "bits", "entropy_bits": "bits"}


def entropy_bits(
    output: Float[Tensor, "batch query d_out"], readout: Readout = "categorical"
) -> Float[Tensor, "batch query"]:
    """Entropy in bits of a model's output: logits, or (mean, log-variance) of a Gaussian."""
    if readout == "gaussian":
        return (output[..., 1] + np.log(2 * np.pi * np.e)) / 2 / LN2
    log_q = output.log_softmax(-1)
    return -(log_q.exp() * log_q).sum(-1) / LN2


def kl_bits(
    posterior: Float[Tensor, "batch query d_out"],
    output: Float[Tensor, "batch query d_out"],
    readout: Readout = "categorical",
) -> Float[Tensor, "batch query"]:
    """KL(posterior || model) in bits; a Gaussian posterior is (mean, variance), the output (mean, log-variance)."""
    if readout == "gaussian":
        (mean, variance), (model_mean, log_variance) = posterior.unbind(-1), output.unbind(-1)
        scaled = (variance + (mean - model_mean) ** 2) * (-log_variance).exp()
        return (log_variance - variance.log() + scaled - 1) / 2 / LN2
    return (torch.special.xlogy(posterior, posterior) - posterior * output.log_softmax(-1)).sum(-1) / LN2


def total_variation(
    posterior: Float64[Tensor, "batch query d_out"], output: Float64[Tensor, "batch query d_out"]
) -> Float64[Tensor, "batch query"]:
    """Total variation distance between the posterior and the softmax of logits, 0 to 1."""
    return (posterior - output.softmax(-1)).abs().sum(-1) / 2


def calibration(
    output: Float[Tensor, "batch query d_out"],
    posterior: Float64[Tensor, "_ _ _"],
    targets: Tensor | None = None,
    *,
    baselines: Mapping[str, Float64[Tensor, "batch query d_out"]] | None = None,
    twin: Float[Tensor, "batch query d_out"] | None = None,
    readout: Readout = "categorical",
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    r"""Compare a model's predictive with the exact posterior, per sequence and position.

    Statistics: ``mae_bits``, the mean over sequences and positions of \|H_model - H_Bayes\| (primary);
    ``curve_mae_bits``, the same after averaging both entropies over sequences (the papers' figure, which hides
    per-sequence errors); ``kl_bits``, KL(Bayes || model); ``tv``, total variation; ``accuracy`` of the most
    likely class. Rows without a ``query`` are over all positions.

    Args:
        output: logits at the supervised positions, or (mean, log-variance) for ``readout="gaussian"``.
        posterior: exact class probabilities, or (mean, variance).
        targets: sampled labels, for the accuracy.
        baselines: named trivial predictors, in the form of ``posterior``; uniform and position-only (the mean
            answer at each position, cross-fitted over two halves of the sequences) always stand beside.
        twin: output of the model at initialisation.
        readout: which of the two forms.
        resamples: bootstrap resamples over sequences.
        level: coverage of the intervals.
        seed: seed of the resamples.

    Raises:
        ProbeError: when shapes differ, values are not finite, or fewer than two sequences are given.
    """
    if output.shape != posterior.shape:
        raise ProbeError(
            f"output has shape {tuple(output.shape)}, the posterior {tuple(posterior.shape)}; they must be equal: "
            "read the model out at the supervised positions, model(batch.tokens, batch.position)"
        )
    if len(output) < 2:
        raise ProbeError(f"calibration needs at least 2 sequences for an interval, got {len(output)}")
    require_finite("the model's output", output.detach().cpu().numpy())
    exact = as_output(posterior, readout)
    predictors = {"measured": output.detach().cpu().double()}
    for name, predictive in {**trivial_predictors(posterior, readout), **(baselines or {})}.items():
        predictors[name] = as_output(predictive, readout)
    if twin is not None:
        predictors["init"] = twin.detach().cpu().double()

    errors = {name: per_sequence(posterior, exact, q, targets, readout) for name, q in predictors.items()}
    entropies = {name: entropy_bits(q, readout).numpy() for name, q in predictors.items()}
    bayes = entropy_bits(exact, readout).numpy()
    halves = _other_half_mean(torch.from_numpy(bayes)).numpy()
    errors["position"]["mae_bits"] = np.abs(halves - bayes)
    entropies["position"] = halves

    bootstrap = Bootstrap(resamples, level, seed)
    others = [name for name in predictors if name != "measured"]
    nulls = {f"null_{name}": entropies[name].mean(0) for name in others}
    curve = bootstrap.mean(entropies["measured"])
    parts = [rows("entropy_bits", *curve, axes=("query",), exact=bayes.mean(0), **nulls)]
    for statistic, values in errors["measured"].items():
        nulls = {f"null_{name}": errors[name][statistic].mean(0) for name in others}
        parts.append(rows(statistic, *bootstrap.mean(values), axes=("query",), **nulls))
        nulls = {name: null.mean() for name, null in nulls.items()}
        parts.append(rows(statistic, *bootstrap.mean(values.mean(1)), **nulls))
    averaged = {name: _curve_mae(entropies[name] - bayes, bootstrap) for name in predictors}
    nulls = {f"null_{name}": averaged[name][0] for name in others}
    parts.append(rows("curve_mae_bits", *averaged["measured"], **nulls))
    return Result("calibration", table(*parts), READING, UNITS, level)


def per_sequence(
    posterior: Float64[Tensor, "batch query d_out"],
    exact: Float64[Tensor, "batch query d_out"],
    output: Float64[Tensor, "batch query d_out"],
    targets: Tensor | None,
    readout: Readout,
) -> dict[str, Float64[np.ndarray, "batch query"]]:
    """The errors of an output at every answer; ``exact`` is the posterior in the form of an output."""
    errors = {
        "mae_bits": (entropy_bits(output, readout) - entropy_bits(exact, readout)).abs(),
        "kl_bits": kl_bits(posterior, output, readout),
    }
    if readout == "categorical":
        errors["tv"] = total_variation(posterior, output)
        if targets is not None:
            errors["accuracy"] = (output.argmax(-1) == targets).double()
    return {name: values.numpy() for name, values in errors.items()}


def as_output(predictive: Float[Tensor, "batch query d_out"], readout: Readout) -> Float64[Tensor, "batch query d_out"]:
    """A predictive distribution in the form of a model's output."""
    predictive = predictive.double()
    if readout == "gaussian":
        return torch.stack([predictive[..., 0], predictive[..., 1].log()], -1)
    return predictive.clamp_min(torch.finfo(torch.float64).tiny).log()


def trivial_predictors(
    posterior: Float64[Tensor, "batch query d_out"], readout: Readout
) -> dict[str, Float64[Tensor, "batch query d_out"]]:
    """What can be said without the sequence: nothing (uniform), or only the position (cross-fitted)."""
    if readout == "gaussian":
        mean = _other_half_mean(posterior[..., 0])
        second = _other_half_mean(posterior[..., 0] ** 2 + posterior[..., 1])
        return {"position": torch.stack([mean, second - mean**2], -1)}
    uniform = torch.full_like(posterior, 1 / posterior.shape[-1])
    return {"uniform": uniform, "position": _other_half_mean(posterior)}


def _other_half_mean(values: Tensor) -> Tensor:
    """For each sequence, the mean over the other half of the sequences (cross-fitting)."""
    even = torch.arange(len(values)) % 2 == 0
    shape = (-1, *[1] * (values.ndim - 1))
    return torch.where(even.reshape(shape), values[~even].mean(0), values[even].mean(0))


def _curve_mae(difference: Float64[np.ndarray, "batch query"], bootstrap: Bootstrap) -> Interval:
    """Mean over positions of the absolute difference of the entropies averaged over sequences."""

    def statistic(weights: Float64[np.ndarray, "resample batch"]) -> Float64[np.ndarray, " resample"]:
        return np.abs(weights @ difference / weights.sum(1, keepdims=True)).mean(1)

    return bootstrap.interval(statistic, len(difference))
