"""Makes operations that write into their arguments safe for cutting."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx

from penstock.runtime.capture.aliases import Alias, alias_of_first, mutated_arguments, set_findings


def read_after_write(graph: fx.Graph) -> None:
    """Make the order of operations follow from the edges alone, so that a cut may be between any two.

    Readers of a value after it is overwritten are redirected to the result of the overwriting, which is the same
    tensor. If others read it before, a copy is overwritten instead, since a cut could make them read later. If only a
    part of the value is overwritten, through a view, later readers of the rest or of other views read the changed
    value.
    """
    _keep_copies_apart(graph)
    _write_buffers_early(graph)
    for buffer in _written_buffers(graph):
        _read_buffer_apart(graph, buffer)
    for node in list(graph.nodes):
        for written in mutated_arguments(node):
            base = base_of(written)
            if base.op != "get_attr":
                _read_value_after(graph, node, written, base)


def touching_written_buffers(graph: fx.Graph) -> list[list[fx.Node]]:
    """For each buffer that the graph writes to, all operations on it. They must be in the stage that has the buffer."""
    return [
        sorted({user for alias in _aliases(buffer) for user in alias.users if user.op != "output"})
        for buffer in _written_buffers(graph)
    ]


def _written_buffers(graph: fx.Graph) -> list[fx.Node]:
    bases = {base_of(written) for node in graph.nodes for written in mutated_arguments(node)}
    return [node for node in graph.nodes if node.op == "get_attr" and node in bases]


def as_written(value: Any, _operation: Any) -> Any:
    """The value after an operation has written to a part of it."""
    return value


def apart(value: Tensor, source: Tensor) -> Tensor:
    """The value in its own memory, also for batches for which its operation returned the argument's memory."""
    same = value.untyped_storage()._cdata == source.untyped_storage()._cdata
    return value.clone() if same else value


_SIZES_DECIDE = {"contiguous", "reshape", "reshape_as", "flatten", "ravel", "to"}
"""Operations that copy or not depending on the layout of their argument. One sample is contiguous in any order."""


def _keep_copies_apart(graph: fx.Graph) -> None:
    """What was a copy when the graph was observed stays a copy, if it or its source is overwritten."""
    written = {base_of(argument) for node in graph.nodes for argument in mutated_arguments(node)}
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if _operation_name(node) not in _SIZES_DECIDE or not isinstance(source, fx.Node) or base_of(node) is not node:
            continue
        if node in written or base_of(source) in written:
            with graph.inserting_after(node):
                copy = _like(graph.call_function(apart, (node, source)), node, node, None)
            for user in [user for user in node.users if user is not copy]:
                user.replace_input_with(node, copy)


def _operation_name(node: fx.Node) -> str:
    if node.op not in ("call_function", "call_method"):
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.rpartition("::")[2]
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _read_value_after(graph: fx.Graph, node: fx.Node, written: fx.Node, base: fx.Node) -> None:
    views = _path(base, written)
    others = [alias for alias in _aliases(base) if alias is not written and alias < node]
    readers = [user for alias in (written, *others) for user in alias.users if user is not node]
    is_view = any(not _writes(view) for view in views)
    later = {alias: [user for user in alias.users if user > node] for alias in (written, *others)}
    is_read_before = any(user < node and user not in views and base_of(user) is not base for user in readers)
    if not is_view and not any(later[alias] for alias in others):
        if any(user < node for user in written.users):
            with graph.inserting_before(node):
                node.replace_input_with(written, copy := _clone(graph, written, node))
            _read_result(graph, node, copy, written, later[written])
        else:
            _read_result(graph, node, written, written, later[written])
        return
    with graph.inserting_before(node):
        whole = _clone(graph, base, node) if is_read_before else base
        node.replace_input_with(written, part := _again(graph, views, whole, node))
    _read_result(graph, node, part, written, later[written])
    with graph.inserting_after(node):
        returns_whole = not is_view and _returns(node, part)
        became = node if returns_whole else _like(graph.call_function(as_written, (whole, node)), node, base, None)
    behind = became
    for alias in others:
        if later[alias]:
            with graph.inserting_after(behind):
                behind = seen = _again(graph, _path(base, alias), became, node)
            for user in later[alias]:
                user.replace_input_with(alias, seen)


