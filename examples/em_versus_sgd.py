# %% [markdown]
# # Is attention's value update an M-step that makes learning faster?
# Paper II (arXiv 2512.22473, section 6) trains one head on one sequence of a sticky Markov chain, once by plain SGD and
# once with ten times the rate on the values ("EM"), and finds EM 2.3 times faster: it has SGD's final loss after about
# 430 of 1000 steps. What is missing is the control: ten times the rate elsewhere, and SGD with a rate that was chosen.
# Here are both, for 20 seeds at once, with 500 steps of the chain instead of 2000 (the authors' own note uses 500 too).

# %%
import time
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from scipy.stats import bootstrap
from torch.nn.functional import cross_entropy, one_hot, pad, scaled_dot_product_attention

from tasks import get_task

torch.set_num_threads(1)
began = time.monotonic()
STEPS, LENGTH, SEEDS, D_K, D_V, LR = 1000, 500, 20, 10, 15, 0.01
SHAPES = {"Q": (20, D_K), "K": (20, D_K), "V": (20, D_V), "O": (D_V, 8)}
GOALS = (2.97, 2.95, 2.93)  # bits held out; 2.95 was settled on after seeing seeds 0 to 5, so other seeds are scored


# %% One head for all seeds at once: weights are `seed in out`, sequences `seed pos d`.
def draw(seeds, self_transition=0.3):
    """Inputs and targets, ``2 seed pos ...``: the training and a held-out sequence of each seed's own prototypes."""
    tasks = [get_task("markov", steps=LENGTH, self_transition=self_transition, parameters_seed=s) for s in seeds]
    batches = [task.sample(2, seed=s) for task, s in zip(tasks, seeds, strict=True)]
    return torch.stack([b.tokens for b in batches], 1), torch.stack([b.targets for b in batches], 1)


def weights(seeds):
    generators = [torch.Generator().manual_seed(s) for s in seeds]
    return {n: torch.stack([0.1 * torch.randn(shape, generator=g) for g in generators]) for n, shape in SHAPES.items()}


def attend(w, x, values):
    width = -(-values.shape[-1] // 16) * 16  # the fused kernel wants one width, and exploits causality
    q, k, v = (pad(t, (0, width - t.shape[-1]))[:, None] for t in (x @ w["Q"], x @ w["K"], values))
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=D_K**-0.5)[:, 0, :, : values.shape[-1]]


def bits(w, x, y):
    """Cross-entropy of the next symbol, in bits a step, for each seed."""
    logits = attend(w, x, x @ w["V"]) @ w["O"]
    return cross_entropy(logits.mT, y, reduction="none").mean(1) / np.log(2)


def run(data, seeds, rates, steps, goal=None, on=0, m_step=None):
    """Losses in bits, ``2 step seed``: training and held-out sequence; a seed stops once row ``on`` meets ``goal``."""
    (x, y), w = data, weights(seeds)
    curves, live = np.full((2, steps + 1, len(seeds)), np.nan), torch.arange(len(seeds))
    for step in range(steps + 1):
        part = {n: t[live].requires_grad_() for n, t in w.items()}
        if m_step:
            part["V"] = m_step(part, x[0, live], y[0, live])
        loss = bits(part, x[0, live], y[0, live])
        with torch.no_grad():
            now = torch.stack([loss, bits(part, x[1, live], y[1, live])])
        curves[:, step, live.numpy()] = now.numpy()
        names = [n for n in part if rates[n]]
        gradients = torch.autograd.grad(loss.sum() * np.log(2), [part[n] for n in names])
        for name, gradient in zip(names, gradients, strict=True):
            w[name][live] -= rates[name] * gradient
        stays = torch.isfinite(now).all(0) if goal is None else torch.isfinite(now).all(0) & (now[on] > goal[live])
        live = live[stays]
        if not len(live):
            break
    return curves


def rates(lr, tenfold=""):
    """One learning rate, ten times as high for the matrices named."""
    return {name: lr * (10 if name in tenfold else 1) for name in SHAPES}


# %% Two closed forms of the M-step, for a quadratic bound of the cross-entropy (Boehning 1992: Hessian below 1/2).
def targets(w, context, y):
    """The context that would minimise the bound at each query."""
    error = (context @ w["O"]).softmax(-1) - one_hot(y, 8)
    return context - 2 * error @ torch.linalg.pinv(w["O"])


@torch.no_grad()
def prototypes(w, x, y):
    """Responsibility-weighted: W_V minimises sum_ij alpha_ij |W_V x_j - target_i|^2, a mixture."""
    scores = x @ w["Q"] @ (x @ w["K"]).mT * D_K**-0.5
    pattern = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf).softmax(-1)
    mixed = pattern @ x
    second_moment = x.mT * pattern.sum(1)[:, None] @ x
    return torch.linalg.solve(second_moment, mixed.mT @ targets(w, mixed @ w["V"], y))


@torch.no_grad()
def least_squares(w, x, y):
    """Exact: W_V minimises the bound itself, sum_i |sum_j alpha_ij W_V x_j - target_i|^2."""
    mixed = attend(w, x, x)
    return torch.linalg.lstsq(mixed, targets(w, mixed @ w["V"], y)).solution


# %% What is counted: steps to a loss, as the median over seeds with its bootstrap interval.
def steps_to(curve, goal):
    met = curve <= goal
    return np.where(met.any(0), met.argmax(0).astype(float), np.inf)


