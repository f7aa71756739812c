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
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

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
    """The scan and its gradient, tile by tile; a tile has the axes ``(batch step) d_state d_inner``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        A = A.mT.contiguous()
        steps, blocks = _plan(x, A)
        y, starts = torch.empty_like(x), []
        for rows in blocks:
            dt_, write = (_tile(t, steps)[:, :, None] for t in (dt[rows], dt[rows] * x[rows]))
            B_, C_ = (_tile(t[rows], steps)[..., None] for t in (B, C))
            y_ = torch.empty_like(dt_)
            (decay, decays), (state, states) = (_buffer(x[rows], steps, A) for _ in range(2))
            start = x.new_zeros(len(dt_), *states[0].shape)
            for tile in range(len(dt_)):
                if tile:
                    start[tile] = states[-1]
                _recur(decay, decays, state, states, start[tile], dt_[tile], write[tile], A, B_[tile])
                torch.bmm(C_[tile].mT, state, out=y_[tile])
            y[rows] = _untile(y_, x[rows])
            starts.append(start)
        ctx.save_for_backward(x, dt, A, B, C, *starts)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        """With g the gradient of h: g_t = C_t dy_t + decay_{t+1} g_{t+1}, and that of decay_t is g_t h_{t-1}."""
        x, dt, A, B, C, *starts = ctx.saved_tensors
        steps, blocks = _plan(x, A)
        dx, ddt, dB, dC = (torch.empty_like(t) for t in (x, dt, B, C))
        dA = torch.zeros_like(A)
        for rows, start in zip(blocks, starts, strict=True):
            dt_, write, dy_ = (_tile(t, steps)[:, :, None] for t in (dt[rows], dt[rows] * x[rows], dy[rows]))
            B_, C_ = (_tile(t[rows], steps)[..., None] for t in (B, C))
            dwrite, ddt_, dB_, dC_ = (torch.empty_like(t) for t in (write, dt_, B_.mT, C_.mT))
            (decay, decays), (state, states), (grad, grads) = (_buffer(x[rows], steps, A) for _ in range(3))
            later = torch.zeros_like(grads[0])
            ones = A.new_ones(len(grad), 1, len(A))
            for tile in reversed(range(len(dt_))):
                _recur(decay, decays, state, states, start[tile], dt_[tile], write[tile], A, B_[tile])
                torch.bmm(dy_[tile], state.mT, out=dC_[tile])

                torch.mul(C_[tile], dy_[tile], out=grad)
                grads[-1].add_(later)
                for t in range(steps - 1, 0, -1):
                    grads[t - 1].addcmul_(decays[t], grads[t])
                torch.mul(decays[0], grads[0], out=later)
                torch.bmm(write[tile], grad.mT, out=dB_[tile])
                torch.bmm(B_[tile].mT, grad, out=dwrite[tile])

                exponent = grad.mul_(decay)
                grads[0].mul_(start[tile])
                for t in range(1, steps):
                    grads[t].mul_(states[t - 1])
                torch.bmm(ones, torch.mul(exponent, A, out=state), out=ddt_[tile])
                dA.view(-1).addmv_(exponent.mul_(dt_[tile]).flatten(1).T, ones[:, 0, 0])
            dwrite, ddt_, dB[rows], dC[rows] = (_untile(t, x[rows]) for t in (dwrite, ddt_, dB_, dC_))
            torch.mul(dwrite, dt[rows], out=dx[rows])
            torch.addcmul(ddt_, dwrite, x[rows], out=ddt[rows])
        return dx, ddt, dA.mT, dB, dC


def _recur(
    decay: Tensor,
    decays: Sequence[Tensor],
    state: Tensor,
    states: Sequence[Tensor],
    start: Tensor,
    dt: Tensor,
    write: Tensor,
    A: Tensor,
    B: Tensor,
) -> None:
    """Fill the tiles of decays and states."""
    torch.mul(dt, A, out=decay).exp_()
    torch.mul(B, write, out=state)
    before = start
    for keep, now in zip(decays, states, strict=True):
        before = now.addcmul_(keep, before)


def _plan(x: Tensor, A: Tensor) -> tuple[int, list[slice]]:
    """Steps in a tile, and its sequences: few enough for the cache of a CPU, or all of them elsewhere."""
    steps = math.ceil(x.shape[1] / math.ceil(x.shape[1] / STEPS))
    count = max(1, ELEMENTS // (steps * A.numel())) if x.device.type == "cpu" else len(x)
    return steps, [slice(first, first + count) for first in range(0, len(x), count)]


def _tile(t: Tensor, steps: int) -> Tensor:
    """Cut positions into tiles; the last is filled with zeros, which leave the state as it is."""
    t = pad(t, (0, 0, 0, -t.shape[1] % steps))
    return rearrange(t, "batch (tile step) d -> tile (batch step) d", step=steps)


def _untile(t: Tensor, like: Tensor) -> Tensor:
    """The inverse of :func:`_tile`."""
    return rearrange(t, "tile (batch step) 1 d -> batch (tile step) d", batch=len(like))[:, : like.shape[1]]


def _buffer(x: Tensor, steps: int, A: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """A tile, and views of its steps."""
    tile = x.new_empty(len(x) * steps, *A.shape)
    return tile, tile.unflatten(0, (len(x), steps)).unbind(1)
