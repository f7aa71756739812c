"""Associative recall against enumeration of all stores."""

from itertools import permutations

import numpy as np
import pytest
import torch

from tasks import Recall


def words(task: Recall, tokens: list[int]) -> tuple[dict[str, str], list[str]]:
    """What was stored, and which keys were asked for, read from the printed names of the tokens."""
    names = [task.vocabulary[token] for token in tokens]
    store, asked = {}, []
    while names:
        if names[0] == "STORE":
            assert names[2] == "SEP"
            store[names[1]] = names[3]
            names = names[4:]
        elif names[0] == "QUERY":
            asked.append(names[1])
            names = names[2:]
        else:
            assert names[0].startswith("~")
            names = names[1:]
    return store, asked


@pytest.mark.parametrize(
    "task",
    [Recall(pairs=2, keys=4, values=5, queries=3, filler=2, absent=0.5), Recall(pairs=3, keys=3, values=4, absent=0)],
)
def test_posterior_equals_enumeration_of_all_maps(task):
    """Every one-to-one map of keys to values that agrees with the store counts once."""
    batch = task.sample(15, seed=1)
    for i, tokens in enumerate(batch.tokens.tolist()):
        store, asked = words(task, tokens)
        assert len(store) == task.pairs
        for query, key in enumerate(asked):
            counts = np.zeros(task.values)
            for images in permutations(range(task.values), task.keys):
                if all(f"v{images[int(k[1:])]}" == v for k, v in store.items()):
                    counts[images[int(key[1:])]] += 1
            np.testing.assert_allclose(batch.posterior[i, query], counts / counts.sum(), rtol=0, atol=1e-12)
            if key in store:
                assert store[key] == f"v{batch.targets[i, query]}"


def test_the_published_size():
    task = Recall()
    batch = task.sample(50, seed=2)
    assert (task.pairs, task.keys, task.values) == (64, 256, 256)
    absent = batch.entropy > 0
    torch.testing.assert_close(batch.entropy[absent], torch.full_like(batch.entropy[absent], np.log2(192)))
    for tokens, unknown in zip(batch.tokens.tolist(), absent.tolist(), strict=True):
        store, asked = words(task, tokens)
        assert len(store) == len(set(store.values())) == 64
        assert [key not in store for key in asked] == unknown


def test_absent_is_the_fraction_of_absent_queries():
    absent = Recall(pairs=8, keys=16, values=16, absent=0.3, queries=10).sample(1000, seed=3).entropy > 0
    assert abs(absent.double().mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 10_000)
    assert (Recall(absent=0).sample(20).entropy == 0).all()
    assert (Recall(absent=1).sample(20).entropy > 7).all()


def test_evidence_and_hypotheses_name_the_pair():
    task = Recall(pairs=8, keys=16, values=16, filler=4)
    batch = task.sample(20, seed=4)
    known = batch.entropy == 0
    shown = torch.where(batch.evidence, batch.hypothesis[:, None], -1).max(-1).values
    assert torch.equal(shown[known], batch.targets[known])
    assert (batch.evidence.sum(-1)[known] == 3).all()
    assert (batch.evidence.sum(-1)[~known] == 2 * 8 + 1).all()


def test_posterior_permutes_with_the_names():
    task = Recall(pairs=4, keys=9, values=7, filler=3)
    tokens = task.sample(50, seed=5).tokens
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randperm(9, generator=generator), torch.randperm(7, generator=generator)
    rename = torch.cat([keys, 9 + values, torch.arange(16, task.d_vocab)])
    torch.testing.assert_close(task.posterior(rename[tokens])[..., values], task.posterior(tokens), rtol=0, atol=0)


def test_no_binding_knows_the_values_but_not_which():
    task = Recall(pairs=8, keys=16, values=16, absent=0.25)
    batch = task.sample(30, seed=6)
    stored = torch.zeros(30, 16, dtype=torch.bool).scatter(1, batch.tokens[:, 3:32:4] - 16, True)
    expected = torch.where(stored, 0.75 / 8, 0.25 / 8).double()
    found = task.baselines(batch)["no binding"]
    torch.testing.assert_close(found, expected[:, None].expand(-1, 8, -1), rtol=0, atol=1e-12)
