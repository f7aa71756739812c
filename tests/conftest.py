"""Every test runs with the jaxtyping annotations of the three packages checked by beartype."""

import torch
from jaxtyping import install_import_hook

install_import_hook(["tasks", "probes", "interp"], "beartype.beartype")
torch.set_num_threads(1)
