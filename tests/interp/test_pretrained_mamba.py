"""transformers' Mamba behind our hooks, against transformers' own mixers and cache."""

import pytest
import torch
import transformers as hf

from interp.errors import ModelError
from interp.models.mamba import Mamba
from interp.pretrained import PADDING, load_pretrained
from probes import extract

LAYERS, VOCABULARY, LENGTH = 2, 61, 13


def raw(**changes):
    config = hf.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=LAYERS, state_size=4, initializer_range=0.3, **changes
    )
    torch.manual_seed(0)
    return hf.MambaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return load_pretrained(raw())


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def test_logits_are_those_of_transformers(model, tokens):
    expected = raw()(tokens).logits
    assert torch.allclose(model(tokens), expected, atol=1e-5)
    position = torch.tensor([[4, 12]]).expand(3, -1)
    assert torch.allclose(model(tokens, position), expected[:, [4, 12]], atol=1e-5)


@torch.no_grad()
def test_the_state_at_every_position_is_the_one_that_transformers_keeps(model, tokens):
    states = extract(model, tokens, ["state"], twin_seed=None)
    for length in (1, 7, LENGTH):
        cache = raw()(tokens[:, :length], use_cache=True).cache
        for layer in range(LAYERS):
            expected = cache.get_recurrent_state(layer, state_idx=0)
            assert torch.allclose(states["state", layer][:, :, length - 1], expected, atol=1e-5)


@torch.no_grad()
def test_what_the_scan_reads_is_what_transformers_gives_its_scan(model, tokens, monkeypatch):
    from transformers.models.mamba import modeling_mamba

    seen, original = [], modeling_mamba.mamba_selective_scan

    def spy(x, dt, A, B, C, *, delta_bias, **options):
        seen.append((x, torch.nn.functional.softplus(dt + delta_bias[:, None]), B, C))
        return original(x, dt, A, B, C, delta_bias=delta_bias, **options)

    reference = raw()
    monkeypatch.setattr(modeling_mamba, "mamba_selective_scan", spy)
    reference(tokens)
    acts = extract(model, tokens, ["v", "dt", "k", "q"], twin_seed=None)
    assert len(seen) == LAYERS
    for layer, inputs in enumerate(seen):
        for site, expected in zip(("v", "dt", "k", "q"), inputs, strict=True):
            assert torch.allclose(acts[site, layer], expected.mT, atol=1e-5)


def test_every_site_of_our_own_mamba_is_there_and_edits_take_effect(model, tokens):
    acts = extract(model, tokens, list(Mamba.sites), twin_seed=1)
    assert len(acts) == LAYERS * len(set(Mamba.sites.values()))
    assert not torch.allclose(acts["state", 1], acts.twin["state", 1], atol=1e-3)
    plain = model(tokens)
    for name in acts:
        edited = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda t, hook: t + torch.rand_like(t))])
        assert not torch.allclose(edited, plain, atol=1e-4), name
    assert torch.equal(model(tokens), plain)


@torch.no_grad()
def test_padding_writes_nothing_into_the_state(model, tokens):
    short, padding = tokens[:1, :8], torch.full((1, 5), PADDING)
    alone, expected = model.run_with_cache(short)
    for row, real in ((torch.cat([padding, short], 1), slice(5, 13)), (torch.cat([short, padding], 1), slice(0, 8))):
        logits, cache = model.run_with_cache(torch.cat([row, tokens[1:]]))
        assert torch.allclose(logits[0, real], alone[0], atol=1e-5)
        for layer in range(LAYERS):
            name = f"blocks.{layer}.mixer.hook_ssm_state"
            assert torch.allclose(cache[name][0, :, real], expected[name][0], atol=1e-5)


def test_gradients_reach_the_parameters_of_the_transformers_model(tokens):
    ours, theirs = load_pretrained(raw()), raw()
    for model in (ours, theirs):
        logits = model(tokens) if model is ours else model(tokens).logits
        logits.log_softmax(-1)[..., 5].sum().backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.lm.named_parameters():
        assert torch.allclose(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-3), name


def test_a_mixer_that_ours_is_not_is_refused():
    with pytest.raises(ModelError, match="use_bias=True"):
        load_pretrained(raw(use_bias=True))
