import pytest
import torch
from torch.nn.functional import conv1d, gelu

from interp import build_model
from interp.models.base import ModelConfig
from interp.models.mlp import MLP

SIZES = {"architecture": "mlp", "d_vocab": 9, "d_out": 5, "n_ctx": 20, "n_layers": 3, "d_model": 8}
TOKENS = torch.randint(0, 9, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("window", [1, 2, 5, 20])
def test_a_position_sees_exactly_the_window_that_ends_there(window):
    model = build_model(ModelConfig(**SIZES, window=window), seed=0).double()
    embeddings = torch.randn(1, 12, 8, dtype=torch.float64)

    def run(embedded):
        with model.hooks(fwd_hooks=[("hook_embed", lambda tensor, hook: embedded)]):
            return model(TOKENS[:1])[0].sum(-1)

    influence = torch.autograd.functional.jacobian(run, embeddings)[:, 0].abs().sum(-1)
    expected = torch.ones(12, 12).tril().triu(1 - window).bool()
    assert torch.equal(influence > 0, expected)


def test_without_a_window_or_positions_order_does_not_matter():
    model = build_model(ModelConfig(**SIZES, positions="none"), seed=0)
    order = torch.randperm(12)
    torch.testing.assert_close(model(TOKENS[:, order]), model(TOKENS)[:, order])


@pytest.mark.parametrize("window", [1, 3])
def test_the_layer_is_a_causal_convolution(window):
    layer = MLP(ModelConfig(**SIZES, window=window), window)
    x = torch.randn(2, 12, 8)
    kernel = layer.input.weight.unflatten(1, (window, 8)).mT
    padded = torch.cat([torch.zeros(2, window - 1, 8), x], 1)
    expected = layer.output(gelu(conv1d(padded.mT, kernel).mT))
    torch.testing.assert_close(layer(x), expected)


def test_without_a_window_the_hidden_layer_is_four_times_as_wide():
    assert ModelConfig(**SIZES).d_mlp == 32


@pytest.mark.parametrize("window", [2, 7, 20])
def test_the_window_is_paid_for_with_hidden_width(window):
    plain, flat = (build_model(ModelConfig(**{**SIZES, "d_model": 64}, window=w)) for w in (1, window))
    assert flat.n_parameters == pytest.approx(plain.n_parameters, rel=0.02)
    assert flat.cfg.d_mlp < plain.cfg.d_mlp
