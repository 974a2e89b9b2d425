"""The codec of plain tensors, and what all codecs share: the layout of one tensor on its way.

A transposed tensor travels as it lies in memory and is transposed again on arrival. So a cut changes neither which
random numbers its elements get, which goes by their order in memory, nor which views of it are possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.errors import WorkerError

# The order is part of the wire format.
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
MOST_DIMENSIONS = 8


class TensorLayout(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    """As it lies in memory."""
    differentiable: bool = False
    """Whether the receiver owes a gradient for it."""
    order: tuple[int, ...] = ()
    """The tensor's dimensions in the order of memory. Empty if they are in that order."""

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Reader(NamedTuple):
    """Makes values of one structure."""

    num_tensors: int
    """How many tensors a value takes."""
    read: Callable[[Iterator[Tensor]], Any]
    """Makes a value of its tensors, the next of these."""


class Codec(Protocol):
    """Turns values of one kind into tensors and a structure, and makes them again."""

    kind: str
    """A name for headers and structures."""

    def takes(self, value: Any) -> bool:
        """Whether a value is of this kind."""
        ...

    def obstacle(self, value: Any) -> str:
        """What keeps a value of this kind from being sent; empty if nothing does."""
        ...

    def encode(self, value: Any) -> tuple[Any, list[Tensor]]:
        """The structure, which can be written as JSON, and the tensors that travel."""
        ...

    def reader(self, structure: Any) -> Reader:
        """Makes values of a structure that another worker sent; a WorkerError if it is none of this kind."""
        ...


class Dense:
    """A plain tensor. Its structure is None."""

    kind = "dense"

    def takes(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.layout is torch.strided

    def obstacle(self, value: Tensor) -> str:
        if value.dtype not in DTYPES:
            return f"{str(value.dtype).partition('.')[2]} tensor"
        return f"tensor of {value.dim()} dimensions" if value.dim() > MOST_DIMENSIONS else ""

    def encode(self, value: Tensor) -> tuple[None, list[Tensor]]:
        return None, [value]

    def reader(self, structure: Any) -> Reader:
        if structure is not None:
            raise WorkerError(f"a message describes a tensor by {structure!r}; run the same version on all workers")
        return Reader(1, next)


def layout_of(tensor: Tensor) -> TensorLayout:
    order, shape = _memory_order(tensor), tuple(tensor.shape)
    return TensorLayout(tensor.dtype, tuple(shape[d] for d in order) if order else shape, tensor.requires_grad, order)


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    if tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension]))
    return order if tensor.permute(order).is_contiguous() else ()  # one with gaps or repeats is sent as a copy


def as_in_memory(tensor: Tensor, entry: TensorLayout) -> Tensor:
    """The tensor without its graph, contiguous, with its dimensions in the order of memory."""
    tensor = tensor.detach()
    return (tensor.permute(entry.order) if entry.order else tensor).contiguous()


def as_it_was(tensor: Tensor, entry: TensorLayout) -> Tensor:
    """A tensor that travelled as it lies in memory: its dimensions in their own order, as a leaf of a new graph."""
    if entry.order:
        tensor = tensor.permute([entry.order.index(dimension) for dimension in range(tensor.dim())])
    return tensor.requires_grad_(entry.differentiable)
