"""How the values on an edge travel: as a list of tensors whose layout both ends know.

The first message of each size carries a small header with the layout; later ones of that size
are bare tensors, received into memory that was ready before they left. A message that begins with ``_MARK`` holds
nothing: its values did not fit that memory, and follow with a header of their own. Values that happen to begin like
that are sent as if they did not fit, so the mark is never mistaken for them.

A transposed tensor travels as it lies in memory and is transposed again on arrival. So a cut changes neither which
random numbers its elements get, which goes by their order in memory, nor which views of it are possible.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import WorkerError

# The order is part of the wire format.
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_MOST_DIMENSIONS = 8
_ROW = 3 + 2 * _MOST_DIMENSIONS
# No boolean begins like this, and little else; a tensor of fewer bytes is marked by the first of these.
_MARK = bytes([183, 52, 9, 201, 77, 150, 33, 240, 18, 99, 171, 5, 222, 64, 140, 87])


class TensorLayout(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    """As it lies in memory."""
    differentiable: bool = False
    """whether the receiver owes a gradient for it"""
    order: tuple[int, ...] = ()
    """The tensor's dimensions in the order of memory. Empty if they are in that order."""

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


Layout = tuple[TensorLayout | None, ...]
"""One entry per value; None for a value that has nothing to send (no gradient reached it)."""


def obstacle(value: Any) -> str:
    """What keeps a value from being sent, as a type or a kind of tensor; empty where nothing does."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.layout != torch.strided or value.is_quantized:
        return f"{str(value.layout).partition('.')[2]} tensor"
    if value.dtype not in _DTYPES:
        return f"{str(value.dtype).partition('.')[2]} tensor"
    return f"tensor of {value.dim()} dimensions" if value.dim() > _MOST_DIMENSIONS else ""


def layout_of(tensors: Sequence[Tensor | None]) -> Layout:
    return tuple(None if tensor is None else _layout(tensor) for tensor in tensors)


def _layout(tensor: Tensor) -> TensorLayout:
    order, shape = _memory_order(tensor), tuple(tensor.shape)
    return TensorLayout(tensor.dtype, tuple(shape[d] for d in order) if order else shape, tensor.requires_grad, order)


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    if tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension]))
    return order if tensor.permute(order).is_contiguous() else ()  # one with gaps or repeats is sent as a copy


def as_in_memory(tensors: Sequence[Tensor | None], layout: Layout) -> list[Tensor | None]:
    """The tensors with their dimensions in the order of memory."""
    return [
        tensor.detach().permute(entry.order) if tensor is not None and entry and entry.order else tensor
        for tensor, entry in zip(tensors, layout, strict=True)
    ]


def as_it_was(tensor: Tensor, entry: TensorLayout) -> Tensor:
    """A tensor that travelled as it lies in memory, with its dimensions in their own order."""
    if not entry.order:
        return tensor
    return tensor.permute([entry.order.index(dimension) for dimension in range(tensor.dim())])


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
        order = entry.order or range(len(entry.shape))
        row[3 : 3 + len(entry.shape)] = torch.tensor(entry.shape, dtype=torch.int64)
        row[-_MOST_DIMENSIONS:][: len(entry.shape)] = torch.tensor(order, dtype=torch.int64)
    return header


def decode_header(header: Tensor) -> Layout:
    return tuple(None if row[0] < 0 else _decode_row(row) for row in header.tolist())


def _decode_row(row: list[int]) -> TensorLayout:
    count = row[2]
    order = tuple(row[-_MOST_DIMENSIONS:][:count])
    in_order = order == tuple(range(count))
    return TensorLayout(_DTYPES[row[0]], tuple(row[3 : 3 + count]), bool(row[1]), () if in_order else order)


def can_be_marked(layout: Layout) -> bool:
    """Whether a message of this layout has a byte to say by that it holds nothing."""
    return any(entry is not None and math.prod(entry.shape) for entry in layout)


def is_marked(tensors: Sequence[Tensor | None]) -> bool:
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            if tensor.is_cpu:  # for every message, so without a tensor operation
                return _MARK.startswith(ctypes.string_at(tensor.data_ptr(), min(tensor.nbytes, len(_MARK))))
            return _MARK.startswith(bytes(_start_of(tensor).tolist()))
    return False


def marked(layout: Layout, device: torch.device) -> list[Tensor]:
    """A message of this layout that says that it holds nothing."""
    tensors = [entry.empty(device).zero_() for entry in layout if entry is not None]
    start = next(_start_of(tensor) for tensor in tensors if tensor.numel())  # ask can_be_marked first
    start.copy_(torch.tensor(list(_MARK[: len(start)]), dtype=torch.uint8))
    return tensors


def _start_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1)[: len(_MARK)].view(torch.uint8)[: len(_MARK)]
