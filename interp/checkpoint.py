"""A checkpoint is one folder: ``config.json``, ``model.safetensors``, ``training.jsonl``, ``README.md``."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from interp.card import model_card
from interp.errors import CheckpointError, InterpError
from interp.files import atomic, write_text
from interp.models.base import ModelConfig, SequenceModel, build_model
from tasks.base import Task, TaskError, get_task, unknown

SCHEMA = 1
"""Version of the folder's layout; a newer one is refused."""

WEIGHTS, CONFIG, LOG, CARD = "model.safetensors", "config.json", "training.jsonl", "README.md"
PLAN, STATE = "run.json", "training-state.safetensors"
"""What only an unfinished run has."""


def checkpoints_folder() -> Path:
    """Where checkpoints are looked up by name: ``$WINDTUNNEL_CHECKPOINTS``, or the folder that is shipped."""
    shipped = Path(__file__).resolve().parents[1] / "checkpoints"
    return Path(os.environ.get("WINDTUNNEL_CHECKPOINTS", shipped))


def checkpoint_names() -> list[str]:
    """Names under which :func:`load_checkpoint` finds shipped checkpoints."""
    return sorted(path.parent.name for path in checkpoints_folder().glob(f"*/{CONFIG}"))


@dataclass(frozen=True)
class Checkpoint:
    """What ``config.json`` says: enough to rebuild the model and to train it again."""

    task: Task
    model: ModelConfig
    training: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    weights_sha256: str = ""
    folder: Path | None = None

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.name if self.folder else f"{self.task.name}-{self.model.architecture}"

    def log(self) -> list[dict[str, int | float]]:
        """What was measured in training, first to last; empty where no log was kept."""
        path = (self.folder or Path()) / LOG
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []

    def to_dict(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        return {
            "schema": SCHEMA,
            "task": {"name": self.task.name, **self.task.parameters()},
            "model": self.model.to_dict(),
            "training": self.training,
            "metrics": self.metrics,
            "versions": self.versions,
            "weights_sha256": self.weights_sha256,
        }


def versions() -> dict[str, str]:
    """Versions of everything that a number may depend on."""
    packages = ("windtunnel", "torch", "transformer-lens", "numpy", "scipy", "scikit-learn")
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}


def save_checkpoint(
    folder: Path | str,
    weights: Mapping[str, Tensor],
    task: Task,
    model: ModelConfig,
    *,
    training: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint folder; ``config.json`` comes last, so a folder that has one is whole.

    Raises:
        InterpError: when the file system refuses; no file is left half-written.
    """
    folder = Path(folder)
    digest = save_tensors(folder / WEIGHTS, weights)
    checkpoint = Checkpoint(task, model, training or {}, metrics or {}, versions(), digest, folder)
    write_text(folder / CARD, model_card(checkpoint.name, checkpoint.to_dict()))
    write_text(folder / CONFIG, json.dumps(checkpoint.to_dict(), indent=2) + "\n")
    return folder


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> str:
    """Write tensors as safetensors, atomically; returns the file's SHA-256."""
    with atomic(path) as temporary:
        try:
            save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, temporary, metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        return _digest(temporary)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; :class:`CheckpointError` when it is missing, truncated or something else."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; the checkpoint is incomplete, copy or train it again")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({error}); copy or train it again"
        ) from error


def find_checkpoint(source: str | Path) -> Path:
    """The folder of a checkpoint given by name, folder, or Hugging Face hub id (``owner/name``).

    Raises:
        CheckpointError: when there is none, with the closest known name.
    """
    if str(source) in checkpoint_names():
        return checkpoints_folder() / str(source)
    if Path(source).is_dir():
        return Path(source)
    if Path(source).is_file():
        raise CheckpointError(f"{source} is a file; expected a checkpoint folder with {CONFIG} and {WEIGHTS}")
    parts = str(source).split("/")
    if len(parts) == 2 and all(parts) and parts[0] not in (".", "..", "~"):
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.jsonl", "*.safetensors", "*.md"]))
        except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                f"no folder '{source}', and the hub did not give it ({type(error).__name__}: {reason})"
            ) from error
    if Path(source).name != str(source):
        raise CheckpointError(f"there is no folder {source}; `windtunnel list` names the checkpoints that are shipped")
    raise CheckpointError(unknown("checkpoint", str(source), checkpoint_names()))


def read_checkpoint(source: str | Path) -> Checkpoint:
    """Read and check ``config.json`` without loading weights.

    Raises:
        CheckpointError: one line that says which file is missing, foreign, corrupt or too new.
    """
    folder = find_checkpoint(source)
    path = folder / CONFIG
    if not path.is_file():
        if (folder / STATE).is_file():
            raise CheckpointError(f"{folder}: training has not finished; continue it with `windtunnel train --resume`")
        raise CheckpointError(f"{folder} has no {CONFIG}: not a windtunnel checkpoint")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}); copy or train it again") from error
    if not isinstance(config, dict) or not isinstance(config.get("schema"), int):
        raise CheckpointError(f"{path} has no schema version: it belongs to another program, not to windtunnel")
    if config["schema"] > SCHEMA:
        raise CheckpointError(
            f"{path} has schema {config['schema']}, this windtunnel reads up to {SCHEMA}; install a newer windtunnel"
        )
    try:
        task = get_task(config["task"]["name"], **{k: v for k, v in config["task"].items() if k != "name"})
        model = ModelConfig(**config["model"])
        sections = {key: dict(config[key]) for key in ("training", "metrics", "versions")}
        return Checkpoint(task, model, **sections, weights_sha256=config["weights_sha256"], folder=folder)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}; copy or train it again") from error
    except (TypeError, AttributeError, TaskError, InterpError) as error:
        raise CheckpointError(f"{path} does not describe a model: {error}") from error


def load_weights(model: SequenceModel, path: Path) -> None:
    """Load a weights file into a model, strictly: every name and shape must match."""
    tensors = load_tensors(path)
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    if found != expected:
        wrong = sorted(set(found.items()) ^ set(expected.items()))[0][0]
        raise CheckpointError(
            f"{path} does not fit the model that {CONFIG} describes: '{wrong}' is {found.get(wrong, 'missing')}, "
            f"expected {expected.get(wrong, 'no such tensor')}"
        )
    model.load_state_dict({name: t.to(torch.float32) for name, t in tensors.items()})


def load_checkpoint(source: str | Path) -> tuple[SequenceModel, Task]:
    """The model, in evaluation mode, and its task, from a name, a folder or a hub id.

    Raises:
        CheckpointError: when the checkpoint is missing, foreign, truncated, corrupt or too new.
    """
    checkpoint = read_checkpoint(source)
    assert checkpoint.folder is not None
    path = checkpoint.folder / WEIGHTS
    model = build_model(checkpoint.model, seed=0)
    load_weights(model, path)
    if _digest(path) != checkpoint.weights_sha256:
        raise CheckpointError(f"{path} is not the file that {CONFIG} was written with; copy or train it again")
    return model.eval(), checkpoint.task


def snapshot_paths(folder: Path | str) -> dict[int, Path]:
    """Training step -> weights file of each snapshot in a checkpoint folder, earliest first."""
    return {int(path.stem.split("-")[1]): path for path in sorted(Path(folder).glob("snapshots/step-*.safetensors"))}


def push_checkpoint(source: str | Path, repo_id: str, *, private: bool = False) -> str:
    """Upload a checkpoint to the Hugging Face hub; returns its address."""
    from huggingface_hub import HfApi

    checkpoint = read_checkpoint(source)
    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    return str(api.upload_folder(folder_path=str(checkpoint.folder), repo_id=repo_id))


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
