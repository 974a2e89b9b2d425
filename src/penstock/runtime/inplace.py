"""Operations that write into their arguments, and how to keep them harmless when a model is cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn


def mutated_arguments(node: fx.Node, root: nn.Module | None = None) -> list[fx.Node]:
    """The nodes whose value this one overwrites."""
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        written = [
            (position, argument.name)
            for position, argument in enumerate(node.target._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return _nodes(node.args[p] if p < len(node.args) else node.kwargs.get(name) for p, name in written)
    if node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__"):
        return _nodes(node.args[:1])
    if (
        node.op == "call_module"
        and root is not None
        and getattr(root.get_submodule(str(node.target)), "inplace", False)
    ):
        return _nodes(node.args[:1])
    if node.op == "call_function" and node.kwargs.get("inplace") is True:
        return _nodes(node.args[:1])
    return []


def read_after_write(graph: fx.Graph, root: nn.Module) -> None:
    """Leave the order of operations to the edges alone, so that a cut may fall between any two.

    Whoever reads a value after it is overwritten reads the result of the overwriting instead, which is the same
    tensor. Where others read it before, what is overwritten is a copy: a cut could make them read later.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        for written in mutated_arguments(node, root):
            if written.op != "get_attr":
                for user in [user for user in written.users if position.get(user, -1) > position[node]]:
                    user.replace_input_with(written, node)
                if len(written.users) > 1:
                    with graph.inserting_before(node):
                        copy = graph.call_method("clone", (written,))
                    copy.meta = dict(node.meta)
                    node.replace_input_with(written, copy)


def base_of(node: fx.Node) -> fx.Node:
    """Where the memory behind a node comes from, through views of it."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        views = returns and returns[0].alias_info is not None
        if not views or not node.args or not isinstance(node.args[0], fx.Node):
            break
        node = node.args[0]
    return node


def _nodes(items: Any) -> list[fx.Node]:
    return [item for item in items if isinstance(item, fx.Node)]