def median(values, digits=0):
    if np.ptp(values) == 0:
        return f"{values[0]:.{digits}f} in all seeds"
    low, high = bootstrap((values,), np.median, n_resamples=2000, rng=0, method="percentile").confidence_interval
    return f"{np.median(values):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def published(seeds, variants, self_transition=0.3):
    """Steps of each variant to the training loss that plain SGD has after all its steps."""
    data = draw(seeds, self_transition)
    plain = run(data, seeds, rates(LR), STEPS)
    print(
        f"Plain SGD after {STEPS} steps: {plain[0, -1].mean():.3f} bits in training, {plain[1, -1].mean():.3f} held out"
    )
    curves, needed, lines = {"plain SGD": plain}, {}, []
    for name, (rate, steps, m_step) in variants.items():
        curves[name] = curve = run(data, seeds, rate, steps, torch.from_numpy(plain[0, -1]), m_step=m_step)
        needed[name] = steps_to(curve[0], plain[0, -1]) + bool(m_step)
        arrive = np.isfinite(needed[name]).all()
        line = {"variant": name, "steps": median(needed[name]) if arrive else "not in all seeds"}
        line["times faster"] = median(STEPS / needed[name], 2) if arrive else ""
        last = np.isfinite(curve[1]).sum(0) - 1
        for where, losses in zip(("training", "held-out"), curve, strict=True):
            line[f"{where} bits there"] = f"{losses[last, np.arange(len(seeds))].mean():.3f}"
        lines.append(line)
    print(pd.DataFrame(lines).to_string(index=False))
    return curves, needed


EM = "EM: values x 10"
VARIANTS = {
    EM: (rates(LR, "V"), STEPS, None),
    "output alone x 10": (rates(LR, "O"), STEPS, None),
    "queries alone x 10": (rates(LR, "Q"), STEPS, None),
    "keys alone x 10": (rates(LR, "K"), STEPS, None),
    "queries and keys x 10": (rates(LR, "QK"), STEPS, None),
    "everything x 10": (rates(10 * LR), STEPS, None),
    "everything x 100": (rates(100 * LR), STEPS, None),
    "M-step, responsibility-weighted": ({**rates(LR), "V": 0}, 30, prototypes),
    "M-step, least squares": ({**rates(LR), "V": 0}, 30, least_squares),
}
pd.set_option("display.width", 200, "display.max_columns", 12, "display.max_colwidth", 60)
floor = get_task("markov").entropy_floor
print(f"Self-transition 0.3, as stated; entropy floor {floor:.3f} bits; {SEEDS} seeds.")
curves, needed = published(range(SEEDS), VARIANTS)

# %% The authors' construction renormalises twice, which makes 0.3 into 0.35.
print("\nSelf-transition 0.35, as constructed by the authors; five seeds.")
published(range(5), {EM: VARIANTS[EM]}, 0.35)

# %% The missing control: a base rate chosen for each schedule on six seeds, scored on 20 that nothing was chosen on.
limit, grid = 150, (0.3, 1.0, 3.0)
parts = {part: (seeds, draw(seeds)) for part, seeds in {"choose": range(100, 106), "score": range(20, 40)}.items()}


def held_out(part, lr, tenfold):
    seeds, data = parts[part]
    return run(data, seeds, rates(lr, tenfold), limit, torch.full((len(seeds),), min(GOALS)), on=1)[1]


lines, tuned = [], {}
for name, tenfold in {"one rate": "", EM: "V", "queries and keys x 10": "QK"}.items():
    found = {lr: {part: held_out(part, lr, tenfold) for part in parts} for lr in grid}
    for goal in GOALS:
        cost = {lr: np.minimum(steps_to(found[lr]["choose"], goal), 10 * limit).mean() for lr in grid}
        lr = min(cost, key=cost.get)
        tuned[name, goal] = steps = steps_to(found[lr]["score"], goal)
        arrive = np.isfinite(steps)
        line = {"schedule": name, "held-out bits": goal, "base rate": lr, "seeds that arrive": arrive.sum()}
        lines.append(line | {"steps of those": median(steps[arrive])})
print("\nEach schedule at the base rate that was fastest on six seeds, scored on 20 others.")
print(pd.DataFrame(lines).to_string(index=False))

# %% Curves, with the entropy floor.
figure = go.Figure()
for name, curve in curves.items():
    for where, dash, losses in (("training", "solid", curve[0]), ("held out", "dot", curve[1])):
        figure.add_scatter(y=losses[:, 0], name=f"{name}, {where}", line={"dash": dash})
figure.add_hline(floor, annotation_text="entropy floor")
figure.update_layout(template="plotly_white", xaxis_title="step", yaxis_title="bits", title="seed 0")
Path("runs").mkdir(exist_ok=True)
figure.write_html("runs/em_versus_sgd.html")

# %% The verdict.
speed = {name: np.median(STEPS / steps) for name, steps in needed.items()}
rivals = [f"{name} ({speed[name]:.2f})" for name in speed if name != EM and speed[name] >= speed[EM]]
print(f"""
Verdict. Ten times the rate on the values reaches the loss of plain SGD {median(STEPS / needed[EM], 2)} times faster.
At least as fast: {", ".join(rivals) or "nothing else"}.
With each base rate chosen, the steps of one rate over those of EM, where both arrive:""")
for goal in GOALS:
    one, em = tuned["one rate", goal], tuned[EM, goal]
    both = np.isfinite(one) & np.isfinite(em)
    arrivals = f"one rate arrives in {np.isfinite(one).sum()} of 20 seeds, EM in {np.isfinite(em).sum()}"
    print(f"  {goal} bits held out: {median(one[both] / em[both], 2)} in {both.sum()} seeds; {arrivals}")
print(f"Above 1 would favour EM. {time.monotonic() - began:.0f} s; curves in runs/em_versus_sgd.html.")
