"""Signatures on planted tables, and a wind tunnel beside a language model on one page in a real browser."""

import json
import re

import numpy as np
import pytest
import torch
from browser import BROWSER, dom
from transformers import LlamaConfig, LlamaForCausalLM

from interp import InterpError, compare, load_checkpoint, load_pretrained
from interp.signatures import SIGNATURES, signature_table
from probes.calibration import calibration
from probes.result import Result, rows, table


def planted(estimate, low, high, **nulls):
    values = [np.asarray(x, dtype=float) for x in (estimate, low, high)]
    part = rows("mass", values[0], (values[1], values[2]), axes=("layer",), **nulls)
    return {"query-key sharpening, planted": Result("planted", table(part), "", {})}


@pytest.mark.parametrize(
    ("low", "verdict", "shown"),
    [
        ([0.6, 0.6, 0.6, 0.4], "present", 3),
        ([0.6, 0.6, 0.4, 0.4], "in part", 2),
        ([0.4, 0.4, 0.4, 0.4], "absent", 0),
    ],
)
def test_a_place_shows_a_signature_when_its_interval_is_beyond_every_null(low, verdict, shown):
    results = planted([0.7, 0.8, 0.9, 0.5], low, [1.0] * 4, null_uniform=0.5, null_init=[0.1, np.nan, 0.3, 0.2])
    (line,) = signature_table(results)
    assert (line["verdict"], line["shown"], line["places"]) == (verdict, shown, 4)
    assert (line["on"], line["null"], line["null_name"]) == ("planted", 0.5, "uniform")
    # Distances to the higher null are .2, .3, .4 and 0; the upper median is .3.
    assert line["effect"] == pytest.approx(0.3)
    assert line["estimate"] == 0.8


def test_chance_hits_among_many_places_are_absence():
    low = np.where(np.arange(100) < 5, 0.6, 0.4)
    (line,) = signature_table(planted(np.full(100, 0.65), low, np.ones(100), null_uniform=0.5))
    assert line["verdict"] == "absent"


def test_a_signature_that_lies_below_its_null_counts_on_that_side():
    posterior = torch.eye(4).double()[torch.arange(12) % 4].reshape(6, 2, 4) * 0.96 + 0.01
    result = calibration(posterior.log().float(), posterior, torch.zeros(6, 2).long())
    (line,) = signature_table({"calibration, planted": result})
    assert line["verdict"] == "present"
    # Each half of the sequences mispredicts the other by position, so uniform is nearest: 2 bits minus the entropy.
    assert line["null_name"] == "uniform"
    assert line["effect"] == pytest.approx(2 + 0.97 * np.log2(0.97) + 0.03 * np.log2(0.01), abs=1e-5)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """A random two-layer Llama that reads SmolLM2's tokens."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    tokenizer = load_pretrained("smollm2").tokenizer
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def comparison(tiny, language_model):
    return compare([tiny, language_model], sequences=16)


def test_both_get_the_same_probes_with_the_twin_beside(comparison, tiny, language_model):
    sections = [
        {title.partition(", ")[0] for title in comparison.results[str(source)]} for source in (tiny, language_model)
    ]
    assert sections[0] >= {"calibration", "key orthogonality", "query-key sharpening", "value manifold", "entropy axis"}
    assert sections[0] <= sections[1]
    for results in comparison.results.values():
        assert all(result.frame["null_init"].notna().any() for result in results.values())


def test_each_signature_is_decided_for_each_model(comparison, tiny, language_model):
    found = comparison.signatures()
    claims = [signature.claim for signature in SIGNATURES]
    assert [line["signature"] for line in found] == sorted((x["signature"] for x in found), key=claims.index)
    assert {x["signature"] for x in found if x["model"] == str(language_model)} == set(claims)
    assert {x["on"] for x in found if x["model"] == str(tiny)} == {"bijection"}
    json.dumps(comparison.to_dict(), allow_nan=True)


def test_the_wind_tunnel_is_calibrated_as_evaluate_says(comparison, tiny):
    model, task = load_checkpoint(tiny)
    batch = task.for_training().sample(16, seed=0)
    with torch.no_grad():
        result = calibration(model(batch.tokens, batch.position), batch.posterior, batch.targets)
    shown = comparison.results[str(tiny)]["calibration, bijection"]
    assert shown.value("kl_bits") == pytest.approx(result.value("kl_bits"), rel=1e-5)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
def test_a_real_browser_draws_the_page_offline(comparison, tmp_path):
    page = tmp_path / "compare.html"
    comparison.to_html(page)
    drawn = dom(page, tmp_path / "profile")
    expected = page.read_text().count('class="plotly-graph-div"')
    assert expected > len({signature.statistic for signature in SIGNATURES})
    assert drawn.count('class="plotly-graph-div js-plotly-plot"') == expected
    body = drawn.split("<body", 1)[1]
    assert not re.search(r"(src|href)=\"https?://(?!plotly)", body)
    for signature in SIGNATURES:
        assert signature.claim in body


def test_wind_tunnels_alone_make_a_page_without_what_only_language_models_show(tiny, tmp_path):
    page = tmp_path / "compare.html"
    compare([tiny, "mess3-transformer"], sequences=16).to_html(page)
    headings = re.findall(r"<h2>(.*?)</h2>", page.read_text())
    assert {"calibration", "key orthogonality", "entropy axis"} < set(headings)
    assert "domain restriction" not in headings


@pytest.mark.parametrize("sources", [["a"], ["a", "a"]])
def test_two_different_models_are_needed(sources):
    with pytest.raises(InterpError, match="two or more different models"):
        compare(sources)


def test_a_folder_that_holds_no_model_is_said_in_one_line(tiny, tmp_path):
    with pytest.raises(InterpError, match="holds no causal language model"):
        compare([tiny, tmp_path])
