"""Sequences a second of every task, beside a plain Python loop over sequences that computes the same.

The loop draws one sequence at a time and answers each position from its prefix, as the definition of the posterior
reads. Both read the same uniforms, so the loop must give the same tokens and the same posterior: that is checked before
anything is timed. Then what a batch of 64 costs beside a training step of the small transformer. One thread, one run.
"""

import time
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import torch

from interp.models.base import build_model, preset
from interp.recipe import TrainConfig, excess_bits, make_optimizers
from tasks import get_task, task_names
from tasks.base import uniforms

BATCH, LOOPED, MANY, STEPS = 64, 30, 1024, 3


def pick(u, weights):
    """Index drawn from ``weights`` by inverse CDF."""
    return int(np.searchsorted(np.cumsum(weights)[:-1], u, side="right"))


def normal(u):
    return NormalDist().inv_cdf(max(u, 2.0**-53))


def draw_bijection(task, u):
    values = np.argsort(u[: task.symbols])
    keys = np.argsort(u[task.symbols : 2 * task.symbols])[: task.pairs]
    tokens = []
    for key in keys:
        tokens += [int(key), task.symbols + int(values[key])]
    return tokens


def answer_bijection(task, prefix):
    *seen, key = prefix
    known = dict(zip(seen[::2], seen[1::2], strict=True))
    posterior = np.zeros(task.symbols)
    if key in known:
        posterior[known[key] - task.symbols] = 1
    else:
        free = set(range(task.symbols, 2 * task.symbols)) - set(known.values())
        for value in free:
            posterior[value - task.symbols] = 1 / len(free)
    return posterior


def grid_row(u, floor):
    """A Dirichlet row above the floor, in whole hundredths."""
    exponentials = -np.log1p(-u)
    above = np.maximum(exponentials / exponentials.sum() - floor, 0)
    scaled = 100 * (floor + (1 - len(u) * floor) * above / above.sum())
    return np.diff(np.floor(scaled.cumsum() + 0.5), prepend=0).astype(int)


def draw_hmm(task, u):
    rows = u[: -2 * task.steps].reshape(task.states, -1)
    stated = [np.array([grid_row(part, task.floor) for part in half]) for half in np.split(rows, [task.states], 1)]
    low, marker, tokens = round(100 * task.floor), 101 - round(100 * task.floor), []
    for i, matrix in enumerate(stated):
        tokens += [marker + i, *(int(x) - low for x in matrix.ravel())]
    tokens.append(marker + 2)
    state = int(u[-2 * task.steps] * task.states)
    for t in range(task.steps):
        if t:
            state = pick(u[t - 2 * task.steps], stated[0][state] / 100)
        tokens += [marker + 3, marker + 4 + pick(u[t - task.steps], stated[1][state] / 100)]
    return tokens


def answer_hmm(task, prefix):
    low, square, size = round(100 * task.floor), task.states**2, task.states * task.symbols
    transition = (np.array(prefix[1 : square + 1]) + low).reshape(task.states, task.states) / 100
    emission = (np.array(prefix[square + 2 : square + size + 2]) + low).reshape(task.states, task.symbols) / 100
    belief = np.full(task.states, 1 / task.states)
    for t, token in enumerate(prefix[square + size + 4 :: 2]):
        belief = (belief @ transition if t else belief) * emission[:, token - 105 + task.symbols]
        belief /= belief.sum()
    return belief


def draw_process(task, u):
    states, tokens = len(task.stationary), []
    state = pick(u[0], task.stationary)
    for t in range(task.steps):
        symbol, state = divmod(pick(u[t + 1], task.kernels[:, state].ravel()), states)
        tokens.append(symbol)
    return tokens


def answer_process(task, prefix):
    belief = task.stationary
    for symbol in prefix:
        belief = belief @ task.kernels[symbol]
        belief = belief / belief.sum()
    return np.array([(belief @ kernel).sum() for kernel in task.kernels])


def draw_markov(task, u):
    symbol, tokens = int(u[0] * task.symbols), []
    for t in range(task.steps):
        noise = u[task.steps + 1 + t * task.dimensions :][: task.dimensions]
        tokens.append(np.float32(task.prototypes[symbol] + task.noise * np.array([normal(x) for x in noise])))
        symbol = pick(u[t + 1], task.transition[symbol])
    return tokens


def answer_markov(task, prefix):
    belief = np.full(task.symbols, 1 / task.symbols)
    for x in prefix:
        distance = ((x - task.prototypes) ** 2).sum(1) / (2 * task.noise**2)
        belief = belief * np.exp(distance.min() - distance)
        belief = belief / belief.sum() @ task.transition
    return belief


def draw_recall(task, u):
    widths = (task.keys, task.values, task.filler, task.queries, task.queries)
    by_key, by_value, filler, absence, which, _ = np.split(u, np.cumsum(widths))
    keys, values, store = np.argsort(by_key).tolist(), np.argsort(by_value).tolist(), task.keys + task.values
    tokens = []
    for key, value in zip(keys[: task.pairs], values, strict=False):
        tokens += [store, key, store + 1, task.keys + value]
    tokens += [store + 3 + int(16 * x) for x in filler]
    for absent, x in zip(absence, which, strict=True):
        spare = task.keys - task.pairs
        key = keys[task.pairs + int(x * spare)] if absent < task.absent else keys[int(x * task.pairs)]
        tokens += [store + 2, key]
    return tokens


