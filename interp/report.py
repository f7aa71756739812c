"""The report: one self-contained interactive page about a model, readable offline."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

import jinja2
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from probes.manifold import ManifoldResult
from probes.result import Result

if TYPE_CHECKING:
    from interp.diagnose import Diagnosis


def report_page(diagnosis: Diagnosis) -> str:
    """The whole page as HTML text."""
    sections = [
        {
            "id": title.replace(" ", "-").replace(",", ""),
            "title": title,
            "reading": result.reading,
            "figures": [_embed(figure) for figure in figures_of(result)],
            "table": _table(result),
        }
        for title, result in diagnosis.results.items()
    ]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("interp").joinpath("report.html.j2").read_text(encoding="utf-8"))
    return template.render(
        name=diagnosis.name,
        task={"name": diagnosis.task.name, **diagnosis.task.parameters()},
        task_doc=(type(diagnosis.task).__doc__ or "").split("\n\n")[0].replace("`", ""),
        primitive=diagnosis.task.primitive,
        model={key: value for key, value in diagnosis.model.items() if key != "sites"},
        calibration=headline_table(diagnosis),
        sections=sections,
        settings=diagnosis.settings,
        plotlyjs=get_plotlyjs(),
    )


def figures_of(result: Result) -> list[Figure]:
    """The figures of a result: its panels, and the point cloud where there is one."""
    if isinstance(result, ManifoldResult):
        return [result.scatter(), result.figure()]
    return [result.figure()]


def headline_table(diagnosis: Diagnosis) -> list[dict[str, str]]:
    """One row a calibration result: each error in bits, with its interval, beside the best trivial predictor's."""
    lines = []
    for title, result in diagnosis.results.items():
        if result.probe == "calibration":
            line = {"on": title}
            for statistic in ("mae_bits", "kl_bits"):
                row = result.row(statistic)
                best = row[result.nulls()].abs().astype(float).idxmin()
                line[statistic] = f"{row['estimate']:.5f} [{row['low']:.5f}, {row['high']:.5f}]"
                line[f"{statistic}_null"] = f"{abs(row[best]):.3f} ({str(best).removeprefix('null_')})"
            lines.append(line)
    return lines


def _embed(figure: Figure) -> str:
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}))


def _table(result: Result) -> str:
    frame = result.to_frame()
    frame = frame.astype(object).where(frame.notna(), "")
    return str(frame.to_html(index=False, border=0, classes="numbers", float_format=lambda x: f"{x:.4g}"))
