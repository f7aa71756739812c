"""The precision of matrix products of float32 numbers, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch


@contextmanager
def matmul_precision(precision: Literal["highest", "medium"]) -> Iterator[None]:
    """Compute in float32 (``highest``), or in bfloat16 where that is faster (``medium``), then go back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
