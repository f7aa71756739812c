"""Properties that hold for any parameters that a task accepts."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import HMM, RRXOR, Bijection, Markov, Mess3, Recall, Recurrence, Regression, Task

small = st.integers(2, 6)
length = st.integers(1, 8)
probability = st.floats(0, 1)
scale = st.floats(0.05, 5)


@st.composite
def recalls(draw: st.DrawFn) -> Recall:
    pairs = draw(small)
    sizes = {key: pairs + draw(st.integers(1, 5)) for key in ("keys", "values")}
    return Recall(pairs=pairs, filler=draw(st.integers(0, 4)), queries=draw(small), absent=draw(probability), **sizes)


@st.composite
def bijections(draw: st.DrawFn) -> Bijection:
    symbols = draw(small)
    return Bijection(symbols=symbols, pairs=draw(st.integers(1, symbols)), repeats=draw(probability))


hmms = st.builds(
    HMM,
    states=small,
    symbols=small,
    steps=length,
    stickiness=probability,
    floor=st.integers(1, 16).map(lambda hundredths: hundredths / 100),
    header=st.booleans(),
    target=st.sampled_from(["state", "next"]),
    parameters_seed=st.integers(0, 99),
)
markovs = st.builds(Markov, symbols=small, steps=length, self_transition=probability, dimensions=small, noise=scale)
recurrences = st.builds(Recurrence, modulus=st.sampled_from([2, 3, 5, 7, 11]), steps=length, mixture=probability)
regressions = st.builds(Regression, dimensions=st.integers(1, 6), pairs=length, noise=scale, prior=scale)
mess3s = st.builds(Mess3, steps=length, x=st.floats(0.01, 0.5), a=probability)
causal = st.one_of(hmms, markovs, recurrences, mess3s, st.builds(RRXOR, steps=length))
tasks = st.one_of(causal, recalls(), bijections(), regressions)


@settings(max_examples=150, deadline=None)
@given(tasks, st.integers(0, 2**32))
def test_posteriors_are_distributions(task: Task, seed: int):
    batch = task.sample(4, seed=seed)
    for values in (batch.posterior, batch.belief, batch.entropy):
        assert torch.isfinite(values).all()
    if task.readout == "gaussian":
        assert (batch.posterior[..., 1] > 0).all()
        return
    assert (batch.posterior >= 0).all()
    torch.testing.assert_close(batch.posterior.sum(-1), torch.ones_like(batch.entropy), rtol=0, atol=1e-12)
    assert (batch.entropy >= 0).all()
    assert (batch.entropy <= np.log2(task.d_out) + 1e-12).all()
    assert (batch.posterior.gather(-1, batch.targets[..., None]) > 0).all()


@settings(max_examples=100, deadline=None)
@given(hmms, st.integers(0, 2**32))
def test_stated_rows_are_exact_hundredths(task: HMM, seed: int):
    for rows in task.parameters_of(task.sample(3, seed=seed).tokens.numpy()):
        hundredths = np.rint(100 * rows)
        np.testing.assert_allclose(100 * rows, hundredths, rtol=0, atol=1e-9)
        assert (hundredths.sum(-1) == 100).all()
    assert hundredths.min() >= round(100 * task.floor)


@settings(max_examples=100, deadline=None)
@given(causal, st.integers(0, 2**32), st.data())
def test_an_answer_never_depends_on_what_comes_later(task: Task, seed: int, data: st.DataObject):
    steps = data.draw(st.integers(1, task.steps))
    batch, shorter = task.sample(4, seed=seed), task.replace(steps=steps)
    prefix = batch.tokens[:, : shorter.n_ctx]
    torch.testing.assert_close(shorter.posterior(prefix), batch.posterior[:, :steps], rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(regressions, st.integers(0, 2**32))
def test_regression_never_gets_less_certain_than_the_prior(task: Regression, seed: int):
    batch = task.sample(4, seed=seed)
    prior = task.baselines(batch)["prior"][..., 1]
    assert (batch.posterior[..., 1] <= prior * (1 + 1e-12)).all()
    assert (batch.posterior[..., 1] >= task.noise**2 * (1 - 1e-12)).all()
