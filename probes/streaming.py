"""Activations on disk: one ``.npy`` file a hook, written a few sequences at a time, read by memory map, no pickles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from .result import ProbeError


class Recording:
    """Tensors that arrive a few sequences at a time: kept in memory, or appended to files in a folder."""

    def __init__(self, rows: int, folder: Path | None = None) -> None:
        self.rows, self.folder = rows, folder
        self.tensors: dict[str, Tensor] = {}

    def append(self, name: str, part: Tensor, start: int) -> None:
        """Add the rows from ``start`` on; bfloat16, which numpy lacks, becomes float32."""
        part = part.detach().to("cpu", torch.float32 if part.dtype == torch.bfloat16 else part.dtype)
        if self.folder is None:
            if name not in self.tensors:
                self.tensors[name] = torch.empty(self.rows, *part.shape[1:], dtype=part.dtype)
            self.tensors[name][start : start + len(part)] = part
            return
        array = part.numpy()
        with open(self.folder / f"{name}.npy", "ab") as file:
            if start == 0:
                header = np.lib.format.header_data_from_array_1_0(array)
                np.lib.format.write_array_header_1_0(file, {**header, "shape": (self.rows, *array.shape[1:])})
            file.write(np.ascontiguousarray(array).data)


@contextmanager
def recording(rows: int, folder: Path | None) -> Iterator[Recording]:
    """A recording whose ``tensors`` are whole once the block ends; on disk, files appear only then.

    Raises:
        ProbeError: when the folder can't be written.
    """
    if folder is None:
        yield Recording(rows)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".") as temporary:
            parts = Recording(rows, Path(temporary))
            yield parts
            for path in sorted(Path(temporary).iterdir()):
                os.replace(path, folder / path.name)
                parts.tensors[path.stem] = torch.from_numpy(np.load(folder / path.name, mmap_mode="c"))
    except OSError as error:
        raise ProbeError(
            f"could not write activations to {folder}: {error.strerror or error}; "
            "free some space or choose another place"
        ) from error
