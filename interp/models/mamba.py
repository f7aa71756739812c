"""Mamba (Gu and Dao 2023): blocks of selective state spaces, with the parameters of mamba-ssm's mixer."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear, silu, softplus
from transformer_lens.hook_points import HookPoint

from interp.models.base import ModelConfig, Norm, SequenceModel
from interp.models.selective_scan import scan_states, selective_scan


class StepSize(nn.Linear):
    """``dt_proj``: softplus of its output is log-uniform in [0.001, 0.1] at initialisation."""

    def reset_parameters(self) -> None:
        """Draw fresh weights as mamba-ssm does."""
        nn.init.uniform_(self.weight, -(self.in_features**-0.5), self.in_features**-0.5)
        dt = torch.exp(torch.empty_like(self.bias).uniform_(math.log(1e-3), math.log(1e-1)))
        with torch.no_grad():
            self.bias.copy_(dt + torch.log(-torch.expm1(-dt)))


class OutProjection(nn.Linear):
    """``out_proj``: torch's initialisation over sqrt(n_layers), mamba-ssm's ``rescale_prenorm_residual``."""

    def __init__(self, d_in: int, d_out: int, n_layers: int) -> None:
        self.n_layers = n_layers
        super().__init__(d_in, d_out, bias=False)

    def reset_parameters(self) -> None:
        """Draw fresh weights."""
        super().reset_parameters()
        with torch.no_grad():
            self.weight /= math.sqrt(self.n_layers)


class Mixer(nn.Module):
    """mamba-ssm's mixer: its state dict moves from and to mamba-ssm's and transformers' without renaming.

    Seen as attention (Ali et al. 2024, *The Hidden Attention of Mamba*), B are keys, C queries and x values:
    y_i = sum_j C_i . exp(A (dt_{j+1} + ... + dt_i)) B_j dt_j x_j.

    Hooks, all ``batch pos d`` unless stated: ``hook_conv`` (before SiLU), ``hook_x`` (what the scan reads, after
    it), ``hook_dt`` (after softplus), ``hook_B``, ``hook_C``, ``hook_gate`` (after SiLU), ``hook_scan_out`` (y,
    with the skip D x), and ``hook_ssm_state``, ``batch channel pos state`` as in TransformerLens. The states are
    computed only if the last has a hook; an edit there changes y at the same position, not later states.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        d_inner, self.d_state, self.dt_rank = cfg.expand * cfg.d_model, cfg.d_state, math.ceil(cfg.d_model / 16)
        self.in_proj = nn.Linear(cfg.d_model, 2 * d_inner, bias=False)
        self.conv1d = nn.Conv1d(d_inner, d_inner, cfg.d_conv, groups=d_inner, padding=cfg.d_conv - 1)
        self.x_proj = nn.Linear(d_inner, self.dt_rank + 2 * cfg.d_state, bias=False)
        self.dt_proj = StepSize(self.dt_rank, d_inner)
        self.A_log = nn.Parameter(torch.empty(d_inner, cfg.d_state))
        self.D = nn.Parameter(torch.empty(d_inner))
        self.out_proj = OutProjection(d_inner, cfg.d_model, cfg.n_layers)
        for parameter in (self.A_log, self.D):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]
        self.hook_conv, self.hook_x, self.hook_dt, self.hook_B, self.hook_C = (HookPoint() for _ in range(5))
        self.hook_ssm_state, self.hook_scan_out, self.hook_gate = (HookPoint() for _ in range(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Decay rates -1 .. -d_state in every channel, and a skip of 1."""
        with torch.no_grad():
            self.A_log.copy_(torch.arange(1.0, self.d_state + 1).log().expand_as(self.A_log))
            self.D.fill_(1.0)

    def forward(self, residual: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Convolve, scan with input-dependent dt, B and C, gate, and project back."""
        x, gate = (linear(residual, half) for half in self.in_proj.weight.chunk(2))
        x = self.hook_conv(self.convolve(x))
        x = self.hook_x(silu(x))
        low_rank, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        dt = self.hook_dt(softplus(self.dt_proj(low_rank)))
        y = self.hook_scan_out(self.scan(x, dt, self.hook_B(B), self.hook_C(C)))
        return self.out_proj(y * self.hook_gate(silu(gate)))

    def convolve(self, x: Float[Tensor, "batch pos d_inner"]) -> Float[Tensor, "batch pos d_inner"]:
        """``conv1d`` over positions, causally: as an image of height 1, channels last, it needs no transposing."""
        image, kernel = x.mT[:, :, None], self.conv1d.weight[:, :, None]
        padding = (0, kernel.shape[-1] - 1)
        y = conv2d(image, kernel, self.conv1d.bias, padding=padding, groups=self.conv1d.groups)
        return y[:, :, 0, : x.shape[1]].mT

    def scan(
        self,
        x: Float[Tensor, "batch pos d_inner"],
        dt: Float[Tensor, "batch pos d_inner"],
        B: Float[Tensor, "batch pos d_state"],
        C: Float[Tensor, "batch pos d_state"],
    ) -> Float[Tensor, "batch pos d_inner"]:
        """The scan and its skip, through the explicit states if they are hooked."""
        A = -torch.exp(self.A_log)
        if not self.hook_ssm_state.has_hooks():
            return torch.addcmul(selective_scan(x, dt, A, B, C), self.D, x)
        states = self.hook_ssm_state(scan_states(x, dt, A, B))
        y = einsum(states, C, "batch channel pos state, batch pos state -> batch pos channel")
        return torch.addcmul(y, self.D, x)


class Block(nn.Module):
    """A mixer that reads a normalised residual stream and adds to it."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.norm, self.mixer = Norm(cfg), Mixer(cfg)
        self.hook_resid_pre, self.hook_mixer_out, self.hook_resid_post = (HookPoint() for _ in range(3))

    def forward(self, residual: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Pass the residual stream through the block."""
        residual = self.hook_resid_pre(residual)
        return self.hook_resid_post(residual + self.hook_mixer_out(self.mixer(self.norm(residual))))


class Mamba(SequenceModel):
    """``n_layers`` Mamba blocks between embedding and unembedding.

    The belief site is the residual stream, as in the transformer, so that the two compare; the recurrent state is
    ``state``.
    """

    sites: ClassVar[dict[str, str]] = {
        "q": "mixer.hook_C",
        "k": "mixer.hook_B",
        "v": "mixer.hook_x",
        "dt": "mixer.hook_dt",
        "gate": "mixer.hook_gate",
        "scan_out": "mixer.hook_scan_out",
        "state": "mixer.hook_ssm_state",
        "mixer_out": "hook_mixer_out",
        "resid_pre": "hook_resid_pre",
        "resid_post": "hook_resid_post",
        "belief": "hook_resid_post",
    }

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg, [Block(cfg) for _ in range(cfg.n_layers)])
