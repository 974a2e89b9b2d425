"""How the values on an edge travel: as a list of tensors whose layout both ends know.

The first message of each size carries a small header with the layout; later ones of that size
are bare tensors, received into memory that was ready before they left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import WorkerError

# The order is part of the wire format.
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_MOST_DIMENSIONS = 8
_ROW = 3 + _MOST_DIMENSIONS


@dataclass(frozen=True)
class TensorLayout:
    dtype: torch.dtype
    shape: tuple[int, ...]
    differentiable: bool = False
    """whether the receiver owes a gradient for it"""

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


Layout = tuple[TensorLayout | None, ...]
"""One entry per value; None for a value that has nothing to send (no gradient reached it)."""


def layout_of(tensors: Sequence[Tensor | None]) -> Layout:
    return tuple(None if t is None else TensorLayout(t.dtype, tuple(t.shape), t.requires_grad) for t in tensors)


def empty_header(count: int) -> Tensor:
    return torch.zeros(count, _ROW, dtype=torch.int64)


def encode_header(layout: Layout) -> Tensor:
    header = empty_header(len(layout))
    for row, entry in zip(header, layout, strict=True):
        if entry is None:
            row[0] = -1
            continue
        if len(entry.shape) > _MOST_DIMENSIONS:
            raise WorkerError(
                f"a tensor of {len(entry.shape)} dimensions crosses a cut; at most {_MOST_DIMENSIONS} can"
            )
        row[0], row[1], row[2] = _DTYPES.index(entry.dtype), entry.differentiable, len(entry.shape)
        row[3 : 3 + len(entry.shape)] = torch.tensor(entry.shape, dtype=torch.int64)
    return header


def decode_header(header: Tensor) -> Layout:
    rows = header.tolist()
    return tuple(
        None if row[0] < 0 else TensorLayout(_DTYPES[row[0]], tuple(row[3 : 3 + row[2]]), bool(row[1])) for row in rows
    )
