"""TransformerLens's hook points inside a transformers model, whatever its architecture.

transformers looks its attention function up by name. The one registered here computes attention step by step, with
a hook point at each, so it sees what every architecture makes of queries, keys, masks and soft-capping, and an
edit there takes effect. Queries and keys before rotation are hooked where they are projected, the residual stream at
the boundaries of the blocks. TransformerLens's own bridge keeps a copy of each architecture instead; it has no rotated
queries and keys for GPT-NeoX, finite scores where attention is masked, and loses parameters of Mamba.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from interp.errors import ModelError

ATTENTION = "windtunnel"
"""Name under which transformers finds the attention function."""

SITES = {
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "z": "attn.hook_z",
    "scores": "attn.hook_attn_scores",
    "pattern": "attn.hook_pattern",
    "attn_out": "hook_attn_out",
    "resid_pre": "hook_resid_pre",
    "resid_post": "hook_resid_post",
    "belief": "hook_resid_post",
}
ROTARY_SITES = {"rot_q": "attn.hook_rot_q", "rot_k": "attn.hook_rot_k"}


class HookedAttention(nn.Module):
    """One layer's attention between its projections, which stay in the transformers model.

    Hooks: ``hook_q`` and ``hook_k``, as projected (before rotation, and before the norm that some models apply to
    them); ``hook_rot_q`` and ``hook_rot_k``, as compared; ``hook_v``, ``hook_z``: all ``batch pos head d_head``.
    ``hook_attn_scores`` (scaled, soft-capped, -inf where masked) and ``hook_pattern``: ``batch head query_pos
    key_pos``. Keys and values keep their own number of heads: query head h reads key and value head
    h // (n_heads / n_kv_heads).
    """

    def __init__(self, rotary: bool) -> None:
        super().__init__()
        self.hook_q, self.hook_k, self.hook_v, self.hook_z = (HookPoint() for _ in range(4))
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()
        if rotary:
            self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint()
        self.compared = (self.hook_rot_q, self.hook_rot_k) if rotary else (self.hook_q, self.hook_k)
        self.reported = False
        """Whether the layer came here since the flag was last cleared."""

    def forward(
        self,
        q: Float[Tensor, "batch head pos d_head"],
        k: Float[Tensor, "batch kv_head pos d_head"],
        v: Float[Tensor, "batch kv_head pos d_head"],
        mask: Bool[Tensor, "batch _ query_pos key_pos"],
        scale: int | float,
        softcap: int | float | None = None,
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Mix positions as transformers' eager attention does; a query that may attend to nothing gets zeros."""
        self.reported = True
        hooks = (*self.compared, self.hook_v)
        q, k, v = (
            hook(rearrange(t, "batch head pos d_head -> batch pos head d_head"))
            for hook, t in zip(hooks, (q, k, v), strict=True)
        )
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
        q, k, v = (rearrange(t, "batch pos head d_head -> batch head pos d_head") for t in (q, k, v))
        scores = q @ k.mT * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = self.hook_attn_scores(scores.masked_fill(~mask, -torch.inf))
        nowhere = ~mask.any(-1, keepdim=True)
        if nowhere.any():
            pattern = scores.masked_fill(nowhere, 0.0).softmax(-1, dtype=torch.float32).masked_fill(nowhere, 0.0)
        else:
            pattern = scores.softmax(-1, dtype=torch.float32)
        pattern = self.hook_pattern(pattern.to(q.dtype))
        return self.hook_z(rearrange(pattern @ v, "batch head pos d_head -> batch pos head d_head"))


class BlockHooks(nn.Module):
    """Hook points of one block: ``hook_attn_out`` is what attention adds to the residual stream."""

    def __init__(self, rotary: bool) -> None:
        super().__init__()
        self.attn = HookedAttention(rotary)
        self.hook_resid_pre, self.hook_attn_out, self.hook_resid_post = (HookPoint() for _ in range(3))


