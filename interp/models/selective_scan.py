"""Mamba's selective scan (Gu and Dao 2023, algorithm 2): exact, in torch, its backward pass written by hand.

    h_t[n, d] = exp(dt_t[d] A[d, n]) h_{t-1}[n, d] + dt_t[d] x_t[d] B_t[n]
    y_t[d]    = sum_n C_t[n] h_t[n, d]

A tile of a few sequences and steps is worked off at a time, so that its states stay in the processor's cache; the
state axis comes before the channels, so that every operation runs along contiguous channels. Only the state
at the start of each tile is stored; the backward pass recomputes the others. Memory is linear in length.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from interp.models.precision import matmul_precision

STEPS = 4
"""Time steps in a tile: one state in so many is stored."""
ELEMENTS = 2**17
"""Numbers in a tile on a CPU, at most: three float32 tiles fit a cache of 2 MiB."""


def selective_scan(
    x: Float[Tensor, "batch pos d_inner"],
    dt: Float[Tensor, "batch pos d_inner"],
    A: Float[Tensor, "d_inner d_state"],
    B: Float[Tensor, "batch pos d_state"],
    C: Float[Tensor, "batch pos d_state"],
) -> Float[Tensor, "batch pos d_inner"]:
    """Scan ``x`` from a zero state, by mamba-ssm's kernel where there is CUDA and by our own scan elsewhere.

    Args:
        x: the input of each channel.
        dt: step sizes, positive.
        A: continuous-time decay rates, negative.
        B: how the input is written into the state.
        C: how the output is read from it.
    """
    kernel = cuda_kernel() if x.is_cuda and x.dtype != torch.float64 else None
    return _Scan.apply(x, dt, A, B, C) if kernel is None else scan_by_kernel(kernel, x, dt, A, B, C)


def scan_states(
    x: Float[Tensor, "batch pos d_inner"],
    dt: Float[Tensor, "batch pos d_inner"],
    A: Float[Tensor, "d_inner d_state"],
    B: Float[Tensor, "batch pos d_state"],
) -> Float[Tensor, "batch d_inner pos d_state"]:
    """The state at every position, axes in TransformerLens's order: ``d_state`` times the memory of ``x``."""
    state, states = x.new_zeros(()), []
    for step, write, gate in zip(dt.unbind(1), (dt * x).unbind(1), B.unbind(1), strict=True):
        state = torch.exp(step[..., None] * A) * state + write[..., None] * gate[:, None]
        states.append(state)
    return torch.stack(states, 2)


@cache
def cuda_kernel() -> Callable[..., Tensor] | None:
    """mamba-ssm's ``selective_scan_fn``, or None where it is not installed."""
    if importlib.util.find_spec("mamba_ssm") is None:
        return None
    return importlib.import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_fn


def scan_by_kernel(
    kernel: Callable[..., Tensor],
    x: Float[Tensor, "batch pos d_inner"],
    dt: Float[Tensor, "batch pos d_inner"],
    A: Float[Tensor, "d_inner d_state"],
    B: Float[Tensor, "batch pos d_state"],
    C: Float[Tensor, "batch pos d_state"],
) -> Float[Tensor, "batch pos d_inner"]:
    """Scan by a function with mamba-ssm's signature, which has the positions last."""
    x, dt, B, C = (rearrange(t, "batch pos d -> batch d pos").contiguous() for t in (x, dt, B, C))
    return rearrange(kernel(x, dt, A, B, C), "batch d pos -> batch pos d")


