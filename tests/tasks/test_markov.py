"""The sticky Markov chain against enumeration of all symbol paths."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from tasks import Markov


def test_the_published_transition():
    """0.3 to stay, the rest proportional to 1 / distance on a circle of eight: 1, 1/2, 1/3, 1/4, 1/3, 1/2, 1."""
    weights = np.array([1, 1 / 2, 1 / 3, 1 / 4, 1 / 3, 1 / 2, 1])
    row = np.array([0.3, *(0.7 * weights / weights.sum())])
    np.testing.assert_allclose(Markov().transition, [np.roll(row, i) for i in range(8)], rtol=0, atol=1e-15)
    assert Markov().entropy_floor == pytest.approx(-(row * np.log2(row)).sum(), abs=1e-12)
    assert Markov(self_transition=0.35).transition[3, 3] == 0.35


def test_posterior_equals_enumeration_of_all_paths():
    task = Markov(symbols=3, steps=4, dimensions=2, noise=1.5)
    batch = task.sample(5, seed=1)
    density = [multivariate_normal(mu, 1.5**2).pdf for mu in task.prototypes]
    for i, x in enumerate(batch.tokens.double().numpy()):
        for t in range(task.steps):
            answer = np.zeros(3)
            for path in product(range(3), repeat=t + 2):
                p = np.prod([task.transition[a, b] for a, b in pairwise(path)])
                answer[path[-1]] += p * np.prod([density[y](x[s]) for s, y in enumerate(path[:-1])])
            np.testing.assert_allclose(batch.posterior[i, t], answer / answer.sum(), rtol=0, atol=1e-9)


def test_inputs_show_the_last_symbol_through_noise():
    task = Markov(noise=0.5)
    batch = task.sample(300, seed=2)
    assert torch.equal(batch.hypothesis[:, 1:], batch.targets[:, :-1])
    residual = batch.tokens.double().numpy() - task.prototypes[batch.hypothesis]
    assert residual.std() == pytest.approx(0.5, rel=0.01)
    stay = (batch.hypothesis == batch.targets).double().mean()
    assert abs(stay - 0.3) < 4 * np.sqrt(0.21 / batch.targets.numel())


def test_the_floor_is_below_the_entropy_and_reached_without_noise():
    noisy, clean = Markov(noise=4), Markov(noise=0.01)
    assert noisy.sample(200, seed=3).entropy.mean() > noisy.entropy_floor + 0.01
    assert clean.sample(200, seed=3).entropy.mean() == pytest.approx(clean.entropy_floor, abs=1e-9)


def test_posterior_turns_with_the_circle():
    class Turned(Markov):
        @property
        def prototypes(self):
            return np.roll(Markov().prototypes, 3, axis=0)

    tokens = Markov(noise=4).sample(20, seed=4).tokens
    turned = Turned(noise=4).posterior(tokens)
    torch.testing.assert_close(turned, Markov(noise=4).posterior(tokens).roll(3, -1), rtol=0, atol=1e-12)


def test_memory_helps_when_inputs_are_noisy():
    task = Markov(noise=4)
    batch = task.sample(300, seed=5)
    memoryless = task.baselines(batch)["window 1"]
    divergence = (batch.posterior * (batch.posterior / memoryless).log2()).sum(-1).mean(0)
    assert divergence[0] == pytest.approx(0, abs=1e-12)
    assert divergence[1:].min() > 1e-3
