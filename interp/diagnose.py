"""Run every probe that applies to a model on its task: the battery behind the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformer_lens.tools.analysis import reinitialized

from interp.checkpoint import versions
from interp.evaluate import fits, predict, require_fit
from interp.files import write_text
from interp.models.base import SequenceModel
from probes.advantage import advantage, extract_gradients
from probes.calibration import calibration, kl_bits
from probes.extract import Activations, extract
from probes.manifold import value_manifold
from probes.orthogonality import key_orthogonality
from probes.responsibilities import responsibilities
from probes.result import Result
from probes.sharpening import query_key_sharpening, separable
from probes.simplex import belief_geometry
from tasks.base import Batch, Task

MANIFOLD_SITES = ("v", "z", "attn_out", "mixer_out", "lstm_out", "resid_post")
SITES = ("k", "scores", "pattern", *MANIFOLD_SITES)


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """All results of one model on one task, and what reproduces them."""

    name: str
    task: Task
    model: dict[str, Any]
    """``model.describe()``."""
    results: dict[str, Result]
    """Section title -> result."""
    settings: dict[str, Any]
    """Sequences, seeds and versions that reproduce the numbers."""

    def to_frame(self) -> pd.DataFrame:
        """All numbers in one tidy table, with the section in the first column."""
        frames = [result.to_frame().assign(section=title) for title, result in self.results.items()]
        frame = pd.concat(frames, ignore_index=True)
        return frame[["section", *frame.columns.drop("section")]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.name,
            "task": {"name": self.task.name, **self.task.parameters()},
            "model": self.model,
            "results": {title: result.to_dict() for title, result in self.results.items()},
            "settings": self.settings,
        }

    def to_json(self, path: Path | str) -> None:
        """Write all numbers as JSON, atomically."""
        write_text(Path(path), json.dumps(self.to_dict(), indent=1) + "\n")

    def to_html(self, path: Path | str) -> None:
        """Write one self-contained interactive page, atomically."""
        from interp.report import report_page

        write_text(Path(path), report_page(self))


def diagnose(
    model: SequenceModel,
    task: Task,
    *,
    name: str | None = None,
    sequences: int = 256,
    seed: int = 0,
    twin_seed: int = 0,
) -> Diagnosis:
    """Calibrate the model on the task and its variants, and measure the geometry that its sites allow.

    Geometry is measured on the training distribution (``task.for_training()``), where entropy varies within a
    position if the task can make it vary.

    Args:
        model: any hooked model that declares its ``sites``.
        task: the task that it reads.
        name: title of the report.
        sequences: sequences drawn, for each part.
        seed: seed of the sequences.
        twin_seed: seed of the untrained twin.

    Raises:
        ModelError: when the model can't read the task.
    """
    require_fit(model, task)
    twin = reinitialized(model, twin_seed)
    results: dict[str, Result] = {}
    for title, changes in {"calibration": {}, **task.variants}.items():
        variant = task.replace(**changes)
        if fits(model, variant):
            batch = variant.sample(sequences, seed=seed)
            outputs = predict(model, batch), predict(twin, batch)
            name_of = title if not changes else f"calibration, {title.replace('_', ' ')}"
            results[name_of] = calibration(
                outputs[0],
                batch.posterior,
                batch.targets,
                baselines=variant.baselines(batch),
                twin=outputs[1],
                readout=task.readout,
            )
    batch = task.for_training().sample(sequences, seed=seed)
    sites = [site for site in SITES if site in model.sites]
    acts = extract(model, batch, sites, twin_seed=twin_seed)
    results |= geometry(acts, batch)
    baselines = task.baselines(batch)
    if any(name.startswith("window") for name in baselines):
        results["belief geometry"] = beliefs(acts, batch, baselines)
    if "pattern" in model.sites:
        loss = partial(kl_bits, readout=task.readout)
        grads = extract_gradients(model, batch, loss=loss, twin_seed=twin_seed)
        results |= {"advantage": advantage(grads), "responsibilities": responsibilities(grads)}
    settings = {"sequences": sequences, "seed": seed, "twin_seed": twin_seed, "versions": versions()}
    return Diagnosis(name or f"{task.name}-{model.cfg.architecture}", task, model.describe(), results, settings)


def beliefs(acts: Activations, batch: Batch, baselines: Mapping[str, Tensor], site: str = "resid_post") -> Result:
    """:func:`probes.belief_geometry` on a task of hidden states, whose supervised tokens are the observations.

    Windowed filters stand beside it as they are where the answer is the belief itself.
    """
    is_belief = batch.posterior.shape == batch.belief.shape and torch.equal(batch.posterior, batch.belief)
    observed = batch.tokens.gather(1, batch.position)
    predictors = baselines if is_belief else None
    return belief_geometry(acts, batch.belief, observed, batch.position, site=site, predictors=predictors)


def geometry(acts: Activations, batch: Batch) -> dict[str, Result]:
    """The geometry probes for which the activations hold the sites."""
    results: dict[str, Result] = {}
    if acts.holds("k") and (batch.hypothesis >= 0).any():
        results["key orthogonality"] = key_orthogonality(acts, batch.hypothesis)
    if acts.holds("scores") and separable(batch.evidence, batch.position).any():
        results["query-key sharpening"] = query_key_sharpening(acts, batch.evidence)
    for site in MANIFOLD_SITES:
        if acts.holds(site):
            results[f"value manifold, site {site}"] = value_manifold(acts, batch.entropy, batch.position, site=site)
    return results
