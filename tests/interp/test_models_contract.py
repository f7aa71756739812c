from dataclasses import replace

import pytest
import torch
from scipy.stats import ks_2samp
from transformer_lens.tools.analysis import reinitialized

from interp import InterpError, build_model, preset
from interp.models.base import ARCHITECTURES, OWNERS, PRESETS, ModelConfig
from tasks import get_task, task_names

CONFIGS = {
    "transformer": ModelConfig(d_vocab=9, d_out=5, n_ctx=14, n_layers=2, d_model=16, n_heads=2),
    "transformer-rotary": ModelConfig(
        d_vocab=9, d_out=5, n_ctx=14, n_layers=2, d_model=16, n_heads=2, positions="rotary"
    ),
    "mamba": ModelConfig(
        d_vocab=9, d_out=5, n_ctx=14, n_layers=2, d_model=16, architecture="mamba", d_state=4, positions="none"
    ),
    "mamba-learned": ModelConfig(d_vocab=9, d_out=5, n_ctx=14, n_layers=2, d_model=16, architecture="mamba"),
    "lstm": ModelConfig(d_vocab=9, d_out=5, n_ctx=14, n_layers=2, d_model=16, architecture="lstm", positions="none"),
    "mlp": ModelConfig(d_vocab=9, d_out=5, n_ctx=14, n_layers=2, d_model=16, architecture="mlp"),
    "mlp-window": ModelConfig(d_vocab=9, d_out=5, n_ctx=14, n_layers=2, d_model=16, architecture="mlp", window=4),
}
TOKENS = torch.randint(0, 9, (3, 14), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture
def model(config):
    """A model far from initialisation, so that everything in it matters."""
    model = build_model(config, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and not hasattr(parameter, "_no_weight_decay"):
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    return model


def test_every_architecture_is_tried():
    assert {config.architecture for config in CONFIGS.values()} == set(ARCHITECTURES) == set(PRESETS)


@pytest.mark.parametrize("readout", ["categorical", "gaussian"])
@pytest.mark.parametrize("readin", ["tokens", "vectors"])
def test_it_reads_both_and_answers_where_asked(config, readin, readout):
    d_out = 2 if readout == "gaussian" else 5
    model = build_model(replace(config, readin=readin, readout=readout, d_out=d_out), seed=0)
    inputs = TOKENS if readin == "tokens" else torch.randn(3, 14, 9)
    everywhere = model(inputs)
    assert everywhere.shape == (3, 14, d_out)
    position = torch.tensor([[0, 3, 13]] * 3)
    torch.testing.assert_close(model(inputs, position), everywhere[:, [0, 3, 13]])


@pytest.mark.parametrize("length", [1, 2, 13])
def test_it_reads_shorter_sequences(model, length):
    torch.testing.assert_close(model(TOKENS[:, :length]), model(TOKENS)[:, :length], rtol=1e-4, atol=1e-5)


def test_it_is_causal(model):
    changed = TOKENS.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 9
    difference = (model(changed) - model(TOKENS)).abs().amax((0, 2))
    assert difference[:7].max() < 1e-6
    assert difference[7] > 1e-3


def test_only_learned_positions_bound_the_length(config):
    model = build_model(config, seed=0)
    tokens = TOKENS.repeat(1, 2)
    if config.positions == "learned":
        with pytest.raises(InterpError, match="sequence of 28 positions is longer than the model's context n_ctx = 14"):
            model(tokens)
    else:
        assert model(tokens).shape == (3, 28, 5)


def test_foreign_tokens_are_refused(config):
    with pytest.raises(InterpError, match="token ids run from 0 to 9, but the model knows 0 to 8"):
        build_model(config)(torch.arange(10)[None])


def test_a_cached_run_equals_an_uncached_one(model):
    cached, cache = model.run_with_cache(TOKENS)
    torch.testing.assert_close(cached, model(TOKENS), rtol=1e-5, atol=1e-5)
    assert set(cache) == set(model.hook_dict)
    again, _ = model.run_with_cache(TOKENS)
    assert torch.equal(cached, again)


def test_gradients_are_those_of_the_uncached_run(model):
    parameters = list(model.parameters())
    plain = torch.autograd.grad(model(TOKENS).logsumexp(-1).sum(), parameters)
    output, _ = model.run_with_cache(TOKENS)
    hooked = torch.autograd.grad(output.logsumexp(-1).sum(), parameters)
    for a, b in zip(hooked, plain, strict=True):
        assert (a - b).abs().max() < 1e-5 * max(1.0, b.abs().max().item())


def test_zeroing_any_hook_changes_the_output(model):
    clean = model(TOKENS)
    for name in model.hook_dict:
        edited = model.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda tensor, hook: torch.zeros_like(tensor))])
        assert (edited - clean).abs().max() > 1e-4, name
    assert torch.equal(model(TOKENS), clean)


