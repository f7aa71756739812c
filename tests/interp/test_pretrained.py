"""Tiny random language models of every family, against transformers itself and computations by hand."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

from interp.errors import CheckpointError, ModelError
from interp.pretrained import PADDING, load_pretrained
from probes import extract, extract_gradients, key_orthogonality, query_key_sharpening, value_manifold
from probes.extract import as_activations

LAYERS, VOCABULARY, LENGTH, WINDOW = 3, 61, 12, 5
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
CONFIGS = {
    "gpt2": hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64, initializer_range=0.2
    ),
    "gpt_neox": hf.GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "llama": hf.LlamaConfig(**GROUPED),
    "mistral": hf.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "qwen2": hf.Qwen2Config(**GROUPED),
    "qwen3": hf.Qwen3Config(**GROUPED, head_dim=16),
    "phi": hf.PhiConfig(**SIZES),
    "phi3": hf.Phi3Config(**GROUPED),
    "gemma": hf.GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=16),
    "gemma2": hf.Gemma2Config(
        **GROUPED, head_dim=16, attn_logit_softcapping=2.0, sliding_window=WINDOW, query_pre_attn_scalar=16
    ),
}
families = pytest.mark.parametrize("family", CONFIGS)


def raw(family):
    """A transformers model with eager attention, the same at every call."""
    config = copy.deepcopy(CONFIGS[family])
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def models():
    return {family: load_pretrained(raw(family)) for family in CONFIGS}


def prompts(count=6):
    tokens = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    position = torch.tensor([LENGTH // 2, LENGTH - 1]).expand(count, -1)
    posterior = torch.rand(count, 2, VOCABULARY, generator=torch.Generator().manual_seed(2)).double()
    return SimpleNamespace(tokens=tokens, position=position, posterior=posterior / posterior.sum(-1, keepdim=True))


@families
def test_logits_are_those_of_eager_attention(models, family):
    batch = prompts()
    expected = raw(family)(batch.tokens).logits
    assert torch.allclose(models[family](batch.tokens), expected, atol=1e-6)
    at = expected.gather(1, batch.position[..., None].expand(-1, -1, VOCABULARY))
    assert torch.allclose(models[family](batch.tokens, batch.position), at, atol=1e-6)


@families
def test_the_four_invariants_of_attention_on_every_layer(models, family):
    grads = extract_gradients(models[family], prompts(), twin_seed=None)
    scores = extract(models[family], prompts(), ["scores", "z"], twin_seed=None)
    for layer in range(LAYERS):
        pattern, v, u = grads["pattern", layer], grads["v", layer], grads["z_grad", layer]
        assert torch.allclose(scores["scores", layer].softmax(-1), pattern, atol=1e-6)
        per_query_head = v[:, :, torch.arange(4) // (4 // v.shape[2])]
        mixed = torch.einsum("bhqk, bkhd -> bqhd", pattern, per_query_head)
        assert torch.allclose(mixed, scores["z", layer], atol=1e-5)
        b = torch.einsum("bqhd, bkhd -> bhqk", u, per_query_head)
        expected = pattern * (b - (pattern * b).sum(-1, keepdim=True))
        assert torch.allclose(expected, grads["scores_grad", layer], atol=1e-6 * float(expected.abs().max()) + 1e-9)
        assert expected.abs().max() > 0


@families
def test_the_gradient_of_the_pattern_is_the_marginal_loss(models, family):
    batch, found = prompts(), {}

    def keep(tensor, hook):
        found[hook.name, tensor.requires_grad] = tensor.detach().clone()

    values = []
    hooks = [(f"blocks.{layer}.attn.hook_{site}", keep) for layer in range(LAYERS) for site in ("z", "pattern")]
    save = [(f"blocks.{layer}.attn.hook_v", lambda v, hook: values.append(v.detach())) for layer in range(LAYERS)]
    with models[family].hooks(save, hooks):
        models[family](batch.tokens, batch.position).log_softmax(-1)[..., 7].sum().backward()
    models[family].zero_grad()
    for layer, v in enumerate(values):
        u, gradient = (found[f"blocks.{layer}.attn.hook_{site}", False] for site in ("z", "pattern"))
        b = torch.einsum("bqhd, bkhd -> bhqk", u, v[:, :, torch.arange(4) // (4 // v.shape[2])])
        assert torch.allclose(b, gradient, atol=1e-5 * float(b.abs().max()))


def rotated(x, dims, base=10_000.0):
    """Rotary positions by complex numbers: dimension i pairs with i + dims / 2. x: batch pos head d_head."""
    pairs = torch.complex(x[..., : dims // 2], x[..., dims // 2 : dims])
    angle = torch.arange(x.shape[1])[:, None] * base ** (-torch.arange(0, dims, 2) / dims)
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag, x[..., dims:]], -1)


def by_hand(family, lm, layer, residual):
    """q, k, v and the rotated dimensions of one layer, head by head, from the weights of the transformers model."""
    if family == "gpt2":
        block = lm.transformer.h[layer]
        x, w, bias = block.ln_1(residual), block.attn.c_attn.weight.T, block.attn.c_attn.bias
        rows = [[slice(32 * part + 8 * head, 32 * part + 8 * head + 8) for head in range(4)] for part in range(3)]
        dims = 0
    elif family == "gpt_neox":
        block = lm.gpt_neox.layers[layer]
        x, w, bias = block.input_layernorm(residual), *block.attention.query_key_value.parameters()
        rows = [[slice(24 * head + 8 * part, 24 * head + 8 * part + 8) for head in range(4)] for part in range(3)]
        dims = 4
    else:
        block = lm.model.layers[layer]
        x, bias = block.input_layernorm(residual), torch.zeros(64)
        w = torch.cat([getattr(block.self_attn, f"{name}_proj").weight for name in "qkv"])
        rows = [[slice(start + 8 * h, start + 8 * h + 8) for h in range(n)] for start, n in ((0, 4), (32, 2), (48, 2))]
        dims = 8
    return *(torch.stack([x @ w[r].T + bias[r] for r in part], 2) for part in rows), dims


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
@torch.no_grad()
def test_queries_keys_values_and_patterns_are_those_of_the_weights(models, family):
    batch, lm = prompts(), raw(family)
    acts = extract(models[family], batch, ["q", "k", "v", "pattern"], twin_seed=None)
    residuals = lm(batch.tokens, output_hidden_states=True).hidden_states
    for layer in range(LAYERS):
        q, k, v, dims = by_hand(family, lm, layer, residuals[layer])
        for site, expected in (("q", q), ("k", k), ("v", v)):
            assert acts[site, layer].shape == expected.shape
            assert torch.allclose(acts[site, layer], expected, atol=1e-4)
        if dims:
            q, k = rotated(q, dims), rotated(k, dims)
        for head in range(4):
            scores = q[:, :, head] @ k[:, :, head * k.shape[2] // 4].mT / 8**0.5
            future = torch.ones(LENGTH, LENGTH).triu(1).bool()
            pattern = scores.masked_fill(future, -torch.inf).softmax(-1)
            assert torch.allclose(acts["pattern", layer][:, head], pattern, atol=1e-4)


@families
def test_patterns_and_the_residual_stream_are_those_that_transformers_returns(models, family):
    batch = prompts()
    expected = raw(family)(batch.tokens, output_attentions=True, output_hidden_states=True)
    acts = extract(models[family], batch, ["pattern", "resid_pre", "resid_post"], twin_seed=None)
    for layer in range(LAYERS):
        assert torch.allclose(acts["pattern", layer], expected.attentions[layer], atol=1e-6)
        assert torch.allclose(acts["resid_pre", layer], expected.hidden_states[layer], atol=1e-5)
    for layer in range(LAYERS - 1):
        assert torch.equal(acts["resid_post", layer], acts["resid_pre", layer + 1])


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
@torch.no_grad()
def test_attention_adds_its_output_to_the_residual_stream(models, family):
    acts = extract(models[family], prompts(), ["resid_pre", "attn_out", "resid_post"], twin_seed=None)
    lm = raw(family)
    for layer in range(LAYERS):
        middle = acts["resid_pre", layer] + acts["attn_out", layer]
        if family == "gpt2":
            block = lm.transformer.h[layer]
            added = block.mlp(block.ln_2(middle))
        elif family == "llama":
            block = lm.model.layers[layer]
            added = block.mlp(block.post_attention_layernorm(middle))
        else:
            block = lm.model.layers[layer]
            added = block.post_feedforward_layernorm(block.mlp(block.pre_feedforward_layernorm(middle)))
        assert torch.allclose(acts["resid_post", layer], middle + added, atol=1e-5)


@pytest.mark.parametrize("family", [f for f in CONFIGS if f != "gpt2"])
def test_rotation_leaves_the_first_position_and_norms_as_they_are(models, family):
    acts = extract(models[family], prompts(), ["k", "rot_k", "q", "rot_q"], twin_seed=None)
    for site in "qk":
        before, after = acts[site, 1], acts[f"rot_{site}", 1]
        if family == "qwen3":  # its norm comes between the projection and the rotation
            before = before / before.square().mean(-1, keepdim=True).sqrt()
        assert torch.allclose(before[:, 0], after[:, 0], atol=1e-4)
        assert torch.allclose(before.norm(dim=-1), after.norm(dim=-1), rtol=1e-4)
        assert not torch.allclose(before[:, 1:], after[:, 1:], atol=1e-2)


def test_a_sliding_window_masks_what_lies_before_it(models):
    pattern = extract(models["mistral"], prompts(), ["pattern"], twin_seed=None)["pattern", 0]
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    inside = (distance >= 0) & (distance < WINDOW)
    assert (pattern[:, :, ~inside] == 0).all()
    assert (pattern[:, :, inside] > 0).all()


def test_soft_capping_bounds_the_scores(models):
    scores = extract(models["gemma2"], prompts(), ["scores"], twin_seed=None)["scores", 2]
    finite = scores[scores.isfinite()]
    assert finite.abs().max() <= 2.0
    assert finite.abs().max() > 1.0


@pytest.mark.parametrize(
    ("family", "output"),
    [
        ("gpt2", "transformer.h.1.attn.c_proj"),
        ("gpt_neox", "gpt_neox.layers.1.attention.dense"),
        ("llama", "model.layers.1.self_attn.o_proj"),
    ],
)
def test_zeroing_z_of_a_head_is_zeroing_its_slice_of_what_the_output_projection_reads(models, family, output):
    batch, lm, head = prompts(), raw(family), 2

    def zero_head(z, hook):
        z = z.clone()
        z[:, :, head] = 0
        return z

    def zero_slice(module, args):
        keep = torch.ones(32)
        keep[8 * head : 8 * head + 8] = 0
        return (args[0] * keep,)

    edited = models[family].run_with_hooks(batch.tokens, fwd_hooks=[("blocks.1.attn.hook_z", zero_head)])
    lm.get_submodule(output).register_forward_pre_hook(zero_slice)
    assert torch.allclose(edited, lm(batch.tokens).logits, atol=1e-5)
    assert not torch.allclose(edited, models[family](batch.tokens), atol=1e-2)


@families
@torch.no_grad()
def test_an_edit_at_any_hook_takes_effect(models, family):
    model, batch = models[family], prompts(2)
    plain = model(batch.tokens)
    for name in model.hook_dict:
        edited = model.run_with_hooks(batch.tokens, fwd_hooks=[(name, lambda t, hook: t + torch.rand_like(t))])
        assert not torch.allclose(edited, plain, atol=1e-4), name
    assert torch.equal(model(batch.tokens), plain)


@families
@torch.no_grad()
def test_padding_at_either_end_changes_nothing_and_gets_no_attention(models, family):
    model, batch = models[family], prompts(2)
    short = batch.tokens[:1, :8]
    alone = model(short)
    padding = torch.full((1, LENGTH - 8), PADDING)
    for tokens, real in (
        (torch.cat([short, padding], 1), slice(0, 8)),
        (torch.cat([padding, short], 1), slice(LENGTH - 8, LENGTH)),
    ):
        both = torch.cat([tokens, batch.tokens[1:]])
        logits, cache = model.run_with_cache(both)
        assert torch.allclose(logits[0, real], alone[0], atol=1e-5)
        assert torch.allclose(logits[1], model(batch.tokens[1:])[0], atol=1e-5)
        for layer in range(LAYERS):
            pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
            assert pattern.isfinite().all()
            assert (pattern[0, :, :, tokens[0] < 0] == 0).all()
            assert torch.allclose(pattern[0, :, real].sum(-1), torch.ones(()))


def test_an_attention_mask_beside_the_tokens_marks_padding(models):
    batch = prompts(2)
    batch.attention_mask = torch.ones_like(batch.tokens)
    batch.attention_mask[0, 10:] = 0
    acts = extract(models["llama"], batch, ["pattern"])
    assert (acts["pattern", 0][0, :, :, 10:] == 0).all()
    assert (acts.twin["pattern", 0][0, :, :, 10:] == 0).all()
    assert (acts.tokens[0, 10:] == PADDING).all()


def test_gradients_stay_finite_beside_padding(models):
    batch = prompts(2)
    batch.tokens[0, :3] = PADDING
    grads = extract_gradients(models["llama"], batch, twin_seed=None)
    assert all(tensor[tensor.isfinite()].numel() == tensor.numel() for name, tensor in grads.items() if "grad" in name)


@families
def test_the_twin_is_transformers_own_initialisation(models, family):
    twin, again, other = (models[family].reinitialized(seed) for seed in (3, 3, 4))
    before = torch.random.get_rng_state()
    config = copy.deepcopy(CONFIGS[family])
    torch.manual_seed(3)
    expected = hf.AutoModelForCausalLM.from_config(config).state_dict()
    torch.random.set_rng_state(before)
    for name, tensor in twin.lm.state_dict().items():
        assert torch.equal(tensor, expected[name])
        assert torch.equal(tensor, again.lm.state_dict()[name])
    tokens = prompts(2).tokens
    assert not torch.allclose(twin(tokens), models[family](tokens), atol=1e-2)
    assert not torch.allclose(twin(tokens), other(tokens), atol=1e-2)


def test_probes_run_unchanged_in_bfloat16():
    batch = prompts(16)
    acts = extract(load_pretrained(raw("llama").to(torch.bfloat16)), batch)
    evidence = torch.zeros(16, 2, LENGTH, dtype=torch.bool)
    evidence[..., 2] = True
    assert acts["k", 0].dtype == torch.float32
    entropy = torch.rand(16, 2)
    for result in (key_orthogonality(acts), value_manifold(acts, entropy), query_key_sharpening(acts, evidence)):
        assert result.to_frame()["null_init"].notna().any()


def test_a_folder_loads_as_the_model_that_was_saved(tmp_path, models):
    raw("llama").save_pretrained(tmp_path)
    tokens = prompts().tokens
    loaded = load_pretrained(tmp_path)
    assert torch.allclose(loaded(tokens), models["llama"](tokens), atol=1e-6)
    assert loaded.describe()["n_kv_heads"] == 2
    half = load_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.describe()["dtype"] == "bfloat16"


def test_weights_on_disk_give_the_same_activations(tmp_path, models):
    raw("llama").save_pretrained(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    rest = {"model.layers.2": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    offloaded = load_pretrained(tmp_path, device_map=places | rest)
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    batch = prompts()
    acts = extract(offloaded, batch, ["k", "z"], twin_seed=None)
    expected = extract(models["llama"], batch, ["k", "z"], twin_seed=None)
    for name in expected:
        assert torch.allclose(acts[name], expected[name], atol=1e-6)
    assert torch.allclose(acts.logits, expected.logits, atol=1e-6)


def test_activations_on_disk_are_those_in_memory(tmp_path, models):
    batch = prompts(7)
    sites = ["k", "pattern", "resid_post"]
    acts = extract(models["llama"], batch, sites, batch_size=3, to=tmp_path / "acts")
    expected = extract(models["llama"], batch, sites, batch_size=3)
    for on_disk, in_memory in ((acts, expected), (acts.twin, expected.twin)):
        assert on_disk.keys() == in_memory.keys()
        assert all(torch.equal(on_disk[name], in_memory[name]) for name in in_memory)
        assert torch.equal(on_disk.logits, in_memory.logits)
    files = sorted(path.name for path in (tmp_path / "acts").iterdir())
    assert files == sorted([f"{name}.npy" for name in expected] + ["logits.npy", "untrained"])


def test_an_extraction_that_fails_leaves_no_files(tmp_path, models):
    batch = prompts(7)
    batch.tokens[5] = VOCABULARY
    with pytest.raises(ModelError, match="token ids run from"):
        extract(models["llama"], batch, ["k"], batch_size=3, to=tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_loaded_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for source, match in (
        ("nobody/no-such-model", "offline, only local files load"),
        (tmp_path, "holds no causal language model"),
    ):
        with pytest.raises(CheckpointError, match=match) as error:
            load_pretrained(source)
        assert "\n" not in str(error.value)
    lm = raw("llama")
    lm.save_pretrained(tmp_path)
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 of its weights, 'model\.layers\.1\.self_attn\.k_proj"):
        load_pretrained(tmp_path)


def test_a_model_that_hides_its_attention_is_refused():
    config = hf.GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    )
    with pytest.raises(ModelError, match="can't be hooked"):
        load_pretrained(hf.GPTNeoForCausalLM(config))
    with pytest.raises(ModelError, match="has hooks already"):
        load_pretrained(load_pretrained(raw("gpt2")).lm)
    model = load_pretrained(raw("llama"))
    model.lm.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match=r"layers \[0, 1, 2\] bypass"):
        model(prompts().tokens)


def test_probes_take_a_transformer_lens_cache(models):
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    bridge = build_bridge_from_module(raw("gpt2"), "GPT2LMHeadModel", hf_config=copy.deepcopy(CONFIGS["gpt2"]))
    batch = prompts()
    _, cache = bridge.run_with_cache(batch.tokens)
    ours = extract(models["gpt2"], batch, ["k", "pattern"], twin_seed=None)
    for layer in range(LAYERS):
        assert torch.allclose(cache[f"blocks.{layer}.attn.hook_k"], ours["k", layer], atol=1e-5)
    frames = [key_orthogonality(acts, batch.tokens).to_frame() for acts in (as_activations(cache), ours)]
    assert torch.allclose(*(torch.tensor(frame["estimate"].to_numpy()) for frame in frames), atol=1e-6)
