import pytest
import torch
from conftest import TINY_MODEL, TINY_TASK
from transformer_lens.tools.analysis import reinitialized

from interp import build_model
from probes import ProbeError, extract


@pytest.fixture(scope="module")
def model():
    return build_model(TINY_MODEL, seed=1)


def test_streamed_activations_are_those_of_one_pass(model):
    batch = TINY_TASK.sample(11)
    acts = extract(model, batch, batch_size=4, twin_seed=None)
    output, cache = model.run_with_cache(batch.tokens, batch.position)
    assert set(acts) <= set(cache)
    for name in acts:
        assert torch.allclose(acts[name], cache[name], atol=1e-6)
    assert torch.allclose(acts.logits, output, atol=1e-6)
    assert acts["k", 1] is acts["blocks.1.attn.hook_k"]


def test_the_four_invariants_of_attention_but_for_gradients(model):
    acts = extract(model, TINY_TASK.sample(5))
    for layer in range(2):
        pattern = acts["pattern", layer]
        assert torch.allclose(acts["scores", layer].softmax(-1), pattern)
        mixed = torch.einsum("bhqk, bkhd -> bqhd", pattern, acts["v", layer])
        assert torch.allclose(mixed, acts["z", layer], atol=1e-6)


def test_only_the_hooks_that_are_asked_for_are_recorded(model):
    acts = extract(model, TINY_TASK.sample(5), ["k"])
    assert sorted(acts) == ["blocks.0.attn.hook_k", "blocks.1.attn.hook_k"]
    assert not any(hook.has_hooks() for hook in model.hook_points())


def test_the_twin_is_the_untrained_architecture_on_the_same_inputs(model):
    batch = TINY_TASK.sample(5)
    twin = extract(model, batch, ["v"], twin_seed=7).twin
    fresh = extract(reinitialized(model, 7), batch, ["v"], twin_seed=None)
    assert torch.equal(twin["v", 0], fresh["v", 0])
    assert not torch.equal(twin["v", 0], extract(model, batch, ["v"])["v", 0])


def test_plain_tokens_are_read_at_every_position(model):
    tokens = TINY_TASK.sample(3).tokens
    acts = extract(model, tokens, ["k"], twin_seed=None)
    assert acts.logits.shape == (3, tokens.shape[1], TINY_TASK.d_out)
    assert acts.position is None


def test_bad_input_is_named(model):
    batch = TINY_TASK.sample(3)
    with pytest.raises(ProbeError, match="has no run_with_cache"):
        extract(torch.nn.Linear(2, 2), batch)
    with pytest.raises(ProbeError, match="unknown site 'kk'; this model declares: q, k"):
        extract(model, batch, ["kk"])
    model.sites = {**type(model).sites, "rot_k": "attn.hook_rot_k"}
    with pytest.raises(ProbeError, match=r"blocks\.0\.attn\.hook_rot_k.*did not fire"):
        extract(model, batch, ["rot_k"])