def answer_recall(task, prefix):
    stored = prefix[: 4 * task.pairs]
    known = dict(zip(stored[1::4], stored[3::4], strict=True))
    posterior = np.zeros(task.values)
    if prefix[-1] in known:
        posterior[known[prefix[-1]] - task.keys] = 1
    else:
        used = set(known.values())
        for value in range(task.values):
            if task.keys + value not in used:
                posterior[value] = 1 / (task.values - task.pairs)
    return posterior


def draw_recurrence(task, u):
    p = task.modulus
    a, b, x = (int(v * p) for v in u[1:4])
    tokens = [x]
    for t in range(1, task.steps):
        x = (a * x + b) % p if u[0] < task.mixture else int(u[3 + t] * p)
        tokens.append(x)
    return tokens


def answer_recurrence(task, prefix):
    p = task.modulus
    posterior = np.full(p, (1 - task.mixture) / p ** (len(prefix) + 1))
    for a in range(p):
        for b in range(p):
            if all((a * x + b) % p == y for x, y in pairwise(prefix)):
                posterior[(a * prefix[-1] + b) % p] += task.mixture / p**3
    return posterior / posterior.sum()


def draw_regression(task, u):
    d, pairs, normals = task.dimensions, task.pairs, [normal(x) for x in u]
    weights, noise, inputs, tokens = np.array(normals[:d]), normals[d : d + pairs], normals[d + pairs :], []
    for i in range(pairs):
        x = np.float32(inputs[i * d : (i + 1) * d])
        y = task.prior * weights @ x.astype(float) + task.noise * noise[i]
        tokens += [np.float32([*x, 0, 0]), np.float32([0] * d + [y, 1])]
    return tokens


def answer_regression(task, prefix):
    d = task.dimensions
    x = np.array(prefix[0::2], dtype=float)[:, :d]
    y = np.array([token[d] for token in prefix[1::2]], dtype=float)
    past, now = x[:-1], x[-1]
    precision = past.T @ past / task.noise**2 + np.eye(d) / task.prior**2
    mean = np.linalg.solve(precision, past.T @ y / task.noise**2)
    return np.array([mean @ now, task.noise**2 + now @ np.linalg.solve(precision, now)])


LOOPS = {
    "bijection": (draw_bijection, answer_bijection),
    "hmm": (draw_hmm, answer_hmm),
    "markov": (draw_markov, answer_markov),
    "mess3": (draw_process, answer_process),
    "recall": (draw_recall, answer_recall),
    "recurrence": (draw_recurrence, answer_recurrence),
    "regression": (draw_regression, answer_regression),
    "rrxor": (draw_process, answer_process),
}


def loop(task, rows, position):
    """Sequences one by one: tokens, posterior and entropy of each answer."""
    draw, answer = LOOPS[task.name]
    found = []
    for u in rows:
        tokens, posterior, entropy = draw(task, u), [], []
        for end in position:
            p = answer(task, tokens[: end + 1])
            posterior.append(p)
            if task.readout == "categorical":
                entropy.append(-(p[p > 0] * np.log2(p[p > 0])).sum())
            else:
                entropy.append(np.log2(2 * np.pi * np.e * p[1]) / 2)
        found.append((tokens, posterior, entropy))
    return found


def best(action, repeats):
    """Shortest of a few runs, in seconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


def training_step(task):
    """Seconds of one step of the small transformer on a batch that is already drawn."""
    model = build_model(preset("transformer", "small", task))
    optimizers, batch = make_optimizers(model, TrainConfig()), task.sample(BATCH)

    def action():
        excess_bits(model(batch.tokens, batch.position), batch, "posterior", task.readout).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    action()
    return best(action, STEPS)


def compare(name):
    """One line of the table."""
    task = get_task(name)
    rows, batch = uniforms(0, 0, LOOPED, task.n_uniforms), task.sample(LOOPED)
    position = batch.position[0].tolist()
    for i, (tokens, posterior, entropy) in enumerate(loop(task, rows, position)):
        np.testing.assert_allclose(batch.tokens[i], tokens, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(batch.posterior[i], posterior, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(batch.entropy[i], entropy, rtol=1e-6, atol=1e-9)
    slow = LOOPED / best(lambda: loop(task, rows, position), 3)
    fast = MANY / best(lambda: task.sample(MANY), 7)
    drawing, step = 1000 * best(lambda: task.sample(BATCH), 10), 1000 * training_step(task)
    figures = f"{slow:10.0f} {fast:10.0f} {fast / slow:7.0f}x {drawing:9.1f} {step:14.0f} {drawing / step:7.1%}"
    print(f"{name:12} {figures}", flush=True)


def main():
    """Print the table."""
    torch.set_num_threads(1)
    print(f"{'':12} {'sequences a second':>21} {'':8} {'ms a batch of 64':>24}")
    print(f"{'task':12} {'loop':>10} {'task':>10} {'ratio':>8} {'drawing':>9} {'training step':>14} {'share':>7}")
    for name in task_names():
        compare(name)


if __name__ == "__main__":
    main()
