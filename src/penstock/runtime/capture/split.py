"""Cuts a captured graph into sections: one per stage to run it, one per layer to measure it.

A section is a function of model inputs and received values, over its own part of the model's parameters, which keep the
model's names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from penstock.errors import PlanError
from penstock.graph import by_edge
from penstock.runtime.capture.aliases import mutated_arguments
from penstock.runtime.capture.capture import Captured
from penstock.runtime.capture.grouping import is_number, is_operation
from penstock.runtime.capture.inplace import names_of_memory
from penstock.runtime.capture.randomness import keyed, may_draw, name_number


@dataclass(frozen=True, kw_only=True)
class Section:
    module: fx.GraphModule
    """Takes the model inputs of ``reads``, then the values of ``received_names``. Returns the values of ``sent_names``,
    and what the output node needs or None."""
    reads: tuple[int, ...]
    """Positions of the model inputs that it takes from its own loader."""
    received_names: tuple[str, ...]
    sent_names: tuple[str, ...]
    makes_output: bool
    parameters: Mapping[str, nn.Parameter]
    """By the model's own names; a shared parameter comes once."""
    local_names: Mapping[str, tuple[str, ...]]
    """The names of each parameter in the module."""
    buffers: Mapping[str, Tensor]
    """By the model's own names. The module updates them in place."""
    functional: Callable[..., Any] | None = None
    """A replacement for torch.func.functional_call that runs the module with other tensors. If None, tensors are
    swapped in place."""

    def run(
        self, leaves: Mapping[str, Tensor], arguments: Iterable[Any], buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[tuple[Any, ...], Any]:
        """Compute with the given tensors in place of the parameters. ``buffers``, by the module's names, replace
        buffers."""
        result: tuple[tuple[Any, ...], Any]
        if self.functional is not None:
            given = {local: leaves[name] for name, locals_ in self.local_names.items() for local in locals_}
            result = self.functional(self.module, given | dict(buffers or {}), tuple(arguments), tie_weights=False)
            return result
        swaps = [(slot, leaves[name]) for name, slot in self._parameter_slots]
        swaps += [(self._buffer_slots[name], buffer) for name, buffer in (buffers or {}).items()]
        own = [holder[key] for (holder, key), _ in swaps]
        try:
            for (holder, key), tensor in swaps:
                holder[key] = tensor
            result = self.module.forward(*arguments)  # modules made here have no hooks
        finally:  # the modules may be shared
            for ((holder, key), _), before in zip(swaps, own, strict=True):
                holder[key] = before
        return result

    def hold(self, leaves: Mapping[str, Tensor]) -> None:
        """Put the given tensors into the module, in place of its parameters."""
        for name, (holder, key) in self._parameter_slots:
            holder[key] = leaves[name]

    @cached_property
    def _parameter_slots(self) -> list[tuple[str, _Slot]]:
        """Where the module keeps each parameter. Cached, since finding them takes as long as a small layer."""
        return [
            (name, _slot(self.module, local, "_parameters"))
            for name, locals_ in self.local_names.items()
            for local in locals_
        ]

    @cached_property
    def _buffer_slots(self) -> dict[str, _Slot]:
        names = (name for name, _ in self.module.named_buffers(remove_duplicate=False))
        return {name: _slot(self.module, name, "_buffers") for name in names}


_Slot = tuple[dict[str, Tensor | None], str]
"""The dictionary in which a module keeps tensors, and the key."""


def _slot(module: nn.Module, name: str, kind: str) -> _Slot:
    owner, _, key = name.rpartition(".")
    return getattr(module.get_submodule(owner), kind), key


@dataclass(frozen=True)
class Splitter:
    """Knows which values each layer makes and reads, and builds sections from sets of layers.

    Layers are numbered by their place in ``captured.layers``. The last one is the loss, which reads the model's output.
    """

    captured: Captured

    @cached_property
    def layer_of(self) -> dict[fx.Node, int]:
        return {node: index for index, layer in enumerate(self.captured.layers) for node in layer.nodes}

    @cached_property
    def draws(self) -> dict[fx.Node, int]:
        """The operations that may draw random numbers, each with a number of its own. It follows from the layer's name
        and the operation's place in the layer, so it does not depend on how layers are put into sections."""
        return {
            node: name_number(f"{layer.name}/{place}")
            for layer in self.captured.layers
            for place, node in enumerate(node for node in layer.nodes if may_draw(node, self.captured.root))
        }

    @property
    def loss_layer(self) -> int:
        return len(self.captured.layers) - 1

    @cached_property
    def consumers(self) -> dict[fx.Node, tuple[int, ...]]:
        """For each value that leaves its layer, the layers that read it, in graph order."""
        found: dict[fx.Node, dict[int, None]] = {node: {} for node in self.layer_of}
        for node, index in self.layer_of.items():
            for source in self._tensor_sources(node.all_input_nodes):
                if source in found and self.layer_of[source] != index:
                    found[source][index] = None
        for source in self._tensor_sources(self._output_node.all_input_nodes):
            if source in found:
                found[source][self.loss_layer] = None
        return {node: tuple(layers) for node, layers in found.items() if layers}

    def parameters_of(self, layer: int) -> tuple[str, ...]:
        """The model's names of the parameters that a layer uses."""
        return tuple(self._parameters(self.captured.layers[layer].nodes))

    def tensors_of(self, layer: int) -> tuple[str, ...]:
        """The model's names of the parameters and buffers that a layer uses."""
        return tuple(self._tensors(self.captured.layers[layer].nodes))

    def held_by(self, layers: Iterable[int]) -> Iterator[Tensor]:
        """The parameters, buffers and constants that these layers use. One that several layers use comes several
        times."""
        return (tensor for layer in layers for tensor in self._held(self.captured.layers[layer].nodes))

    def edge_values(self, stages: Sequence[Collection[int]]) -> dict[tuple[int, int], tuple[str, ...]]:
        """For each pair of stages that exchange values, the names of the values, in graph order."""
        stage_of = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
        made = ((node.name, self.layer_of[node], readers) for node, readers in self.consumers.items())
        return {edge: tuple(names) for edge, names in by_edge(made, stage_of).items()}

    def section(self, layers: Collection[int]) -> Section:
        """The part of the graph in these layers."""
        members = set(layers)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        nodes = [node for node in self.captured.graph.nodes if self.layer_of.get(node) in members]
        has_loss = self.loss_layer in members
        ends = [self._output_node] if has_loss else []
        outside, sizes = self._outside(nodes + ends, set(nodes))
        inputs = [node for node in self.captured.placeholders if node in outside]
        received = [node for node in self.captured.graph.nodes if node in outside and node.op != "placeholder"]
        for node in (*inputs, *received):
            copies[node] = graph.placeholder(node.name)
        self._clone_what_is_overwritten(graph, nodes, copies, received)

        def copied(node: fx.Node) -> fx.Node:
            if node in sizes:
                tensor, dimension = sizes[node]
                size: fx.Node = graph.call_function(torch.ops.aten.sym_size.int, (copied(tensor), dimension))
                return size
            if node not in copies:  # a parameter, or a number that this section computes itself
                copies[node] = graph.node_copy(node, copied)
            return copies[node]

        for node in nodes:
            copies[node] = graph.node_copy(node, copied)
        sent = [node for node in nodes if any(reader not in members for reader in self.consumers.get(node, ()))]
        output = fx.map_arg(self._output_node.args[0], copied) if has_loss else None
        graph.output((tuple(copies[node] for node in sent), output))
        parameters, targets = self._parameters(graph.nodes), self._targets(graph)
        for node in nodes:
            if node in self.draws:
                keyed(copies[node], targets, self.draws[node])
        module = fx.GraphModule(targets, graph)
        local: dict[str, list[str]] = {name: [] for name in parameters}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            local[self.captured.canonical_names[id(parameter)]].append(name)
        return Section(
            module=module,
            reads=tuple(self.captured.placeholders.index(node) for node in inputs),
            received_names=tuple(node.name for node in received),
            sent_names=tuple(node.name for node in sent),
            makes_output=has_loss,
            parameters=parameters,
            local_names={name: tuple(names) for name, names in local.items()},
            buffers={
                self.captured.canonical_names[id(buffer)]: buffer
                for buffer in module.buffers()
                if id(buffer) in self.captured.canonical_names
            },
        )

    @cached_property
    def _output_node(self) -> fx.Node:
        return self.captured.graph.output_node()

    def _tensor_sources(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """The values and model inputs that these nodes depend on, directly or through numbers."""
        found: dict[fx.Node, None] = {}
        stack = list(nodes)[::-1]
        while stack:
            node = stack.pop()
            if is_number(node):
                stack.extend(node.all_input_nodes[::-1])
            elif node.op == "placeholder" or is_operation(node):
                found[node] = None
        return list(found)

    def _outside(
        self, nodes: list[fx.Node], members: set[fx.Node]
    ) -> tuple[set[fx.Node], dict[fx.Node, tuple[fx.Node, int]]]:
        """The values and model inputs that these nodes need from outside, and the sizes that can be read from those.

        A stage that needs only the batch size of the model's input takes it from a tensor that it receives anyway.
        """
        arguments = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in members)
        tensors = [node for node in arguments if node.op == "placeholder" or is_operation(node)]
        sizes = {node: found for node in arguments if is_number(node) and (found := _size_of_any(node, tensors))}
        others = [node for node in arguments if node not in sizes]
        return {source for source in self._tensor_sources(others) if source not in members}, sizes

    def _clone_what_is_overwritten(
        self, graph: fx.Graph, nodes: list[fx.Node], copies: dict[fx.Node, fx.Node], received: list[fx.Node]
    ) -> None:
        """Clone received tensors that are overwritten under any of their names. They are leaves, and autograd forbids
        writing to leaves."""
        for node in nodes:
            for written in mutated_arguments(node):
                source = next((name for name in names_of_memory(written) if name in received), None)
                if source is not None and copies[source].op == "placeholder":
                    copies[source] = graph.call_function(_cloned, (copies[source],))

    def _targets(self, graph: fx.Graph) -> dict[str, Any]:
        """What the graph refers to in the root: tensors for get_attr, modules for call_module."""
        targets: dict[str, Any] = {}
        for node in graph.nodes:
            name = str(node.target)
            if node.op == "get_attr":
                path, _, attribute = name.rpartition(".")
                targets[name] = getattr(self.captured.root.get_submodule(path), attribute)
            elif node.op == "call_module":
                targets[name] = self.captured.root.get_submodule(name)
        return targets

    def _parameters(self, nodes: Iterable[fx.Node]) -> dict[str, nn.Parameter]:
        return {name: t for name, t in self._tensors(nodes).items() if isinstance(t, nn.Parameter)}

    def _tensors(self, nodes: Iterable[fx.Node]) -> dict[str, Tensor]:
        named = ((self.captured.canonical_names.get(id(tensor)), tensor) for tensor in self._held(nodes))
        return {name: tensor for name, tensor in named if name is not None}

    def _held(self, nodes: Iterable[fx.Node]) -> Iterator[Tensor]:
        for node in nodes:
            for holder in (node, *(source for source in node.all_input_nodes if source.op == "get_attr")):
                yield from self._held_by(holder)

    def _held_by(self, node: fx.Node) -> Iterable[Tensor]:
        name = str(node.target)
        if node.op == "call_module":
            module = self.captured.root.get_submodule(name)
            return (*module.parameters(), *module.buffers())
        if node.op == "get_attr":
            path, _, attribute = name.rpartition(".")
            value = getattr(self.captured.root.get_submodule(path), attribute)
            return (value,) if isinstance(value, Tensor) else ()
        return ()


def _cloned(value: Any) -> Any:
    """A value with memory of its own, also where it holds several tensors."""
    return value.clone() if isinstance(value, Tensor) else pytree.tree_map_only(Tensor, Tensor.clone, value)


def _size_of_any(number: fx.Node, tensors: Iterable[fx.Node]) -> tuple[fx.Node, int] | None:
    """The tensor and dimension with this size, by export's symbols."""
    value = number.meta.get("val")
    if not isinstance(value, torch.SymInt):
        return None
    for tensor in tensors:
        shape = getattr(tensor.meta.get("val"), "shape", ())
        for dimension, size in enumerate(shape):
            if isinstance(size, torch.SymInt) and size.node.expr == value.node.expr:
                return tensor, dimension
    return None


def check_same_model(splitter: Splitter, names: Iterable[str], source: str) -> None:
    """Raise an error unless the captured model has the layers that a plan or profile was made for."""
    ours, theirs = [layer.name for layer in splitter.captured.layers], list(names)
    if ours == theirs:
        return
    where = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    shown = [repr(side[where]) if where < len(side) else "nothing" for side in (ours, theirs)]
    raise PlanError(
        f"{source} is for another model: layer {where} is {shown[1]} there and {shown[0]} in this job "
        f"({len(theirs)} and {len(ours)} layers); profile and plan this job"
    )
