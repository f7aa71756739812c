"""From a result's table to a plotly figure, so that the figure's numbers are the table's numbers."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .glossary import AXES
from .result import Result

MEASURED, EXACT, INIT, BOUND = "#1b6ca8", "#111111", "#d95f02", "#999999"
OTHERS = ("#7570b3", "#1b9e77", "#e7298a", "#a6761d", "#66a61e", "#666666")


def panels(result: Result) -> go.Figure:
    """One panel a statistic, the first axis along x, heads side by side, nulls beside the estimate."""
    frame = result.frame
    statistics = list(frame["statistic"].unique())
    columns = min(3, len(statistics))
    lines = -(-len(statistics) // columns)
    titles = [f"{name} ({unit})" if (unit := result.units.get(name)) else name for name in statistics]
    figure = make_subplots(lines, columns, subplot_titles=titles, vertical_spacing=0.32 / lines)
    styles = _styles(result)
    shown: set[str] = set()
    for i, statistic in enumerate(statistics):
        place = {"row": i // columns + 1, "col": i % columns + 1}
        part = frame[frame["statistic"] == statistic]
        axes = [axis for axis in result.axes() if part[axis].notna().any()]
        part = part.dropna(subset=axes)
        axis = "query" if "query" in axes else axes[0] if axes else None
        x = part[axis].to_numpy(float) if axis else np.zeros(len(part))
        if "head" in axes:
            heads = part["head"].to_numpy(float)
            x = x + 0.6 * (heads - heads.mean()) / (heads.max() + 1)
        for column, (label, style) in styles.items():
            if part[column].isna().all():
                continue
            trace = go.Scatter(
                x=x,
                y=part[column],
                name=label,
                legendgroup=label,
                showlegend=label not in shown,
                mode="markers" if axis is None or "head" in axes else "lines+markers",
                text=["<br>".join(f"{name} {row[name]}" for name in axes) for _, row in part.iterrows()],
                hovertemplate="%{text}<br>%{y:.4g}<extra>" + label + "</extra>",
                **style,
            )
            if column == "estimate":
                above, below = part["high"] - part["estimate"], part["estimate"] - part["low"]
                trace.error_y = {"symmetric": False, "array": above, "arrayminus": below, "thickness": 1}
            figure.add_trace(trace, **place)
            shown.add(label)
        figure.update_xaxes(title=AXES[axis] if axis else "", showticklabels=axis is not None, **place)
        if axis == "layer":
            figure.update_xaxes(dtick=1, **place)
    figure.update_layout(
        template="plotly_white",
        height=120 + 260 * lines,
        legend={"orientation": "h", "y": 1 + 0.22 / lines, "yanchor": "bottom"},
        margin={"t": 110, "b": 50, "l": 50, "r": 20},
        hovermode="closest",
    )
    return figure


def _styles(result: Result) -> dict[str, tuple[str, dict]]:
    """Column -> legend label and trace style, in drawing order."""
    styles: dict[str, tuple[str, dict]] = {}
    if "exact" in result.frame:
        line = {"color": EXACT, "width": 3, "shape": "hvh"}
        styles["exact"] = "exact posterior", {"line": line, "marker": {"size": 1}}
    others = iter(OTHERS * 3)
    for column in (c for c in result.frame if c.startswith(("null_", "bound_"))):
        kind, name = column.split("_", 1)
        label, colour = name.replace("_", " "), BOUND if kind == "bound" else next(others)
        if column == "null_init":
            label, colour = "same model at initialisation", INIT
        line = {"color": colour, "dash": "dot", "width": 1.5}
        marker = {"color": colour, "symbol": "line-ew-open", "size": 8}
        styles[column] = f"{label} bound" if kind == "bound" else label, {"line": line, "marker": marker}
    styles["estimate"] = "measured", {"line": {"color": MEASURED}, "marker": {"color": MEASURED, "size": 6}}
    return styles


def heat_map(result: Result, statistic: str) -> go.Figure:
    """One statistic by layer and supervised position (or head), with intervals and nulls where the mouse points."""
    axis = "query" if "query" in result.frame else "head"
    frame = result.frame[result.frame["statistic"] == statistic].dropna(subset=["layer", axis])

    def grid(column: str) -> np.ndarray:
        return frame.pivot_table(column, "layer", axis, dropna=False).to_numpy(float)

    columns = ["low", "high", *result.nulls()]
    told = "".join(f"<br>{name.removeprefix('null_')} %{{customdata[{i}]:.4g}}" for i, name in enumerate(columns))
    heat = go.Heatmap(
        x=sorted(frame[axis].unique()),
        y=sorted(frame["layer"].unique()),
        z=grid("estimate"),
        customdata=np.stack([grid(column) for column in columns], -1),
        hovertemplate=f"layer %{{y}}, {axis} %{{x}}<br>%{{z:.4g}}{told}<extra></extra>",
        colorscale="RdBu_r",
        zmid=0,
        colorbar={"title": result.units.get(statistic, "")},
    )
    figure = go.Figure(
        heat, layout={"template": "plotly_white", "height": 360, "title": f"{result.probe}: {statistic}"}
    )
    return figure.update_xaxes(title=AXES[axis]).update_yaxes(title="layer", dtick=1)


def manifold_scatter(points: pd.DataFrame, layer: int | None = None) -> go.Figure:
    """Points of one layer on their first three components, coloured by entropy; turn it with the mouse."""
    layer = int(points["layer"].max()) if layer is None else layer
    part = points[points["layer"] == layer]
    part = part.iloc[:: max(1, len(part) // 2500)]
    figure = go.Figure(
        go.Scatter3d(
            x=part["PC1"],
            y=part.get("PC2", 0 * part["PC1"]),
            z=part.get("PC3", 0 * part["PC1"]),
            mode="markers",
            marker={
                "size": 2.5,
                "color": part["entropy_bits"],
                "colorscale": "Viridis",
                "colorbar": {"title": "posterior<br>entropy (bits)"},
            },
            customdata=np.stack([part["position"], part["entropy_bits"]], 1),
            hovertemplate="position %{customdata[0]}<br>%{customdata[1]:.3f} bits<extra></extra>",
        )
    )
    scene = {f"{axis}axis": {"title": {"text": f"PC{i + 1}"}} for i, axis in enumerate("xyz")}
    figure.update_layout(template="plotly_white", height=560, scene=scene, title=f"layer {layer}")
    return figure


def belief_simplex(points: pd.DataFrame, layer: int | None = None) -> go.Figure:
    """Exact and regressed beliefs side by side: barycentric for three states, on two principal axes for more."""
    layer = int(points["layer"].max()) if layer is None else layer
    part = points[points["layer"] == layer]
    part = part.iloc[:: max(1, len(part) // 6000)]
    exact, read = (part.filter(regex=f"^{kind}_").to_numpy(float) for kind in ("belief", "regressed"))
    if exact.shape[1] == 3:
        plane = np.array([[0, 0], [1, 0], [0.5, np.sqrt(3) / 2]])
    else:
        plane = np.linalg.svd(exact - exact.mean(0), full_matrices=False)[2][:2].T
    share = exact[:, :3] / np.maximum(exact.max(0)[:3], np.finfo(float).tiny)
    colours = [f"rgb({r:.0f},{g:.0f},{b:.0f})" for r, g, b in 230 * share]
    figure = make_subplots(1, 2, subplot_titles=["exact belief", f"read from layer {layer}"])
    hover = [", ".join(f"{p:.3f}" for p in row) for row in exact]
    for column, cloud in enumerate((exact, read), 1):
        x, y = (cloud @ plane).T
        marker = {"size": 2.5, "color": colours}
        trace = go.Scatter(x=x, y=y, mode="markers", marker=marker, text=hover, hoverinfo="text", showlegend=False)
        figure.add_trace(trace, row=1, col=column)
        figure.update_yaxes(scaleanchor=f"x{column}", row=1, col=column)
    return figure.update_layout(template="plotly_white", height=480, width=960)
