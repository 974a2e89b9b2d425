"""The layer graph: what a model is made of, as far as planning goes.

A cut is a downset of this graph and a stage is what lies between two cuts. What crosses a cut is
counted per value and consumer stage, once, however many layers of that stage read it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeVar

from penstock.errors import GraphError
from penstock.limits import is_size

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A learned tensor. Two layers that name the same one are tied."""

    name: str
    num_bytes: int
    state_bytes: int = 0
    """Bytes that the optimizer keeps for it."""

    def __post_init__(self) -> None:
        for field in ("num_bytes", "state_bytes"):
            if not is_size(getattr(self, field)):
                raise GraphError(
                    f"parameter {self.name!r}: {field} is {getattr(self, field)}; sizes are 0 or more, up to 9 PB"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    id: int
    name: str
    kind: str
    parameters: tuple[str, ...] = ()
    saved_bytes: int = 0
    """Bytes that autograd keeps from the forward for the backward of one microbatch, without parameters."""
    reads_data: bool = False
    """Whether it reads model inputs (or, as the loss, the target), so that its stage loads them."""

    def __post_init__(self) -> None:
        if not is_size(self.saved_bytes):
            raise GraphError(
                f"layer {self.id} ({self.name}): saved_bytes is {self.saved_bytes}; sizes are 0 or more, up to 9 PB"
            )

    @property
    def is_input(self) -> bool:
        """A model input in an imported graph: any stage that reads it loads it for itself, so it costs nothing."""
        return self.kind.startswith("Input")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTensor:
    """One tensor of a value that holds several."""

    num_bytes: int
    dtype: str
    """The type of its numbers, by torch's name without the module."""
    differentiable: bool = True
    """Whether a gradient of the same size travels back."""

    def __post_init__(self) -> None:
        if not is_size(self.num_bytes):
            raise GraphError(f"a value's tensor: num_bytes is {self.num_bytes}; sizes are 0 or more, up to 9 PB")

    @property
    def is_float32(self) -> bool:
        return self.dtype == "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What one layer makes and others read: a tensor, or a container of tensors."""

    name: str
    producer: int
    consumers: tuple[int, ...]
    num_bytes: int
    differentiable: bool = True
    """Whether a gradient of the same size is returned."""
    dtype: str = ""
    """The type of its numbers, by torch's name without the module; empty if unknown."""
    opaque: str = ""
    """The type of a value that cannot be sent to another stage, such as an object of the model's own; else empty."""
    tensors: tuple[ValueTensor, ...] = ()
    """The tensors of a container, such as a dict; empty for a value that is a tensor itself."""

    def __post_init__(self) -> None:
        if not is_size(self.num_bytes):
            raise GraphError(f"value {self.name!r}: num_bytes is {self.num_bytes}; sizes are 0 or more, up to 9 PB")
        held_bytes = sum(tensor.num_bytes for tensor in self.tensors)
        if self.tensors and held_bytes != self.num_bytes:
            raise GraphError(
                f"value {self.name!r}: num_bytes is {self.num_bytes}, but its tensors have {held_bytes} bytes; "
                "the sum is expected"
            )

    @property
    def gradient_bytes(self) -> int:
        """Of what travels back."""
        if self.tensors:
            return sum(tensor.num_bytes for tensor in self.tensors if tensor.differentiable)
        return self.num_bytes if self.differentiable else 0

    @property
    def is_float32(self) -> bool:
        """If the type is unknown, a value with a gradient counts as float32."""
        return self.dtype == "float32" or (not self.dtype and self.differentiable)


@dataclass(frozen=True, kw_only=True)
class LayerGraph:
    layers: tuple[Layer, ...]
    values: tuple[Value, ...] = ()
    parameters: tuple[Parameter, ...] = ()

    FORMAT: ClassVar[str] = "penstock.graph/1"

    def __post_init__(self) -> None:
        if not self.layers:
            raise GraphError("layers: empty; a model has at least one layer")
        _unique("layer id", (layer.id for layer in self.layers))
        _unique("layer name", (layer.name for layer in self.layers))
        _unique("value name", (value.name for value in self.values))
        _unique("parameter name", (parameter.name for parameter in self.parameters))
        known_parameters = {parameter.name for parameter in self.parameters}
        for layer in self.layers:
            for name in layer.parameters:
                if name not in known_parameters:
                    raise GraphError(f"layer {layer.id} ({layer.name}): parameter {name!r} is not in `parameters`")
        ids = {layer.id for layer in self.layers}
        for value in self.values:
            for end in (value.producer, *value.consumers):
                if end not in ids:
                    raise GraphError(f"value {value.name!r}: layer {end} does not exist; its edge leads nowhere")
        _ = self.order

    @cached_property
    def by_id(self) -> dict[int, Layer]:
        return {layer.id: layer for layer in self.layers}

    @cached_property
    def successors(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, set[int]] = {layer.id: set() for layer in self.layers}
        for value in self.values:
            found[value.producer].update(value.consumers)
        return {layer: tuple(sorted(after)) for layer, after in found.items()}

    @cached_property
    def order(self) -> tuple[int, ...]:
        """A topological order, smallest id first among the layers that are ready."""
        waiting = {layer.id: 0 for layer in self.layers}
        for after in self.successors.values():
            for layer_id in after:
                waiting[layer_id] += 1
        ready = [layer_id for layer_id, count in waiting.items() if count == 0]
        heapq.heapify(ready)
        order = []
        while ready:
            layer_id = heapq.heappop(ready)
            order.append(layer_id)
            for after_id in self.successors[layer_id]:
                waiting[after_id] -= 1
                if waiting[after_id] == 0:
                    heapq.heappush(ready, after_id)
        if len(order) < len(self.layers):
            stuck = sorted(layer_id for layer_id, count in waiting.items() if count > 0)
            names = ", ".join(f"{layer_id} ({self.by_id[layer_id].name})" for layer_id in stuck[:4])
            raise GraphError(f"the layers {names} lie on a cycle; a layer graph has none")
        return tuple(order)

    @cached_property
    def parameter_by_name(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    def parameters_of(self, layers: Iterable[int]) -> tuple[Parameter, ...]:
        """The parameters that these layers use; a shared one comes once."""
        names = dict.fromkeys(name for layer in layers for name in self.by_id[layer].parameters)
        return tuple(self.parameter_by_name[name] for name in names)

    @cached_property
    def sent_values(self) -> tuple[Value, ...]:
        """The values that are sent if a cut separates the layers that make and read them."""
        return tuple(filter(self.is_sent, self.values))

    def is_sent(self, value: Value) -> bool:
        """Whether a stage sends the value to other stages that read it. Model inputs are not sent: every stage loads
        its own."""
        return bool(value.consumers) and not self.by_id[value.producer].is_input

    def crossing(self, source: Collection[int], target: Collection[int]) -> tuple[Value, ...]:
        """The values that layers in ``source`` make and layers in ``target`` read."""
        return tuple(
            value
            for value in self.values
            if value.producer in source and any(consumer in target for consumer in value.consumers)
        )


def by_edge(
    made: Iterable[tuple[T, int, Iterable[int]]], stage_of: Mapping[int, int]
) -> dict[tuple[int, int], list[T]]:
    """What passes between each pair of stages (producer, consumer), in the given order and once per pair.

    ``made`` has values of any type, each with the layer that makes it and the layers that read it.
    """
    found: dict[tuple[int, int], list[T]] = defaultdict(list)
    for value, producer, consumers in made:
        source = stage_of[producer]
        for target in sorted({stage_of[consumer] for consumer in consumers} - {source}):
            found[source, target].append(value)
    return dict(found)


def _unique(what: str, items: Iterable[object]) -> None:
    seen: set[object] = set()
    for item in items:
        if item in seen:
            raise GraphError(f"duplicate {what} {item!r}; each must be there once")
        seen.add(item)
