"""The layer graphs of "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020)."""

# ruff: noqa: N815  (fields are the file's own keys)

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from penstock.cluster import ANY_KIND, HOST_KIND, Cluster, Device, Level
from penstock.errors import FormatError, GraphError
from penstock.formats.reading import checked_amount, decode_json, find_cycle, layer_seconds, shorten
from penstock.graph import Layer, LayerGraph, Parameter, Value
from penstock.limits import MOST_DEVICES, is_size
from penstock.profile import LayerSeconds, Profile

FRONT_END = "dnn-partitioning"

BYTES_PER_COST = 2**31
"""Bytes for an edge cost of 1. Costs are times, mostly far below 1, while sizes are whole bytes; links with this many
bytes per second give the costs back. The published files also have sizes, which agree with these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    id: int
    name: str
    fpgaLatency: float
    size: float
    isBackwardNode: int
    colorClass: int
    supportedOnFpga: int = 1
    cpuLatency: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edge:
    sourceId: int
    destId: int
    cost: float
    size: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    maxFPGAs: int
    maxSizePerFPGA: float
    nodes: tuple[_Node, ...]
    edges: tuple[_Edge, ...]
    maxCPUs: int = 0


def parse_placement(text: str, *, source: str, model: str) -> tuple[Profile, Cluster]:
    """The profile and the cluster of a placement problem, in the file's own unit of time, called seconds here.

    Nodes of one colour class, forward nodes and their gradients, are one layer. CPUs, if the file has any, are devices
    of kind ``host``; they come first, so that plans for fewer devices leave them out.
    """
    problem = decode_json(_Problem, text, source)
    nodes = _checked_nodes(problem, source)
    layers = _layers(problem, source)
    values = _values(problem, nodes, source)
    _check_cycles(layers, values, source)
    try:
        graph = _graph(layers, values, source)
    except GraphError as error:
        raise FormatError(f"{source}: {error}") from None
    seconds = {ANY_KIND: _seconds(layers, "fpgaLatency", source)}
    if problem.maxCPUs:
        seconds[HOST_KIND] = _seconds(layers, "cpuLatency", source)
    profile = Profile(model=model, front_end=FRONT_END, batch_size=1, microbatch_size=1, graph=graph, seconds=seconds)
    return profile, _cluster(problem, source)


_Layers = dict[int, tuple[list[_Node], list[_Node]]]
"""For each colour class, its forward nodes and its gradient nodes, in the file's order."""


def _checked_nodes(problem: _Problem, source: str) -> dict[int, _Node]:
    found: dict[int, _Node] = {}
    for i, node in enumerate(problem.nodes):
        where = f"{source}: nodes[{i}]"
        if node.id in found:
            raise FormatError(f"{where}.id: node {node.id} is there twice; ids are unique")
        for field in ("fpgaLatency", "size"):
            checked_amount(getattr(node, field), f"{where}.{field}")
        if node.cpuLatency is not None:
            checked_amount(node.cpuLatency, f"{where}.cpuLatency")
        elif problem.maxCPUs:
            raise FormatError(f"{where}.cpuLatency: missing, and maxCPUs is {problem.maxCPUs}; give it, or no CPUs")
        for field in ("isBackwardNode", "supportedOnFpga"):
            if getattr(node, field) not in (0, 1):
                raise FormatError(f"{where}.{field}: {getattr(node, field)}; expected 0 or 1")
        if not node.supportedOnFpga:
            raise FormatError(
                f"{where}.supportedOnFpga: {shorten(node.name)} runs on CPUs alone; Penstock places on one sort"
            )
        found[node.id] = node
    if not found:
        raise FormatError(f"{source}: nodes: empty; a graph has at least one")
    return found


def _layers(problem: _Problem, source: str) -> _Layers:
    layers: _Layers = {}
    for node in problem.nodes:
        layers.setdefault(node.colorClass, ([], []))[node.isBackwardNode].append(node)
    names: dict[str, int] = {}
    for color, (forward, backward) in layers.items():
        if not forward:
            raise FormatError(f"{source}: {shorten(backward[0].name)}: colorClass {color} has gradients alone")
        other = names.setdefault(forward[0].name, color)
        if other != color:
            shown = shorten(forward[0].name)
            raise FormatError(f"{source}: colorClass {other} and {color} both start with {shown!r}; name nodes apart")
    return layers


