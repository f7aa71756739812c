import math
from dataclasses import replace

import pytest
import torch
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge.sources.native.model import NativeModel
from transformers import GPT2Config, GPT2Model, GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding, apply_rotary_pos_emb

from interp import build_model
from interp.models.base import ModelConfig
from interp.models.transformer import rotate

CONFIG = ModelConfig(d_vocab=11, d_out=7, n_ctx=13, n_layers=3, d_model=24, n_heads=3, init_std=0.3)
TOKENS = torch.randint(0, 11, (4, 13), generator=torch.Generator().manual_seed(0))
POSITIONS = ["learned", "rotary", "none"]


def model_with(**changes):
    """A model whose norms have weights that are not all one."""
    model = build_model(replace(CONFIG, **changes), seed=1)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if ".norm." in name:
            torch.nn.init.normal_(parameter, mean=1.0 if name.endswith("weight") else 0.0, std=0.3)
    return model


def copy(parameters):
    with torch.no_grad():
        for target, source in parameters:
            target.copy_(source)


def as_gpt2(model):
    cfg = model.cfg
    theirs = GPT2Model(
        GPT2Config(
            vocab_size=cfg.d_vocab,
            n_positions=cfg.n_ctx,
            n_embd=cfg.d_model,
            n_layer=cfg.n_layers,
            n_head=cfg.n_heads,
            activation_function="gelu",
        )
    ).eval()
    copy((p, torch.zeros_like(p)) for name, p in theirs.named_parameters() if name.endswith("bias"))
    copy([(theirs.wte.weight, model.embed.weight), (theirs.wpe.weight, model.pos_embed.weight)])
    norms = [(theirs.ln_f, model.ln_final)]
    for h, block in zip(theirs.h, model.blocks, strict=True):
        norms += [(h.ln_1, block.ln1), (h.ln_2, block.ln2)]
        fused = torch.cat([block.attn.query.weight, block.attn.key.weight, block.attn.value.weight])
        copy([(h.attn.c_attn.weight, fused.T), (h.attn.c_proj.weight, block.attn.output.weight.T)])
        copy([(h.mlp.c_fc.weight, block.mlp.input.weight.T), (h.mlp.c_proj.weight, block.mlp.output.weight.T)])
    for target, source in norms:
        copy([(target.weight, source.norm.weight), (target.bias, source.norm.bias)])
    return theirs


def as_native(model):
    cfg = model.cfg
    theirs = NativeModel(
        TransformerBridgeConfig(
            d_model=cfg.d_model,
            d_head=cfg.d_head,
            n_heads=cfg.n_heads,
            n_layers=cfg.n_layers,
            n_ctx=cfg.n_ctx,
            d_vocab=cfg.d_vocab,
            d_vocab_out=cfg.d_out,
            d_mlp=4 * cfg.d_model,
            act_fn="gelu",
            normalization_type="RMS",
            positional_embedding_type="standard",
            eps=1e-5,
        )
    )
    copy((p, torch.zeros_like(p)) for name, p in theirs.named_parameters() if name.endswith("bias"))
    copy([(theirs.tok_embed.weight, model.embed.weight), (theirs.pos.weight, model.pos_embed.weight)])
    copy([(theirs.ln_out.weight, model.ln_final.norm.weight), (theirs.head.weight, model.unembed.weight)])
    for layer, block in zip(theirs.layers, model.blocks, strict=True):
        copy([(layer.ln1.weight, block.ln1.norm.weight), (layer.ln2.weight, block.ln2.norm.weight)])
        for name, source in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output")):
            copy([(getattr(layer.attn, name).weight, getattr(block.attn, source).weight)])
        copy([(layer.mlp.fc_in.weight, block.mlp.input.weight), (layer.mlp.fc_out.weight, block.mlp.output.weight)])
    return theirs


def test_parity_with_gpt2():
    model = model_with(norm="layer")
    output = as_gpt2(model)(TOKENS, output_hidden_states=True)
    _, cache = model.run_with_cache(TOKENS)
    torch.testing.assert_close(cache["ln_final.hook_normalized"], output.last_hidden_state, rtol=1e-5, atol=1e-5)
    for layer in range(3):
        resid = cache[f"blocks.{layer}.hook_resid_pre"]
        torch.testing.assert_close(resid, output.hidden_states[layer], rtol=1e-5, atol=1e-5)


