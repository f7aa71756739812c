import math

import pytest
import torch
from mambapy.mamba import MambaBlock
from mambapy.mamba import MambaConfig as MambapyConfig
from scipy.stats import kstest
from torch.nn.functional import silu, softplus
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

from interp import build_model
from interp.models.base import ModelConfig
from interp.models.mamba import Mixer

CONFIG = ModelConfig(
    architecture="mamba", d_vocab=9, d_out=5, n_ctx=40, n_layers=2, d_model=24, d_state=6, positions="none"
)
TOKENS = torch.randint(0, 9, (3, 11), generator=torch.Generator().manual_seed(0))


def mixer(dtype=torch.float32, **changes):
    torch.manual_seed(1)
    return Mixer(ModelConfig(**{**CONFIG.to_dict(), **changes})).to(dtype)


def twin_of_transformers(ours, **changes):
    sizes = {"d_state": 6, "d_conv": 4, "expand": 2, **changes}
    config = MambaConfig(
        hidden_size=24,
        state_size=sizes["d_state"],
        conv_kernel=sizes["d_conv"],
        expand=sizes["expand"],
        num_hidden_layers=2,
    )
    theirs = MambaMixer(config, layer_idx=0)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return theirs


def twin_of_mambapy(ours, **changes):
    sizes = {"d_state": 6, "d_conv": 4, "expand": 2, **changes}
    theirs = MambaBlock(MambapyConfig(d_model=24, n_layers=1, expand_factor=sizes.pop("expand"), **sizes))
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return theirs


def with_gradients(module, residual):
    residual = residual.clone().requires_grad_()
    out = module(residual)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    parameters = dict(sorted(module.named_parameters()))
    gradients = torch.autograd.grad(out, [residual, *parameters.values()], weights)
    return {"out": out, **dict(zip(["residual", *parameters], gradients, strict=True))}