def _read_result(graph: fx.Graph, node: fx.Node, given: fx.Node, written: fx.Node, users: list[fx.Node]) -> None:
    """Make these users of ``written`` read the result of ``node`` instead, which got the value as ``given``."""
    if users and not _returns(node, given):
        with graph.inserting_after(node):
            result = _like(graph.call_function(as_written, (given, node)), node, written, None)
    else:
        result = node
    for user in users:
        user.replace_input_with(written, result)


def _returns(node: fx.Node, argument: fx.Node) -> bool:
    """Whether an operation returns the argument that it has overwritten, as most do."""
    return bool(node.args) and node.args[0] is argument and alias_of_first(node) == "same"


def _clone(graph: fx.Graph, value: fx.Node, node: fx.Node) -> fx.Node:
    return _like(graph.call_method("clone", (value,)), node, value, None)


def _again(graph: fx.Graph, views: list[fx.Node], whole: fx.Node, node: fx.Node) -> fx.Node:
    """The same views of another value, as part of the layer of ``node``."""
    made = whole
    for view in views:
        if not _writes(view) and _operation_name(view) not in ("contiguous", "to"):  # these returned their argument
            before, made = made, graph.node_copy(view)
            made.args = (before, *view.args[1:])
            _like(made, node, view, alias_of_first(view))
            graph._insert = made.append
    return made


def _read_buffer_apart(graph: fx.Graph, buffer: fx.Node) -> None:
    """Give readers of a buffer a copy, made at once. The buffer may be written again before autograd or transport use
    it."""
    aliases = _aliases(buffer)
    writings = [node for node in graph.nodes if any(written in aliases for written in mutated_arguments(node))]
    for alias in aliases:
        readers: dict[fx.Node | None, list[fx.Node]] = {}
        for user in alias.users:
            if user not in aliases and user not in writings:
                readers.setdefault(max((node for node in writings if node < user), default=None), []).append(user)
        for written, users in readers.items():
            beside = min(users) if written is None else max(written, alias)
            with graph.inserting_before(beside) if written is None else graph.inserting_after(beside):
                copy = _clone(graph, alias, beside)
            for user in users:
                user.replace_input_with(alias, copy)


def _write_buffers_early(graph: fx.Graph) -> None:
    """Move writes to buffers to their layers. Export puts them all at the end."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.copy_.default and base_of(node).op == "get_attr" and not node.users:
            buffer, value = node.args[0], node.args[1]
            assert isinstance(buffer, fx.Node)
            if isinstance(value, fx.Node) and base_of(value) is buffer:
                graph.erase_node(node)  # it is written already
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
    """The views and writes that lead from a value to another name of its memory, which comes last."""
    found: list[fx.Node] = []
    while alias is not base:
        found.insert(0, alias)
        alias = alias.args[0]  # type: ignore[assignment]
    return found


def _writes(node: fx.Node) -> bool:
    return bool(mutated_arguments(node))


def _like(made: fx.Node, node: fx.Node, value: fx.Node, alias: Alias | None) -> fx.Node:
    """``made`` belongs to the layer of ``node``, has the shape of ``value``, and shares memory with its first argument
    as ``alias`` says."""
    made.meta = {**node.meta, "val": value.meta.get("val")}
    set_findings(made, alias)
    return made


def base_of(node: fx.Node) -> fx.Node:
    """The node that made the memory of a node, through views."""
    return names_of_memory(node)[-1]


def names_of_memory(node: fx.Node) -> list[fx.Node]:
    """The node and all values that share its memory, through views and writes, back to where the memory was made."""
    found = [node]
    while alias := alias_of_first(found[-1]):
        source = cast(fx.Node, found[-1].args[0])
        if alias == "item" and alias_of_first(source) is None:
            break  # an operation made several tensors, and this is one of them
        found.append(source)
    return found
