"""A causal pre-norm transformer with explicit attention and TransformerLens's hook names."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformer_lens.hook_points import HookPoint

from interp.models.base import Linear, ModelConfig, Norm, SequenceModel


class Attention(nn.Module):
    """Causal multi-head attention; the scores hook holds the scores before softmax, -inf where masked."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.query, self.key, self.value = (Linear(cfg.d_model, cfg.d_model, cfg.init_std) for _ in range(3))
        self.output = Linear(cfg.d_model, cfg.d_model, cfg.init_std / math.sqrt(2 * cfg.n_layers))
        self.hook_q, self.hook_k, self.hook_v, self.hook_z = (HookPoint() for _ in range(4))
        if cfg.positions == "rotary":
            self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint()
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Mix positions: z = softmax(q k^T / sqrt(d_head)) v, then project back."""
        q, k, v = (
            hook(rearrange(project(x), "batch pos (head d_head) -> batch pos head d_head", head=self.cfg.n_heads))
            for hook, project in (
                (self.hook_q, self.query),
                (self.hook_k, self.key),
                (self.hook_v, self.value),
            )
        )
        if self.cfg.positions == "rotary":
            q, k = self.hook_rot_q(rotate(q)), self.hook_rot_k(rotate(k))
        q, k, v = (rearrange(t, "batch pos head d_head -> batch head pos d_head") for t in (q, k, v))
        scores = q @ k.mT / math.sqrt(self.cfg.d_head)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        scores = self.hook_attn_scores(scores.masked_fill(future, -torch.inf))
        pattern = self.hook_pattern(scores.softmax(-1))
        z = self.hook_z(rearrange(pattern @ v, "batch head pos d_head -> batch pos head d_head"))
        return self.output(rearrange(z, "batch pos head d_head -> batch pos (head d_head)"))


def rotate(x: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_head"]:
    """Rotary positions (Su et al. 2021), GPT-NeoX's pairing: dimension i turns with i + d_head / 2."""
    half = x.shape[-1] // 2
    frequency = 10_000 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None, None] * frequency
    first, second = x[..., :half], x[..., half:]
    turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
    return torch.cat(turned, -1)


class MLP(nn.Module):
    """The feed-forward layer, four times as wide as the residual stream."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.input = Linear(cfg.d_model, 4 * cfg.d_model, cfg.init_std)
        self.output = Linear(4 * cfg.d_model, cfg.d_model, cfg.init_std / math.sqrt(2 * cfg.n_layers))
        self.hook_pre, self.hook_post = HookPoint(), HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Apply the layer position by position."""
        return self.output(self.hook_post(gelu(self.hook_pre(self.input(x)))))


class Block(nn.Module):
    """Attention and feed-forward layer, each reading a normalised residual stream and adding to it."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2, self.mlp = Norm(cfg), Attention(cfg), Norm(cfg), MLP(cfg)
        self.hook_resid_pre, self.hook_resid_mid, self.hook_resid_post = (HookPoint() for _ in range(3))
        self.hook_attn_out, self.hook_mlp_out = HookPoint(), HookPoint()

    def forward(self, residual: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Pass the residual stream through the block."""
        residual = self.hook_resid_pre(residual)
        residual = self.hook_resid_mid(residual + self.hook_attn_out(self.attn(self.ln1(residual))))
        return self.hook_resid_post(residual + self.hook_mlp_out(self.mlp(self.ln2(residual))))


class Transformer(SequenceModel):
    """Pre-norm transformer: ``n_layers`` blocks between embedding and unembedding."""

    sites: ClassVar[dict[str, str]] = {
        "q": "attn.hook_q",
        "k": "attn.hook_k",
        "v": "attn.hook_v",
        "z": "attn.hook_z",
        "scores": "attn.hook_attn_scores",
        "pattern": "attn.hook_pattern",
        "attn_out": "hook_attn_out",
        "resid_pre": "hook_resid_pre",
        "resid_mid": "hook_resid_mid",
        "resid_post": "hook_resid_post",
        "belief": "hook_resid_post",
    }

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg, [Block(cfg) for _ in range(cfg.n_layers)])
