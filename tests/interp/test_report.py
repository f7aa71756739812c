"""The report in a real browser, and its numbers against the probes' own."""

import re

import numpy as np
import pytest
from browser import BROWSER, dom

from interp import diagnose, load_checkpoint


@pytest.fixture(scope="module")
def diagnosis(tiny):
    model, task = load_checkpoint(tiny)
    return diagnose(model, task, sequences=32)


def test_every_probe_that_applies_ran_and_carries_the_twin(diagnosis):
    probes = {result.probe for result in diagnosis.results.values()}
    assert probes >= {"calibration", "key_orthogonality", "query_key_sharpening", "value_manifold(v)"}
    for result in diagnosis.results.values():
        assert "null_init" in result.nulls()
        assert result.frame["null_init"].notna().any()


def test_the_numbers_in_the_figures_are_those_in_the_frames(diagnosis):
    for result in diagnosis.results.values():
        drawn = {
            round(float(y), 9)
            for trace in result.figure().data
            if trace.name == "measured"
            for y in trace.y
            if y is not None and np.isfinite(y)
        }
        known = {round(float(value), 9) for value in result.to_frame()["estimate"].dropna()}
        assert drawn
        assert drawn <= known


def test_summaries_have_one_row_a_place(diagnosis):
    summary = diagnosis.results["key orthogonality"].summary()
    assert len(summary) == 4
    assert re.match(r"[\d.]+ \[[\d.]+, [\d.]+\] \([+-][\d.e-]+\)", summary.iloc[0, 0])


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
def test_a_real_browser_draws_every_figure_offline(diagnosis, tmp_path):
    page = tmp_path / "report.html"
    diagnosis.to_html(page)
    drawn = dom(page, tmp_path / "profile")
    figures = sum(len(result.figures()) for result in diagnosis.results.values())
    assert drawn.count('class="plotly-graph-div js-plotly-plot"') == figures
    body = drawn.split("<body", 1)[1]
    assert not re.search(r"(src|href)=\"https?://(?!plotly)", body)
