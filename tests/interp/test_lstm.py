import pytest
import torch

from interp import build_model
from interp.models.base import ModelConfig
from interp.models.lstm import Recurrence

CONFIG = ModelConfig(architecture="lstm", d_vocab=9, d_out=5, n_ctx=40, n_layers=2, d_model=12, positions="none")
GATES = ("i", "f", "g", "o")


@pytest.fixture
def lstm():
    torch.manual_seed(0)
    return Recurrence(CONFIG)


def sequences(length, dtype=torch.float32):
    return torch.randn(3, length, 12, generator=torch.Generator().manual_seed(length), dtype=dtype)


def by_lstm_cell(lstm, x):
    """torch's LSTMCell, step by step: hidden and cell states."""
    cell = torch.nn.LSTMCell(12, 12, dtype=x.dtype)
    cell.load_state_dict({name.removesuffix("_l0"): tensor for name, tensor in lstm.cell.state_dict().items()})
    state, states = None, []
    for step in x.unbind(1):
        state = cell(step, state)
        states.append(state)
    return (torch.stack(part, 1) for part in zip(*states, strict=True))


def observed(lstm, x, edits=None):
    """The output, and what the hooks saw."""
    seen, edits = {}, edits or {}
    for name in (*GATES, "cell"):

        def hook(tensor, hook, name=name):
            seen[name] = edits.get(name, lambda t: t)(tensor)
            return seen[name]

        getattr(lstm, f"hook_{name}").add_hook(hook)
    try:
        return lstm(x), seen
    finally:
        for name in (*GATES, "cell"):
            getattr(lstm, f"hook_{name}").remove_hooks()


@pytest.mark.parametrize("length", [1, 2, 17])
def test_fused_explicit_and_torchs_cell_agree(lstm, length):
    x = sequences(length)
    hidden, cells = by_lstm_cell(lstm, x)
    explicit, seen = observed(lstm, x)
    torch.testing.assert_close(lstm(x), hidden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(explicit, hidden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(seen["cell"], cells, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_all_gradients_agree_hooked_and_fused(lstm, dtype, tolerance):
    lstm, x = lstm.to(dtype), sequences(17, dtype).requires_grad_()
    inputs = [x, *lstm.parameters()]
    weights = torch.randn(3, 17, 12, dtype=dtype)
    fused = torch.autograd.grad(lstm(x), inputs, weights)
    explicit = torch.autograd.grad(observed(lstm, x)[0], inputs, weights)
    for a, b in zip(explicit, fused, strict=True):
        assert (a - b).abs().max() < tolerance * max(1.0, b.abs().max().item())


def test_gates_are_computed_from_the_hidden_state_before(lstm):
    x = sequences(6)
    hidden, _ = by_lstm_cell(lstm, x)
    _, seen = observed(lstm, x)
    before = torch.cat([torch.zeros(3, 1, 12), hidden[:, :-1]], 1)
    weights = lstm.cell.state_dict()
    pre = x @ weights["weight_ih_l0"].T + before @ weights["weight_hh_l0"].T
    i, f, g, o = (pre + weights["bias_ih_l0"] + weights["bias_hh_l0"]).chunk(4, -1)
    expected = {"i": i.sigmoid(), "f": f.sigmoid(), "g": g.tanh(), "o": o.sigmoid()}
    for name in GATES:
        torch.testing.assert_close(seen[name], expected[name], rtol=1e-5, atol=1e-5)


def test_with_open_gates_the_cell_adds_up_the_candidates(lstm):
    x = sequences(9)
    hidden, seen = observed(lstm, x, dict.fromkeys(("i", "f", "o"), torch.ones_like))
    torch.testing.assert_close(seen["cell"], seen["g"].cumsum(1))
    torch.testing.assert_close(hidden, seen["g"].cumsum(1).tanh())


def test_with_closed_forget_gates_nothing_is_kept(lstm):
    _, seen = observed(lstm, sequences(9), {"f": torch.zeros_like})
    torch.testing.assert_close(seen["cell"], seen["i"] * seen["g"])


def test_an_edited_cell_is_read_at_its_own_position(lstm):
    def edit(cell):
        cell = cell.clone()
        cell[:, 4] = 0
        return cell

    x = sequences(9)
    change = observed(lstm, x, {"cell": edit})[0] - observed(lstm, x)[0]
    assert change[:, 4].abs().min() > 0
    change[:, 4] = 0
    assert (change == 0).all()


def test_forget_gates_start_open():
    torch.manual_seed(0)
    cell = Recurrence(ModelConfig(**{**CONFIG.to_dict(), "d_model": 400})).cell
    bias = (cell.bias_ih_l0 + cell.bias_hh_l0).detach().unflatten(0, (4, 400)).mean(1)
    torch.testing.assert_close(bias, torch.tensor([0.0, 1.0, 0.0, 0.0]), rtol=0, atol=0.02)
    assert cell.weight_hh_l0.abs().max() <= 400**-0.5


def test_the_block_adds_the_hidden_state_to_the_residual_stream():
    model = build_model(CONFIG, seed=0)
    tokens = torch.randint(0, 9, (2, 8))
    _, cache = model.run_with_cache(tokens)
    for layer, block in enumerate(model.blocks):
        normalized = cache[f"blocks.{layer}.norm.hook_normalized"]
        expected = cache[f"blocks.{layer}.hook_resid_pre"] + block.lstm.cell(normalized)[0]
        torch.testing.assert_close(cache[f"blocks.{layer}.hook_resid_post"], expected, rtol=1e-5, atol=1e-5)
