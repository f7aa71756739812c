"""Mamba's selective scan (Gu and Dao 2023, algorithm 2): exact, in torch, its backward pass written by hand.

    h_t[n, d] = exp(dt_t[d] A[d, n]) h_{t-1}[n, d] + dt_t[d] x_t[d] B_t[n]
    y_t[d]    = sum_n C_t[n] h_t[n, d]

A tile of a few sequences and steps is worked off at a time, so that its states stay in the processor's cache; the
state axis comes before the channels, so that every operation runs along contiguous channels. Only the state
at the start of each tile is stored; the backward pass recomputes the others. Memory is linear in length.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

STEPS = 8
"""Time steps in a tile: one state in so many is stored."""
ELEMENTS = 2**18
"""States in a tile on a CPU, about: two such float32 tiles fill a cache of 2 MiB."""


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
    """The scan and its gradient, tile by tile; tiles have the axes ``batch step d_state d_inner``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        A = A.mT.contiguous()
        y = torch.empty_like(x)
        starts = x.new_empty(len(x), -(-x.shape[1] // STEPS), *A.shape)
        for rows in _rows(x, A):
            decays, states = _buffers(2, x[rows], A)
            end = x.new_zeros(())
            for start, x_, dt_, B_, C_, y_ in _tiles(rows, starts, x, dt, B, C, y):
                start.copy_(end)
                decay, state = decays[:, : x_.shape[1]], states[:, : x_.shape[1]]
                end = _recur(decay, state, start, dt_ * x_, dt_, A, B_)
                y_.copy_(_over_states(C_, state))
        ctx.save_for_backward(x, dt, A, B, C, starts)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        """With g the gradient of h: g_t = C_t dy_t + decay_{t+1} g_{t+1}, and d decay_t = g_t h_{t-1}."""
        x, dt, A, B, C, starts = ctx.saved_tensors
        dx, ddt, dA, dB, dC = (torch.empty_like(t) for t in (x, dt, A, B, C))
        dA.zero_()
        for rows in _rows(x, A):
            decays, states, grads = _buffers(3, x[rows], A)
            later = torch.zeros_like(states[:, 0])
            tiles = _tiles(rows, starts, x, dt, B, C, dy, dx, ddt, dB, dC)
            for start, x_, dt_, B_, C_, dy_, dx_, ddt_, dB_, dC_ in reversed(list(tiles)):
                decay, state, grad = (buffer[:, : x_.shape[1]] for buffer in (decays, states, grads))
                write = dt_ * x_
                _recur(decay, state, start, write, dt_, A, B_)
                dC_.copy_(_over_channels(dy_, state))

                torch.mul(C_[..., None], dy_[:, :, None], out=grad)
                steps, keeps = grad.unbind(1), decay.unbind(1)
                steps[-1].add_(later)
                for t in range(len(steps) - 1, 0, -1):
                    steps[t - 1].addcmul_(keeps[t], steps[t])
                torch.mul(keeps[0], steps[0], out=later)
                dB_.copy_(_over_channels(write, grad))
                dwrite = _over_states(B_, grad)
                torch.mul(dwrite, dt_, out=dx_)

                exponent = grad.mul_(decay)
                exponent[:, 1:].mul_(state[:, :-1])
                exponent[:, 0].mul_(start)
                torch.addcmul(torch.mul(exponent, A, out=state).sum(2), dwrite, x_, out=ddt_)
                dA += exponent.mul_(dt_[:, :, None]).sum((0, 1))
        return dx, ddt, dA.mT, dB, dC


def _recur(decay: Tensor, state: Tensor, start: Tensor, write: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """Fill ``decay`` and ``state``, and return the last state."""
    torch.mul(dt[:, :, None], A, out=decay).exp_()
    torch.mul(B[..., None], write[:, :, None], out=state)
    before = start
    for now, keep in zip(state.unbind(1), decay.unbind(1), strict=True):
        before = now.addcmul_(keep, before)
    return before


def _over_states(weight: Tensor, tile: Tensor) -> Tensor:
    """Sum over d_state with weights ``batch step d_state``; a batch of row vectors times matrices is fastest."""
    return torch.bmm(weight.flatten(0, 1)[:, None], tile.flatten(0, 1)).view(*tile.shape[:2], -1)


def _over_channels(weight: Tensor, tile: Tensor) -> Tensor:
    """Sum over d_inner with weights ``batch step d_inner``."""
    return torch.bmm(weight.flatten(0, 1)[:, None], tile.flatten(0, 1).mT).view(*tile.shape[:2], -1)


def _rows(x: Tensor, A: Tensor) -> list[slice]:
    """The sequences of each tile: few enough for the cache, or all where there is no CPU cache to fill."""
    count = max(1, ELEMENTS // (STEPS * A.numel())) if x.device.type == "cpu" else len(x)
    return [slice(first, first + count) for first in range(0, len(x), count)]


def _tiles(rows: slice, starts: Tensor, *sequences: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The state at the start of each tile, and views of each ``batch pos ...`` tensor within it."""
    return zip(starts[rows].unbind(1), *(t[rows].split(STEPS, 1) for t in sequences), strict=True)


def _buffers(count: int, x: Tensor, A: Tensor) -> Tensor:
    return x.new_empty(count, len(x), min(STEPS, x.shape[1]), *A.shape)