class _Scan(torch.autograd.Function):
    """The scan and its gradient, tile by tile; a tile has the axes ``(step batch) d_state d_inner``.

    Always in full precision: the recurrence adds errors up, and oneDNN's bfloat16 ``bmm`` multiplies what an ``out``
    buffer held by zero, which leaves NaN where memory was not clean.
    """

    @staticmethod
    @matmul_precision("highest")
    def forward(ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        A = A.mT.contiguous()
        steps, blocks = _plan(x, A)
        y, starts = torch.empty_like(x), []
        for rows in blocks:
            dts, writes = (_tiles(t, steps)[:, :, None] for t in (dt[rows], dt[rows] * x[rows]))
            Bs, Cs = (_tiles(t[rows], steps)[..., None] for t in (B, C))
            ys = torch.empty_like(dts)
            decay, state = (_Tile(x[rows], steps, A) for _ in range(2))
            end, start = torch.zeros_like(state.steps[0]), x.new_empty(len(ys), *state.steps[0].shape)
            tiles = zip(*map(torch.unbind, (start, dts, writes, Bs, Cs, ys)), strict=True)
            for start_, dt_, write, B_, C_, y_ in tiles:
                start_.copy_(end)
                end = _recur(decay, state, start_, dt_, write, A, B_)
                torch.bmm(C_.mT, state.whole, out=y_)
            y[rows] = _untile(ys, x[rows])
            starts.append(start)
        ctx.save_for_backward(x, dt, A, B, C, *starts)
        return y

    @staticmethod
    @once_differentiable
    @matmul_precision("highest")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        """With g the gradient of h: g_t = C_t dy_t + decay_{t+1} g_{t+1}, and that of decay_t is g_t h_{t-1}."""
        x, dt, A, B, C, *starts = ctx.saved_tensors
        steps, blocks = _plan(x, A)
        dx, ddt, dB, dC = (torch.empty_like(t) for t in (x, dt, B, C))
        dA = torch.zeros_like(A)
        for rows, start in zip(blocks, starts, strict=True):
            dts, writes, dys = (_tiles(t, steps)[:, :, None] for t in (dt[rows], dt[rows] * x[rows], dy[rows]))
            Bs, Cs = (_tiles(t[rows], steps)[..., None] for t in (B, C))
            dwrites, ddts, dBs, dCs = (torch.empty_like(t) for t in (writes, dts, Bs.mT, Cs.mT))
            decay, state, grad = (_Tile(x[rows], steps, A) for _ in range(3))
            later = torch.zeros_like(grad.steps[0])
            ones = A.new_ones(len(grad.whole), 1, len(A))
            tiles = zip(*map(torch.unbind, (start, dts, writes, Bs, Cs, dys, ddts, dwrites, dBs, dCs)), strict=True)
            for start_, dt_, write, B_, C_, dy_, ddt_, dwrite, dB_, dC_ in reversed(list(tiles)):
                _recur(decay, state, start_, dt_, write, A, B_)
                torch.bmm(dy_, state.whole.mT, out=dC_)

                torch.mul(C_, dy_, out=grad.whole)
                grad.steps[-1].add_(later)
                for t in range(steps - 1, 0, -1):
                    grad.steps[t - 1].addcmul_(decay.steps[t], grad.steps[t])
                torch.mul(decay.steps[0], grad.steps[0], out=later)
                torch.bmm(write, grad.whole.mT, out=dB_)
                torch.bmm(B_.mT, grad.whole, out=dwrite)

                exponent = grad.whole.mul_(decay.whole)
                for now, before in zip(grad.steps, (start_, *state.steps[:-1]), strict=True):
                    now.mul_(before)
                torch.bmm(ones, torch.mul(exponent, A, out=state.whole), out=ddt_)
                dA.view(-1).addmv_(exponent.mul_(dt_).flatten(1).T, ones[:, 0, 0])
            dwrite, ddt_, dB[rows], dC[rows] = (_untile(t, x[rows]) for t in (dwrites, ddts, dBs, dCs))
            torch.mul(dwrite, dt[rows], out=dx[rows])
            torch.addcmul(ddt_, dwrite, x[rows], out=ddt[rows])
        return dx, ddt, dA.mT, dB, dC


class _Tile:
    """A buffer of states, reused from tile to tile, and views of its steps."""

    def __init__(self, x: Tensor, steps: int, A: Tensor) -> None:
        self.whole = x.new_empty(steps * len(x), *A.shape)
        self.steps = self.whole.split(len(x))


def _recur(decay: _Tile, state: _Tile, start: Tensor, dt: Tensor, write: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """Fill the tiles of decays and states from the state at the start; returns the last state."""
    torch.mul(dt, A, out=decay.whole).exp_()
    torch.mul(B, write, out=state.whole)
    before = start
    for keep, now in zip(decay.steps, state.steps, strict=True):
        before = now.addcmul_(keep, before)
    return before


def _plan(x: Tensor, A: Tensor) -> tuple[int, list[slice]]:
    """Steps in a tile, and its sequences: few enough for the cache of a CPU, or all of them elsewhere."""
    steps = math.ceil(x.shape[1] / math.ceil(x.shape[1] / STEPS))
    count = max(1, ELEMENTS // (steps * A.numel())) if x.device.type == "cpu" else len(x)
    return steps, [slice(first, first + count) for first in range(0, len(x), count)]


def _tiles(t: Tensor, steps: int) -> Tensor:
    """``batch pos d`` to ``tile (step batch) d``; the last tile ends in zeros, which leave the state as it is."""
    batch, length, d = t.shape
    tiles = t.new_empty(math.ceil(length / steps), steps * batch, d)
    by_time = tiles.view(-1, batch, d)
    by_time[:length], by_time[length:] = t.transpose(0, 1), 0
    return tiles


def _untile(t: Tensor, like: Tensor) -> Tensor:
    """The inverse of :func:`_tiles`, the shape of ``like`` but for its last axis."""
    return t.view(-1, len(like), t.shape[-1])[: like.shape[1]].transpose(0, 1)