def hook_attention(lm: PreTrainedModel) -> nn.ModuleList:
    """Put hook points into a transformers model, in place; returns them, one :class:`BlockHooks` a layer.

    Raises:
        ModelError: when a block is not built around one attention layer with known projections.
    """
    config = lm.config.get_text_config()
    rotary = getattr(config, "rope_parameters", None) is not None
    hooks = [BlockHooks(rotary) for _ in range(config.num_hidden_layers)]
    for block, points in zip(decoder_blocks(lm), hooks, strict=True):
        inner = [child for child in block.children() if hasattr(child, "layer_idx")]
        if len(inner) != 1 or hasattr(inner[0], "hooked"):
            why = "it has hooks already" if inner else "its blocks have no attention layer that transformers numbers"
            raise ModelError(f"{type(lm).__name__} can't be hooked: {why}; load it afresh, or choose another model")
        attention = inner[0]
        object.__setattr__(attention, "hooked", points.attn)
        if rotary:
            _hook_projections(attention, points.attn, config)
        # Gemma 2 and 3 normalise what attention adds.
        writer = block.post_attention_layernorm if hasattr(block, "pre_feedforward_layernorm") else attention
        hook_boundaries(block, points.hook_resid_pre, points.hook_resid_post)
        writer.register_forward_hook(partial(_hook_output, points.hook_attn_out))
    lm.set_attn_implementation(ATTENTION)
    return nn.ModuleList(hooks)


def decoder_blocks(lm: PreTrainedModel) -> list[Any]:
    """The blocks of a causal language model, first layer first."""
    blocks = [child for child in lm.get_decoder().children() if isinstance(child, nn.ModuleList)]
    if not blocks:
        raise ModelError(f"{type(lm).__name__} has no list of blocks; expected a causal language model")
    return list(blocks[0])


def hook_boundaries(block: nn.Module, before: HookPoint, after: HookPoint) -> None:
    """Hook the residual stream where it enters a block and where it leaves it."""
    block.register_forward_pre_hook(partial(_hook_input, before), with_kwargs=True)
    block.register_forward_hook(partial(_hook_output, after))


def _hook_projections(attention: nn.Module, hooks: HookedAttention, config: Any) -> None:
    """Hook queries and keys where they are projected; each is a slice of the heads that a projection gives."""
    heads, kv_heads, d_head = head_sizes(config)
    layouts: dict[str, tuple[int, dict[HookPoint, slice]]] = {
        "q_proj": (heads, {hooks.hook_q: slice(None)}),
        "k_proj": (kv_heads, {hooks.hook_k: slice(None)}),
        # GPT-NeoX: query, key and value of one head, then of the next.
        "query_key_value": (3 * heads, {hooks.hook_q: slice(0, None, 3), hooks.hook_k: slice(1, None, 3)}),
        # Phi-3: all queries, then all keys, then all values.
        "qkv_proj": (
            heads + 2 * kv_heads,
            {hooks.hook_q: slice(0, heads), hooks.hook_k: slice(heads, heads + kv_heads)},
        ),
    }
    hooked: set[HookPoint] = set()
    for name, (total, parts) in layouts.items():
        projection = getattr(attention, name, None)
        if isinstance(projection, nn.Linear) and projection.out_features == total * d_head:
            projection.register_forward_hook(partial(_hook_heads, parts, d_head))
            hooked |= set(parts)
    if hooked != {hooks.hook_q, hooks.hook_k}:
        raise ModelError(
            f"{type(attention).__name__} projects queries and keys in a way that is not known here; expected q_proj "
            "and k_proj, GPT-NeoX's query_key_value or Phi-3's qkv_proj"
        )


def head_sizes(config: Any) -> tuple[int, int, int]:
    """Query heads, heads of keys and values, and the width of a head."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, width


def _hook_heads(parts: dict[HookPoint, slice], d_head: int, _: nn.Module, __: Any, output: Tensor) -> Tensor:
    heads = output.unflatten(-1, (-1, d_head))
    edited = heads.clone()
    for hook, part in parts.items():
        edited[:, :, part] = hook(heads[:, :, part])
    return edited.flatten(-2)


def _hook_input(hook: HookPoint, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    if args:
        return (hook(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hook(kwargs["hidden_states"])}


def _hook_output(hook: HookPoint, _: nn.Module, __: Any, output: Any) -> Any:
    return (hook(output[0]), *output[1:]) if isinstance(output, tuple) else hook(output)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: int | float | None = None,
    softcap: int | float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if kwargs.get("s_aux") is not None:
        raise ModelError(f"{type(module).__name__} has attention sinks, so its pattern is no softmax of its scores")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return module.hooked(query, key, value, attention_mask, scale, softcap), None


def _mask(**kwargs: Any) -> Tensor | None:
    """True where a query may attend: causal, within the window, not padding; never left out (None)."""
    return sdpa_mask(**{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, _mask)
