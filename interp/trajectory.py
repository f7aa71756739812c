"""A model in time: at the snapshots of its training, and one optimiser step further."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.optim import Optimizer
from transformer_lens.tools.analysis import reinitialized

from interp.checkpoint import find_checkpoint, load_tensors, read_checkpoint, snapshot_paths
from interp.errors import CheckpointError
from interp.models.base import SequenceModel, build_model
from probes.advantage import extract_gradients
from probes.calibration import Readout, kl_bits
from probes.extract import Activations, extract
from probes.first_order import first_order
from probes.result import Result
from tasks.base import Batch

Optimizers = Callable[[nn.Module], Sequence[Optimizer]]
"""Makes the optimisers of a model, e.g. ``lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)]``."""


def snapshot_models(source: str | Path) -> dict[int, SequenceModel]:
    """Training step -> the model at that step, for a checkpoint by name, folder or hub id; earliest first.

    Raises:
        CheckpointError: when the checkpoint has no snapshots, or they don't fit its model.
    """
    folder, config = find_checkpoint(source), read_checkpoint(source).model
    paths = snapshot_paths(folder)
    if not paths:
        raise CheckpointError(f"{folder} holds no snapshots; train with --config snapshots=12")
    models = {}
    for step, path in paths.items():
        model = build_model(config)
        try:
            model.load_state_dict({name: tensor.float() for name, tensor in load_tensors(path).items()})
        except RuntimeError as error:
            raise CheckpointError(f"{path} does not fit the model in its folder; copy or train it again") from error
        models[step] = model.eval()
    return models


def stepped(
    model: nn.Module, batch: Batch, optimizers: Optimizers, readout: Readout = "categorical"
) -> tuple[nn.Module, Float[Tensor, " batch"]]:
    """A copy of the model after one step on the batch, by optimisers that start fresh.

    Returns:
        The copy, and the change of each sequence's loss, in bits, that the step has to first order in the weights.
    """

    def losses(output: Float[Tensor, "batch query d_out"]) -> Float[Tensor, " batch"]:
        return kl_bits(batch.posterior.to(output), output, readout).mean(1)

    after = copy.deepcopy(model)
    losses(after(batch.tokens, batch.position)).mean().backward()
    for optimizer in optimizers(after):
        optimizer.step()
    after.zero_grad()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    change = {name: parameter.detach() - weights[name] for name, parameter in after.named_parameters()}

    def loss_of(weights: dict[str, Tensor]) -> Float[Tensor, " batch"]:
        return losses(functional_call(model, weights, (batch.tokens, batch.position)))

    return after, jvp(loss_of, (weights,), (change,))[1].detach()


def step_response(
    model: SequenceModel,
    batch: Batch,
    optimizers: Optimizers,
    lr: float,
    *,
    readout: Readout = "categorical",
    twin_seed: int = 0,
    resamples: int = 1000,
) -> Result:
    """:func:`probes.first_order` of one step on the batch, beside the same step of the untrained twin.

    Args:
        model: a model with attention.
        batch: what it steps on and is measured on.
        optimizers: makes the optimisers.
        lr: learning rate in the space of scores; it scales slopes only.
        readout: form of the model's output.
        twin_seed: seed of the twin.
        resamples: bootstrap resamples over sequences.
    """
    loss = partial(kl_bits, readout=readout)
    before: list[Activations] = []
    after: list[Activations] = []
    linear: list[Tensor] = []
    for subject in (model, reinitialized(model, twin_seed)):
        later, change = stepped(subject, batch, optimizers, readout)
        before.append(extract_gradients(subject, batch, loss=loss, twin_seed=None))
        after.append(extract(later, batch, ["pattern", "v"], twin_seed=None))
        linear.append(change)
    return first_order(
        replace(before[0], twin=before[1]),
        replace(after[0], twin=after[1]),
        batch.posterior,
        lr,
        linear=linear[0],
        loss=loss,
        resamples=resamples,
    )
