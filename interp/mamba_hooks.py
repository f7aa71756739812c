"""Our hook points inside transformers' Mamba: its mixers' forward pass is that of ours, on its own parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformers import MambaForCausalLM

from interp.attention_hooks import decoder_blocks, hook_boundaries
from interp.errors import ModelError
from interp.models.base import ModelConfig
from interp.models.mamba import Mixer

SHARED = ("in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "D", "out_proj")
"""Submodules and parameters that both mixers call by the same name."""


class PaddedMixer(Mixer):
    """Our mixer, which padding enters and leaves as zero: it writes nothing into the state."""

    mask: Int64[Tensor, "batch pos"] | None = None

    def forward(
        self, residual: Float[Tensor, "batch pos d_model"], mask: Int64[Tensor, "batch pos"] | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Pass on what is not padding."""
        self.mask = mask
        return super().forward(residual)

    def convolve(self, x: Float[Tensor, "batch pos d_inner"]) -> Float[Tensor, "batch pos d_inner"]:
        """The causal convolution, of zeros and to zeros where there is padding."""
        if self.mask is None:
            return super().convolve(x)
        real = self.mask[..., None].to(x.dtype)
        return super().convolve(x * real) * real


class MambaBlockHooks(nn.Module):
    """A mixer with our hooks, and the hook points around it."""

    def __init__(self, mixer: PaddedMixer) -> None:
        super().__init__()
        self.mixer = mixer
        self.hook_resid_pre, self.hook_mixer_out, self.hook_resid_post = (HookPoint() for _ in range(3))


def hook_mamba(lm: MambaForCausalLM) -> nn.ModuleList:
    """Route the mixers of a transformers model through ours, in place; returns one :class:`MambaBlockHooks` a layer.

    Raises:
        ModelError: for biases or an activation that our mixer lacks.
    """
    config = lm.config
    if config.use_bias or config.hidden_act != "silu":
        raise ModelError(
            f"this Mamba has use_bias={config.use_bias} and hidden_act='{config.hidden_act}'; expected False and 'silu'"
        )
    ours = ModelConfig(
        d_vocab=config.vocab_size,
        d_out=config.vocab_size,
        n_ctx=1,
        architecture="mamba",
        positions="none",
        n_layers=config.num_hidden_layers,
        d_model=config.hidden_size,
        d_state=config.state_size,
        d_conv=config.conv_kernel,
        expand=config.expand,
    )
    hooks = nn.ModuleList()
    for block in decoder_blocks(lm):
        with torch.device("meta"):
            mixer = PaddedMixer(ours)
        for name in SHARED:
            setattr(mixer, name, getattr(block.mixer, name))
        mixer.dt_rank = block.mixer.time_step_rank
        points = MambaBlockHooks(mixer)
        block.mixer.forward = partial(_mix, points)
        hook_boundaries(block, points.hook_resid_pre, points.hook_resid_post)
        hooks.append(points)
    return hooks


def _mix(points: MambaBlockHooks, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
    return points.hook_mixer_out(points.mixer(hidden_states, attention_mask))
