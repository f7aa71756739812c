"""LSTM blocks in a pre-norm residual stream: torch's fused kernel, or the explicit cell where something is hooked."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens.hook_points import HookPoint

from interp.models.base import ModelConfig, Norm, SequenceModel


class Cell(nn.LSTM):
    """torch's one-layer LSTM, with forget gates that are open at initialisation (Jozefowicz et al. 2015)."""

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, d_model, batch_first=True)

    def reset_parameters(self) -> None:
        """Draw fresh weights as torch does, and add 1 to the bias of the forget gates."""
        super().reset_parameters()
        with torch.no_grad():
            self.bias_ih_l0[self.hidden_size : 2 * self.hidden_size] += 1


class Recurrence(nn.Module):
    """The LSTM and its hooks, all ``batch pos d_model``: the gates i, f, g, o after their nonlinearity, and the cell.

    An edit of a gate reaches the cell at its own and all later positions; an edit of the cell, the output at its
    own. Neither re-enters the gates of later positions, which come from the unedited run.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cell = Cell(cfg.d_model)
        self.hook_i, self.hook_f, self.hook_g, self.hook_o, self.hook_cell = (HookPoint() for _ in range(5))

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The hidden state at every position."""
        hooks = (self.hook_i, self.hook_f, self.hook_g, self.hook_o)
        if not any(hook.has_hooks() for hook in (*hooks, self.hook_cell)):
            return self.cell(x)[0]
        i, f, g, o = (hook(gate) for hook, gate in zip(hooks, self.gates(x), strict=True))
        cell, cells = torch.zeros_like(x[:, 0]), []
        for forget, write in zip(f.unbind(1), (i * g).unbind(1), strict=True):
            cell = forget * cell + write
            cells.append(cell)
        return o * self.hook_cell(torch.stack(cells, 1)).tanh()

    def gates(self, x: Float[Tensor, "batch pos d_model"]) -> tuple[Float[Tensor, "batch pos d_model"], ...]:
        """The gates i, f, g and o (torch's order) of an unedited run."""
        lstm, steps = self.cell, []
        hidden = cell = torch.zeros_like(x[:, 0])
        for drive in linear(x, lstm.weight_ih_l0, lstm.bias_ih_l0).unbind(1):
            pre = drive + linear(hidden, lstm.weight_hh_l0, lstm.bias_hh_l0)
            i, f, g, o = pre.chunk(4, dim=-1)
            steps.append((i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()))
            i, f, g, o = steps[-1]
            cell = f * cell + i * g
            hidden = o * cell.tanh()
        return tuple(torch.stack(gate, 1) for gate in zip(*steps, strict=True))


class Block(nn.Module):
    """An LSTM that reads a normalised residual stream and adds its hidden state to it."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.norm, self.lstm = Norm(cfg), Recurrence(cfg)
        self.hook_resid_pre, self.hook_lstm_out, self.hook_resid_post = (HookPoint() for _ in range(3))

    def forward(self, residual: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Pass the residual stream through the block."""
        residual = self.hook_resid_pre(residual)
        return self.hook_resid_post(residual + self.hook_lstm_out(self.lstm(self.norm(residual))))


class LSTM(SequenceModel):
    """``n_layers`` LSTM blocks between embedding and unembedding; the belief site is the cell state."""

    sites: ClassVar[dict[str, str]] = {
        "i": "lstm.hook_i",
        "f": "lstm.hook_f",
        "g": "lstm.hook_g",
        "o": "lstm.hook_o",
        "state": "lstm.hook_cell",
        "lstm_out": "hook_lstm_out",
        "resid_pre": "hook_resid_pre",
        "resid_post": "hook_resid_post",
        "belief": "lstm.hook_cell",
    }

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg, [Block(cfg) for _ in range(cfg.n_layers)])
