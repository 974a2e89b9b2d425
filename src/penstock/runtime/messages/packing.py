"""A message: values as tensors whose layouts both ends know."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from penstock.errors import WorkerError
from penstock.runtime.messages.dense import Reader, TensorLayout, as_in_memory, as_it_was, layout_of
from penstock.runtime.messages.values import TENSOR_CODECS, codec_named, codec_of, obstacle

_DENSE = TENSOR_CODECS[0]


@dataclass(frozen=True)
class Described:
    """The layout of a value that is not one plain tensor."""

    kind: str
    structure: str
    """JSON, so that 1, 1.0 and true differ."""
    tensors: tuple[TensorLayout, ...]

    @cached_property
    def reader(self) -> Reader:
        reader = codec_named(self.kind).reader(json.loads(self.structure))
        if reader.num_tensors != len(self.tensors):
            raise WorkerError(
                f"a message has a structure of {reader.num_tensors} tensors, but {len(self.tensors)} layouts; "
                "run the same version on all workers"
            )
        return reader


Layout = tuple[TensorLayout | Described | None, ...]
"""One entry per value: that of a tensor for a plain one; None for None, as where no gradient reached a value."""


class Packed(NamedTuple):
    layout: Layout
    tensors: list[Tensor]
    """Those of all values, contiguous, as they are sent."""


class Packing(Protocol):
    """How a message's values become tensors on the wire, and values again."""

    def pack(self, values: Sequence[Any]) -> Packed: ...

    def wire_layouts(self, layout: Layout) -> list[TensorLayout]:
        """Of the tensors that are sent for values of this layout."""
        ...

    def unpack(self, layout: Layout, tensors: Sequence[Tensor]) -> list[Any]:
        """The values, of which tensors are leaves of the receiver's graph."""
        ...


class Exact:
    """Every tensor travels as it is."""

    def pack(self, values: Sequence[Any]) -> Packed:
        layout: list[TensorLayout | Described | None] = []
        tensors: list[Tensor] = []
        for value in values:
            if value is None:
                layout.append(None)
            elif _DENSE.takes(value):  # nearly every message
                layout.append(entry := layout_of(value))
                tensors.append(as_in_memory(value, entry))
            else:
                layout.append(_describe(value, tensors))
        return Packed(tuple(layout), tensors)

    def wire_layouts(self, layout: Layout) -> list[TensorLayout]:
        return wire_layouts(layout)

    def unpack(self, layout: Layout, tensors: Sequence[Tensor]) -> list[Any]:
        left = iter(tensors)
        values: list[Any] = []
        for entry in layout:
            if isinstance(entry, TensorLayout):
                values.append(as_it_was(next(left), entry))
            elif entry is None:
                values.append(None)
            else:
                own = [as_it_was(next(left), each) for each in entry.tensors]
                values.append(entry.reader.read(iter(own)))
        return values


EXACT = Exact()


def _describe(value: Any, tensors: list[Tensor]) -> Described:
    """Adds the tensors of the value to ``tensors``."""
    codec = codec_of(value)
    if codec is None:
        raise WorkerError(f"a {obstacle(value)} cannot be sent; keep the layers on both sides of it in one stage")
    structure, own = codec.encode(value)
    layouts = tuple(layout_of(tensor) for tensor in own)
    tensors += [as_in_memory(tensor, entry) for tensor, entry in zip(own, layouts, strict=True)]
    return Described(codec.kind, json.dumps(structure), layouts)


def wire_layouts(layout: Layout) -> list[TensorLayout]:
    """Of all tensors of the values, in the order in which they travel."""
    found: list[TensorLayout] = []
    for entry in layout:
        if isinstance(entry, TensorLayout):
            found.append(entry)
        elif entry is not None:
            found += entry.tensors
    return found
