"""The report: one self-contained interactive page about a model, readable offline."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

import jinja2
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from probes.result import Result

if TYPE_CHECKING:
    from interp.diagnose import Diagnosis


def report_page(diagnosis: Diagnosis) -> str:
    """The whole page as HTML text."""
    sections = [
        {
            "id": anchor(title),
            "title": title,
            "reading": result.reading,
            "figures": [embed(figure) for figure in result.figures()],
            "table": numbers(result),
        }
        for title, result in diagnosis.results.items()
    ]
    return render(
        "report.html.j2",
        name=diagnosis.name,
        task={"name": diagnosis.task.name, **diagnosis.task.parameters()},
        task_doc=(type(diagnosis.task).__doc__ or "").split("\n\n")[0].replace("`", ""),
        primitive=diagnosis.task.primitive,
        model={key: value for key, value in diagnosis.model.items() if key != "sites"},
        calibration=headline_table(diagnosis),
        sections=sections,
        settings=diagnosis.settings,
    )


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


def render(template: str, **context: Any) -> str:
    """A page from a template of this package, with plotly inside."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(files("interp").joinpath(template).read_text(encoding="utf-8"))
    return page.render(plotlyjs=get_plotlyjs(), **context)


def anchor(title: str) -> str:
    """The title of a section as an HTML id."""
    return title.replace(" ", "-").replace(",", "")


def embed(figure: Figure) -> str:
    """A figure as a piece of HTML."""
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}))


def numbers(result: Result) -> str:
    """A result's table as a piece of HTML."""
    frame = result.to_frame()
    frame = frame.astype(object).where(frame.notna(), "")
    return str(frame.to_html(index=False, border=0, classes="numbers", float_format=lambda x: f"{x:.4g}"))
