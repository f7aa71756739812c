import math

import pytest
import torch
from planted import activations

from probes import ProbeError, query_key_sharpening

N, P = 32, 12
POSITION = torch.arange(2, P).expand(N, P - 2)
CAUSAL = torch.ones(P, P, dtype=torch.bool).tril()


def attention(scores):
    scores = scores.masked_fill(~CAUSAL, -torch.inf)
    return {"scores": scores, "pattern": scores.softmax(-1)}


def test_a_planted_score_gap_is_the_margin_and_gives_the_mass():
    evidence = torch.zeros(N, P - 2, P, dtype=torch.bool)
    evidence[..., 1] = True  # position 1 alone determines every answer
    scores = torch.zeros(N, 1, P, P)
    scores[..., 1] = 3 * math.log(2)  # three bits above the rest
    result = query_key_sharpening(activations(**attention(scores)), evidence, POSITION)
    assert result.value("margin", layer=0, head=0) == pytest.approx(3, abs=1e-5)
    sources = [q + 1 for q in range(2, P)]
    mass = sum(8 / (8 + n - 1) for n in sources) / len(sources)
    assert result.value("mass", layer=0, head=0) == pytest.approx(mass, abs=1e-5)
    assert result.row("mass", layer=0, head=0)["null_uniform"] == pytest.approx(
        sum(1 / n for n in sources) / len(sources)
    )


def test_uniform_attention_has_no_effect():
    evidence = torch.rand(N, P - 2, P, generator=torch.Generator().manual_seed(0)) < 0.3
    result = query_key_sharpening(activations(**attention(torch.zeros(N, 2, P, P))), evidence, POSITION)
    for head in (0, 1):
        assert result.value("margin", layer=0, head=head) == pytest.approx(0, abs=1e-9)
        assert result.value("attention_entropy", layer=0, head=head) == pytest.approx(1, abs=1e-6)
        row = result.row("mass", layer=0, head=head)
        assert row["estimate"] == pytest.approx(row["null_uniform"], abs=1e-6)


def test_sharpening_over_layers_is_the_planted_slope():
    hooks = {}
    evidence = torch.zeros(N, P - 2, P, dtype=torch.bool)
    evidence[..., 0] = True
    for layer in range(3):
        scores = torch.zeros(N, 1, P, P)
        scores[..., 0] = layer * 2 * math.log(2)
        for site, value in attention(scores).items():
            name = "hook_attn_scores" if site == "scores" else "hook_pattern"
            hooks[f"blocks.{layer}.attn.{name}"] = value
    result = query_key_sharpening(hooks, evidence, POSITION)
    assert result.value("margin_per_layer") == pytest.approx(2, abs=1e-5)


def test_bad_input_is_named():
    acts = activations(**attention(torch.zeros(N, 1, P, P)))
    everything = torch.ones(N, P - 2, P, dtype=torch.bool)
    with pytest.raises(ProbeError, match="nothing to separate"):
        query_key_sharpening(acts, everything, POSITION)
    with pytest.raises(ProbeError, match="pass position"):
        query_key_sharpening(acts, everything)
    with pytest.raises(ProbeError, match="hold no 'scores'"):
        query_key_sharpening(activations(k=torch.zeros(N, P, 1, 4)), everything & CAUSAL[2:].flip(-1), POSITION)
