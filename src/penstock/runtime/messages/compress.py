"""What an edge's tensors become on their way to another worker: float32 ones are rounded, if the plan says so, to bf16
or int8; all others travel as they are.

Both ends know the plan and the layout of the values, so what arrives needs no description of its own. An int8 message
holds a scale for each block of consecutive numbers (the largest of them is 127 steps), then a byte for each number.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.compression import BLOCK
from penstock.runtime.messages.payload import Layout, TensorLayout, layout_of

STEPS = 127
LOOKED_AT_EVERY = 100
"""To measure an error costs as much again as to compress."""

Direction = tuple[int, int, str]
"""(stage that makes the values, stage that reads them, forward or backward)"""


class Coding(Protocol):
    def layout(self, entry: TensorLayout) -> TensorLayout:
        """Of a tensor on its way."""
        ...

    def encode(self, tensor: Tensor) -> Tensor: ...

    def decode(self, sent: Tensor, entry: TensorLayout) -> Tensor:
        """The tensor again, of the layout that it had."""
        ...


class _Exact:
    def layout(self, entry: TensorLayout) -> TensorLayout:
        return entry

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor

    def decode(self, sent: Tensor, entry: TensorLayout) -> Tensor:
        return sent


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


_EXACT = _Exact()
_CODINGS: dict[str, Coding] = {"exact": _EXACT, "bf16": _Bf16(), "int8": _Int8()}


def coding_of(sends: str, entry: TensorLayout) -> Coding:
    """How a tensor of this layout travels where the plan says ``sends``."""
    return _CODINGS[sends] if entry.dtype is torch.float32 and 0 not in entry.shape else _EXACT


def layout_sent(layout: Layout, sends: str) -> Layout:
    return tuple(entry and coding_of(sends, entry).layout(entry) for entry in layout)


def encode(tensors: Sequence[Tensor | None], sends: str) -> list[Tensor]:
    """What is sent of the tensors that there are."""
    if sends == "exact":
        return [tensor.detach().contiguous() for tensor in tensors if tensor is not None]
    return [coding_of(sends, entry).encode(tensor) for tensor, entry in _present(tensors)]


def decode(sent: Sequence[Tensor | None], layout: Layout, sends: str) -> list[Tensor | None]:
    if sends == "exact":
        return list(sent)
    pairs = zip(sent, layout, strict=True)
    return [
        coding_of(sends, entry).decode(tensor, entry) if entry and tensor is not None else None
        for tensor, entry in pairs
    ]


def relative_error(tensors: Sequence[Tensor | None], sent: Sequence[Tensor], sends: str) -> float:
    """The norm of what is lost beside that of what was to be sent, over the tensors that are rounded."""
    lost, size = 0.0, 0.0
    for (tensor, entry), message in zip(_present(tensors), sent, strict=True):
        coding = coding_of(sends, entry)
        if coding is not _EXACT:
            lost += _square_sum(tensor - coding.decode(message, entry))
            size += _square_sum(tensor)
    return math.sqrt(lost / size) if size else 0.0


def _present(tensors: Sequence[Tensor | None]) -> Iterator[tuple[Tensor, TensorLayout]]:
    for tensor, entry in zip(tensors, layout_of(tensors), strict=True):
        if tensor is not None and entry is not None:
            yield tensor.detach().contiguous(), entry


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
