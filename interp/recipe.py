"""The recipe of a training run: its settings, the loss in bits above the Bayes floor, and the optimisers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from interp.errors import TrainingError
from interp.models.base import choose
from probes.calibration import LN2, Readout, kl_bits
from tasks.base import Batch


@dataclass(frozen=True)
class TrainConfig:
    """Everything that determines a training run but task and model."""

    steps: int = 4000
    batch_size: int = 64
    """Sequences a step, over all processes."""
    objective: Literal["posterior", "labels"] = "posterior"
    """``labels``: cross-entropy on sampled labels; ``posterior``: the same with the label integrated out
    (Rao-Blackwell), which has the same expected gradient and far less noise."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """``muon``: Muon on the matrices of the blocks, AdamW on the rest; ``adamw``: AdamW on everything."""
    lr: int | float = 2e-3
    """Peak learning rate of AdamW."""
    muon_lr: int | float = 0.012
    """Peak learning rate of Muon."""
    weight_decay: int | float = 0.0
    """Decoupled weight decay of matrices."""
    warmup: int = 50
    """Steps of linear warm-up."""
    decay: int | float = 0.9
    """Fraction of the steps, at the end, over which the learning rate falls linearly to zero."""
    clip: int | float = 1.0
    """Largest gradient norm."""
    coarse: int | float = 0.6
    """Fraction of the steps, at the start, whose matrix products are computed in bfloat16 where that is faster; the
    rest, like all evaluation and probing, are in float32."""
    eval_every: int = 100
    """Steps between measurements, log lines and saved states."""
    eval_sequences: int = 256
    snapshots: int = 0
    """How many log-spaced snapshots of the weights to keep, in half precision."""
    seed: int = 0

    def __post_init__(self) -> None:
        choose("objective", self.objective, ["posterior", "labels"])
        choose("optimizer", self.optimizer, ["muon", "adamw"])
        for key in ("steps", "batch_size", "eval_every", "eval_sequences"):
            if getattr(self, key) < 1:
                raise TrainingError(f"{key} must be at least 1, got {getattr(self, key)}")
        for key in ("lr", "muon_lr", "clip"):
            if not getattr(self, key) > 0:
                raise TrainingError(f"{key} must be positive, got {getattr(self, key)}")
        for key in ("decay", "coarse"):
            if not 0 <= getattr(self, key) <= 1:
                raise TrainingError(f"{key} is a fraction of the steps, 0 to 1, got {getattr(self, key)}")
        for key in ("warmup", "snapshots", "seed", "weight_decay"):
            if getattr(self, key) < 0:
                raise TrainingError(f"{key} must not be negative, got {getattr(self, key)}")

    def schedule(self, step: int) -> float:
        """Learning rate at ``step`` as a fraction of its peak: warm-up, constant, linear decay."""
        rise = (step + 1) / (self.warmup + 1)
        fall = (self.steps - step) / max(self.decay * self.steps, 1)
        return min(1.0, rise, fall)

    def snapshot_steps(self) -> set[int]:
        """Steps after which a snapshot is kept: the initialisation, then log-spaced to the end."""
        if not self.snapshots:
            return set()
        spaced = np.geomspace(min(10, self.steps), self.steps, max(self.snapshots - 1, 1))
        return {0, *(int(step) for step in spaced.round())}


def train_config(**settings: Any) -> TrainConfig:
    """A training configuration; an unknown setting raises with the closest match."""
    known = [field.name for field in fields(TrainConfig)]
    for key in settings:
        choose("training setting", key, known)
    return TrainConfig(**settings)


def excess_bits(output: Tensor, batch: Batch, objective: str, readout: Readout) -> Tensor:
    """The loss, in bits above the Bayes floor: both objectives have KL(Bayes || model) as their expectation.

    Args:
        output: the model's output at the supervised positions, ``batch query d_out``.
        batch: what was asked.
        objective: ``posterior`` or ``labels``.
        readout: form of the output.
    """
    if objective == "posterior":
        return kl_bits(batch.posterior.to(output), output, readout).mean()
    floor = batch.entropy.mean().to(output)
    targets = batch.targets.to(output.device)
    if readout == "gaussian":
        mean, log_variance = output.unbind(-1)
        nll = nn.functional.gaussian_nll_loss(mean, targets.to(output), log_variance.exp(), full=True)
        return nll / LN2 - floor
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten()) / LN2 - floor


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """The optimisers of a run, at their peak learning rates."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [p for name, p in named if p.ndim == 2 and "blocks." in name and not hasattr(p, "_no_weight_decay")]
    rest = [p for _, p in named if not any(p is matrix for matrix in matrices)]
    if config.optimizer == "muon":
        adamw = torch.optim.AdamW(rest, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
        muon = torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay)
        optimizers: list[torch.optim.Optimizer] = [adamw, muon]
    else:
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        optimizers = [torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95))]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers
