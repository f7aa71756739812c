"""One drawn sequence of a task with its exact posterior, as an interactive figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from interp.files import write_text
from tasks.base import Batch, Task

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NARROW = 64
"""Longest sequence whose tokens are written into the figure; of a longer one they are shown on hovering."""


def write_figures(path: Path | str, figures: Sequence[Figure]) -> None:
    """Write figures below each other as one interactive page, readable offline, atomically."""
    parts = [figure.to_html(full_html=False, include_plotlyjs=i == 0) for i, figure in enumerate(figures)]
    write_text(Path(path), "".join(parts))


def sequence_figure(task: Task, seed: int = 0, index: int = 0) -> Figure:
    """Draw sequence ``index`` of the stream ``seed``: its tokens, the exact posterior at every query, the entropy.

    Tokens are along the top, dark where an answer is due (real vectors: their coordinates in colour). Below, the
    posterior at each query with the sampled label (a Gaussian as mean +- standard deviation), and beside it its
    entropy in bits. Hovering tells tokens, probabilities and positions.

    Args:
        task: any wind tunnel.
        seed: stream of sequences.
        index: which sequence of the stream.

    Raises:
        TaskError: if ``seed`` or ``index`` is negative.
    """
    from plotly.subplots import make_subplots

    batch = task.sample(1, seed=seed, start=index)
    gaussian, vectors = task.readout == "gaussian", task.readin == "vectors"
    figure = make_subplots(
        2,
        2,
        specs=[[{"colspan": 2}, None], [{}, {}]],
        row_heights=[0.35, 0.65] if vectors else [0.12, 0.88],
        column_widths=[0.66, 0.34],
        vertical_spacing=0.2,
        horizontal_spacing=0.14,
        subplot_titles=["sequence", "exact posterior and sampled label", "entropy of the posterior"],
    )
    figure.add_trace(_sequence(task, batch), 1, 1)
    figure.add_trace(_gaussian(batch) if gaussian else _classes(batch), 2, 1)
    figure.add_trace(_labels(batch), 2, 1)
    figure.add_trace(_entropy(batch), 2, 2)
    figure.update_xaxes(title="position in the sequence", row=1, col=1)
    figure.update_yaxes(showticklabels=vectors, autorange="reversed", row=1, col=1)
    figure.update_xaxes(title="query (where an answer is due)", row=2)
    figure.update_yaxes(title="answer" if gaussian else "class of the answer", row=2, col=1)
    figure.update_yaxes(title="bits", rangemode="normal" if gaussian else "tozero", row=2, col=2)
    figure.update_layout(
        template="plotly_white",
        height=640,
        title=f"{task.name}, sequence {index} of seed {seed}",
        legend={"orientation": "h", "y": -0.14},
        margin={"t": 90, "b": 60, "l": 60, "r": 20},
    )
    return figure


def _sequence(task: Task, batch: Batch) -> dict[str, Any]:
    """The tokens in a row, or the coordinates of the vectors in columns."""
    if task.readin == "vectors":
        return {
            "type": "heatmap",
            "z": batch.tokens[0].numpy().T,
            "y": task.vocabulary,
            "colorscale": "RdBu",
            "zmid": 0,
            "showscale": False,
            "hovertemplate": "position %{x}<br>%{y}: %{z:.3f}<extra></extra>",
        }
    names = [task.vocabulary[token] for token in batch.tokens[0].tolist()]
    return {
        "type": "heatmap",
        "z": batch.supervised.int().numpy(),
        "text": [names],
        "texttemplate": "%{text}" if len(names) <= NARROW else "",
        "zmin": 0,
        "zmax": 1,
        "colorscale": [[0, "#e4e9ee"], [1, "#1b6ca8"]],
        "showscale": False,
        "xgap": 1,
        "hovertemplate": "position %{x}<br>token %{text}<extra></extra>",
    }


def _classes(batch: Batch) -> dict[str, Any]:
    """Class probabilities at each query."""
    classes = batch.posterior[0].numpy().T
    return {
        "type": "heatmap",
        "z": classes,
        "zmin": 0,
        "zmax": 1,
        "colorscale": "Blues",
        "colorbar": {"title": "p", "x": 0.575, "len": 0.72, "y": 0.36, "thickness": 10},
        "customdata": np.broadcast_to(batch.position[0].numpy(), classes.shape),
        "hovertemplate": "query %{x}, position %{customdata}<br>class %{y}<br>probability %{z:.4f}<extra></extra>",
    }


def _gaussian(batch: Batch) -> dict[str, Any]:
    """Mean and standard deviation at each query."""
    mean, variance = batch.posterior[0].numpy().T
    return {
        **_points(batch, mean, "%{y:.4f} +- %{error_y.array:.4f}"),
        "error_y": {"type": "data", "array": np.sqrt(variance), "thickness": 1.5},
        "name": "mean +- standard deviation",
        "marker": {"color": "#111111", "size": 6},
    }


def _labels(batch: Batch) -> dict[str, Any]:
    """The sampled label of each query."""
    return {
        **_points(batch, batch.targets[0].numpy(), "label %{y:.4~g}"),
        "name": "sampled label",
        "marker": {"color": "#d95f02", "size": 8, "symbol": "circle-open", "line": {"width": 2}},
    }


def _entropy(batch: Batch) -> dict[str, Any]:
    """Bits at each query."""
    return {
        **_points(batch, batch.entropy[0].numpy(), "%{y:.4f} bits"),
        "mode": "lines+markers",
        "showlegend": False,
        "line": {"color": "#111111"},
    }


def _points(batch: Batch, y: np.ndarray, hover: str) -> dict[str, Any]:
    """One point a query."""
    return {
        "type": "scatter",
        "x": np.arange(len(y)),
        "y": y,
        "mode": "markers",
        "customdata": batch.position[0].numpy(),
        "hovertemplate": "query %{x}, position %{customdata}<br>" + hover + "<extra></extra>",
    }
