"""PipeDream's profile, graph.txt: nodes with their times and sizes, then the edges between them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from penstock.cluster import ANY_KIND
from penstock.errors import FormatError
from penstock.formats.reading import (
    MILLI,
    checked_amount,
    find_cycle,
    layer_seconds,
    numbered_lines,
    parse_amount,
    shorten,
)
from penstock.graph import Layer, LayerGraph, Parameter, Value
from penstock.profile import Profile

FRONT_END = "pipedream"
SEPARATOR = " -- "
ATTRIBUTES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")

_NUMBERED = re.compile(r"node(0|[1-9][0-9]{0,17})")
_NODE_FORM = "ID -- DESCRIPTION -- forward_compute_time=.., .. [-- stage_id=N]"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    name: str
    description: str
    forward_s: float
    backward_s: float
    activation_bytes: int
    parameter_bytes: int
    stage: int | None


def parse_graph(text: str, *, source: str, model: str, kind: str = ANY_KIND) -> tuple[Profile, dict[int, int]]:
    """The profile in a graph.txt, and the stages of those layers for which the file has one.

    There is one layer per node, in the file's order. ``kind`` names the measured device, which the file does not.
    """
    nodes: dict[str, _Node] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in numbered_lines(text, source):
        where = f"{source}:{number}"
        if line[0].isspace():
            edges.setdefault(_parse_edge(line, where), number)
            continue
        node = _parse_node(line, where)
        if node.name in nodes:
            raise FormatError(f"{where}: node {shorten(node.name)!r} is there twice; keep one of the two lines")
        nodes[node.name] = node
    consumers = _consumers(nodes, edges, source)
    ids = _layer_ids(list(nodes))
    profile = Profile(
        model=model,
        front_end=FRONT_END,
        batch_size=1,
        microbatch_size=1,
        graph=_layer_graph(nodes, consumers, ids),
        seconds={
            kind: tuple(
                layer_seconds(node.forward_s, node.backward_s, node.parameter_bytes > 0) for node in nodes.values()
            )
        },
    )
    return profile, {ids[node.name]: node.stage for node in nodes.values() if node.stage is not None}


def graph_text(profile: Profile, stage_of_layer: Mapping[int, int] | None = None, kind: str | None = None) -> str:
    """The graph.txt of a profile, with the times of ``kind`` (by default the first).

    Reading it gives back a profile that came from a graph.txt. What the format cannot express is left out: the halves
    of a backward, updates, optimizer state, what autograd keeps, shared parameters.
    """
    seconds = profile.seconds_on(kind or next(iter(profile.seconds)))
    graph, stages = profile.graph, stage_of_layer or {}
    names = _node_names(graph.layers)
    output_bytes = {layer.id: 0 for layer in graph.layers}
    for value in graph.values:
        output_bytes[value.producer] += value.num_bytes
    lines = []
    for layer, row in zip(graph.layers, seconds, strict=True):
        amounts = (
            _show_ms(row.forward_s),
            _show_ms(row.backward_input_s + row.backward_weight_s),
            f"{output_bytes[layer.id]}.000",
            f"{sum(parameter.num_bytes for parameter in graph.parameters_of([layer.id]))}.000",
        )
        attributes = ", ".join(f"{name}={amount}" for name, amount in zip(ATTRIBUTES, amounts, strict=True))
        stage = [f"stage_id={stages[layer.id]}"] if layer.id in stages else []
        lines.append(SEPARATOR.join([names[layer.id], _description(layer.kind), attributes, *stage]))
    edges = dict.fromkeys((value.producer, consumer) for value in graph.values for consumer in value.consumers)
    lines += [f"\t{names[producer]}{SEPARATOR}{names[consumer]}" for producer, consumer in edges]
    return "\n".join(lines) + "\n"


def _parse_node(line: str, where: str) -> _Node:
    name, *rest = line.split(SEPARATOR)
    if len(rest) not in (2, 3) or not name:
        raise FormatError(f"{where}: expected a node, {_NODE_FORM}, or an indented edge; found {shorten(line)!r}")
    found = _attributes(rest[1], where)
    forward, backward, activation, parameter = (found[key] for key in ATTRIBUTES)
    return _Node(
        name=name,
        description=rest[0],
        forward_s=parse_amount(forward, f"{where}: {ATTRIBUTES[0]}", MILLI),
        backward_s=parse_amount(backward, f"{where}: {ATTRIBUTES[1]}", MILLI),
        activation_bytes=_activation_bytes(activation, f"{where}: {ATTRIBUTES[2]}"),
        parameter_bytes=round(parse_amount(parameter, f"{where}: {ATTRIBUTES[3]}")),
        stage=_parse_stage(rest[2], where) if len(rest) == 3 else None,
    )


def _attributes(text: str, where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in text.split(","):
        key, equals, amount = item.strip().partition("=")
        if not equals or key not in ATTRIBUTES:
            raise FormatError(
                f"{where}: unknown attribute {shorten(item.strip())!r}; there are {', '.join(ATTRIBUTES)}"
            )
        if key in found:
            raise FormatError(f"{where}: {key} is there twice; keep one of the two")
        found[key] = amount
    for key in ATTRIBUTES:
        if key not in found:
            raise FormatError(f"{where}: {key} is missing; a node has {', '.join(ATTRIBUTES)}")
    return found


def _activation_bytes(text: str, where: str) -> int:
    """One number, or ``[a; b; c]`` for a node with several outputs, whose sizes are added."""
    if not text.startswith("["):
        return round(parse_amount(text, where))
    if not text.endswith("]"):
        raise FormatError(f"{where}: the list {shorten(text)!r} has no end; write [a; b; c]")
    total = sum(parse_amount(item, f"{where}[{i}]") for i, item in enumerate(text[1:-1].split(";")))
    return round(checked_amount(total, where))


def _parse_stage(text: str, where: str) -> int:
    match = re.fullmatch(r"stage_id=([0-9]{1,9})", text.strip())
    if match is None:
        raise FormatError(f"{where}: expected stage_id=N with N from 0 on, found {shorten(text)!r}")
    return int(match[1])


def _parse_edge(line: str, where: str) -> tuple[str, str]:
    ends = line.strip().split(SEPARATOR)
    if len(ends) != 2 or not all(ends):
        raise FormatError(f"{where}: expected an edge, SOURCE -- TARGET, found {shorten(line.strip())!r}")
    return ends[0], ends[1]


def _consumers(nodes: Mapping[str, _Node], edges: Mapping[tuple[str, str], int], source: str) -> dict[str, list[str]]:
    """The readers of each node. Nodes come in the order of the edges, those without readers last."""
    if not nodes:
        raise FormatError(f"{source}: no node; expected lines of the form {_NODE_FORM}")
    found: dict[str, list[str]] = {}
    for (producer, consumer), number in edges.items():
        for end in (producer, consumer):
            if end not in nodes:
                raise FormatError(f"{source}:{number}: the edge leads to node {shorten(end)!r}, which has no line")
        found.setdefault(producer, []).append(consumer)
    for name in nodes:
        found.setdefault(name, [])
    cycle = find_cycle(found)
    if cycle:
        number = max(edges[pair] for pair in itertools.pairwise(cycle))
        shown = shorten(" -- ".join(cycle))
        raise FormatError(f"{source}:{number}: the edge closes the cycle {shown}; a layer graph has none")
    return found


def _layer_ids(names: Sequence[str]) -> dict[str, int]:
    """The number in ``node12``, or the order of appearance if some node has another kind of name."""
    matches = [_NUMBERED.fullmatch(name) for name in names]
    if all(matches):
        return {match[0]: int(match[1]) for match in matches if match}
    return {name: position for position, name in enumerate(names)}


def _layer_graph(
    nodes: Mapping[str, _Node], consumers: Mapping[str, Sequence[str]], ids: Mapping[str, int]
) -> LayerGraph:
    with_parameters = [node for node in nodes.values() if node.parameter_bytes > 0]
    return LayerGraph(
        layers=tuple(
            Layer(
                id=ids[node.name],
                name=node.name,
                kind=node.description,
                parameters=(node.name,) if node.parameter_bytes > 0 else (),
            )
            for node in nodes.values()
        ),
        values=tuple(
            Value(
                name=name,
                producer=ids[name],
                consumers=tuple(ids[reader] for reader in readers),
                num_bytes=nodes[name].activation_bytes,
            )
            for name, readers in consumers.items()
        ),
        parameters=tuple(Parameter(name=node.name, num_bytes=node.parameter_bytes) for node in with_parameters),
    )


def _node_names(layers: Sequence[Layer]) -> dict[int, str]:
    """The layers' own names if reading them gives the same layers, otherwise node<id>."""
    plain = all(layer.name and not re.search(r"\s|--", layer.name) for layer in layers)
    own = {layer.id: layer.name for layer in layers}
    if plain and _layer_ids(list(own.values())) == {name: layer_id for layer_id, name in own.items()}:
        return own
    return {layer.id: f"node{layer.id}" for layer in layers}


def _description(kind: str) -> str:
    return re.sub(r"[\r\n\t]", " ", kind).replace(SEPARATOR, " - ") or "Layer"


def _show_ms(seconds: float) -> str:
    """Three decimals as PipeDream writes them, or more if needed to read the same seconds again."""
    exact = Decimal(repr(seconds)).scaleb(-MILLI)
    usual = f"{exact:.3f}"
    return usual if Decimal(usual) == exact else f"{exact:f}"
