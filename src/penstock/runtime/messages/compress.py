"""Messages whose float32 tensors are rounded to bf16 or int8 on their way; all other tensors travel as they are.

Both ends know the plan and the layout of the values, so what arrives needs no description of its own. An int8 message
holds a scale for each block of consecutive numbers (the largest of them is 127 steps), then a byte for each number.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.compression import BLOCK
from penstock.runtime.messages.dense import TensorLayout
from penstock.runtime.messages.packing import EXACT, Layout, Packed, Packing

STEPS = 127
LOOKED_AT_EVERY = 100
"""To measure an error costs as much again as to compress."""

Direction = tuple[int, int, str]
"""(stage that makes the values, stage that reads them, forward or backward)"""


class Rounding(Protocol):
    """How one float32 tensor travels in fewer bytes."""

    def layout(self, entry: TensorLayout) -> TensorLayout:
        """Of a tensor on its way."""
        ...

    def encode(self, tensor: Tensor) -> Tensor: ...

    def decode(self, sent: Tensor, entry: TensorLayout) -> Tensor:
        """The tensor again, of the layout that it had."""
        ...


class _Bf16:
    """Eight bits of each number's size, to the nearest. Beyond 3.39e38 it is infinite; what is no number stays none."""

    def layout(self, entry: TensorLayout) -> TensorLayout:
        return entry._replace(dtype=torch.bfloat16)

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16)

    def decode(self, sent: Tensor, entry: TensorLayout) -> Tensor:
        return sent.to(entry.dtype)


class _Int8:
    """The nearest of 255 steps between plus and minus the largest of a block.

    A block with anything infinite or no number in it arrives as no numbers at all, so that it is noticed. Blocks of
    nothing above 1e-36 arrive as zeros.
    """

    def layout(self, entry: TensorLayout) -> TensorLayout:
        count = math.prod(entry.shape)
        return entry._replace(dtype=torch.int8, shape=(4 * _blocks(count) + count,))

    def encode(self, tensor: Tensor) -> Tensor:
        count, blocks = tensor.numel(), _blocks(tensor.numel())
        sent = torch.empty(4 * blocks + count, dtype=torch.int8, device=tensor.device)
        numbers = _in_blocks(tensor.reshape(-1), blocks)
        step = numbers.abs().amax(dim=1) / STEPS
        step = step.masked_fill_(step < torch.finfo(step.dtype).tiny, 1.0).masked_fill_(step.isinf(), math.nan)
        sent[: 4 * blocks].view(step.dtype).copy_(step)
        sent[4 * blocks :].copy_((numbers / step[:, None]).round_().view(-1)[:count])
        return sent

    def decode(self, sent: Tensor, entry: TensorLayout) -> Tensor:
        blocks = _blocks(math.prod(entry.shape))
        step, steps = sent[: 4 * blocks].view(entry.dtype), sent[4 * blocks :]
        return (_in_blocks(steps, blocks) * step[:, None]).view(-1)[: len(steps)].view(entry.shape)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _in_blocks(flat: Tensor, blocks: int) -> Tensor:
    missing = blocks * BLOCK - len(flat)
    return (functional.pad(flat, (0, missing)) if missing else flat).view(blocks, BLOCK)


class Rounded:
    """A packing whose float32 tensors are rounded after another packing has made them."""

    def __init__(self, inner: Packing, rounding: Rounding) -> None:
        self._inner, self._rounding = inner, rounding

    def pack(self, values: Sequence[Any]) -> Packed:
        layout, tensors = self._inner.pack(values)
        pairs = zip(tensors, self._inner.wire_layouts(layout), strict=True)
        return Packed(layout, [self._rounding.encode(t) if _is_rounded(entry) else t for t, entry in pairs])

    def wire_layouts(self, layout: Layout) -> list[TensorLayout]:
        entries = self._inner.wire_layouts(layout)
        return [self._rounding.layout(entry) if _is_rounded(entry) else entry for entry in entries]

    def unpack(self, layout: Layout, tensors: Sequence[Tensor]) -> list[Any]:
        pairs = zip(tensors, self._inner.wire_layouts(layout), strict=True)
        return self._inner.unpack(
            layout, [self._rounding.decode(t, entry) if _is_rounded(entry) else t for t, entry in pairs]
        )

    def relative_error(self, values: Sequence[Any], packed: Packed) -> float:
        """The norm of what is lost beside that of what was to be sent, over the tensors that are rounded."""
        lost, size = 0.0, 0.0
        entries = self._inner.wire_layouts(packed.layout)
        for tensor, sent, entry in zip(self._inner.pack(values).tensors, packed.tensors, entries, strict=True):
            if _is_rounded(entry):
                lost += _square_sum(tensor - self._rounding.decode(sent, entry))
                size += _square_sum(tensor)
        return math.sqrt(lost / size) if size else 0.0


def _is_rounded(entry: TensorLayout) -> bool:
    return entry.dtype is torch.float32 and 0 not in entry.shape


_ROUNDED: Mapping[str, Rounded] = {"bf16": Rounded(EXACT, _Bf16()), "int8": Rounded(EXACT, _Int8())}


def packing_of(sends: str) -> Packing:
    """How messages travel where the plan says ``sends``."""
    return EXACT if sends == "exact" else _ROUNDED[sends]


def _square_sum(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


class ErrorMeter:
    """Adds up what compression loses: of the first message of each edge and direction, and then of one in a hundred."""

    def __init__(self) -> None:
        self.errors: dict[Direction, tuple[float, int]] = {}
        """The sum of the relative errors, and of how many messages."""
        self._messages: dict[Direction, int] = defaultdict(int)

    def look(self, direction: Direction, measure: Callable[[], float]) -> None:
        if self._messages[direction] % LOOKED_AT_EVERY == 0:
            total, count = self.errors.get(direction, (0.0, 0))
            self.errors[direction] = (total + measure(), count + 1)
        self._messages[direction] += 1
