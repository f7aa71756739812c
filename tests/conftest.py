"""Every test runs with the jaxtyping annotations of the three packages checked by beartype."""

from jaxtyping import install_import_hook

install_import_hook(["tasks", "probes", "interp"], "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402

from interp.models.base import ModelConfig  # noqa: E402
from interp.recipe import TrainConfig  # noqa: E402
from interp.training import train  # noqa: E402
from tasks import Bijection  # noqa: E402

torch.set_num_threads(1)

TINY_TASK = Bijection(symbols=5, pairs=4)
TINY_MODEL = ModelConfig(d_vocab=10, d_out=5, n_ctx=8, n_layers=2, d_model=16, n_heads=2)
TINY_RUN = TrainConfig(steps=12, batch_size=8, eval_every=4, eval_sequences=16, snapshots=3, warmup=2)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A checkpoint of a tiny transformer after a few steps."""
    return train(TINY_TASK, TINY_MODEL, TINY_RUN, tmp_path_factory.mktemp("runs") / "tiny", progress=False)
