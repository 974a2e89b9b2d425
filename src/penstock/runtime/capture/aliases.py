"""Finds which operations of a graph return the memory of their argument, and which overwrite an argument.

Schemas cannot tell: ``contiguous``, ``reshape``, ``to`` and dropout at rate 0 return their argument or a copy of it,
depending on its layout. So the graph is run once and storages are compared. For a model without values, the fake
tensors of torch.export are compared instead. The findings are kept in each node's ``meta``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

Alias = Literal["same", "view", "item"]
"""How a value shares memory with the first argument of its operation: as the same tensor, as a view of it, or as one of
several tensors that it holds."""

_ALIAS, _OVERWRITES = "penstock_alias", "penstock_overwrites"


def alias_of_first(node: fx.Node) -> Alias | None:
    """How the value of ``node`` shares memory with its first argument; None if it has its own memory."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if _ALIAS in node.meta:
        found: Alias | None = node.meta[_ALIAS]
        return found
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        if returns and returns[0].alias_info is not None:
            return "same" if returns[0].alias_info.is_write else "view"
    return None


def set_findings(node: fx.Node, alias: Alias | None, overwrites: tuple[int | str, ...] = ()) -> None:
    """``overwrites`` names arguments by position or keyword."""
    node.meta[_ALIAS], node.meta[_OVERWRITES] = alias, overwrites


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes whose value this one overwrites."""
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        written = [
            (position, argument.name)
            for position, argument in enumerate(node.target._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return _nodes(node.args[p] if p < len(node.args) else node.kwargs.get(name) for p, name in written)
    if _OVERWRITES in node.meta:
        return _nodes(node.args[p] if isinstance(p, int) else node.kwargs[p] for p in node.meta[_OVERWRITES])
    if node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__"):
        return _nodes(node.args[:1])
    if node.op == "call_function" and (node.kwargs.get("inplace") is True or node.target in _IN_PLACE_OPERATORS):
        return _nodes(node.args[:1])
    return []


_IN_PLACE_OPERATORS = {
    getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "ipow", "imod", "iand", "ior", "ixor")
}


def observe(graph: fx.Graph, root: nn.Module, arguments: Sequence[Any]) -> None:
    """Note what every operation shares and overwrites when the graph runs on these arguments."""
    with torch.no_grad():
        _Observer(fx.GraphModule(root, graph), graph=graph).run(*arguments, enable_io_processing=False)


def observe_without_values(graph: fx.Graph, root: nn.Module) -> None:
    """Note the same from the fake tensors that torch.export leaves in the graph, or from the modules that the graph
    calls."""
    for node in graph.nodes:
        if node.op == "call_module" and getattr(root.get_submodule(str(node.target)), "inplace", False):
            set_findings(node, "same", (0,))
        first = node.args[0] if node.args else None
        if isinstance(first, fx.Node) and "val" in node.meta and "val" in first.meta:
            made, given = _memories(node.meta["val"]), _memories(first.meta["val"])
            alias: Alias = "same" if first in mutated_arguments(node) else "view"
            if not isinstance(first.meta["val"], Tensor):
                alias = "item"
            set_findings(node, alias if made and made <= given else None)


def _memories(value: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in _tensors(value)}


def _layouts(value: Any) -> list[tuple[Any, ...]]:
    return [(t.dtype, tuple(t.shape), t.stride(), t.storage_offset()) for t in _tensors(value)]


class _Observer(fx.Interpreter):
    """Notes storages while a graph runs. Values are freed after their last reader."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_method", "call_module"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs)
        memories = {name: _memories(value) for name, value in given.items()}
        versions = {name: _versions(value) for name, value in given.items()}
        layouts = _layouts(args[:1])
        result = super().run_node(n)
        overwrites: list[int | str] = []
        seen: set[int] = set()  # memory of overwritten arguments; others that share it were not themselves overwritten
        for name, value in given.items():
            if _versions(value) != versions[name] and not memories[name] & seen:
                overwrites.append(name)
                seen |= memories[name]
        shared = bool(args) and _memories(result) and _memories(result) <= memories[0]
        alias: Alias = "same" if _layouts(result) == layouts else "view"
        if args and not isinstance(args[0], Tensor):
            alias = "item"
        set_findings(n, alias if shared else None, tuple(overwrites))
        return result


def _versions(value: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(value)]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _nodes(items: Any) -> list[fx.Node]:
    return [item for item in items if isinstance(item, fx.Node)]
