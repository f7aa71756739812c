"""What `--monitor advantage` adds to training, in one run: bijection, the small transformer, one thread.

The seconds inside the monitor over all others of the same run, first with log lines alone (every 100 steps), then with
12 snapshots too, which crowd the first steps.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

from interp import TrainConfig, preset
from interp.monitor import Monitor
from interp.training import train
from tasks import get_task

STEPS, GOAL = 500, 0.05


def share(task, snapshots):
    """Seconds inside the monitor, and outside it, of one run."""
    inside = []
    record = Monitor.record

    def timed(monitor, step):
        start = time.perf_counter()
        record(monitor, step)
        inside.append(time.perf_counter() - start)

    Monitor.record = timed
    try:
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            config = TrainConfig(steps=STEPS, snapshots=snapshots)
            model = preset("transformer", "small", task)
            train(task, model, config, Path(folder) / "run", progress=False, monitor="advantage")
            total = time.perf_counter() - start
    finally:
        Monitor.record = record
    return sum(inside), total - sum(inside), len(inside)


def main():
    torch.set_num_threads(1)
    task = get_task("bijection")
    worst = 0.0
    for snapshots in (0, 12):
        inside, outside, records = share(task, snapshots)
        worst = max(worst, inside / outside)
        print(
            f"{STEPS} steps, {snapshots} snapshots: {records} records of {1e3 * inside / records:.0f} ms; "
            f"monitor {inside:.1f} s, the rest {outside:.1f} s: {100 * inside / outside:.2f} % more"
        )
    print(f"goal below {100 * GOAL:.0f} %: {'met' if worst < GOAL else 'MISSED'}")
    sys.exit(worst >= GOAL)


if __name__ == "__main__":
    main()
