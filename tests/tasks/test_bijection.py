"""Bijection against enumeration of all V! bijections."""

from itertools import permutations

import numpy as np
import pytest
import torch

from tasks import Bijection


def enumerated(symbols: int, pairs: list[tuple[int, int]], key: int) -> np.ndarray:
    """Posterior of the value of ``key``: every bijection that gives the pairs counts once."""
    counts = np.zeros(symbols)
    for bijection in permutations(range(symbols)):
        if all(bijection[k] == v for k, v in pairs):
            counts[bijection[key]] += 1
    return counts / counts.sum()


@pytest.mark.parametrize(
    "task",
    [
        Bijection(symbols=2, pairs=2),
        Bijection(symbols=4, pairs=4),
        Bijection(symbols=5, pairs=3),
        Bijection(symbols=3, pairs=6, repeats=1),
        Bijection(symbols=5, pairs=8, repeats=1),
        Bijection(symbols=5, pairs=5, repeats=0.5),
    ],
)
def test_posterior_equals_enumeration(task):
    batch = task.sample(12, seed=1)
    for tokens, posterior in zip(batch.tokens.tolist(), batch.posterior.numpy(), strict=True):
        pairs = [(k, v - task.symbols) for k, v in zip(tokens[::2], tokens[1::2], strict=True)]
        for i, (key, _) in enumerate(pairs):
            np.testing.assert_allclose(posterior[i], enumerated(task.symbols, pairs[:i], key), rtol=0, atol=1e-12)


def test_values_outside_the_evidence_do_not_matter():
    task = Bijection(symbols=5, pairs=6, repeats=1)
    batch = task.sample(40, seed=2)
    for tokens, evidence, posterior in zip(
        batch.tokens.tolist(), batch.evidence.numpy(), batch.posterior.numpy(), strict=True
    ):
        pairs = [(k, v - task.symbols) for k, v in zip(tokens[::2], tokens[1::2], strict=True)]
        for i, (key, _) in enumerate(pairs):
            shown = [pair for j, pair in enumerate(pairs[:i]) if evidence[i, 2 * j + 1]]
            np.testing.assert_allclose(posterior[i], enumerated(task.symbols, shown, key), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "task", [Bijection(symbols=6, pairs=6, repeats=0.5), Bijection(symbols=8, pairs=12, repeats=1)]
)
def test_only_the_evidence_determines_the_posterior(task):
    """Keys and values are renamed at random, but for the query and the pairs whose value is evidence."""
    batch, rng, renamed = task.sample(60, seed=6), np.random.default_rng(0), 0
    for n, tokens in enumerate(batch.tokens):
        for i in range(task.pairs):
            evident = batch.evidence[n, i, 1::2].numpy()
            keys, values = tokens[::2].numpy(), tokens[1::2].numpy() - task.symbols
            edited = tokens.clone()
            for start, place, fixed in ((0, keys, [*keys[evident], keys[i]]), (1, values, values[evident])):
                rename, free = np.arange(task.symbols), np.setdiff1d(np.arange(task.symbols), fixed)
                rename[free] = rng.permutation(free)
                edited[start::2] = torch.from_numpy(rename[place]) + start * task.symbols
            renamed += (edited != tokens).any()
            torch.testing.assert_close(task.posterior(edited[None])[0, i], batch.posterior[n, i], rtol=0, atol=0)
    assert renamed > 200


def test_posterior_permutes_with_the_names():
    task = Bijection(symbols=6, pairs=9, repeats=1)
    tokens = task.sample(50, seed=7).tokens
    keys, values = torch.tensor([3, 1, 5, 0, 2, 4]), torch.tensor([4, 5, 0, 3, 1, 2])
    renamed = task.posterior(torch.cat([keys, 6 + values])[tokens])
    torch.testing.assert_close(renamed[..., values], task.posterior(tokens), rtol=0, atol=0)


def test_entropy_without_repeats_is_that_of_the_values_left():
    task = Bijection()
    expected = torch.log2(20.0 - torch.arange(19, dtype=torch.float64)).expand(50, -1)
    torch.testing.assert_close(task.sample(50, seed=3).entropy, expected, rtol=0, atol=1e-12)


def test_repeats_is_the_fraction_of_sequences_drawn_with_replacement():
    batch = Bijection(symbols=20, pairs=19, repeats=0.3).sample(4000, seed=4)
    repeated = (batch.tokens[:, ::2].sort(1).values.diff(dim=1) == 0).any(1).double().mean()
    no_collision = np.prod(1 - np.arange(19) / 20)
    assert abs(repeated - 0.3 * (1 - no_collision)) < 4 * np.sqrt(0.3 * 0.7 / 4000)


def test_every_bijection_is_equally_likely():
    batch = Bijection(symbols=3, pairs=3).sample(6000, seed=5)
    keys, values = batch.tokens[:, ::2], batch.tokens[:, 1::2] - 3
    drawn = values.gather(1, keys.argsort(1)) @ torch.tensor([9, 3, 1])
    counts = drawn.unique(return_counts=True)[1]
    assert len(counts) == 6
    assert ((counts - 1000) ** 2 / 1000).sum() < 20.5