def _values(problem: _Problem, nodes: dict[int, _Node], source: str) -> tuple[Value, ...]:
    """The values that forward nodes send to other layers. An edge between the gradients of two layers means that a
    gradient is returned."""
    readers: dict[tuple[int, float], list[int]] = defaultdict(list)
    returned: set[frozenset[int]] = set()
    for i, edge in enumerate(problem.edges):
        where = f"{source}: edges[{i}]"
        for field in ("sourceId", "destId"):
            if getattr(edge, field) not in nodes:
                raise FormatError(f"{where}.{field}: node {getattr(edge, field)} does not exist")
        for field in ("cost", "size"):
            checked_amount(getattr(edge, field), f"{where}.{field}")
        start, end = nodes[edge.sourceId], nodes[edge.destId]
        if start.isBackwardNode and not end.isBackwardNode:
            raise FormatError(f"{where}: leads from a gradient to the forward node {shorten(end.name)}; turn it round")
        if not end.isBackwardNode and start.colorClass != end.colorClass:
            readers[start.id, edge.cost].append(end.colorClass)
        if start.isBackwardNode:
            returned.add(frozenset((start.colorClass, end.colorClass)))
    sent: dict[int, int] = defaultdict(int)
    values = []
    for (node_id, cost), consumers in readers.items():
        sent[node_id] += 1
        suffix = f".{sent[node_id]}" if sent[node_id] > 1 else ""
        values.append(
            Value(
                name=f"{nodes[node_id].name}{suffix}",
                producer=nodes[node_id].colorClass,
                consumers=tuple(dict.fromkeys(consumers)),
                num_bytes=round(checked_amount(cost * BYTES_PER_COST, f"{source}: cost of an edge of node {node_id}")),
                differentiable=any(frozenset((nodes[node_id].colorClass, c)) in returned for c in consumers),
            )
        )
    return tuple(values)


def _graph(layers: _Layers, values: tuple[Value, ...], source: str) -> LayerGraph:
    """A layer has the name of its first forward node. A layer without size has no parameter.

    The sizes of both its nodes count as memory, as for a weight and its gradient. The difference of the two sizes is
    optimizer state.
    """
    names = {color: forward[0].name for color, (forward, _) in layers.items()}
    parameters = {}
    for color, nodes in layers.items():
        forward_bytes, backward_bytes = (round(_total(each, "size", source)) for each in nodes)
        if forward_bytes or backward_bytes:
            parameters[color] = Parameter(
                name=names[color],
                num_bytes=min(forward_bytes, backward_bytes),
                state_bytes=abs(forward_bytes - backward_bytes),
            )
    return LayerGraph(
        layers=tuple(
            Layer(id=color, name=name, kind="Layer", parameters=(name,) if color in parameters else ())
            for color, name in names.items()
        ),
        values=values,
        parameters=tuple(parameters.values()),
    )


def _seconds(layers: _Layers, field: str, source: str) -> tuple[LayerSeconds, ...]:
    return tuple(
        layer_seconds(
            _total(forward, field, source),
            _total(backward, field, source),
            has_parameters=any(node.size > 0 for node in forward),
        )
        for forward, backward in layers.values()
    )


def _check_cycles(layers: _Layers, values: tuple[Value, ...], source: str) -> None:
    successors: dict[int, list[int]] = {color: [] for color in layers}
    for value in values:
        successors[value.producer] += value.consumers
    cycle = find_cycle(successors)
    if cycle:
        shown = shorten(" -- ".join(layers[color][0][0].name for color in cycle))
        raise FormatError(f"{source}: edges: the layers {shown} form a cycle; a layer graph has none")


def _total(nodes: list[_Node], field: str, source: str) -> float:
    total = sum((getattr(node, field) for node in nodes), start=0.0)
    return checked_amount(total, f"{source}: {field} of a colorClass")


def _cluster(problem: _Problem, source: str) -> Cluster:
    if not 1 <= problem.maxFPGAs <= MOST_DEVICES:
        raise FormatError(f"{source}: maxFPGAs: {problem.maxFPGAs} devices; expected 1 to {MOST_DEVICES}")
    if not 0 <= problem.maxCPUs <= MOST_DEVICES:
        raise FormatError(f"{source}: maxCPUs: {problem.maxCPUs} devices; expected 0 to {MOST_DEVICES}")
    if not (is_size(problem.maxSizePerFPGA) and problem.maxSizePerFPGA >= 1):
        raise FormatError(f"{source}: maxSizePerFPGA: {problem.maxSizePerFPGA} bytes; expected at least 1")
    hosts = (Device(kind=HOST_KIND),) * problem.maxCPUs
    devices = hosts + (Device(memory_bytes=round(problem.maxSizePerFPGA)),) * problem.maxFPGAs
    name = f"{problem.maxFPGAs} accelerators" + (f" + {problem.maxCPUs} CPU" if hosts else "")
    return Cluster(name=name, devices=devices, levels=(Level(size=len(devices), bytes_per_s=float(BYTES_PER_COST)),))
