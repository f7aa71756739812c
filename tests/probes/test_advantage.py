"""The gradient law: hand-made heads, finite differences, enumeration, and real models of three kinds."""

from itertools import permutations

import numpy as np
import pytest
import torch
from conftest import TINY_MODEL, TINY_TASK
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from interp import ModelConfig, build_model, load_checkpoint
from probes import Activations, ProbeError, advantage, extract_gradients
from probes.advantage import advantages
from probes.calibration import LN2
from probes.extract import SITES


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def head(pattern, u, v, scores_grad=None):
    """One layer as a cache of TransformerLens names; dL/ds from autograd's softmax unless it is given."""
    if scores_grad is None:
        scores = pattern.log().clone().requires_grad_()
        z = torch.einsum("bhij, bjhd -> bihd", scores.softmax(-1), v.repeat_interleave(u.shape[2] // v.shape[2], 2))
        (scores_grad,) = torch.autograd.grad((z * u).sum(), scores)
    names = {"hook_pattern": pattern, "hook_v": v, "hook_z_grad": u, "hook_attn_scores_grad": scores_grad.nan_to_num()}
    return {f"blocks.0.attn.{name}": tensor for name, tensor in names.items()}


def causal(seed, batch=6, heads=2, pos=5):
    scores = draw(seed, batch, heads, pos, pos).masked_fill(torch.ones(pos, pos).triu(1).bool(), -torch.inf)
    return scores.softmax(-1)


def test_a_head_worked_out_by_hand():
    # Two positions; the second attends 1/4 to the first, whose value costs u.v = 4, and 3/4 to itself, at 0.
    pattern = torch.tensor([[1.0, 0.0], [0.25, 0.75]]).double().expand(3, 1, 2, 2)
    u = torch.tensor([[0.0, 0.0], [2.0, 1.0]]).double()[:, None].expand(3, 2, 1, 2)
    v = torch.tensor([[2.0, 0.0], [0.0, 0.0]]).double()[:, None].expand(3, 2, 1, 2)
    assert advantages(pattern, u, v)[0, 0].tolist() == [[0, 0], [3, -1]]
    by_hand = torch.tensor([[0.0, 0.0], [0.75, -0.75]]).double().expand(3, 1, 2, 2)
    result = advantage(head(pattern, u, v, by_hand))
    place = {"layer": 0, "head": 0}
    assert result.value("law_residual", **place) == 0
    assert result.value("advantage_rms", **place) == pytest.approx(np.sqrt((9 / 4 + 3 / 4) / 2))
    assert result.value("routing_gain", **place) == pytest.approx(2 - 1)
    assert result.value("attention_correlation", **place) == pytest.approx(1)
    assert result.value("cancellation", **place) == pytest.approx(1 / np.sqrt(2 * 0.75**2))
    wrong = advantage(head(pattern, u, v, -by_hand))
    assert wrong.value("law_residual", **place) == pytest.approx(2)


def test_the_law_is_what_finite_differences_give():
    scores, v, weights = draw(0, 1, 1, 4, 4), draw(1, 1, 4, 1, 3), draw(2, 1, 4, 1, 3)

    def loss(scores):
        z = torch.einsum("bhij, bjhd -> bihd", scores.softmax(-1), v)
        return (weights * torch.tanh(z)).sum().item()

    z = torch.einsum("bhij, bjhd -> bihd", scores.softmax(-1), v)
    u = weights * (1 - torch.tanh(z) ** 2)  # dL/dz on paper
    law = (scores.softmax(-1) * advantages(scores.softmax(-1), u, v)).flatten()
    for entry in range(16):
        bump = torch.zeros(16, dtype=torch.float64)
        bump[entry] = 1e-5
        slope = (loss(scores + bump.view_as(scores)) - loss(scores - bump.view_as(scores))) / 2e-5
        assert law[entry].item() == pytest.approx(slope, rel=1e-7, abs=1e-10)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("name", ["bijection-transformer", "hmm-transformer"])
def test_the_law_holds_on_every_head_of_shipped_models(name, dtype, most):
    model, task = load_checkpoint(name)
    grads = extract_gradients(model.to(dtype), task.sample(8, seed=1), batch_size=5)
    frame = advantage(grads, resamples=10).frame
    residual = frame[frame["statistic"] == "law_residual"]
    assert len(residual) == 16
    assert residual["estimate"].max() <= most
    assert residual["null_init"].max() <= most
    assert residual["null_no_baseline"].min() > 0.1


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_the_law_holds_on_a_grouped_query_rotary_model(dtype, most):
    frame = advantage(llama_gradients(dtype)).frame
    residual = frame[frame["statistic"] == "law_residual"]
    assert len(residual) == 2 * 6
    assert residual["estimate"].max() <= most
    assert residual["null_no_baseline"].min() > 0.1


def test_a_transformer_bridge_is_recorded_by_its_own_hooks():
    bridge = build_bridge_from_module(llama(), "LlamaForCausalLM", hf_config=llama().config)
    tokens = torch.randint(30, (5, 12), generator=torch.Generator().manual_seed(1))
    grads = extract_gradients(bridge, tokens, tokens, loss=nats, batch_size=3, twin_seed=None)
    frame = advantage(grads).frame
    assert frame[frame["statistic"] == "law_residual"]["estimate"].max() < 1e-5


def nats(labels, logits):
    return torch.nn.functional.cross_entropy(logits.mT, labels, reduction="none")


def llama():
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=30, intermediate_size=64, attn_implementation="eager", **sizes)
    return LlamaForCausalLM(config).eval()


def llama_gradients(dtype):
    """A random Llama with 6 query heads on 2 value heads, recorded by transformers' own attention interface."""
    kept = {}

    def attention(module, q, k, v, mask, scaling, dropout=0.0, **_):
        groups = module.num_key_value_groups
        scores = q @ k.repeat_interleave(groups, 1).mT * scaling + mask
        pattern = scores.softmax(-1)
        z = (pattern @ v.repeat_interleave(groups, 1)).transpose(1, 2).contiguous()
        kept[module.layer_idx] = {"scores": scores, "pattern": pattern, "v": v, "z": z}
        for tensor in (scores, v, z):
            tensor.retain_grad()
        return z, pattern

    AttentionInterface.register("recorded", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("recorded", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model = llama().to(dtype)
    tokens = torch.randint(30, (9, 12), generator=torch.Generator().manual_seed(1))
    plain = model(tokens).logits
    model.set_attn_implementation("recorded")
    output = model(tokens, labels=tokens)
    assert torch.allclose(output.logits, plain, atol=1e-5)
    output.loss.backward()
    cache = {}
    for layer, site in kept.items():
        cache[f"blocks.{layer}.attn.hook_pattern"] = site["pattern"]
        cache[f"blocks.{layer}.attn.hook_v"] = site["v"].transpose(1, 2)
        cache[f"blocks.{layer}.attn.hook_v_grad"] = site["v"].grad.transpose(1, 2)
        cache[f"blocks.{layer}.attn.hook_z_grad"] = site["z"].grad
        cache[f"blocks.{layer}.attn.hook_attn_scores_grad"] = site["scores"].grad
    return cache


def test_the_permutation_null_is_the_mean_over_all_permutations():
    pattern, u, v = causal(3, batch=2, heads=1, pos=4), draw(4, 2, 4, 1, 3), draw(5, 2, 4, 1, 3)
    b = torch.einsum("bihd, bjhd -> bhij", u, v)
    squares = []
    for query in range(4):
        rows = pattern[:, 0, query, : query + 1], b[:, 0, query, : query + 1]
        shuffled = [rows[1][:, list(order)] for order in permutations(range(query + 1))]
        variance = [(rows[0] * s**2).sum(-1) - (rows[0] * s).sum(-1) ** 2 for s in shuffled]
        squares.append(torch.stack(variance).mean(0))
    row = advantage(head(pattern, u, v)).row("advantage_rms", layer=0, head=0)
    assert row["null_permutation"] == pytest.approx(torch.stack(squares).mean().sqrt().item())


def test_routing_that_follows_the_loss_has_gain_and_routing_that_ignores_it_has_none():
    u, v = draw(6, 400, 8, 1, 4), draw(7, 400, 8, 1, 4)
    b = torch.einsum("bihd, bjhd -> bhij", u, v)
    mask = torch.ones(8, 8).triu(1).bool()
    follows = (-b).masked_fill(mask, -torch.inf).softmax(-1)
    row = advantage(head(follows, u, v)).row("attention_correlation", layer=0, head=0)
    assert row["low"] > 0.5
    ignores = advantage(head(causal(8, 400, 1, 8), u, v), level=0.999)
    for statistic in ("attention_correlation", "routing_gain"):
        row = ignores.row(statistic, layer=0, head=0)
        assert row["low"] < 0 < row["high"]
        assert row["null_permutation"] == 0


def test_recording_is_that_of_autograd_and_leaves_the_model_alone():
    model, batch = build_model(TINY_MODEL, seed=1).double(), TINY_TASK.sample(7)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    grads = extract_gradients(model, batch, batch_size=3, twin_seed=None)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not any(hook.has_hooks() for hook in model.hook_points())
    # An offset added to z, which needs no hook backward: the gradient of the loss of each sequence, in bits.
    offset = torch.zeros_like(grads["z_grad", 1]).requires_grad_()
    hooks = [("blocks.1.attn.hook_z", lambda z, hook: z + offset)]
    log_q = model.run_with_hooks(batch.tokens, batch.position, fwd_hooks=hooks).log_softmax(-1)
    loss = (-(batch.posterior * log_q).sum(-1) / LN2).mean(1).sum()
    assert torch.allclose(torch.autograd.grad(loss, offset)[0], grads["z_grad", 1], atol=1e-12)


def test_labels_and_plain_tokens_are_read_with_a_loss_of_the_callers():
    model, batch = build_model(TINY_MODEL, seed=1).double(), TINY_TASK.sample(5)

    labels = torch.zeros(batch.tokens.shape, dtype=torch.long)
    grads = extract_gradients(model, batch.tokens, labels, loss=nats)
    assert advantage(grads).value("law_residual", layer=1, head=0) < 1e-10


def test_bad_input_is_named():
    batch = TINY_TASK.sample(3)
    with pytest.raises(ProbeError, match="has no hooks"):
        extract_gradients(torch.nn.Linear(2, 2), batch)
    mamba = build_model(ModelConfig(architecture="mamba", d_vocab=10, d_out=5, n_ctx=8, d_model=16, positions="none"))
    with pytest.raises(ProbeError, match="Mamba mixes positions without normalised attention weights"):
        extract_gradients(mamba, batch)
    model = build_model(TINY_MODEL)
    with pytest.raises(ProbeError, match="pass target="):
        extract_gradients(model, batch.tokens)
    with pytest.raises(ProbeError, match="requires a gradient"):
        extract_gradients(model.requires_grad_(False), batch)
    with pytest.raises(ProbeError, match="hold no 'z_grad'"):
        advantage(Activations({"blocks.0.attn.hook_pattern": torch.ones(2, 1, 1, 1)}, dict(SITES)))
    with pytest.raises(ProbeError, match="3 query heads can't share 2 value heads"):
        advantages(torch.ones(1, 3, 2, 2), torch.ones(1, 2, 3, 4), torch.ones(1, 2, 2, 4))
