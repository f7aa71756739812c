"""What every probe returns: estimates with intervals, nulls and the effect over the nearest null."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

INDEX = ("layer", "head", "query")
"""Axes along which a table of results may run."""


class ProbeError(ValueError):
    """Activations or beliefs that a probe can't measure; the message says what to change."""


@dataclass(frozen=True, eq=False)
class Result:
    """One probe's measurements as a tidy table: a row is one statistic at one place.

    Columns: the axes that apply (of ``layer``, ``head``, ``query``), ``statistic``, ``estimate``, ``low`` and
    ``high`` (bootstrap interval over sequences), one ``null_*`` column a baseline, ``effect`` (the estimate
    minus the nearest null: what no baseline explains), and where they exist ``bound_*`` (a value that can't be
    crossed), ``exact`` (the value of the true posterior) and ``p_value`` (permutation).
    """

    probe: str
    """Name of the probe."""
    frame: pd.DataFrame
    """The table."""
    reading: str
    """One plain sentence: what to look for."""
    units: Mapping[str, str]
    """Statistic -> unit, empty for a plain number."""
    level: float = 0.95
    """Coverage of the interval."""

    def to_frame(self) -> pd.DataFrame:
        """The tidy table; a copy."""
        return self.frame.copy()

    def axes(self) -> list[str]:
        """The axes along which the table runs."""
        return [axis for axis in INDEX if axis in self.frame]

    def nulls(self) -> list[str]:
        """The ``null_*`` columns."""
        return [column for column in self.frame if column.startswith("null_")]

    def summary(self) -> pd.DataFrame:
        """One row a layer, head or query; each cell reads ``estimate [low, high] (effect over nearest null)``."""

        def cell(row: pd.Series) -> str:
            interval = "" if np.isnan(row["low"]) else f" [{row['low']:.3g}, {row['high']:.3g}]"
            effect = "" if np.isnan(row["effect"]) else f" ({row['effect']:+.3g})"
            return f"{row['estimate']:.4g}{interval}{effect}"

        axes = self.axes()
        table = self.frame[[*axes, "statistic"]].copy()
        table[axes] = table[axes].astype(object).where(table[axes].notna(), "all")
        table["cell"] = self.frame.apply(cell, axis=1)
        wide = table.pivot_table(index=axes or None, columns="statistic", values="cell", aggfunc="first", sort=False)
        return wide.fillna("")

    def value(self, statistic: str, **place: Any) -> float:
        """The estimate of one statistic at one place, e.g. ``value("mean_abs_cos", layer=0, head=1)``."""
        return float(self.row(statistic, **place)["estimate"])

    def row(self, statistic: str, **place: Any) -> pd.Series:
        """The one row of the table for a statistic at a place; axes that are not given must be empty in it.

        Raises:
            ProbeError: when there is no such row.
        """
        match = self.frame["statistic"] == statistic
        for axis in self.axes():
            match &= self.frame[axis].isna() if place.get(axis) is None else self.frame[axis] == place[axis]
        if not match.any():
            known = ", ".join(self.frame["statistic"].unique())
            raise ProbeError(f"{self.probe} has no '{statistic}' at {place or 'the whole'}; it measures: {known}")
        return self.frame[match].iloc[0]

    def overall(self, statistic: str) -> pd.DataFrame:
        """The rows of one statistic over all supervised positions, by layer and head where it has them."""
        part = self.frame[self.frame["statistic"] == statistic]
        return part[part["query"].isna()] if "query" in part else part

    def figures(self) -> list[Figure]:
        """All there is to show: the panels of the table, after the points where the result holds some."""
        return [self.figure()]

    def figure(self) -> Figure:
        """The table as a plotly figure: estimates with intervals beside every null, a panel a statistic."""
        from .plotting import panels

        return panels(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what is undefined is None."""
        rows = self.frame.astype(object).where(self.frame.notna(), None).to_dict("records")
        return {"probe": self.probe, "reading": self.reading, "level": self.level, "rows": rows}


def rows(
    statistic: str,
    estimate: Any,
    interval: tuple[Any, Any] | None = None,
    *,
    axes: tuple[str, ...] = (),
    **columns: Any,
) -> pd.DataFrame:
    """Rows of a result for one statistic: arrays of shape ``axes`` (or scalars) become columns."""
    estimate = np.asarray(estimate, dtype=float)
    low, high = interval if interval is not None else (np.nan, np.nan)
    places = np.indices(estimate.shape).reshape(len(axes), estimate.size)
    table = {axis: places[i] for i, axis in enumerate(axes)}
    table["statistic"] = np.full(estimate.size, statistic, dtype=object)
    for name, column in {"estimate": estimate, "low": low, "high": high, **columns}.items():
        if column is not None:
            table[name] = np.broadcast_to(np.asarray(column, dtype=float), estimate.shape).ravel()
    return pd.DataFrame(table)


def table(*parts: pd.DataFrame) -> pd.DataFrame:
    """Stack rows and add the effect: the estimate minus the null that lies nearest to it."""
    frame = pd.concat(parts, ignore_index=True)
    nulls = frame[[column for column in frame if column.startswith("null_")]].to_numpy(float)
    distance = frame[["estimate"]].to_numpy(float) - nulls
    magnitude = np.where(np.isnan(distance), np.inf, np.abs(distance))
    if magnitude.shape[1]:
        nearest = np.take_along_axis(distance, magnitude.argmin(1)[:, None], 1)[:, 0]
    else:
        nearest = np.full(len(frame), np.nan)
    frame["effect"] = nearest
    for axis in INDEX:
        if axis in frame:
            frame[axis] = frame[axis].astype("Int64")
    order = [axis for axis in INDEX if axis in frame]
    rest = [column for column in frame if column not in order]
    return frame[order + rest]
