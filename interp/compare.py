"""Wind tunnels and language models under the same probes, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plotly.graph_objects import Figure
from plotly.subplots import make_subplots

from interp.checkpoint import CONFIG, checkpoint_names, load_checkpoint, versions
from interp.errors import InterpError
from interp.evaluate import require_fit
from interp.files import write_text
from interp.language import known_posterior, probe_language_model
from interp.models.base import SequenceModel
from interp.pretrained import load_pretrained
from interp.report import anchor, embed, numbers, render
from interp.signatures import RULE, SIGNATURES, in_words, signature_table
from probes.extract import extract
from probes.manifold import ManifoldResult
from probes.plotting import panels
from probes.result import Result
from tasks.base import Task

SITES = ("k", "v", "scores", "pattern")


@dataclass(frozen=True, eq=False)
class Comparison:
    """The results of several models under the same probes."""

    results: dict[str, dict[str, Result]]
    """Model -> section title, with what it was measured on after the comma -> result."""
    models: dict[str, dict[str, Any]]
    """Model -> its ``describe()``."""
    settings: dict[str, Any]
    """Sequences, seeds and versions that reproduce the numbers."""

    def signatures(self) -> list[dict[str, Any]]:
        """One row a signature, model and task: present or not, and by how much over its null."""
        found = [{"model": name, **line} for name, results in self.results.items() for line in signature_table(results)]
        order = [signature.claim for signature in SIGNATURES]
        return sorted(found, key=lambda line: order.index(line["signature"]))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        results = {
            name: {title: result.to_dict() for title, result in found.items()} for name, found in self.results.items()
        }
        return {"signatures": self.signatures(), "models": self.models, "results": results, "settings": self.settings}

    def to_html(self, path: Path | str) -> None:
        """Write one self-contained interactive page, atomically."""
        sections = map(self._section, dict.fromkeys(signature.section for signature in SIGNATURES))
        page = render(
            "compare.html.j2",
            names=list(self.results),
            rule=RULE,
            signatures=[{"model": line["model"], **in_words(line)} for line in self.signatures()],
            sections=[section for section in sections if section["tables"]],
            models={name: {k: v for k, v in model.items() if k != "sites"} for name, model in self.models.items()},
            settings=self.settings,
        )
        write_text(Path(path), page)

    def _section(self, section: str) -> dict[str, Any]:
        measured = {
            f"{name} on {title.partition(', ')[2]}": result
            for name, results in self.results.items()
            for title, result in results.items()
            if title.partition(", ")[0] == section
        }
        found = {statistic for result in measured.values() for statistic in result.frame["statistic"]}
        drawn = [s.statistic for s in SIGNATURES if s.section == section and s.statistic in found]
        clouds = [
            result.scatter().update_layout(title=label)
            for label, result in measured.items()
            if isinstance(result, ManifoldResult)
        ]
        return {
            "id": anchor(section),
            "title": section,
            "readings": sorted({result.reading for result in measured.values()}),
            "figures": [embed(side_by_side(measured, statistic)) for statistic in drawn],
            "clouds": [embed(cloud) for cloud in clouds],
            "tables": {label: numbers(result) for label, result in measured.items()},
        }


def compare(sources: Sequence[str | Path], *, sequences: int = 64, seed: int = 0, twin_seed: int = 0) -> Comparison:
    """Run the same probes on checkpoints of ours and on pretrained language models.

    A source that is a checkpoint's name or folder is read on its own wind tunnel (as it was trained, so that entropy
    varies at equal position where the task can make it); any other is loaded by
    :func:`~interp.pretrained.load_pretrained` and read on prompts
    (:func:`~interp.language.probe_language_model`).

    Args:
        sources: two models or more.
        sequences: sequences of each task, or prompts of each family.
        seed: seed of the sequences.
        twin_seed: seed of the untrained twins.

    Raises:
        InterpError: when a source can't be loaded, or is named twice.
    """
    names = [str(source) for source in sources]
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise InterpError(f"compare needs two or more different models, got {', '.join(names) or 'none'}")
    loaded = {name: load_checkpoint(name) if is_checkpoint(name) else load_pretrained(name) for name in names}
    drawn = {"sequences": sequences, "seed": seed, "twin_seed": twin_seed}
    results = {
        name: probe_wind_tunnel(it[0], it[1], **drawn) if isinstance(it, tuple) else probe_language_model(it, **drawn)
        for name, it in loaded.items()
    }
    models = {name: (it[0] if isinstance(it, tuple) else it).describe() for name, it in loaded.items()}
    return Comparison(results, models, {**drawn, "versions": versions()})


def is_checkpoint(source: str) -> bool:
    """Whether a name or folder is a checkpoint of this project."""
    path = Path(source) / CONFIG
    return source in checkpoint_names() or (path.is_file() and '"weights_sha256"' in path.read_text(encoding="utf-8"))


def probe_wind_tunnel(
    model: SequenceModel, task: Task, *, sequences: int = 64, seed: int = 0, twin_seed: int = 0
) -> dict[str, Result]:
    """Section title -> result: the probes of :func:`interp.language.known_posterior` on a wind tunnel."""
    require_fit(model, task)
    task = task.for_training()
    batch = task.sample(sequences, seed=seed)
    acts = extract(model, batch, [site for site in SITES if site in model.sites], twin_seed=twin_seed)
    assert acts.logits is not None
    assert acts.twin is not None
    assert acts.twin.logits is not None
    outputs = acts.logits, acts.twin.logits
    return known_posterior(acts, batch, outputs, task.baselines(batch), task.name, readout=task.readout)


def side_by_side(results: dict[str, Result], statistic: str) -> Figure:
    """One panel a result on a common y axis, with the nulls drawn."""
    frames = {label: frame for label, result in results.items() if len(frame := result.overall(statistic))}
    labels = list(frames)
    figure = make_subplots(1, len(labels), subplot_titles=labels, shared_yaxes="all")
    legend: set[str] = set()
    for i, label in enumerate(labels):
        result, frame = results[label], frames[label]
        panel = panels(replace(result, frame=frame))
        for trace in panel.data:
            trace.showlegend = trace.name not in legend
            legend.add(trace.name)
            trace.xaxis = trace.yaxis = None
            figure.add_trace(trace, row=1, col=i + 1)
        axis = panel.layout.xaxis
        figure.update_xaxes(title=axis.title, showticklabels=axis.showticklabels, row=1, col=i + 1)
    unit = results[labels[0]].units.get(statistic, "")
    figure.update_yaxes(title=f"{statistic} ({unit})" if unit else statistic, row=1, col=1)
    legend_at = {"orientation": "h", "y": 1.18, "yanchor": "bottom"}
    figure.update_layout(template="plotly_white", height=400, legend=legend_at, margin={"t": 110, "b": 50})
    return figure
