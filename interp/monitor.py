"""The live monitor: what each head's advantage, routing and values do during training, one JSON line a record."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Float64
from torch import Tensor

from interp.errors import CheckpointError, TrainingError
from interp.files import write_text
from interp.models.base import SequenceModel
from probes.advantage import advantage, extract_gradients
from probes.calibration import Readout, kl_bits
from probes.extract import Activations
from probes.result import Result, rows, table
from tasks.base import Batch

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MONITOR = "monitor.jsonl"
"""File of a checkpoint folder: one line a record, statistics as ``[layer][head]``, null where undefined."""
KINDS = ("advantage",)
"""What can be monitored."""
SEQUENCES = 32
"""Held-out sequences that the monitor reads: half a training batch, whose cost every record adds."""
PROBED, MOVED = ("law_residual", "advantage_rms", "routing_gain"), ("routing_change", "value_change")
"""Statistics of :func:`probes.advantage`, and changes since the last record."""

READING = (
    "Each line is a head. Learning in the order that the papers tell would show routing_change fade while value_change "
    "goes on; advantage_rms that is still high then is a pull on attention that the optimiser does not follow. The "
    "table gives the last record; null_init is the first, before training."
)
UNITS = {"advantage_rms": "bits", "routing_gain": "bits", "routing_change": "total variation"}


class Monitor:
    """Measures a model on fixed held-out sequences at each call of :meth:`record`; weights and gradients stay as is.

    Beside the statistics of :func:`probes.advantage`: ``routing_change``, the mean total variation between a
    query's attention now and at the last record; ``value_change``, the norm of the change of the values relative to
    that of the values.

    Args:
        kind: what to monitor; ``advantage``.
        module: the model that is trained.
        batch: held-out sequences.
        readout: form of the model's output.
        folder: the checkpoint folder.

    Raises:
        TrainingError: for an unknown kind, or a model without attention weights.
    """

    def __init__(self, kind: str, module: SequenceModel, batch: Batch, readout: Readout, folder: Path) -> None:
        if kind not in KINDS:
            raise TrainingError(f"unknown monitor '{kind}'; known: {', '.join(KINDS)}")
        if "pattern" not in module.sites:
            raise TrainingError(
                f"the {module.cfg.architecture} has no attention weights, hence no advantage to monitor; "
                "leave --monitor out, or train a transformer"
            )
        self.module, self.batch, self.path = module, batch, folder / MONITOR
        self.loss = partial(kl_bits, readout=readout)
        self.last: Activations | None = None

    def record(self, step: int) -> None:
        """Measure the model and append a line to the file."""
        grads = self._extract()
        frame = advantage(grads, resamples=0).frame
        line: dict[str, Any] = {"step": step}
        for name in PROBED:
            part = frame[frame["statistic"] == name].pivot_table(index="layer", columns="head", values="estimate")
            line[name] = part.to_numpy(float)
        if self.last is not None:
            line |= dict(zip(MOVED, moved(self.last, grads), strict=True))
        self.last = grads
        plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in line.items()}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(plain) + "\n")

    def resume(self, step: int) -> None:
        """Drop records after ``step``, whose weights the model has again, and measure changes from here."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        write_text(self.path, "".join(line + "\n" for line in kept))
        self.last = self._extract()

    def _extract(self) -> Activations:
        return extract_gradients(self.module, self.batch, loss=self.loss, batch_size=SEQUENCES, twin_seed=None)


def moved(
    before: Activations, after: Activations
) -> tuple[Float64[np.ndarray, "layer head"], Float64[np.ndarray, "layer _"]]:
    """Mean total variation of the patterns, and relative norm of the change of the values, of every head."""

    def norm(v: Float[Tensor, "batch pos _ d_head"]) -> Float[Tensor, " _"]:
        return v.double().square().sum((0, 1, 3)).sqrt()

    patterns = zip(before.layers("pattern"), after.layers("pattern"), strict=True)
    values = zip(before.layers("v"), after.layers("v"), strict=True)
    variation = [(q - p).double().abs().sum(-1).mean((0, 2)).numpy() / 2 for p, q in patterns]
    relative = [(norm(w - v) / norm(v)).numpy() for v, w in values]
    return np.stack(variation), np.stack(relative)


@dataclass(frozen=True, eq=False)
class MonitorResult(Result):
    """The last record of a run as a table, and all of them as curves."""

    curves: pd.DataFrame = None
    """Columns ``step``, ``layer``, ``head``, ``statistic``, ``value``."""

    def figure(self) -> Figure:
        """A panel a statistic, a line a head, over training steps."""
        import plotly.express as px

        frame = self.curves.dropna(subset="value").assign(head=lambda f: "head " + f["head"].astype(str))
        figure = px.line(
            frame, x="step", y="value", facet_col="statistic", facet_col_wrap=3, color="layer", line_group="head"
        )
        figure.update_yaxes(matches=None, showticklabels=True, title="")
        figure.for_each_annotation(lambda a: a.update(text=_label(a.text.split("=")[-1])))
        figure.update_layout(template="plotly_white", height=640)
        return figure


def monitor_result(folder: Path | str) -> MonitorResult | None:
    """What the monitor of a run wrote into its folder; None where there was none.

    Raises:
        CheckpointError: when the file is not what a monitor writes.
    """
    path = Path(folder) / MONITOR
    if not path.is_file():
        return None
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        parts = [
            rows(name, np.array(line[name], dtype=float), axes=("layer", "head")).assign(step=line["step"])
            for line in lines
            for name in (*PROBED, *MOVED)
            if name in line
        ]
        curves = pd.concat(parts, ignore_index=True)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a monitor's file ({error}); delete it, or train again") from error
    curves = curves.rename(columns={"estimate": "value"})[["step", "layer", "head", "statistic", "value"]]
    ends = curves.groupby(["statistic", "layer", "head"], sort=False)["value"].agg(["first", "last"]).reset_index()
    ends["first"] = ends["first"].where(ends["statistic"].isin(PROBED))
    frame = table(ends.rename(columns={"last": "estimate", "first": "null_init"}).assign(low=np.nan, high=np.nan))
    return MonitorResult("monitor", frame, READING, UNITS, curves=curves)


def _label(statistic: str) -> str:
    return f"{statistic} ({UNITS[statistic]})" if statistic in UNITS else statistic
