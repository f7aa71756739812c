"""An MLP that can't integrate evidence: each position alone (the papers' control), or a fixed window of positions."""

from __future__ import annotations

import math
from typing import ClassVar

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import gelu, pad
from transformer_lens.hook_points import HookPoint

from interp.models.base import Linear, ModelConfig, Norm, SequenceModel


class MLP(nn.Module):
    """The feed-forward layer of a block, which reads the last ``window`` positions side by side."""

    def __init__(self, cfg: ModelConfig, window: int) -> None:
        super().__init__()
        self.window = window
        self.input = Linear(window * cfg.d_model, cfg.d_mlp, cfg.init_std)
        self.output = Linear(cfg.d_mlp, cfg.d_model, cfg.init_std / math.sqrt(2 * cfg.n_layers))
        self.hook_pre, self.hook_post = HookPoint(), HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Apply the layer at every position; before the first there are zeros."""
        if self.window > 1:
            windows = pad(x, (0, 0, self.window - 1, 0)).unfold(1, self.window, 1)
            x = rearrange(windows, "batch pos d_model lag -> batch pos (lag d_model)")
        return self.output(self.hook_post(gelu(self.hook_pre(self.input(x)))))


class Block(nn.Module):
    """A feed-forward layer that reads a normalised residual stream and adds to it."""

    def __init__(self, cfg: ModelConfig, window: int) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(cfg), MLP(cfg, window)
        self.hook_resid_pre, self.hook_mlp_out, self.hook_resid_post = (HookPoint() for _ in range(3))

    def forward(self, residual: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Pass the residual stream through the block."""
        residual = self.hook_resid_pre(residual)
        return self.hook_resid_post(residual + self.hook_mlp_out(self.mlp(self.norm(residual))))


class MLPModel(SequenceModel):
    """``n_layers`` feed-forward blocks; with ``window`` above 1 the first reads the last ``window`` positions.

    The hidden width shrinks as the window grows (``ModelConfig.d_mlp``), so that the parameter count stays.
    """

    sites: ClassVar[dict[str, str]] = {
        "pre": "mlp.hook_pre",
        "post": "mlp.hook_post",
        "mlp_out": "hook_mlp_out",
        "resid_pre": "hook_resid_pre",
        "resid_post": "hook_resid_post",
        "belief": "hook_resid_post",
    }

    def __init__(self, cfg: ModelConfig) -> None:
        windows = [cfg.window] + [1] * (cfg.n_layers - 1)
        super().__init__(cfg, [Block(cfg, window) for window in windows])
