"""Training dynamics: how calibration and geometry move over the snapshots of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from plotly.graph_objects import Figure, Frame, Scatter
from plotly.subplots import make_subplots

from interp.checkpoint import read_checkpoint
from interp.diagnose import MANIFOLD_SITES, geometry
from interp.trajectory import snapshot_models
from probes.calibration import calibration
from probes.extract import extract
from probes.manifold import ManifoldResult
from probes.result import Result
from probes.settling import settling

FOLLOWED = {
    "kl_bits": "calibration",
    "mean_abs_cos": "key orthogonality",
    "mass": "query-key sharpening",
    "pc1_variance": "value manifold",
    "entropy_r2_within_position": "value manifold",
}
"""Statistic that is followed -> title, up to the comma, of the result that measures it."""
TIMED = 0.1
"""What is left of the initial distance when a site counts as settled: the time to 90 %."""


@dataclass(frozen=True, eq=False)
class Dynamics:
    """Every probe at every snapshot, on the same sequences."""

    name: str
    results: dict[int, dict[str, Result]]
    """Training step -> section title -> result."""
    dissociation: Result | None
    """Settling (90 %) of attention against values, per layer and head; None without attention."""
    value_site: str
    """The site whose manifold is followed: ``v``, or what the mixer writes in models without values."""

    def to_frame(self) -> pd.DataFrame:
        """Tidy: ``step``, ``statistic``, ``layer`` (none for the calibration), ``estimate``; means over heads."""
        parts = []
        for step, results in self.results.items():
            for statistic, section in FOLLOWED.items():
                title = f"{section}, site {self.value_site}" if section == "value manifold" else section
                if title not in results:
                    continue
                frame = results[title].overall(statistic)
                columns = [c for c in ("estimate", "null_init", "null_random", "null_uniform") if c in frame]
                if "layer" in frame:
                    frame = frame.groupby("layer", as_index=False)[columns].mean()
                parts.append(
                    frame[[c for c in ("layer", *columns) if c in frame]].assign(step=step, statistic=statistic)
                )
        return pd.concat(parts, ignore_index=True)

    def figure(self) -> Figure:
        """The statistics over training, one line a layer."""
        frame = self.to_frame()
        names = list(frame["statistic"].unique())
        figure = make_subplots(1, len(names), subplot_titles=names)
        for i, name in enumerate(names, 1):
            part = frame[frame["statistic"] == name]
            for layer, line in part.groupby(part["layer"].fillna(-1)):
                label = "whole" if layer < 0 else f"layer {int(layer)}"
                trace = Scatter(x=1 + line["step"], y=line["estimate"], name=label, mode="lines+markers")
                figure.add_trace(trace, row=1, col=i)
            figure.update_xaxes(type="log", title="1 + step", row=1, col=i)
        return figure.update_layout(template="plotly_white", height=380, showlegend=False)

    def animation(self, layer: int | None = None) -> Figure:
        """The value manifold of one layer (by default the last), with a slider over the snapshots."""
        clouds = {step: self._cloud(step, layer) for step in self.results}
        frames = [Frame(data=[cloud], name=str(step)) for step, cloud in clouds.items()]
        steps = [
            {"label": str(step), "method": "animate", "args": [[str(step)], {"mode": "immediate"}]} for step in clouds
        ]
        last = len(frames) - 1
        figure = Figure(frames[last].data, frames=frames)
        play = {"label": "play", "method": "animate", "args": [None, {"frame": {"duration": 600}}]}
        return figure.update_layout(
            template="plotly_white",
            height=520,
            title=f"{self.name}: values on their first two components, as training goes",
            xaxis={"title": "PC1 (standard deviations)", "range": [-4, 4]},
            yaxis={"title": "PC2 (standard deviations)", "range": [-4, 4]},
            sliders=[{"active": last, "steps": steps, "currentvalue": {"prefix": "step "}}],
            updatemenus=[{"type": "buttons", "buttons": [play], "x": 0, "y": 1.12}],
        )

    def _cloud(self, step: int, layer: int | None) -> Scatter:
        """The points of a snapshot in standard deviations, each axis turned so that entropy rises along it."""
        result = self.results[step][f"value manifold, site {self.value_site}"]
        assert isinstance(result, ManifoldResult)
        assert result.points is not None
        points = result.points
        points = points[points["layer"] == (points["layer"].max() if layer is None else layer)]
        points = points.iloc[:: max(1, len(points) // 1500)]
        h = points["entropy_bits"].to_numpy()
        axes = []
        for name in ("PC1", "PC2"):
            z = points[name].to_numpy() / max(points[name].std(), np.finfo(float).tiny)
            axes.append(z * (-1 if ((h - h.mean()) * z).sum() < 0 else 1))
        marker = {"size": 4, "color": h, "colorscale": "Viridis", "colorbar": {"title": "entropy (bits)"}}
        return Scatter(x=axes[0], y=axes[1], mode="markers", marker=marker)


def dynamics(source: str | Path, *, sequences: int = 128, seed: int = 0) -> Dynamics:
    """Run the probes at every snapshot of a checkpoint, on the same sequences.

    Args:
        source: a checkpoint by name or folder that has snapshots.
        sequences: sequences drawn from the training distribution.
        seed: their seed.

    Raises:
        CheckpointError: when the checkpoint has no snapshots.
    """
    models = snapshot_models(source)
    task, declared = read_checkpoint(source).task, next(iter(models.values())).sites
    batch = task.for_training().sample(sequences, seed=seed)
    value_site = next(site for site in MANIFOLD_SITES if site in declared)
    sites = [site for site in ("k", "scores", "pattern", value_site) if site in declared]
    results, records = {}, {}
    for step, snapshot in models.items():
        acts = extract(snapshot, batch, sites, twin_seed=None)
        assert acts.logits is not None
        found = geometry(acts, batch)
        found["calibration"] = calibration(
            acts.logits, batch.posterior, batch.targets, baselines=task.baselines(batch), readout=task.readout
        )
        results[step], records[step] = found, acts
    dissociation = settling(records, fraction=TIMED) if "pattern" in declared else None
    return Dynamics(str(source), results, dissociation, value_site)
