"""What every task promises, whatever its sequences are."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
import torch

from interp.errors import ModelError
from interp.models.base import ModelConfig, build_model
from tasks import Task, TaskError, get_task, task_names

TASKS = {
    "bijection": get_task("bijection"),
    "bijection, repeats": get_task("bijection", symbols=6, pairs=9, repeats=1),
    "hmm": get_task("hmm"),
    "hmm, next": get_task("hmm", target="next", states=3, symbols=4, steps=8),
    "hmm, sticky": get_task("hmm", stickiness=0.9),
    "hmm, no header": get_task("hmm", header=False, parameters_seed=3),
    "hmm, no header, sticky, next": get_task("hmm", header=False, stickiness=0.8, target="next", floor=0),
    "markov": get_task("markov", steps=20, dimensions=4, noise=2),
    "mess3": get_task("mess3"),
    "recall": get_task("recall"),
    "recall, small": get_task("recall", pairs=8, keys=16, values=16, filler=4, absent=0.5),
    "recall, all stored": get_task("recall", pairs=5, keys=5, values=5, absent=0),
    "recurrence": get_task("recurrence"),
    "recurrence, horizon": get_task("recurrence", modulus=5, steps=9, horizon=4, mixture=0.3),
    "regression": get_task("regression"),
    "regression, one weight": get_task("regression", dimensions=1, pairs=5, noise=2, prior=3),
    "rrxor": get_task("rrxor"),
}
EVERY = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
MIXED = {key: task for key, task in TASKS.items() if task.name != "bijection"}
MIXABLE = pytest.mark.parametrize("task", MIXED.values(), ids=MIXED)
"""Tasks of which a mixture of two sequences often is one; bijection has this test in its own file."""


def at(values: torch.Tensor, query: torch.Tensor) -> np.ndarray:
    """One query of each sequence."""
    return values[torch.arange(len(values)), query].numpy()


def calibration_pvalue(task: Task, batch, posterior: torch.Tensor, seed: int = 0) -> float:
    """Probability of labels this far from ``posterior``, from one random query a sequence (so independent).

    Gaussian: Kolmogorov-Smirnov on the standardised label. Categorical: one class is drawn from the posterior, and
    whether the label is that class is a Bernoulli with its probability; chi-square over ten bins of it.
    """
    rng = np.random.default_rng(seed)
    query = torch.from_numpy(rng.integers(batch.position.shape[1], size=len(batch)))
    answer, label = at(posterior, query), at(batch.targets, query)
    if task.readout == "gaussian":
        return scipy.stats.kstest((label - answer[:, 0]) / np.sqrt(answer[:, 1]), "norm").pvalue
    chosen = (rng.random((len(batch), 1)) > answer.cumsum(1)[:, :-1]).sum(1)
    p = answer[np.arange(len(batch)), chosen]
    bins = np.minimum((10 * p).astype(int), 9)
    excess, variance = (np.bincount(bins, x, 10) for x in ((label == chosen) - p, p * (1 - p)))
    assert excess[variance < 1e-9] == pytest.approx(0, abs=1e-6)
    used = variance >= 1e-9
    return scipy.stats.chi2.sf((excess[used] ** 2 / variance[used]).sum(), max(used.sum(), 1))


def test_every_registered_task_is_here():
    assert {task.name for task in TASKS.values()} == set(task_names())


@EVERY
def test_batches_have_the_declared_form(task):
    batch = task.sample(5, seed=1)
    width = () if task.readin == "tokens" else (task.d_vocab,)
    assert batch.tokens.shape == (5, task.n_ctx, *width)
    queries = batch.position.shape[1]
    assert batch.posterior.shape == (5, queries, task.d_out)
    assert batch.evidence.shape == (5, queries, task.n_ctx)
    assert batch.belief.shape[:2] == batch.targets.shape == batch.entropy.shape == (5, queries)
    assert batch.position.diff(dim=1).min() > 0
    assert batch.position.min() >= 0
    assert batch.position.max() < task.n_ctx
    assert len(task.vocabulary) == len(set(task.vocabulary)) == task.d_vocab
    if task.readin == "tokens":
        assert batch.tokens.min() >= 0
        assert batch.tokens.max() < task.d_vocab
    assert task.replace(**task.parameters()) == task


@EVERY
def test_posteriors_are_distributions_and_entropies_are_theirs(task):
    batch = task.sample(200, seed=2)
    if task.readout == "gaussian":
        mean, variance = batch.posterior.numpy().transpose(2, 0, 1)
        expected = scipy.stats.norm(mean, np.sqrt(variance)).entropy() / np.log(2)
    else:
        assert batch.posterior.min() >= 0
        torch.testing.assert_close(batch.posterior.sum(-1), torch.ones_like(batch.entropy), rtol=0, atol=1e-12)
        expected = scipy.stats.entropy(batch.posterior.numpy(), base=2, axis=-1)
        assert batch.entropy.min() >= 0
        assert (batch.posterior.gather(-1, batch.targets[..., None]) > 0).all()
    np.testing.assert_allclose(batch.entropy, expected, rtol=0, atol=1e-12)


@EVERY
@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_sequence_depends_on_seed_and_index_only(task, size):
    whole = task.sample(64, seed=5)
    for start in range(0, 64 - size + 1, max(size, 21)):
        part = task.sample(size, seed=5, start=start)
        for field in ("tokens", "targets", "evidence", "hypothesis"):
            assert torch.equal(getattr(part, field), getattr(whole, field)[start : start + size])
        for field in ("posterior", "belief", "entropy"):
            expected = getattr(whole, field)[start : start + size]
            torch.testing.assert_close(getattr(part, field), expected, rtol=0, atol=1e-12)
    assert not torch.equal(task.sample(64, seed=6).tokens, whole.tokens)


@EVERY
def test_workers_draw_the_same_sequences(task):
    class Sequences(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return task.sample(1, seed=5, start=index).tokens[0]

    loader = torch.utils.data.DataLoader(Sequences(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    assert torch.equal(torch.cat(list(loader)), task.sample(6, seed=5).tokens)


def test_another_process_draws_the_same_sequences():
    script = (
        "import hashlib\nfrom tasks import get_task, task_names\nfor name in task_names():\n"
        "    print(hashlib.sha256(get_task(name).sample(3, seed=9, start=4).tokens.numpy().tobytes()).hexdigest())"
    )
    digests = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    drawn = [get_task(name).sample(3, seed=9, start=4).tokens.numpy() for name in task_names()]
    assert digests == [hashlib.sha256(tokens.tobytes()).hexdigest() for tokens in drawn]


@EVERY
def test_cross_entropy_of_the_posterior_is_its_mean_entropy(task):
    batch = task.sample(2000, seed=7)
    if task.readout == "gaussian":
        mean, variance = batch.posterior.numpy().transpose(2, 0, 1)
        surprise = -scipy.stats.norm(mean, np.sqrt(variance)).logpdf(batch.targets) / np.log(2)
    else:
        surprise = -batch.posterior.gather(-1, batch.targets[..., None])[..., 0].log2().numpy()
    excess = (surprise - batch.entropy.numpy()).mean(1)
    assert abs(excess.mean()) <= 4 * excess.std(ddof=1) / np.sqrt(len(excess)) + 1e-12


@EVERY
def test_labels_are_distributed_as_the_posterior(task):
    batch = task.sample(4000, seed=8)
    assert calibration_pvalue(task, batch, batch.posterior) > 1e-3


@EVERY
def test_the_calibration_test_finds_a_posterior_that_is_off(task):
    batch = task.sample(4000, seed=8)
    if task.readout == "gaussian":
        wrong = batch.posterior * torch.tensor([1, 1.4])
    else:
        sharpened = batch.posterior**4
        wrong = 0.7 * sharpened / sharpened.sum(-1, keepdim=True) + 0.3 / task.d_out
    assert calibration_pvalue(task, batch, wrong) < 1e-6


def could_occur(task: Task, tokens: torch.Tensor) -> torch.Tensor:
    """Which sequences the task can produce, of those that a mixture of two sequences might break."""
    if task.name == "rrxor":
        xor = tokens[:, 2:] == (tokens[:, 1:-1] ^ tokens[:, :-2])
        return torch.stack([xor[:, phase::3].all(1) for phase in range(3)]).any(0)
    if task.name == "recall":
        stored = tokens[:, : 4 * task.pairs]
        return torch.stack([stored[:, i::4].sort(1).values.diff(dim=1).ne(0).all(1) for i in (1, 3)]).all(0)
    return torch.ones(len(tokens), dtype=torch.bool)


@MIXABLE
def test_only_the_evidence_determines_the_posterior(task):
    batch, other = task.sample(200, seed=9), task.sample(200, seed=10)
    changed, tried = 0, 0
    for query in range(batch.position.shape[1]):
        mask = batch.evidence[:, query] if task.readin == "tokens" else batch.evidence[:, query, :, None]
        kept = torch.where(mask, batch.tokens, other.tokens)
        usable = could_occur(task, kept)
        found = task.posterior(kept[usable])[:, query]
        torch.testing.assert_close(found, batch.posterior[usable, query], rtol=0, atol=1e-9)
        broken = torch.where(mask, other.tokens, batch.tokens)
        usable = could_occur(task, broken)
        moved = (task.posterior(broken[usable])[:, query] - batch.posterior[usable, query]).abs() > 1e-9
        changed, tried = changed + moved.any(-1).sum(), tried + usable.sum()
        assert usable.any()
    assert changed > 0.4 * tried


@EVERY
def test_the_posterior_of_given_tokens(task):
    batch = task.sample(20, seed=11)
    torch.testing.assert_close(task.posterior(batch.tokens), batch.posterior, rtol=0, atol=1e-12)
    with pytest.raises(TaskError, match=f"has {task.n_ctx} positions, got {task.n_ctx - 1}"):
        task.posterior(batch.tokens[:, 1:])


@EVERY
def test_baselines_have_the_form_of_the_posterior_and_score_worse(task):
    batch = task.sample(500, seed=12)
    baselines = task.baselines(batch)
    assert ("uniform" in baselines) == (task.readout == "categorical")
    for predictive in baselines.values():
        assert predictive.shape == batch.posterior.shape
        if task.readout == "categorical":
            torch.testing.assert_close(predictive.sum(-1), torch.ones_like(batch.entropy), rtol=0, atol=1e-12)
            kl = scipy.stats.entropy(batch.posterior.numpy(), predictive.numpy(), axis=-1)
            assert kl.min() > -1e-12
            assert kl.mean() > 0
        else:
            assert (predictive[..., 1] >= batch.posterior[..., 1] - 1e-12).all()


BAD = [
    ("bijection", {"symbols": 1}, "symbols must be at least 2"),
    ("bijection", {"pairs": 21}, "lower pairs to 20"),
    ("bijection", {"repeats": 1.5}, "repeats is a fraction"),
    ("hmm", {"states": 0}, "states must be at least 2, got 0"),
    ("hmm", {"symbols": 1}, "symbols must be at least 2"),
    ("hmm", {"steps": 0}, "steps must be at least 1"),
    ("hmm", {"symbols": 25}, "25 symbols at probability 0.05 or more sum to over 1; lower floor to 0.04"),
    ("hmm", {"floor": 0.21}, "sum to over 1"),
    ("hmm", {"floor": 0.015}, "whole number of hundredths"),
    ("hmm", {"floor": -0.01}, "whole number of hundredths"),
    ("hmm", {"floor": float("nan")}, "whole number of hundredths"),
    ("hmm", {"stickiness": 1.1}, "stickiness is a probability"),
    ("hmm", {"target": "states"}, "target is 'state' or 'next', got 'states'"),
    ("hmm", {"parameters_seed": -1}, "parameters_seed must be at least 0"),
    ("hmm", {"stikiness": 0.5}, "did you mean 'stickiness'"),
    ("markov", {"symbols": 1}, "symbols must be at least 2"),
    ("markov", {"steps": 0}, "steps must be at least 1"),
    ("markov", {"dimensions": 0}, "dimensions must be at least 1"),
    ("markov", {"noise": -1}, "noise is a standard deviation and must be positive, got -1"),
    ("markov", {"self_transition": 2}, "self_transition is a probability"),
    ("mess3", {"steps": 0}, "steps must be at least 1"),
    ("mess3", {"x": 0}, "x must lie above 0 and not above 0.5, got 0"),
    ("mess3", {"a": -0.1}, "a is a probability"),
    ("rrxor", {"steps": 0}, "steps must be at least 1"),
    ("recall", {"pairs": 0}, "pairs must be at least 1"),
    ("recall", {"keys": 64}, "64 different keys and one spare for absent keys, got keys=64; raise it to 65"),
    ("recall", {"values": 10, "absent": 0}, "64 different values, got values=10; raise it to 64"),
    ("recall", {"filler": -1}, "filler must be at least 0"),
    ("recall", {"queries": 0}, "queries must be at least 1"),
    ("recall", {"absent": 2}, "absent is the probability"),
    ("recurrence", {"modulus": 15}, "modulus must be prime for a x \\+ b to permute, got 15"),
    ("recurrence", {"modulus": 1}, "modulus must be prime"),
    ("recurrence", {"steps": 0}, "steps must be at least 1"),
    ("recurrence", {"mixture": -0.5}, "mixture is the probability"),
    ("recurrence", {"horizon": 17}, "horizon counts answers, 1 to steps=16 or 0 for all, got 17"),
    ("regression", {"noise": -0.5}, "noise is a standard deviation and must be positive, got -0.5"),
    ("regression", {"noise": 0}, "noise is a standard deviation and must be positive"),
    ("regression", {"prior": 0}, "prior is a standard deviation"),
    ("regression", {"dimensions": 0}, "dimensions must be at least 1"),
]


@pytest.mark.parametrize(("name", "parameters", "message"), BAD)
def test_each_bad_parameter_gets_one_clear_line(name, parameters, message):
    with pytest.raises(TaskError, match=message) as caught:
        get_task(name, **parameters)
    assert "\n" not in str(caught.value)


def test_each_bad_type_gets_one_clear_line():
    """In a process of its own, without the type checker of the tests, which would speak first."""
    script = (
        "import sys\nfrom tasks import TaskError, get_task\n"
        "for name, bad in (('hmm', {'header': 1}), ('regression', {'pairs': 2.5}), ('recall', {'absent': 'some'})):\n"
        "    try:\n        get_task(name, **bad)\n    except TaskError as error:\n        print(error)"
    )
    lines = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert lines.splitlines() == [
        "hmm: header must be true or false, got 1",
        "regression: pairs must be an integer, got 2.5",
        "recall: absent must be a number, got 'some'",
    ]


def test_more_steps_than_the_model_reads_get_one_clear_line():
    task = get_task("hmm", steps=3)
    model = build_model(
        ModelConfig(d_vocab=task.d_vocab, d_out=task.d_out, n_ctx=task.n_ctx, n_layers=1, d_model=8, n_heads=1)
    )
    with pytest.raises(ModelError, match="longer than the model's context n_ctx = 59") as caught:
        model(task.replace(steps=4).sample(1).tokens)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("request_", [{"batch": 0}, {"batch": 1, "seed": -1}, {"batch": 1, "start": -1}])
def test_impossible_requests(request_):
    with pytest.raises(TaskError, match="must be at least"):
        get_task("mess3").sample(**request_)


def test_impossible_tokens_are_refused():
    with pytest.raises(TaskError, match="probability 0 under the task"):
        get_task("rrxor", steps=5).posterior(torch.tensor([[0, 0, 1, 0, 0]]))
    with pytest.raises(TaskError, match="no program gives"):
        get_task("recurrence", modulus=5, steps=4, mixture=1).posterior(torch.tensor([[0, 0, 1, 1]]))


def test_tokens_of_another_layout_are_refused():
    hmm, recall = get_task("hmm"), get_task("recall")
    row, symbol, value = (task.sample(1).tokens for task in (hmm, hmm, recall))
    row[0, 1] += 1
    symbol[0, 54] = 3
    value[0, 3] = 0
    for task, tokens, message in (
        (hmm, row, "must sum to 1"),
        (hmm, symbol, "by a symbol"),
        (recall, value, "by a value"),
    ):
        with pytest.raises(TaskError, match=message):
            task.posterior(tokens)
    with pytest.raises(TaskError, match="token ids run from 0 to 2, got 0 to 3"):
        get_task("mess3", steps=2).posterior(torch.tensor([[0, 3]]))
    twice = recall.sample(1).tokens
    twice[0, 7] = twice[0, 3]
    with pytest.raises(TaskError, match="a value twice"):
        recall.posterior(twice)


def test_an_unknown_task_is_answered_with_the_closest():
    with pytest.raises(TaskError, match="did you mean 'recurrence'"):
        get_task("recurence")
