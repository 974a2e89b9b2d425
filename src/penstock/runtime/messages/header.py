"""How the receiver learns the layout of a message, and that there is none.

The first message of each size has a header with a row for each value. If a value is not one plain tensor, a
description follows the header, whose size is in the row. Later messages of that size are bare tensors, received into
memory that was ready before they left. A message that begins with ``MARK`` holds nothing: its values did not fit that
memory, and follow with a header of their own. Values that happen to begin like that are sent as if they did not fit, so
the mark is never mistaken for them.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.errors import WorkerError
from penstock.runtime.messages.dense import DTYPES, MOST_DIMENSIONS, TensorLayout
from penstock.runtime.messages.packing import Described, Layout, wire_layouts

_ROW = 3 + 2 * MOST_DIMENSIONS
_NOTHING, _DESCRIBED = -1, -2
# No boolean begins like this, and little else; a tensor of fewer bytes is marked by the first of these.
MARK = bytes([183, 52, 9, 201, 77, 150, 33, 240, 18, 99, 171, 5, 222, 64, 140, 87])

Rows = list[list[int]]


def empty_header(count: int) -> Tensor:
    return torch.zeros(count, _ROW, dtype=torch.int64)


def encode_header(layout: Layout) -> tuple[Tensor, Tensor | None]:
    """The header, and the description of the values that are not one plain tensor each, if there are any."""
    rows: Rows = []
    texts: list[bytes] = []
    for entry in layout:
        if entry is None:
            rows.append([_NOTHING])
        elif isinstance(entry, TensorLayout):
            rows.append(_row(entry))
        else:
            texts.append(_description(entry))
            rows.append([_DESCRIBED, len(texts[-1])])
    header = torch.tensor([row + [0] * (_ROW - len(row)) for row in rows], dtype=torch.int64).view(len(rows), _ROW)
    return header, torch.tensor(list(b"".join(texts)), dtype=torch.uint8) if texts else None


def described_bytes(rows: Rows) -> int:
    """The size of the description that follows a header; 0 if none does."""
    return sum(row[1] for row in rows if row[0] == _DESCRIBED)


def decode_header(rows: Rows, description: Tensor | None) -> Layout:
    text = b"" if description is None else bytes(description.tolist())
    layout: list[TensorLayout | Described | None] = []
    for row in rows:
        if row[0] == _DESCRIBED:
            layout.append(_described(text[: row[1]]))
            text = text[row[1] :]
        else:
            layout.append(None if row[0] == _NOTHING else _tensor_layout(row))
    return tuple(layout)


def _row(entry: TensorLayout) -> list[int]:
    count = len(entry.shape)
    if count > MOST_DIMENSIONS:
        raise WorkerError(f"a tensor of {count} dimensions crosses a cut; at most {MOST_DIMENSIONS} can")
    unused = [0] * (MOST_DIMENSIONS - count)
    order = entry.order or range(count)
    return [DTYPES.index(entry.dtype), int(entry.differentiable), count, *entry.shape, *unused, *order, *unused]


def _tensor_layout(row: Sequence[int]) -> TensorLayout:
    count = row[2]
    order = tuple(row[3 + MOST_DIMENSIONS :][:count])
    in_order = order == tuple(range(count))
    return TensorLayout(DTYPES[row[0]], tuple(row[3 : 3 + count]), bool(row[1]), () if in_order else order)


def _description(entry: Described) -> bytes:
    return json.dumps([entry.kind, entry.structure, [_row(each) for each in entry.tensors]]).encode()


def _described(text: bytes) -> Described:
    kind, structure, rows = json.loads(text)
    layout = Described(kind, structure, tuple(_tensor_layout(row) for row in rows))
    _ = layout.reader  # refuses a structure that this worker cannot read
    return layout


def can_be_marked(layout: Layout) -> bool:
    """Whether a message of this layout has a byte to say by that it holds nothing."""
    return any(math.prod(entry.shape) for entry in wire_layouts(layout))


def is_marked(tensors: Sequence[Tensor]) -> bool:
    for tensor in tensors:
        if tensor.numel():
            if tensor.is_cpu:  # for every message, so without a tensor operation
                return MARK.startswith(ctypes.string_at(tensor.data_ptr(), min(tensor.nbytes, len(MARK))))
            return MARK.startswith(bytes(_start_of(tensor).tolist()))
    return False


def marked(layouts: Sequence[TensorLayout], device: torch.device) -> list[Tensor]:
    """A message of tensors of these layouts that says that it holds nothing."""
    tensors = [entry.empty(device).zero_() for entry in layouts]
    start = next(_start_of(tensor) for tensor in tensors if tensor.numel())  # ask can_be_marked first
    start.copy_(torch.tensor(list(MARK[: len(start)]), dtype=torch.uint8))
    return tensors


def _start_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1)[: len(MARK)].view(torch.uint8)[: len(MARK)]
