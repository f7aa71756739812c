import pytest
import torch
from mambapy.mamba import MambaBlock
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from interp.models import selective_scan as module
from interp.models.precision import matmul_precision
from interp.models.selective_scan import scan_by_kernel, scan_states, selective_scan


def inputs(length, batch=3, d_inner=6, d_state=5, dtype=torch.float32, dt=0.5):
    generator = torch.Generator().manual_seed(length)
    draw = {"generator": generator, "dtype": dtype}
    x = torch.randn(batch, length, d_inner, **draw)
    steps = dt * torch.rand(batch, length, d_inner, **draw)
    A = -6 * torch.rand(d_inner, d_state, **draw)
    B, C = (torch.randn(batch, length, d_state, **draw) for _ in range(2))
    return [t.requires_grad_() for t in (x, steps, A, B, C)]


def by_transformers(x, dt, A, B, C):
    return mamba_selective_scan(x.mT, dt.mT, A, B.mT, C.mT).mT


def by_mambapy(x, dt, A, B, C):
    return MambaBlock.selective_scan(None, x, dt, A, B, C, torch.zeros_like(A[:, 0]))


def by_unrolling(x, dt, A, B, C):
    """y_i = sum_{j <= i} C_i . exp(A (dt_{j+1} + ... + dt_i)) B_j dt_j x_j, all pairs at once."""
    time = dt.cumsum(1)
    decay = torch.exp(A * (time[:, :, None] - time[:, None]).clamp_min(0)[..., None])
    causal = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
    return torch.einsum("bin, bijdn, bjn, bjd, ij -> bid", C, decay, B, dt * x, causal)


def with_gradients(scan, tensors):
    y = scan(*tensors)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return y, *torch.autograd.grad(y, tensors, weights)


LENGTHS = [1, 2, 3, 4, 5, 7, 8, 31, 93]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("oracle", [by_transformers, by_mambapy])
def test_outputs_and_gradients_agree_in_float32(oracle, length):
    tensors = inputs(length)
    ours, theirs = with_gradients(selective_scan, tensors), with_gradients(oracle, tensors)
    for name, a, b in zip(("y", "dx", "ddt", "dA", "dB", "dC"), ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("oracle", [by_mambapy, by_unrolling])
@pytest.mark.parametrize("elements", [1, 300, 2**17])
def test_outputs_and_gradients_agree_in_float64_whatever_the_tiles(monkeypatch, oracle, length, elements):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(module, "ELEMENTS", elements)
    tensors = inputs(length, dtype=torch.float64)
    ours, theirs = with_gradients(selective_scan, tensors), with_gradients(oracle, tensors)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [1, 3, 6])
def test_gradcheck(length):
    assert torch.autograd.gradcheck(selective_scan, inputs(length, batch=2, d_inner=3, d_state=2, dtype=torch.float64))


def test_a_constant_input_gives_the_geometric_series():
    length, dt, rate = 9, 0.3, 0.7
    ones = torch.ones(1, length, 1, dtype=torch.float64)
    y = selective_scan(ones, dt * ones, torch.tensor([[-rate]], dtype=torch.float64), ones, 2 * ones)
    decay = torch.exp(torch.tensor(-rate * dt, dtype=torch.float64))
    powers = decay ** torch.arange(1, length + 1)
    torch.testing.assert_close(y[0, :, 0], 2 * dt * (1 - powers) / (1 - decay))


def test_large_steps_forget_everything_and_stay_finite():
    tensors = inputs(20, dt=0.5)
    with torch.no_grad():
        tensors[1] += 1000
        tensors[2] -= 1
    y, *gradients = with_gradients(selective_scan, tensors)
    x, dt, _, B, C = tensors
    torch.testing.assert_close(y, dt * x * (B * C).sum(-1, keepdim=True), rtol=1e-4, atol=1e-3)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_strided_inputs():
    x, dt, A, B, C = inputs(7)
    both = torch.cat([B, C], -1)
    strided = selective_scan(x.mT.contiguous().mT, dt, A, *both.split(5, dim=-1))
    torch.testing.assert_close(strided, selective_scan(x, dt, A, B, C))


@pytest.mark.parametrize("length", [1, 7])
def test_states_are_what_one_hot_readouts_read(length):
    x, dt, A, B, C = inputs(length)
    states = scan_states(x, dt, A, B)
    assert states.shape == (3, 6, length, 5)
    for n, one_hot in enumerate(torch.eye(5)):
        read = by_transformers(x, dt, A, B, one_hot.expand_as(C))
        torch.testing.assert_close(states[..., n].mT, read, rtol=1e-5, atol=1e-6)


def test_the_kernel_is_called_with_its_layout():
    tensors = inputs(11)
    ours = with_gradients(lambda *t: scan_by_kernel(mamba_selective_scan, *t), tensors)
    for a, b in zip(ours, with_gradients(selective_scan, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_states_are_recomputed_rather_than_stored():
    tensors, kept = inputs(64, d_inner=32, d_state=16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        selective_scan(*tensors)
    inputs_kept = sum(t.numel() for t in tensors)
    states = 3 * 64 * 32 * 16
    assert sum(t.numel() for t in kept) <= inputs_kept + states / module.STEPS


def test_a_second_derivative_is_refused():
    tensors = inputs(3)
    (gradient,) = torch.autograd.grad(selective_scan(*tensors).square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_coarse_matrix_products_and_dirty_memory_change_nothing():
    tensors = inputs(37, batch=8, d_inner=64, d_state=16)
    exact = with_gradients(selective_scan, tensors)
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    try:
        with matmul_precision("medium"):
            found = with_gradients(selective_scan, tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(exact, found, strict=True):
        assert torch.equal(a, b)