def test_parity_with_transformer_lens():
    model = model_with(norm="rms")
    logits = as_native(model)(TOKENS)
    torch.testing.assert_close(model(TOKENS), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("d_head", [2, 8, 12])
def test_rotary_parity_with_gpt_neox(d_head):
    config = GPTNeoXConfig(
        hidden_size=3 * d_head, num_attention_heads=3, rotary_pct=1.0, rope_theta=10_000, max_position_embeddings=50
    )
    q, k = torch.randn(2, 4, 50, 3, d_head)
    cos, sin = GPTNeoXRotaryEmbedding(config)(q, torch.arange(50)[None])
    assert cos.shape[-1] == d_head
    for ours, theirs in zip((rotate(q), rotate(k)), apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", POSITIONS)
def test_invariants_of_attention(positions):
    model, kept = model_with(positions=positions), {}

    def keep(name):
        def hook(tensor, hook):
            kept[name, hook.layer()] = tensor

        return hook

    names = {"q": "rot_q", "k": "rot_k"} if positions == "rotary" else {}
    forward = {name: names.get(name, name) for name in ("q", "k", "v", "z", "attn_scores", "pattern")}
    backward = {"dz": "z", "dpattern": "pattern", "dscores": "attn_scores"}
    with model.hooks(
        fwd_hooks=[(f"blocks.{i}.attn.hook_{hook}", keep(name)) for name, hook in forward.items() for i in range(3)],
        bwd_hooks=[(f"blocks.{i}.attn.hook_{hook}", keep(name)) for name, hook in backward.items() for i in range(3)],
    ):
        model(TOKENS).logsumexp(-1).sum().backward()
    for layer in range(3):
        q, k, v, z, scores, pattern = (kept[name, layer].detach() for name in forward)
        u, dpattern, dscores = (kept[name, layer] for name in backward)
        future = torch.ones(13, 13).triu(1).bool()
        expected = torch.einsum("bihd, bjhd -> bhij", q, k) / math.sqrt(8)
        torch.testing.assert_close(scores, expected.masked_fill(future, -torch.inf), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(pattern, scores.softmax(-1))
        torch.testing.assert_close(z, torch.einsum("bhij, bjhd -> bihd", pattern, v), rtol=1e-5, atol=1e-6)
        b = torch.einsum("bihd, bjhd -> bhij", u, v)
        torch.testing.assert_close(dpattern, b, rtol=1e-4, atol=1e-6)
        advantage = pattern * (b - (pattern * b).sum(-1, keepdim=True))
        torch.testing.assert_close(dscores, advantage, rtol=1e-4, atol=1e-6)
        assert dscores.abs().max() > 1e-4


@pytest.mark.parametrize("positions", POSITIONS)
def test_gradients_do_not_come_from_the_future(positions):
    model = build_model(replace(CONFIG, positions=positions, readin="vectors"), seed=1)
    vectors = torch.randn(1, 13, 11)
    influence = torch.autograd.functional.jacobian(lambda x: model(x)[0].sum(-1), vectors)[:, 0].abs().sum(-1)
    assert torch.equal(influence > 0, torch.ones(13, 13).tril().bool())


def test_one_layer_without_positions_reads_a_set():
    model = model_with(positions="none", n_layers=1)
    shuffled = torch.cat([TOKENS[:, torch.randperm(12)], TOKENS[:, 12:]], 1)
    torch.testing.assert_close(model(shuffled)[:, -1], model(TOKENS)[:, -1], rtol=1e-4, atol=1e-5)


def test_rotary_scores_depend_on_distance_alone():
    q, k = torch.randn(2, 8)
    turned_q, turned_k = (rotate(vector.expand(1, 20, 1, 8))[0, :, 0] for vector in (q, k))
    scores = turned_q @ turned_k.T
    for distance in range(-19, 20):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)


def test_initialisation_scales():
    model = build_model(replace(CONFIG, d_model=192, init_std=0.02), seed=0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "blocks" in name:
            expected = 0.02 / math.sqrt(6) if name.endswith("output.weight") else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
