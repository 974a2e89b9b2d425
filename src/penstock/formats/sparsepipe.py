"""SparsePipe's server file: unequal devices in servers, each kind with a graph.txt of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.cluster import Cluster, Device, Level
from penstock.errors import ClusterError, FormatError, ProfileError
from penstock.formats.reading import numbered_lines, parse_count, shorten
from penstock.graph import LayerGraph
from penstock.limits import MOST_DEVICES
from penstock.profile import Profile

FRONT_END = "sparsepipe"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDevices:
    kind: str
    count: int
    profile_path: str
    """The path as the file gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    name: str
    devices: tuple[ServerDevices, ...]

    @property
    def num_devices(self) -> int:
        return sum(group.count for group in self.devices)


def parse_servers(text: str, source: str) -> tuple[Server, ...]:
    """Lines ``Server0``, each followed by indented lines ``name count profile_path``."""
    groups: dict[str, list[ServerDevices]] = {}
    paths: dict[str, str] = {}
    total = 0
    for number, line in numbered_lines(text, source):
        where = f"{source}:{number}"
        if not line[0].isspace():
            _check_server_name(line, groups, where)
            groups[line] = []
            continue
        if not groups:
            raise FormatError(f"{where}: a device before the first server; start with a line such as Server0")
        devices = _parse_devices(line, where)
        total += devices.count
        if total > MOST_DEVICES:
            raise FormatError(f"{where}: {total} devices so far; expected at most {MOST_DEVICES}")
        if paths.setdefault(devices.kind, devices.profile_path) != devices.profile_path:
            raise FormatError(
                f"{where}: {devices.kind} has the profile {devices.profile_path} here and {paths[devices.kind]} "
                "before; a kind has one: name the kinds apart"
            )
        list(groups.values())[-1].append(devices)
    for name, found in groups.items():
        if not found:
            raise FormatError(f"{source}: {name} has no device; add an indented line `name count profile_path`")
    return tuple(Server(name=name, devices=tuple(found)) for name, found in groups.items())


def profile_paths(servers: Sequence[Server]) -> dict[str, str]:
    """The profile path of each device kind, in the file's order."""
    return {group.kind: group.profile_path for server in servers for group in server.devices}


def cluster_of_servers(servers: Sequence[Server], bytes_per_s: Sequence[float], name: str = FRONT_END) -> Cluster:
    """The cluster, with devices in the file's order, the bandwidth inside a server and, if there are several, between
    them.

    A single bandwidth joins all devices equally. That is how to describe servers of unequal size, which levels cannot
    express.
    """
    sizes = [server.num_devices for server in servers]
    counts = " and ".join(map(str, sorted(set(sizes))))
    devices = tuple(Device(kind=g.kind) for server in servers for g in server.devices for _ in range(g.count))
    if len(bytes_per_s) == 1:
        return Cluster(name=name, devices=devices, levels=(Level(size=sum(sizes), bytes_per_s=bytes_per_s[0]),))
    if len(bytes_per_s) != 2 or len(servers) < 2:
        raise ClusterError(
            f"{name}: {len(bytes_per_s)} bandwidths for {len(servers)} servers; give one, or for several servers two: "
            "inside a server, between them"
        )
    if len(set(sizes)) > 1:
        raise ClusterError(
            f"{name}: servers of {counts} devices; links come as levels of equal servers: give one bandwidth, the "
            "lower, to join all devices at it, or use servers of equal size"
        )
    inside, between = bytes_per_s
    levels = (Level(size=sizes[0], bytes_per_s=inside), Level(size=len(sizes), bytes_per_s=between))
    return Cluster(name=name, devices=devices, levels=levels)


def merge_kinds(profiles: Mapping[str, Profile]) -> Profile:
    """One profile with the seconds of several device kinds, from one profile per kind of the same model.

    Nodes, edges, modules and parameters must be the same. Sizes of activations may differ, as for sparse data of which
    every device measured its own sample: the largest counts.
    """
    if not profiles:
        raise ProfileError("no profile to merge; give one for each device kind")
    first_kind, first = next(iter(profiles.items()))
    expected = _nodes(first.graph)
    sizes = {value.name: value.num_bytes for value in first.graph.values}
    seconds = {}
    for kind, profile in profiles.items():
        found = _nodes(profile.graph)
        for node in (*expected, *found):
            if expected.get(node) != found.get(node):
                raise ProfileError(
                    f"node {shorten(node)} differs: {_show(expected.get(node))} on {first_kind}, "
                    f"{_show(found.get(node))} on {kind}; profile the same model on both"
                )
        for value in profile.graph.values:
            sizes[value.name] = max(sizes[value.name], value.num_bytes)
        rows = dict(zip((layer.name for layer in profile.graph.layers), profile.seconds_on(kind), strict=True))
        seconds[kind] = tuple(rows[layer.name] for layer in first.graph.layers)
    values = tuple(replace(value, num_bytes=sizes[value.name]) for value in first.graph.values)
    return replace(first, front_end=FRONT_END, graph=replace(first.graph, values=values), seconds=seconds)


@dataclass(frozen=True, slots=True)
class _Node:
    module: str
    parameter_bytes: int
    readers: frozenset[str]


def _nodes(graph: LayerGraph) -> dict[str, _Node]:
    """What must agree between profiles. Library versions print a module's arguments differently, so only its name
    counts."""
    name_of = {layer.id: layer.name for layer in graph.layers}
    return {
        layer.name: _Node(
            layer.kind.partition("(")[0],
            sum(parameter.num_bytes for parameter in graph.parameters_of([layer.id])),
            frozenset(name_of[reader] for reader in graph.successors[layer.id]),
        )
        for layer in graph.layers
    }


def _show(node: _Node | None) -> str:
    if node is None:
        return "absent"
    readers = shorten(", ".join(sorted(node.readers)) or "nobody")
    return f"{shorten(node.module)} with {node.parameter_bytes} bytes of parameters, read by {readers}"


def _check_server_name(line: str, known: Mapping[str, object], where: str) -> None:
    if not line.startswith("Server") or len(line.split()) != 1:
        raise FormatError(f"{where}: expected a line such as Server0, or an indented device; found {shorten(line)!r}")
    if line in known:
        raise FormatError(f"{where}: {line} is there twice; number the servers")


def _parse_devices(line: str, where: str) -> ServerDevices:
    parts = line.split(maxsplit=2)
    if len(parts) != 3 or not parts[2].isprintable():
        raise FormatError(f"{where}: expected `name count profile_path`, found {shorten(line.strip())!r}")
    kind, count, path = parts
    return ServerDevices(kind=kind, count=parse_count(count, f"{where}: count", MOST_DEVICES), profile_path=path)
