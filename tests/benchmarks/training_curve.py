"""Entropy MAE against training time: this project's recipe beside the authors', same model, equal time, one thread.

Ours: the exact posterior as target, Muon and AdamW, batch 64, learning rate down to zero at the end. The authors' (as
found to work): sampled labels, AdamW 3e-4, decay 0.1, warm-up of 2,000 steps, batch 256. Both on keys without repeats.

    python tests/benchmarks/training_curve.py --minutes 3
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from interp import TrainConfig, preset, train
from tasks import Bijection

OURS = TrainConfig(eval_every=50)
AUTHORS = TrainConfig(
    objective="labels",
    optimizer="adamw",
    lr=3e-4,
    weight_decay=0.1,
    warmup=2000,
    decay=0,
    coarse=0,
    batch_size=256,
    eval_every=25,
)


def log_of(config, folder):
    """The training log of a run."""
    train(TASK, MODEL, config, folder, training_task=TASK, progress=False)
    return [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]


def curve(config, folder, minutes):
    """The log of a run whose number of steps fills so many minutes, at the speed of a short one."""
    short = log_of(replace(config, steps=30, eval_every=30), folder / "short")[-1]
    steps = max(20, int(60 * minutes * short["step"] / short["seconds"]))
    return log_of(replace(config, steps=steps), folder / "run")


TASK = Bijection()
MODEL = preset("transformer", "small", TASK)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    minutes = parser.parse_args().minutes
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ours = curve(OURS, Path(folder) / "ours", minutes)
        authors = curve(AUTHORS, Path(folder) / "authors", minutes)
    print(f"{'recipe':8} {'step':>6} {'seconds':>8} {'MAE bits':>10} {'KL bits':>10}")
    for name, log in (("ours", ours), ("authors", authors)):
        for line in [*log[:: max(1, len(log) // 8)], log[-1]]:
            figures = f"{line['seconds']:8.0f} {line['mae_bits']:10.5f} {line['kl_bits']:10.5f}"
            print(f"{name:8} {line['step']:6d} {figures}")
    seconds = ours[-1]["seconds"] / authors[-1]["seconds"]
    ratio = authors[-1]["mae_bits"] / ours[-1]["mae_bits"]
    print(f"MAE of the authors' recipe over ours: {ratio:.1f} (time of ours over theirs: {seconds:.2f})")
