"""The figure of a sequence shows the sequence, its posterior and its entropy, and nothing else."""

import json

import numpy as np
import pytest

from interp.figures import sequence_figure
from tasks import TaskError, get_task, task_names


@pytest.mark.parametrize("name", task_names())
def test_the_figure_shows_the_numbers_of_the_batch(name):
    task = get_task(name)
    batch = task.sample(1, seed=3, start=7)
    figure = sequence_figure(task, seed=3, index=7)
    sequence, posterior, label, entropy = figure.data
    np.testing.assert_array_equal(entropy.y, batch.entropy[0])
    np.testing.assert_array_equal(label.y, batch.targets[0])
    if task.readout == "gaussian":
        np.testing.assert_array_equal(posterior.y, batch.posterior[0, :, 0])
        np.testing.assert_allclose(np.square(posterior.error_y.array), batch.posterior[0, :, 1], rtol=1e-12)
    else:
        np.testing.assert_array_equal(posterior.z, batch.posterior[0].T)
    if task.readin == "vectors":
        np.testing.assert_array_equal(sequence.z, batch.tokens[0].T)
    else:
        assert list(sequence.text[0]) == [task.vocabulary[token] for token in batch.tokens[0]]
        assert np.flatnonzero(sequence.z[0]).tolist() == batch.position[0].tolist()
    assert json.loads(figure.to_json())["layout"]["title"]["text"] == f"{name}, sequence 7 of seed 3"


def test_a_negative_index_is_refused():
    with pytest.raises(TaskError, match="start must be at least 0"):
        sequence_figure(get_task("mess3"), index=-1)
