"""Mess3 and RRXOR against enumeration of hidden paths and the published machines."""

from itertools import product

import numpy as np
import pytest
import torch

from tasks import RRXOR, Mess3

MESS3_A = [
    [0.6 * 0.7, 0.2 * 0.15, 0.2 * 0.15],
    [0.6 * 0.15, 0.2 * 0.7, 0.2 * 0.15],
    [0.6 * 0.15, 0.2 * 0.15, 0.2 * 0.7],
]
"""T^(A) of Shai et al. 2024, appendix, at x = 0.15, a = 0.6: [[a y, b x, b x], [a x, b y, b x], [a x, b x, b y]]."""


def enumerated(kernels: np.ndarray, stationary: np.ndarray, symbols: list[int]) -> np.ndarray:
    """p(state after the symbols | symbols) by summing over all state paths."""
    belief = np.zeros(len(stationary))
    for path in product(range(len(stationary)), repeat=len(symbols) + 1):
        steps = zip(symbols, path[:-1], path[1:], strict=True)
        belief[path[-1]] += stationary[path[0]] * np.prod([kernels[x, i, j] for x, i, j in steps])
    return belief / belief.sum()


def test_the_machines_are_the_published_ones():
    mess3 = Mess3()
    np.testing.assert_allclose(mess3.kernels[0], MESS3_A, rtol=0, atol=1e-15)
    rotated = [np.roll(mess3.kernels[0], k, axis=(0, 1)) for k in range(3)]
    np.testing.assert_allclose(mess3.kernels, rotated, rtol=0, atol=1e-15)
    np.testing.assert_allclose(mess3.stationary, np.full(3, 1 / 3), rtol=0, atol=1e-12)
    rrxor = RRXOR()
    np.testing.assert_allclose(rrxor.kernels.sum((0, 2)), 1, rtol=0, atol=0)
    np.testing.assert_allclose(rrxor.stationary, [1 / 3, 1 / 6, 1 / 6, 1 / 6, 1 / 6], rtol=0, atol=1e-12)
    assert rrxor.entropy_floor == pytest.approx(2 / 3)


@pytest.mark.parametrize("task", [Mess3(steps=5), Mess3(steps=4, x=0.05, a=0.85), RRXOR(steps=5)])
def test_belief_and_predictive_equal_enumeration(task):
    batch = task.sample(8, seed=1)
    for i, tokens in enumerate(batch.tokens.tolist()):
        for t in range(task.steps):
            belief = enumerated(task.kernels, task.stationary, tokens[: t + 1])
            np.testing.assert_allclose(batch.belief[i, t], belief, rtol=0, atol=1e-12)
            expected = [belief @ kernel.sum(1) for kernel in task.kernels]
            np.testing.assert_allclose(batch.posterior[i, t], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("task", [Mess3(steps=5), RRXOR(steps=5)])
@pytest.mark.parametrize("window", [0, 1, 2, 5])
def test_window_is_exact_given_what_it_sees(task, window):
    batch = task.sample(8, seed=2)
    found = task.windowed_posterior(batch.tokens, window)
    for i, tokens in enumerate(batch.tokens.tolist()):
        for t in range(task.steps):
            belief = enumerated(task.kernels, task.stationary, tokens[max(t + 1 - window, 0) : t + 1])
            expected = [belief @ kernel.sum(1) for kernel in task.kernels]
            np.testing.assert_allclose(found[i, t], expected, rtol=0, atol=1e-12)


def test_rrxor_has_the_published_number_of_beliefs():
    """36 belief states, the stationary one included (Shai et al. 2024, section 4)."""
    task = RRXOR(steps=20)
    batch = task.sample(4000, seed=3)
    beliefs = np.concatenate([task.stationary[None], batch.belief.flatten(0, 1).numpy()])
    assert len(np.unique(beliefs.round(9), axis=0)) == 36


def test_rrxor_sequences_are_two_bits_and_their_exclusive_or():
    tokens = RRXOR(steps=12).sample(500, seed=4).tokens
    holds = tokens[:, 2:] == (tokens[:, :-2] ^ tokens[:, 1:-1])
    assert torch.stack([holds[:, phase::3].all(1) for phase in range(3)]).any(0).all()


def test_mess3_permutes_with_its_symbols():
    task = Mess3()
    tokens = task.sample(100, seed=5).tokens
    for order in ([1, 2, 0], [1, 0, 2]):
        order = torch.tensor(order)
        renamed = task.posterior(order[tokens])
        torch.testing.assert_close(renamed[..., order], task.posterior(tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize("task", [Mess3(), RRXOR()])
def test_sequences_are_as_likely_as_the_machine_says(task):
    """Chi-square over the first three tokens; the 0.9999 quantile is 58 at 26 degrees of freedom, 30 at 7."""
    n = 8000
    tokens = task.sample(n, seed=6).tokens[:, :3].numpy()
    statistic = 0.0
    for word in product(range(task.d_vocab), repeat=3):
        state = task.stationary
        for symbol in word:
            state = state @ task.kernels[symbol]
        statistic += ((tokens == word).all(1).sum() - n * state.sum()) ** 2 / (n * state.sum())
    assert statistic < (58 if task.d_vocab == 3 else 30)
