"""Train a model on a wind tunnel: resumable bit for bit, logged, and distributed by ``accelerate launch``."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from interp.checkpoint import LOG, PLAN, STATE, save_checkpoint, save_tensors
from interp.errors import TrainingError
from interp.evaluate import measure, metrics
from interp.files import write_text
from interp.models.base import ModelConfig, build_model
from interp.models.precision import matmul_precision
from interp.monitor import SEQUENCES, Monitor
from interp.recipe import TrainConfig, excess_bits, make_optimizers
from interp.run_state import load_state, save_state
from tasks.base import Task


def train(
    task: Task,
    model_config: ModelConfig,
    config: TrainConfig,
    folder: Path | str,
    *,
    training_task: Task | None = None,
    resume: bool = False,
    command: str = "interp.training.train(...)",
    progress: bool = True,
    monitor: str | None = None,
    record: dict[str, Any] | None = None,
) -> Path:
    """Train from scratch, or go on where a killed run stopped, and write a checkpoint folder.

    A resumed run ends with the same weights, bit for bit on one machine, as one that was never stopped: data
    are a function of (seed, step), and weights and optimiser state are saved together in one atomic file.

    Args:
        task: what the model is evaluated on and saved with.
        model_config: the architecture.
        config: the run.
        folder: where to write.
        training_task: distribution to train on, where wider than ``task`` (default ``task.for_training()``).
        resume: continue in a folder that holds an unfinished run.
        command: the command line, for the model card.
        progress: show a progress bar on standard error.
        monitor: ``advantage`` measures every head at each log line and snapshot, into ``monitor.jsonl``.
        record: more to keep in the checkpoint's ``training``, e.g. how its settings were chosen.

    Returns:
        The folder.

    Raises:
        TrainingError: when the folder holds another run, or the loss diverges (the last good weights stay).
    """
    trained_on = training_task or task.for_training()
    run = Run(task, model_config, config, Path(folder), trained_on, command, monitor, record or {})
    run.start(resume)
    with run.progress_bar(progress) as bar:
        run.loop(bar)
    return run.folder


@dataclass
class Run:
    """One training run: its parts, and where it stands."""

    task: Task
    model_config: ModelConfig
    config: TrainConfig
    folder: Path
    training_task: Task
    command: str
    monitor: str | None = None
    record: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.accelerator = Accelerator()
        init_seed, self.data_seed, eval_seed = (
            int(word) for word in np.random.SeedSequence(self.config.seed).generate_state(3, np.uint64)
        )
        self.held_out = self.task.sample(self.config.eval_sequences, seed=eval_seed)
        self.module = build_model(self.model_config, init_seed % 2**63)
        self.watch: Monitor | None = None
        if self.monitor is not None and self.accelerator.is_main_process:
            watched = self.task.sample(SEQUENCES, seed=eval_seed)
            self.watch = Monitor(self.monitor, self.module, watched, self.task.readout, self.folder)
        optimizers = make_optimizers(self.module, self.config)
        self.model, *self.optimizers = self.accelerator.prepare(self.module, *optimizers)
        self.share, rest = divmod(self.config.batch_size, self.accelerator.num_processes)
        if rest:
            raise TrainingError(
                f"batch_size {self.config.batch_size} can't be split evenly over "
                f"{self.accelerator.num_processes} processes; choose a multiple"
            )

    def description(self) -> dict[str, Any]:
        """What must agree for a run to be continued."""
        tasks = {"task": self.task, "training_task": self.training_task}
        described = {key: {"name": task.name, **task.parameters()} for key, task in tasks.items()}
        return {**described, "model": asdict(self.model_config), "training": asdict(self.config)}

    def start(self, resume: bool) -> None:
        """Open a fresh folder, or restore an unfinished run; a loss far above that at initialisation is divergence."""
        plan = self.folder / PLAN
        self.ceiling = 10 * measure(self.module, self.held_out, self.task.readout)["kl_bits"] + 1
        if not resume:
            if self.accelerator.is_main_process:
                if self.folder.exists() and any(self.folder.iterdir()):
                    raise TrainingError(
                        f"{self.folder} is not empty: pass --resume to continue the run in it, or another --out"
                    )
                write_text(plan, json.dumps(self.description(), indent=2) + "\n")
                self.save_snapshot()
                if self.watch is not None:
                    self.watch.record(0)
                self.save_state()
            self.accelerator.wait_for_everyone()
            return
        if not plan.is_file():
            raise TrainingError(f"{self.folder} holds no unfinished run to resume; start one without --resume")
        planned = json.loads(plan.read_text(encoding="utf-8"))
        for section, settings in json.loads(json.dumps(self.description())).items():
            for key, value in settings.items():
                if planned[section].get(key) != value:
                    raise TrainingError(
                        f"the run in {self.folder} has {section} {key}={planned[section].get(key)!r}, "
                        f"you asked for {value!r}; resume with the same settings, or choose another --out"
                    )
        if (self.folder / STATE).is_file():
            self.restore()

    def loop(self, bar: Progress) -> None:
        """Step to the end, measuring, logging and saving on the way."""
        bar_task = bar.add_task("", total=self.config.steps, completed=self.step)
        snapshot_steps = self.config.snapshot_steps()
        began, before, first = time.monotonic(), self.seconds, self.step
        losses: list[float] = []
        while self.step < self.config.steps:
            with matmul_precision("medium" if self.step < self.config.coarse * self.config.steps else "highest"):
                losses.append(self.update())
            self.step += 1
            if self.step in snapshot_steps and self.accelerator.is_main_process:
                self.save_snapshot()
            measuring = self.step % self.config.eval_every == 0 or self.step == self.config.steps
            if self.watch is not None and (measuring or self.step in snapshot_steps):
                self.watch.record(self.step)
            if measuring:
                elapsed = time.monotonic() - began
                self.seconds = before + elapsed
                speed = (self.step - first) * self.config.batch_size / elapsed
                line = {
                    "step": self.step,
                    "loss_bits": self.mean_over_processes(losses),
                    **measure(self.module, self.held_out, self.task.readout),
                    "lr_fraction": self.config.schedule(self.step - 1),
                    "seconds": round(self.seconds, 2),
                    "sequences_per_second": round(speed, 1),
                }
                losses.clear()
                if self.accelerator.is_main_process:
                    self.log(line)
                    self.save_state()
                figures = f"loss {line['loss_bits']:.4f} bits, MAE {line['mae_bits']:.4f} bits, {speed:.0f} seq/s"
                bar.update(bar_task, completed=self.step, description=figures)
            else:
                bar.advance(bar_task)
        if self.accelerator.is_main_process:
            self.finish("finished")
        self.accelerator.wait_for_everyone()

    def mean_over_processes(self, losses: list[float]) -> float:
        """Mean of the losses of all processes."""
        mean = torch.tensor(np.mean(losses), dtype=torch.float64, device=self.accelerator.device)
        return float(self.accelerator.reduce(mean, "mean"))

    def update(self) -> float:
        """One optimiser step; returns the loss in bits above the Bayes floor."""
        start = self.step * self.config.batch_size + self.accelerator.process_index * self.share
        batch = self.training_task.sample(self.share, seed=self.data_seed, start=start)
        device = self.accelerator.device
        output = self.model(batch.tokens.to(device), batch.position.to(device))
        loss = excess_bits(output, batch, self.config.objective, self.task.readout)
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip)
        if not (loss < self.ceiling and torch.isfinite(torch.as_tensor(norm))):
            self.diverged(loss.item())
        fraction = self.config.schedule(self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * fraction
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    def diverged(self, loss: float) -> None:
        """Put the last good weights in the checkpoint and say what happened."""
        step = self.step
        self.restore()
        if self.accelerator.is_main_process:
            self.finish(f"diverged at step {step + 1}")
        raise TrainingError(
            f"the loss became {loss} at step {step + 1}; the weights of step {self.step} are kept in {self.folder}: "
            "lower --lr and --muon-lr, or --clip"
        )

    def finish(self, status: str) -> None:
        """Write the checkpoint, then drop what only an unfinished run needs."""
        training = {
            **asdict(self.config),
            **self.record,
            "training_task": self.training_task.parameters(),
            "status": status,
            "steps_done": self.step,
            "seconds": round(self.seconds, 1),
            "threads": torch.get_num_threads(),
            "command": self.command,
        }
        found = metrics(self.module, self.task, sequences=1024, seed=0)
        save_checkpoint(
            self.folder,
            self.module.state_dict(),
            self.task,
            self.model_config,
            training=training,
            metrics=found,
        )
        (self.folder / STATE).unlink(missing_ok=True)
        (self.folder / PLAN).unlink(missing_ok=True)

    def save_snapshot(self) -> None:
        """Keep the weights of this step in half precision."""
        if self.step in self.config.snapshot_steps():
            half = {name: t.half() for name, t in self.module.state_dict().items()}
            save_tensors(self.folder / "snapshots" / f"step-{self.step:07d}.safetensors", half)

    def save_state(self) -> None:
        """Save what a killed run goes on from."""
        save_state(self.folder / STATE, self.module, self.optimizers, self.step, self.seconds)

    def restore(self) -> None:
        """Go back to the last saved state, dropping log lines that come after it."""
        self.step, self.seconds = load_state(self.folder / STATE, self.module, self.optimizers)
        log = self.folder / LOG
        if log.is_file():
            lines = [line for line in log.read_text().splitlines() if _step(line) <= self.step]
            write_text(log, "".join(line + "\n" for line in lines))
        if self.watch is not None:
            self.watch.resume(self.step)

    def log(self, line: dict[str, int | float]) -> None:
        """Append one JSON line to the training log."""
        with open(self.folder / LOG, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def progress_bar(self, wanted: bool) -> Progress:
        """A progress bar on standard error, on the main process."""
        columns = (TextColumn("{task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"))
        return Progress(
            *columns,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not (wanted and self.accelerator.is_main_process),
        )


def _step(line: str) -> float:
    """Step of a log line; infinite for one that a kill cut short."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")
