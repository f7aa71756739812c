"""Where a training run stands: weights, optimiser state and step, in one atomic file without pickle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from interp.checkpoint import load_tensors, save_tensors


def save_state(path: Path, module: nn.Module, optimizers: Sequence[Optimizer], step: int, seconds: float) -> None:
    """Write the state of a run."""
    tensors = {f"model.{name}": t for name, t in module.state_dict().items()}
    for i, optimizer in enumerate(optimizers):
        for index, entries in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{index}.{key}": torch.as_tensor(t) for key, t in entries.items()}
    save_tensors(path, tensors | {"step": torch.tensor(step), "seconds": torch.tensor(seconds, dtype=torch.float64)})


def load_state(path: Path, module: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[int, float]:
    """Put the state of a run back into its parts.

    Returns:
        Step and seconds at which it was saved.
    """
    tensors = load_tensors(path)
    step, seconds = int(tensors.pop("step")), float(tensors.pop("seconds"))
    module.load_state_dict({k.removeprefix("model."): t for k, t in tensors.items() if k.startswith("model.")})
    for i, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, *place = name.split(".", 3)
            if kind == "optimizer" and place[0] == str(i):
                state.setdefault(int(place[1]), {})[place[2]] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return step, seconds