def assert_same(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        scale = max(1.0, theirs[name].abs().max().item())
        assert (tensor - theirs[name]).abs().max() < tolerance * scale, name


@pytest.mark.parametrize("changes", [{}, {"d_state": 3, "d_conv": 2, "expand": 3}])
@pytest.mark.parametrize("twin", [twin_of_transformers, twin_of_mambapy])
@pytest.mark.parametrize("length", [1, 2, 7, 38, 93])
def test_parity_in_float32(twin, length, changes):
    ours = mixer(**changes)
    residual = torch.randn(3, length, 24, generator=torch.Generator().manual_seed(3))
    assert_same(with_gradients(ours, residual), with_gradients(twin(ours, **changes), residual), 1e-5)


@pytest.mark.parametrize("twin", [twin_of_transformers, twin_of_mambapy])
@pytest.mark.parametrize("length", [1, 7, 38])
def test_parity_in_float64(monkeypatch, twin, length):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    ours = mixer(torch.float64)
    residual = torch.randn(3, length, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert_same(with_gradients(ours, residual), with_gradients(twin(ours).double(), residual), 1e-10)


def test_shapes_at_the_published_size():
    shapes = {name: tuple(p.shape) for name, p in mixer(d_model=128, d_state=16).named_parameters()}
    assert shapes == {
        "A_log": (256, 16),
        "D": (256,),
        "in_proj.weight": (512, 128),
        "conv1d.weight": (256, 1, 4),
        "conv1d.bias": (256,),
        "x_proj.weight": (40, 256),
        "dt_proj.weight": (256, 8),
        "dt_proj.bias": (256,),
        "out_proj.weight": (128, 256),
    }


def test_initialisation_is_that_of_mamba_ssm():
    m = mixer(d_model=256, d_state=16, n_layers=4)
    assert torch.allclose(m.A_log.exp(), torch.arange(1.0, 17).expand(512, 16))
    assert (m.D == 1).all()
    assert all(parameter._no_weight_decay for parameter in (m.A_log, m.D))
    log_dt = softplus(m.dt_proj.bias.detach()).log() / math.log(10)
    uniform = {
        "dt": (log_dt + 3) / 2,
        "dt_proj": m.dt_proj.weight.flatten() * 16**0.5 / 2 + 0.5,
        "in_proj": m.in_proj.weight.flatten() * 256**0.5 / 2 + 0.5,
        "out_proj": m.out_proj.weight.flatten() * (512 * 4) ** 0.5 / 2 + 0.5,
    }
    for name, values in uniform.items():
        values = values.detach()
        assert values.min() > -1e-5, name
        assert values.max() < 1 + 1e-5, name
        assert kstest(values[:4000].numpy(), "uniform").pvalue > 1e-3, name


@pytest.fixture
def model():
    return build_model(CONFIG, seed=0)


def cache_of(model, tokens=TOKENS):
    return model.run_with_cache(tokens)[1]


def test_hooks_hold_what_they_are_named_for(model):
    cache = cache_of(model)
    for layer, block in enumerate(model.blocks):
        m = block.mixer
        x, z = m.in_proj(cache[f"blocks.{layer}.norm.hook_normalized"]).chunk(2, -1)
        padded = torch.nn.functional.pad(x, (0, 0, 3, 0))
        conv = sum(padded[:, k : k + 11] * m.conv1d.weight[:, 0, k] for k in range(4)) + m.conv1d.bias
        low_rank, B, C = m.x_proj(silu(conv)).split([2, 6, 6], -1)
        expected = {"conv": conv, "x": silu(conv), "dt": softplus(m.dt_proj(low_rank)), "B": B, "C": C}
        for name, tensor in expected.items():
            torch.testing.assert_close(cache[f"blocks.{layer}.mixer.hook_{name}"], tensor, rtol=1e-5, atol=1e-6)
        gate, scan_out = cache[f"blocks.{layer}.mixer.hook_gate"], cache[f"blocks.{layer}.mixer.hook_scan_out"]
        torch.testing.assert_close(gate, silu(z), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(cache[f"blocks.{layer}.hook_mixer_out"], m.out_proj(gate * scan_out))


def test_states_are_the_decayed_sum_of_what_was_written(model):
    cache = cache_of(model)
    x, dt, B = (cache[f"blocks.1.mixer.hook_{name}"].double() for name in ("x", "dt", "B"))
    A = -model.blocks[1].mixer.A_log.double().exp()
    time = dt.cumsum(1)
    states = torch.zeros(3, 48, 11, 6, dtype=torch.float64)
    for i in range(11):
        for j in range(i + 1):
            decay = torch.exp(A * (time[:, i] - time[:, j])[..., None])
            states[:, :, i] += decay * (dt * x)[:, j, :, None] * B[:, j, None, :]
    torch.testing.assert_close(cache["blocks.1.mixer.hook_ssm_state"].double(), states, rtol=1e-5, atol=1e-6)


def test_states_are_materialised_only_if_hooked(model, monkeypatch):
    def forbidden(*_):
        raise AssertionError("the states were materialised")

    monkeypatch.setattr("interp.models.mamba.scan_states", forbidden)
    model(TOKENS)
    model.run_with_cache(TOKENS, names_filter="blocks.0.mixer.hook_scan_out")
    with pytest.raises(AssertionError, match="materialised"):
        model.run_with_cache(TOKENS, names_filter="blocks.0.mixer.hook_ssm_state")


def test_without_its_state_a_mixer_passes_only_the_skip(model):
    zero = [("blocks.0.mixer.hook_ssm_state", lambda state, hook: torch.zeros_like(state))]
    with model.hooks(fwd_hooks=zero):
        cache = cache_of(model)
    skip = model.blocks[0].mixer.D * cache["blocks.0.mixer.hook_x"]
    torch.testing.assert_close(cache["blocks.0.mixer.hook_scan_out"], skip)


def test_an_edited_state_is_read_at_its_own_position(model):
    def edit(state, hook):
        state[:, :, 4] += 1
        return state

    with model.hooks(fwd_hooks=[("blocks.0.mixer.hook_ssm_state", edit)]):
        edited = cache_of(model)
    clean = cache_of(model)
    change = edited["blocks.0.mixer.hook_scan_out"] - clean["blocks.0.mixer.hook_scan_out"]
    expected = torch.zeros_like(change)
    expected[:, 4] = clean["blocks.0.mixer.hook_C"][:, 4].sum(-1, keepdim=True)
    torch.testing.assert_close(change, expected, rtol=1e-4, atol=1e-6)


def test_the_gradient_at_the_state_is_that_of_the_readout(model):
    found = {}

    def keep(gradient, hook):
        found[hook.name] = gradient

    names = ["blocks.0.mixer.hook_ssm_state", "blocks.0.mixer.hook_scan_out"]
    with model.hooks(bwd_hooks=[(name, keep) for name in names]):
        model(TOKENS).square().sum().backward()
    C = cache_of(model)["blocks.0.mixer.hook_C"]
    expected = torch.einsum("bld, bln -> bdln", found[names[1]], C)
    torch.testing.assert_close(found[names[0]], expected)