def test_hooks_are_gone_after_an_exception(model):
    clean = model(TOKENS)

    def fail(tensor, hook):
        raise RuntimeError("within the hook")

    for name in model.hook_dict:
        with pytest.raises(RuntimeError, match="within the hook"):
            model.run_with_hooks(TOKENS, fwd_hooks=[(name, fail)])
        with pytest.raises(RuntimeError, match="within the hook"), model.hooks(fwd_hooks=[(name, fail)]):
            model(TOKENS)
    assert not any(point.has_hooks() for point in model.hook_dict.values())
    assert torch.equal(model(TOKENS), clean)


def test_declared_sites_are_hooks_of_every_block(model):
    assert {"resid_pre", "resid_post", "belief"} <= set(model.sites)
    for layer in range(2):
        for hook in model.sites.values():
            assert f"blocks.{layer}.{hook}" in model.hook_dict


def test_the_residual_stream_is_the_sum_of_what_is_written(model):
    _, cache = model.run_with_cache(TOKENS)
    writers = ("hook_attn_out", "hook_mlp_out", "hook_mixer_out", "hook_lstm_out")
    total = cache["hook_embed"] + sum(tensor for name, tensor in cache.items() if name.endswith(writers))
    if model.cfg.positions == "learned":
        total = total + cache["hook_pos_embed"]
    torch.testing.assert_close(cache["blocks.1.hook_resid_post"], total, rtol=1e-4, atol=1e-5)


def test_the_same_seed_gives_the_same_parameters(config):
    first, second, other = (build_model(config, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_building_touches_no_global_state(config):
    before = torch.get_rng_state()
    build_model(config, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_untrained_twin_is_a_fresh_draw_from_the_initialisation(config):
    model = build_model(replace(config, d_model=64), seed=5)
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    twin = reinitialized(model, 6)
    assert all((parameter == 7).all() for parameter in model.parameters())
    for name, parameter in twin.named_parameters():
        if initial[name].unique().numel() <= config.d_state:
            assert torch.equal(parameter, initial[name]), name
        else:
            assert not torch.equal(parameter, initial[name]), name
            assert ks_2samp(parameter.detach().flatten(), initial[name].flatten()).pvalue > 1e-4, name


def test_describe_lists_only_the_settings_that_it_has(model):
    row = model.describe()
    assert row["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert row["sites"] == model.sites
    assert row["architecture"] == model.cfg.architecture
    for key, owner in OWNERS.items():
        assert (key in row) == (owner == model.cfg.architecture)


@pytest.mark.parametrize("size", ["small", "paper"])
@pytest.mark.parametrize("task", task_names())
def test_presets_match_the_transformer_within_ten_percent(task, size):
    task = get_task(task)
    reference = build_model(preset("transformer", size, task)).n_parameters
    variants = [(name, {}) for name in ARCHITECTURES] + [("mlp", {"window": w}) for w in (2, 8, task.n_ctx)]
    for name, changes in variants:
        model = build_model(preset(name, size, task, **changes))
        assert model.n_parameters == pytest.approx(reference, rel=0.1), (name, changes)
        batch = task.sample(2)
        assert model(batch.tokens, batch.position).shape == (*batch.position.shape, task.d_out)


def test_preset_sizes():
    task = get_task("bijection")
    for size, millions in {"small": 0.80, "paper": 2.68}.items():
        assert build_model(preset("transformer", size, task)).n_parameters / 1e6 == pytest.approx(millions, rel=0.01)
    assert preset("mamba", "small", task).positions == preset("lstm", "paper", task).positions == "none"
    assert preset("mlp", "small", task).positions == "learned"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "lstn"}, "unknown architecture 'lstn': did you mean 'lstm'"),
        ({"architecture": "lstm", "window": 3}, "window is a setting of the mlp, which the lstm does not have"),
        ({"architecture": "mlp", "d_state": 3}, "d_state is a setting of the mamba, which the mlp does not have"),
        ({"architecture": "mamba", "n_heads": 2}, "n_heads is a setting of the transformer, which the mamba does not"),
        ({"architecture": "mamba", "positions": "rotary"}, "rotary positions turn queries and keys, which the mamba"),
        ({"architecture": "mlp", "window": 0}, "window must be a positive integer, got 0"),
        ({"n_heads": 5}, "d_model 16 is not a multiple of n_heads 5"),
        ({"d_model": 15, "n_heads": 5, "positions": "rotary"}, "rotary positions need an even d_head, got 3"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(changes, message):
    with pytest.raises(InterpError, match=message) as caught:
        ModelConfig(**{"d_vocab": 9, "d_out": 5, "n_ctx": 14, "d_model": 16, **changes})
    assert "\n" not in str(caught.value)
