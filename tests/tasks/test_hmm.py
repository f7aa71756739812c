"""HMM filtering against enumeration of all paths, hmmlearn, and published figures."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hmmlearn.hmm import CategoricalHMM

from tasks import HMM


def spelled(task: HMM, tokens: list[int]) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """T, E and the observations, read from the printed names of the tokens."""
    words = [task.vocabulary[token] for token in tokens]
    size = task.states**2
    assert words[0] == "[T]"
    assert words[size + 1] == "[E]"
    end = size + 2 + task.states * task.symbols
    assert words[end] == "[SEP]"
    assert words[end + 1 :: 2] == ["[OBS]"] * task.steps
    transition = np.array(words[1 : size + 1], dtype=float).reshape(task.states, task.states)
    emission = np.array(words[size + 2 : end], dtype=float).reshape(task.states, task.symbols)
    return transition, emission, [int(word.removeprefix("o")) for word in words[end + 2 :: 2]]


def enumerated(start: np.ndarray, transition: np.ndarray, emission: np.ndarray, seen: list[int | None]) -> np.ndarray:
    """p(s_t | observations) by summing over all paths; None where an observation was not seen."""
    belief = np.zeros(len(start))
    for path in product(range(len(start)), repeat=len(seen)):
        p = start[path[0]]
        for before, after in pairwise(path):
            p *= transition[before, after]
        for state, symbol in zip(path, seen, strict=True):
            p *= 1 if symbol is None else emission[state, symbol]
        belief[path[-1]] += p
    return belief / belief.sum()


SMALL = [
    HMM(states=3, symbols=4, steps=5),
    HMM(states=2, symbols=2, steps=6, stickiness=0.85),
    HMM(states=3, symbols=3, steps=4, floor=0.1, target="next"),
    HMM(states=3, symbols=2, steps=5, header=False, stickiness=0.5, target="next"),
]


def parameters(task: HMM, tokens: torch.Tensor) -> list[tuple[np.ndarray, np.ndarray, list[int]]]:
    """T, E and observations of each sequence; without a header T and E are the task's own."""
    if task.header:
        return [spelled(task, row) for row in tokens.tolist()]
    transition, emission = task.parameters_of(tokens.numpy())
    return [(transition[0], emission[0], row) for row in tokens.tolist()]


@pytest.mark.parametrize("task", SMALL)
def test_posterior_equals_enumeration_of_all_paths(task):
    batch = task.sample(6, seed=1)
    start = np.full(task.states, 1 / task.states)
    for i, (transition, emission, symbols) in enumerate(parameters(task, batch.tokens)):
        for t in range(task.steps):
            belief = enumerated(start, transition, emission, symbols[: t + 1])
            np.testing.assert_allclose(batch.belief[i, t], belief, rtol=0, atol=1e-12)
            answer = belief if task.target == "state" else belief @ transition @ emission
            np.testing.assert_allclose(batch.posterior[i, t], answer, rtol=0, atol=1e-12)


@pytest.mark.parametrize("task", SMALL)
@pytest.mark.parametrize("window", [0, 1, 2, 3])
def test_marginal_window_is_exact_given_what_it_sees(task, window):
    batch = task.sample(4, seed=2)
    found = task.windowed_posterior(batch.tokens, window, "marginal")
    start = np.full(task.states, 1 / task.states)
    for i, (transition, emission, symbols) in enumerate(parameters(task, batch.tokens)):
        for t in range(task.steps):
            seen = [symbol if s > t - window else None for s, symbol in enumerate(symbols[: t + 1])]
            belief = enumerated(start, transition, emission, seen)
            answer = belief if task.target == "state" else belief @ transition @ emission
            np.testing.assert_allclose(found[i, t], answer, rtol=0, atol=1e-12)


@pytest.mark.parametrize("task", [HMM(), HMM(steps=50, states=4, symbols=7), HMM(stickiness=0.9), HMM(header=False)])
def test_belief_equals_hmmlearn(task):
    batch = task.sample(3, seed=3)
    for i, (transition, emission, symbols) in enumerate(parameters(task, batch.tokens)):
        oracle = CategoricalHMM(n_components=task.states)
        oracle.startprob_ = np.full(task.states, 1 / task.states)
        oracle.transmat_, oracle.emissionprob_, oracle.n_features = transition, emission, task.symbols
        for t in range(task.steps):
            belief = oracle.predict_proba(np.array(symbols[: t + 1])[:, None])[-1]
            np.testing.assert_allclose(batch.belief[i, t], belief, rtol=0, atol=1e-9)


def test_the_published_layout():
    task = HMM()
    assert (task.d_vocab, task.n_ctx, task.d_out) == (105, 93, 5)
    transition, emission, _ = zip(*(spelled(task, row) for row in task.sample(200).tokens.tolist()), strict=True)
    for rows in (np.array(transition), np.array(emission)):
        hundredths = np.rint(100 * rows)
        assert (hundredths.sum(-1) == 100).all()
        assert hundredths.min() == 5


