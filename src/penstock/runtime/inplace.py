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
    tensor. Where others read it before, what is overwritten is a copy: a cut could make them read later. If only a part
    of the value is overwritten, through a view, later readers of the rest or of other views read what it became.
    """
    _write_buffers_early(graph)
    for buffer in _written_buffers(graph, root):
        _read_buffer_apart(graph, root, buffer)
    for node in list(graph.nodes):
        for written in mutated_arguments(node, root):
            base = base_of(written)
            if base.op != "get_attr":
                _read_value_after(graph, node, written, base)


def touching_written_buffers(graph: fx.Graph, root: nn.Module) -> list[list[fx.Node]]:
    """For each buffer that the graph writes to, all operations on it: the stage that has it must have them."""
    return [
        sorted({user for alias in _aliases(buffer) for user in alias.users if user.op != "output"})
        for buffer in _written_buffers(graph, root)
    ]


def _written_buffers(graph: fx.Graph, root: nn.Module) -> list[fx.Node]:
    bases = {base_of(written) for node in graph.nodes for written in mutated_arguments(node, root)}
    return [node for node in graph.nodes if node.op == "get_attr" and node in bases]


def as_written(value: Any, _operation: Any) -> Any:
    """A value after an operation has written to a part of it."""
    return value


def _read_value_after(graph: fx.Graph, node: fx.Node, written: fx.Node, base: fx.Node) -> None:
    views = _path(base, written)
    others = [alias for alias in _aliases(base) if alias is not written and alias < node]
    readers = [user for alias in (written, *others) for user in alias.users if user is not node]
    is_view = any(not _writes(view) for view in views)
    later = {alias: [user for user in alias.users if user > node] for alias in others}
    is_read_before = any(user < node and user not in views and base_of(user) is not base for user in readers)
    for user in [user for user in written.users if user > node]:
        user.replace_input_with(written, node)
    if not is_view and not any(later.values()):
        if len(written.users) > 1:
            with graph.inserting_before(node):
                node.replace_input_with(written, _like(graph.call_method("clone", (written,)), node, written))
        return
    with graph.inserting_before(node):
        whole = _like(graph.call_method("clone", (base,)), node, base) if is_read_before else base
        node.replace_input_with(written, _again(graph, views, whole, node))
    with graph.inserting_after(node):
        became = _like(graph.call_function(as_written, (whole, node)), node, base) if is_view else node
    behind = became
    for alias, users in later.items():
        if users:
            with graph.inserting_after(behind):
                behind = seen = _again(graph, _path(base, alias), became, node)
            for user in users:
                user.replace_input_with(alias, seen)


def _again(graph: fx.Graph, views: list[fx.Node], whole: fx.Node, node: fx.Node) -> fx.Node:
    """The same view of another value; part of the operation ``node``, as far as layers go."""
    made = whole
    for view in views:
        if not _writes(view):
            before, made = made, graph.node_copy(view)
            made.args = (before, *view.args[1:])
            _like(made, node, view)
            graph._insert = made.append
    return made


def _read_buffer_apart(graph: fx.Graph, root: nn.Module, buffer: fx.Node) -> None:
    """Readers have a copy, made at once: when autograd or transport use it, others may have written to it again."""
    aliases = _aliases(buffer)
    writings = [node for node in graph.nodes if any(written in aliases for written in mutated_arguments(node, root))]
    for alias in aliases:
        readers: dict[fx.Node | None, list[fx.Node]] = {}
        for user in alias.users:
            if user not in aliases and user not in writings:
                readers.setdefault(max((node for node in writings if node < user), default=None), []).append(user)
        for written, users in readers.items():
            beside = min(users) if written is None else max(written, alias)
            with graph.inserting_before(beside) if written is None else graph.inserting_after(beside):
                copy = _like(graph.call_method("clone", (alias,)), beside, alias)
            for user in users:
                user.replace_input_with(alias, copy)


def _write_buffers_early(graph: fx.Graph) -> None:
    """Export puts a buffer's new value back at the very end, whichever layer it is of."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.copy_.default and base_of(node).op == "get_attr" and not node.users:
            buffer, value = node.args[0], node.args[1]
            assert isinstance(buffer, fx.Node)
            if isinstance(value, fx.Node) and base_of(value) is buffer:
                graph.erase_node(node)  # it is there already
            elif isinstance(value, fx.Node):
                last = max([value, *(user for user in buffer.users if user is not node)])
                last.append(node)
                node.meta["nn_module_stack"] = last.meta.get("nn_module_stack")


def _aliases(base: fx.Node) -> list[fx.Node]:
    """All names of one memory: the value, views of it, and results of writing to either."""
    found, stack = [base], [base]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user not in found and user.args and user.args[0] is node and base_of(user) is base:
                found.append(user)
                stack.append(user)
    return found


def _path(base: fx.Node, alias: fx.Node) -> list[fx.Node]:
    """The views, and writings, that lead from a value to a name of its memory, which comes last."""
    found: list[fx.Node] = []
    while alias is not base:
        found.insert(0, alias)
        alias = alias.args[0]  # type: ignore[assignment]
    return found


def _writes(node: fx.Node) -> bool:
    return bool(mutated_arguments(node))


def _like(made: fx.Node, node: fx.Node, value: fx.Node) -> fx.Node:
    """``made`` belongs with ``node`` and has the shape of ``value``."""
    made.meta = {**node.meta, "val": value.meta.get("val")}
    return made


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
