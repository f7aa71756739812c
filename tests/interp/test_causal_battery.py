"""The battery finds, in a planted model, the direction that is read and the one that is not."""

import pytest
from toy import Toy

from interp.causal_battery import NAMES, causal_battery, causal_table
from probes import Subject
from probes.plotting import heat_map


@pytest.fixture(scope="module")
def found():
    model = Toy((0, 1))
    batch, fit = model.batch(40, seed=0), model.batch(200, seed=1)
    for drawn in (batch, fit):
        p = drawn.posterior
        drawn.entropy = -(p * p.log2()).sum(-1)
    return causal_battery(Subject(model, batch), fit, per_position=True, placebos=2)


def test_the_frame_is_the_direction_that_the_model_reads(found):
    swap = found["swap, belief frame"].row("redirected_bits", layer=0)
    assert swap["low"] > max(swap["null_random"], swap["null_shuffled"], swap["null_wrong_state"])
    assert found["swap, belief frame"].value("kl_to_target_bits", layer=0) < 0.1
    assert found["ablation, belief frame"].row("kl_increase_bits", layer=0)["effect"] > 0.1


def test_every_test_of_every_subspace_is_a_row_of_the_table(found):
    lines = causal_table(found)
    tests = {(line["test"], line["subspace"]) for line in lines}
    expected = {(test, name) for test in ("ablation", "swap") for name in NAMES}
    expected |= {("steering", name) for name in NAMES[:3]} | {("decodability", "")}
    assert tests == expected
    assert len(lines) == 2 * len(expected)


def test_the_heat_map_shows_the_table(found):
    result = found["swap, belief frame"]
    (heat,) = heat_map(result, "redirected_bits").data
    assert heat.z.shape == (2, 4)
    assert heat.z[1, 2] == result.value("redirected_bits", layer=1, query=2)
    assert heat.customdata[1, 2, 0] == result.row("redirected_bits", layer=1, query=2)["low"]