def test_sticky_rows_lie_on_the_grid_from_zero():
    task = HMM(stickiness=0.9)
    assert task.vocabulary[0] == "0.00"
    assert task.d_vocab == 110
    rows = np.rint(100 * np.array([spelled(task, row)[0] for row in task.sample(200).tokens.tolist()]))
    assert (rows.sum(-1) == 100).all()
    stay = rows.diagonal(axis1=1, axis2=2)
    assert stay.min() >= 90
    assert stay.max() <= 98.5


def test_without_a_header_parameters_are_fixed_and_unstated():
    task = HMM(header=False)
    assert (task.d_vocab, task.n_ctx) == (5, 20)
    first, second = (task.parameters_of(task.sample(2, seed=seed).tokens.numpy()) for seed in (0, 1))
    other = task.replace(parameters_seed=1).parameters_of(task.sample(2).tokens.numpy())
    for a, b, c in zip(first, second, other, strict=True):
        assert (a == b).all()
        assert (a[0] == a[1]).all()
        assert (a != c).any()
        np.testing.assert_allclose(a.sum(-1), 1, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("window", "kl", "curve_mae", "tolerance"),
    [(1, 0.123, 0.125, 0.02), (2, 0.014, 0.018, 0.004), (3, 0.002, 0.006, 0.002)],
)
def test_windows_score_as_published(window, kl, curve_mae, tolerance):
    """An earlier measurement of the same filters on the authors' task, whose rounding onto the grid is not known."""
    task = HMM()
    batch = task.sample(3000, seed=4)
    answer = task.windowed_posterior(batch.tokens, window)
    divergence = (batch.posterior * (batch.posterior / answer).log2()).sum(-1).mean()
    curve = (torch.special.entr(answer).sum(-1) / np.log(2)).mean(0)
    assert 0 < divergence == pytest.approx(kl, abs=tolerance)
    assert (curve - batch.entropy.mean(0)).abs().mean() == pytest.approx(curve_mae, abs=tolerance)


def test_uniform_scores_as_published():
    batch = HMM().sample(3000, seed=4)
    assert (np.log2(5) - batch.entropy.mean(0)).mean() == pytest.approx(0.410, rel=0.03)


def test_a_window_as_long_as_the_sequence_is_exact_and_stickiness_needs_it():
    for task in (HMM(), HMM(stickiness=0.9)):
        batch = task.sample(300, seed=5)
        for window in (20, 30):
            exact = task.windowed_posterior(batch.tokens, window)
            torch.testing.assert_close(exact, batch.posterior, rtol=0, atol=1e-12)
        scores = []
        for window in range(7):
            answer = task.windowed_posterior(batch.tokens, window)
            scores.append((batch.posterior * (batch.posterior / answer).log2()).sum(-1).mean())
        assert (np.diff(scores) < 0).all()
        assert (scores[6] > 0.04) == (task.stickiness == 0.9)


def test_next_answers_are_the_observations_that_follow():
    task = HMM(header=False, target="next")
    batch = task.sample(50, seed=6)
    assert torch.equal(batch.targets[:, :-1], batch.tokens[:, 1:])


def test_posterior_permutes_with_the_states_and_ignores_the_names_of_symbols():
    task = HMM(states=4, symbols=3, steps=10)
    tokens = task.sample(30, seed=7).tokens
    states, symbols = torch.tensor([2, 0, 3, 1]), torch.tensor([1, 2, 0])
    renamed = tokens.clone()
    renamed[:, 1:17] = tokens[:, 1:17].reshape(-1, 4, 4)[:, states][:, :, states].flatten(1)
    renamed[:, 18:30] = tokens[:, 18:30].reshape(-1, 4, 3)[:, states][:, :, symbols].flatten(1)
    first = task.d_vocab - 3
    renamed[:, 32::2] = symbols.argsort()[tokens[:, 32::2] - first] + first
    torch.testing.assert_close(task.posterior(renamed), task.posterior(tokens)[..., states], rtol=0, atol=1e-12)


def test_expected_entropy_of_a_frozen_state_never_rises():
    """Weighted over all observation sequences, so without sampling error."""
    task = HMM(states=3, symbols=3, steps=5, stickiness=1, header=False)
    tokens = torch.tensor(list(product(range(3), repeat=5)))
    _, emission = task.parameters_of(tokens.numpy())
    probability = np.prod(emission[0][:, tokens], axis=-1).mean(0)
    assert probability.sum() == pytest.approx(1, abs=1e-12)
    entropy = torch.special.entr(task.posterior(tokens)).sum(-1).numpy()
    expected = probability @ entropy
    assert (np.diff([np.log(3), *expected]) < -1e-6).all()
