"""A whole training step (forward, backward, optimiser) of each small model beside the transformer's, in one run.

93 positions, batch 64, one thread: the length of the HMM task. The models take turns; each keeps its fastest step.
"""

import sys
import time

import torch

from interp.models.base import ARCHITECTURES, build_model, preset
from tasks import get_task

BATCH, ROUNDS, GOAL = 64, 8, 3.0


def main():
    torch.set_num_threads(1)
    task = get_task("hmm")
    batch = task.sample(BATCH)
    models = {name: build_model(preset(name, "small", task)) for name in ARCHITECTURES}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-3) for name, model in models.items()}
    seconds = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            start = time.perf_counter()
            log_p = model(batch.tokens, batch.position).log_softmax(-1)
            (-(batch.posterior * log_p).sum(-1).mean()).backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            seconds[name].append(time.perf_counter() - start)
    print(f"{task.name}, {task.n_ctx} positions, batch {BATCH}, fastest and median of {ROUNDS} steps")
    for name, model in models.items():
        best, reference = min(seconds[name]), min(seconds["transformer"])
        median = sorted(seconds[name])[ROUNDS // 2]
        print(
            f"{name:<12}{model.n_parameters:>9,} parameters{1e3 * best:8.0f} ms{1e3 * median:8.0f} ms"
            f"{best / reference:7.2f} times the transformer"
        )
    ratio = min(seconds["mamba"]) / min(seconds["transformer"])
    verdict = "met" if ratio <= GOAL else "MISSED"
    print(f"Mamba costs {ratio:.2f} times the transformer; goal at most {GOAL:.0f}: {verdict}")
    sys.exit(ratio > GOAL)


if __name__ == "__main__":
    main()
