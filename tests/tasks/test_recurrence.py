"""Modular recurrence against enumeration in exact fractions."""

from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from tasks import Recurrence


def enumerated(p: int, mixture: Fraction, symbols: list[int]) -> tuple[list[Fraction], list[Fraction]]:
    """Posterior over (no program, programs), and the predictive, by enumerating hypotheses."""
    random = (1 - mixture) * Fraction(1, p) ** len(symbols)
    weights, answer = [random], [random / p] * p
    for a, b in product(range(p), repeat=2):
        gives = all((a * x + b) % p == y for x, y in pairwise(symbols))
        weight = gives * mixture * Fraction(1, p**2) * Fraction(1, p)
        weights.append(weight)
        answer[(a * symbols[-1] + b) % p] += weight
    total = sum(weights)
    return [w / total for w in weights], [w / total for w in answer]


@pytest.mark.parametrize(
    "task",
    [
        Recurrence(modulus=2, steps=5),
        Recurrence(modulus=5, steps=6, mixture=0.25),
        Recurrence(modulus=7, steps=5, mixture=1),
        Recurrence(modulus=5, steps=4, mixture=0),
        Recurrence(modulus=17, steps=6, horizon=4),
    ],
)
def test_belief_and_predictive_equal_enumeration(task):
    batch = task.sample(8, seed=1)
    for i, tokens in enumerate(batch.tokens.tolist()):
        for t in range(batch.position.shape[1]):
            weights, answer = enumerated(task.modulus, Fraction(task.mixture), tokens[: t + 1])
            np.testing.assert_allclose(batch.belief[i, t], np.array(weights, float), rtol=0, atol=1e-12)
            np.testing.assert_allclose(batch.posterior[i, t], np.array(answer, float), rtol=0, atol=1e-12)


def test_half_of_the_sequences_are_programs():
    batch = Recurrence().sample(2000, seed=2)
    program = batch.belief[:, -1, 0] < 0.5
    assert abs(program.double().mean() - 0.5) < 4 * np.sqrt(0.25 / 2000)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])


def test_long_sequences_do_not_overflow():
    """After 400 symbols the odds of a program are 17^397 or 0."""
    weight = Recurrence(steps=400).sample(50, seed=3).belief[:, -1, 0]
    assert torch.isfinite(weight).all()
    assert set(weight.tolist()) == {0.0, 1.0}


def test_a_horizon_asks_for_the_first_answers_only():
    whole, cut = Recurrence().sample(20, seed=4), Recurrence(horizon=5).sample(20, seed=4)
    assert torch.equal(whole.tokens, cut.tokens)
    assert torch.equal(cut.position, torch.arange(5).expand(20, -1))
    for field in ("targets", "posterior", "entropy", "belief"):
        assert torch.equal(getattr(cut, field), getattr(whole, field)[:, :5])
    assert Recurrence(horizon=5).replace(**Recurrence.variants["no_horizon"]) == Recurrence()


@pytest.mark.parametrize("scale", [1, 3])
@pytest.mark.parametrize("shift", [0, 5])
def test_posterior_follows_an_affine_renaming(scale, shift):
    """x -> s x + d turns the program (a, b) into (a, s b + d - a d), so programs stay programs."""
    task = Recurrence()
    tokens = task.sample(100, seed=5).tokens
    rename = (scale * torch.arange(17) + shift) % 17
    renamed = task.posterior(rename[tokens])
    torch.testing.assert_close(renamed[..., rename], task.posterior(tokens), rtol=0, atol=1e-12)


def test_expected_entropy_of_the_program_never_rises():
    """Weighted over all sequences of five symbols mod 3, so without sampling error."""
    task = Recurrence(modulus=3, steps=5)
    tokens = np.array(list(product(range(3), repeat=5)))
    belief, _ = task.infer(tokens)
    probability = np.array(
        [
            0.5 / 3**5
            + 0.5 / 27 * sum(all((a * x + b) % 3 == y for x, y in pairwise(s)) for a in range(3) for b in range(3))
            for s in tokens.tolist()
        ]
    )
    assert probability.sum() == pytest.approx(1, abs=1e-12)
    entropy = -np.where(belief > 0, belief * np.log2(np.where(belief > 0, belief, 1)), 0).sum(-1)
    assert (np.diff(probability @ entropy) < 0).all()
