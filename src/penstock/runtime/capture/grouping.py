"""Groups the operations of a captured graph into layers.

A layer is a run of consecutive operations of the same innermost module. Runs of a topological order always form an
acyclic graph of layers, and they are what people call layers: ``features.0``, ``blocks.3.mlp.1``, the
addition that closes a residual block. What reads and writes the same buffer is one layer, with all that is between.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from penstock.errors import CaptureError
from penstock.runtime.capture.inplace import read_after_write, touching_written_buffers


@dataclass(frozen=True, kw_only=True)
class CapturedLayer:
    name: str
    kind: str
    nodes: tuple[fx.Node, ...]


LOSS = "loss"
"""The name of the last layer of every graph, which is not part of the model: the job's loss."""


def group_into_layers(graph: fx.Graph, root: nn.Module) -> tuple[CapturedLayer, ...]:
    """Every operation is in one layer. The last layer is the loss, which has no operations."""
    read_after_write(graph)
    _keep_getitem_with_its_producer(graph)
    runs: list[tuple[str, list[fx.Node]]] = []
    for node in graph.nodes:
        if not is_operation(node):
            continue
        scope = _scope(node)
        joins = node.target is operator.getitem and runs and node.args[0] in runs[-1][1]
        if runs and (joins or scope == runs[-1][0]):
            runs[-1][1].append(node)
        else:
            runs.append((scope, [node]))
    for nodes in touching_written_buffers(graph):
        holders = [index for index, (_, members) in enumerate(runs) if not set(nodes).isdisjoint(members)]
        first, last = holders[0], holders[-1] + 1
        runs[first:last] = [(runs[first][0], [node for _, members in runs[first:last] for node in members])]
    if not runs:
        raise CaptureError("the model does no operation on its inputs")
    layers, taken = [], {LOSS}
    for scope, nodes in runs:
        name, kind = _name(scope, nodes[0], root)
        unique, copy = name, 1
        while unique in taken:
            copy += 1
            unique = f"{name}~{copy}"
        taken.add(unique)
        layers.append(CapturedLayer(name=unique, kind=kind, nodes=tuple(nodes)))
    return (*layers, CapturedLayer(name=LOSS, kind="Loss", nodes=()))


def is_operation(node: fx.Node) -> bool:
    """Whether a node belongs to a layer. Inputs, parameters and plain numbers do not."""
    return node.op in ("call_function", "call_method", "call_module") and not is_number(node)


def is_number(node: fx.Node) -> bool:
    """Whether a node is a size or arithmetic on sizes. These cost nothing: each stage computes those it needs."""
    if node.op not in ("call_function", "call_method"):
        return False
    value = node.meta.get("val")
    if value is not None:
        return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device")
    arguments = [item for item in node.args if isinstance(item, fx.Node)]
    module = getattr(node.target, "__module__", "")
    return bool(arguments) and module == "_operator" and all(is_number(item) for item in arguments)


def _keep_getitem_with_its_producer(graph: fx.Graph) -> None:
    """Move it right after its producer in the order, so that only tensors pass from layer to layer."""
    for node in list(graph.nodes):
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and is_operation(node):
            source = node.args[0]
            if source.op != "placeholder" and not isinstance(node.args[1], fx.Node):
                source.append(node)


def _scope(node: fx.Node) -> str:
    """The qualified name of the innermost module that the operation comes from."""
    if node.op == "call_module":
        return str(node.target)
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    names = [entry[0] for entry in stack.values() if not entry[0].startswith("_empty_nn_module_stack")]
    return names[-1] if names else ""


def _name(scope: str, first: fx.Node, root: nn.Module) -> tuple[str, str]:
    """A layer has the name and class of its module if that is one of torch's own, otherwise those of the first
    operation."""
    if first.op == "call_module":
        return scope, type(root.get_submodule(scope)).__name__
    module_class = _module_class(first)
    if scope and module_class.startswith("torch.nn.modules.") and ".container." not in module_class:
        return scope, module_class.rpartition(".")[2]
    operation = getattr(first.target, "__name__", str(first.target)).split(".")[0]
    return (f"{scope}.{operation}" if scope else operation), operation


def _module_class(node: fx.Node) -> str:
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    for _, kind in reversed(stack.values()):
        return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    return ""
