"""The devices there are and the links between them.

Links come as nested levels, innermost first: ``4@12GB/s,4@1.25GB/s`` is four devices joined at 12 GB/s in
each of four hosts joined at 1.25 GB/s. Two devices talk over the lowest level that holds them both.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from penstock import codec, units
from penstock.errors import ClusterError, FormatError, PenstockError
from penstock.limits import MOST_DEVICES, is_rate, is_seconds, is_size, is_speed

ANY_KIND = "any"
"""The device kind that takes its seconds from whatever the profile was measured on."""

HOST_KIND = "host"
"""Cores of the host in whose memory accelerators exchange values, as in dnn-partitioning's files."""

# Defaults for shared memory between workers of one host: the rate of one core's copies, and its own time.
SHARED_BYTES_PER_S = 8.0e9
SHARED_LATENCY_S = 80e-6
SHARED_RING_BYTES_PER_S = 4.0e9
SHARED_RING_LATENCY_S = 30e-6
SHARED_HANDLING_S = 25e-6
SHARED_COPYING_BYTES_PER_S = 12e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    kind: str = ANY_KIND
    memory_bytes: int | None = None
    """None where memory is no constraint."""
    speed: float = 1.0
    """Speed relative to the profile of its kind: 0.5 takes twice the time."""

    def __post_init__(self) -> None:
        if not is_speed(self.speed):
            raise ClusterError(f"device speed is {self.speed}; it must be above 0, at most a million")
        if self.memory_bytes is not None and not (self.memory_bytes > 0 and is_size(self.memory_bytes)):
            raise ClusterError(f"device memory is {self.memory_bytes} bytes; leave it out where it is no constraint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    size: int
    """How many groups of the next inner level (or devices, at the innermost level) one group joins."""
    bytes_per_s: float
    latency_s: float = 0.0
    ring_bytes_per_s: float | None = None
    """Bytes per second that each member of an all-reduce passes to the next one. None means the rate of messages."""
    ring_latency_s: float | None = None
    ring_by_workers: bool = False
    """Whether the members of an all-reduce copy and sum it themselves, as through shared memory, and compute nothing
    meanwhile. Otherwise it overlaps with computing."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ClusterError(f"level size is {self.size}; a level joins at least one")
        for what, rate in (("bandwidth", self.bytes_per_s), ("all-reduce bandwidth", self.ring_bytes_per_s)):
            if rate is not None and not is_rate(rate):
                raise ClusterError(f"{what} is {rate} bytes/s; it must be above 0, and a rate that a link can have")
        for what, seconds in (("latency", self.latency_s), ("all-reduce latency", self.ring_latency_s)):
            if seconds is not None and not is_seconds(seconds):
                raise ClusterError(f"{what} is {seconds}; it must be 0 or more, and a time that can pass")

    @property
    def ring(self) -> Level:
        """The rate and latency of this link for all-reduces."""
        return Level(
            size=self.size,
            bytes_per_s=self.bytes_per_s if self.ring_bytes_per_s is None else self.ring_bytes_per_s,
            latency_s=self.latency_s if self.ring_latency_s is None else self.ring_latency_s,
        )

    def no_better_than(self, inner: Level) -> Level:
        """This link for transfers that also pass the inner link: the lower rate and the higher latency of the two."""
        changed = replace(
            self,
            bytes_per_s=min(self.bytes_per_s, inner.bytes_per_s),
            latency_s=max(self.latency_s, inner.latency_s),
        )
        if self.ring == self and inner.ring == inner:
            return changed
        rate, latency_s = self.ring.bytes_per_s, self.ring.latency_s
        return replace(
            changed,
            ring_bytes_per_s=min(rate, inner.ring.bytes_per_s),
            ring_latency_s=max(latency_s, inner.ring.latency_s),
        )


class Port(NamedTuple):
    """One direction of the connection between a level and one of its members: a device, or a group of the next inner
    level."""

    level: int
    member: int
    """Which of the level's members it connects."""
    out: bool


@dataclass(frozen=True, kw_only=True)
class Cluster:
    name: str
    devices: tuple[Device, ...]
    levels: tuple[Level, ...]
    cores: int | None = None
    """Cores of each host (a group of the innermost level). Its devices share them, and none computes on more than one.
    None where each device computes by itself."""
    handling_s: float = 0.0
    """Seconds of a worker's own time per message that it sends or receives, without copying."""
    copying_bytes_per_s: float | None = None
    """The rate at which a worker copies messages. None where copying takes none of its time."""

    FORMAT: ClassVar[str] = "penstock.cluster/1"

    def __post_init__(self) -> None:
        if not self.devices:
            raise ClusterError("devices: empty; a cluster has at least one")
        if self.cores is not None and self.cores < 1:
            raise ClusterError(f"cores is {self.cores}; leave it out where devices compute by themselves")
        if not is_seconds(self.handling_s):
            raise ClusterError(f"handling is {self.handling_s}; it must be 0 or more, and a time that can pass")
        if self.copying_bytes_per_s is not None and not is_rate(self.copying_bytes_per_s):
            raise ClusterError(f"copying is {self.copying_bytes_per_s}; leave it out where it takes no time")
        reach = math.prod(level.size for level in self.levels)
        if reach != len(self.devices):
            sizes = " x ".join(str(level.size) for level in self.levels)
            raise ClusterError(
                f"the levels join {sizes} = {reach} devices but there are {len(self.devices)}; make the two agree"
            )

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Devices in a group of each level."""
        return tuple(itertools.accumulate((level.size for level in self.levels), operator.mul))

    @cached_property
    def links(self) -> tuple[Level, ...]:
        """For each level, the link between two of its groups. It is never better than the links inside a group, which
        the bytes pass too. A level with one group joins nothing and has the link of the level inside it."""
        links: list[Level] = []
        for level in self.levels:
            inner = next((link for link in reversed(links) if link.size > 1), None)
            if inner is None or level.size == 1:
                links.append(level if inner is None else replace(inner, size=1))
                continue
            links.append(level.no_better_than(inner))
        return tuple(links)

    def link(self, first: int, second: int) -> Level:
        """The link between two devices: that of the lowest level with both."""
        return self.links[self.span((first, second))]

    def slowest_link(self, devices: Sequence[int]) -> Level:
        """The outermost level between any two of these devices, whose links a ring all-reduce among them must cross."""
        return self.links[self.span(devices)]

    def carries(self, devices: Sequence[int]) -> bool:
        """Whether an all-reduce among these devices goes on while they compute."""
        return not self.slowest_link(devices).ring_by_workers

    def span(self, devices: Sequence[int]) -> int:
        """The lowest level that holds all of these devices."""
        first, last = min(devices), max(devices)
        for level, reach in enumerate(self.reach):
            if first // reach == last // reach:
                return level
        raise ClusterError(f"devices {first} and {last} are not both in {self.name}, which has {len(self.devices)}")

    def ports(self, source: int, target: int) -> list[Port]:
        """The ports that a transfer passes: up to the level that joins the two devices, and down again."""
        found: list[Port] = []
        for number, level in enumerate(self.levels):
            here, there = self.member(number, source), self.member(number, target)
            if here == there:
                break
            if level.size > 1:
                found += [Port(number, here, True), Port(number, there, False)]
        return found

    def handled_s(self, num_bytes: Any) -> Any:
        """Seconds of a worker's own time for a message, at either end. Accepts a number or an array. Zero bytes are no
        message."""
        copied_s = 0.0 if self.copying_bytes_per_s is None else num_bytes / self.copying_bytes_per_s
        return self.handling_s * (num_bytes > 0) + copied_s

    def host(self, device: int) -> int:
        return device // self.reach[0]

    @cached_property
    def has_hosts(self) -> bool:
        """Whether a group of the innermost level is certainly one host. A single level may also join hosts of one
        device each, unless its devices share memory or cores."""
        return self.reach[0] < len(self.devices) or self.levels[0].ring_by_workers or self.cores is not None

    def start_order(self, device: int) -> tuple[int, int]:
        """The sort key by which workers are started: host by host. On a host with unequal devices, in the order of the
        devices."""
        host, size = self.host(device), self.reach[0]
        is_uneven = len(set(self.devices[host * size : (host + 1) * size])) > 1
        return host, device if is_uneven else 0

    def member(self, level: int, device: int) -> int:
        """The member of a level that has the device: the device itself at the innermost level, else a group of the next
        inner level."""
        return device // self.reach[level - 1] if level else device


def parse_cluster(text: str) -> Cluster:
    """A cluster from what a user gives: a TOML file, ``local:4``, or levels such as ``4@12GB/s,4@1.25GB/s``."""
    if text.startswith("local:"):
        count = text.removeprefix("local:")
        if not count.isdecimal() or len(count) > 9 or int(count) < 1:
            raise FormatError(f"cluster {text!r}: expected local:N with N workers on this machine, such as local:4")
        _check_count(int(count), f"cluster {text!r}")
        return local_cluster(int(count))
    if "@" in text and not Path(text).exists():
        return _parse_levels(text)
    return load_cluster(Path(text))


def local_cluster(workers: int) -> Cluster:
    level = Level(
        size=workers,
        bytes_per_s=SHARED_BYTES_PER_S,
        latency_s=SHARED_LATENCY_S,
        ring_bytes_per_s=SHARED_RING_BYTES_PER_S,
        ring_latency_s=SHARED_RING_LATENCY_S,
        ring_by_workers=True,
    )
    return Cluster(
        name=f"local:{workers}",
        devices=(Device(),) * workers,
        levels=(level,),
        handling_s=SHARED_HANDLING_S if workers > 1 else 0.0,
        copying_bytes_per_s=SHARED_COPYING_BYTES_PER_S if workers > 1 else None,
    )


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file (TOML); see docs/clusters.md for the keys."""
    text = codec.read_text(path) if path.suffix == ".toml" or path.exists() else _not_a_cluster(str(path))
    return parse_cluster_toml(text, str(path))


def parse_cluster_toml(text: str, source: str) -> Cluster:
    """The cluster of a TOML text; ``source`` (a file name) starts every error."""
    data = codec.parse_toml(text, source, "see docs/clusters.md for an example")
    try:
        return _from_toml(data)
    except PenstockError as error:
        raise type(error)(f"{source}: {error}") from None


def cluster_toml(cluster: Cluster, about: Sequence[str] = (), about_levels: Sequence[str] = ()) -> str:
    """The text of a cluster file, rounded to what people read; ``about`` becomes comments, one line each."""
    parts = [f"# {_on_one_line(line)}".rstrip() for line in about]
    parts += ["", f"name = {_quoted(cluster.name)}"] if about else [f"name = {_quoted(cluster.name)}"]
    parts += [f"cores = {cluster.cores}"] if cluster.cores is not None else []
    parts += [f'handling = "{units.write_seconds(cluster.handling_s)}"'] if cluster.handling_s else []
    if cluster.copying_bytes_per_s is not None:
        parts.append(f'copying = "{units.write_bytes_per_s(cluster.copying_bytes_per_s)}"')
    for device, equal in itertools.groupby(cluster.devices):
        parts += ["", "[[devices]]", f"count = {len(list(equal))}"]
        if device.kind != ANY_KIND:
            parts.append(f"kind = {_quoted(device.kind)}")
        if device.memory_bytes is not None:
            parts.append(f'memory = "{units.write_bytes(device.memory_bytes)}"')
        if device.speed != 1.0:
            parts.append(f"speed = {device.speed}")
    for level, note in zip(cluster.levels, about_levels or [""] * len(cluster.levels), strict=True):
        parts += ["", f"[[levels]]  # {_on_one_line(note)}" if note else "[[levels]]", f"size = {level.size}"]
        parts.append(f'bandwidth = "{units.write_bytes_per_s(level.bytes_per_s)}"')
        parts.append(f'latency = "{units.write_seconds(level.latency_s)}"')
        if level.ring_bytes_per_s is not None:
            parts.append(f'all_reduce_bandwidth = "{units.write_bytes_per_s(level.ring_bytes_per_s)}"')
        if level.ring_latency_s is not None:
            parts.append(f'all_reduce_latency = "{units.write_seconds(level.ring_latency_s)}"')
        if level.ring_by_workers:
            parts.append("all_reduce_by_workers = true")
    return "\n".join(parts) + "\n"


def _on_one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _quoted(text: str) -> str:
    """A TOML string. JSON has the same escapes, but does not escape DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _not_a_cluster(text: str) -> str:
    raise FormatError(
        f"cluster {text!r}: neither a file nor a known form; write local:4, 4@12GB/s,4@1.25GB/s, or a TOML file's path"
    )


def _parse_levels(text: str) -> Cluster:
    levels = []
    for part in text.split(","):
        size, at, rate = part.partition("@")
        if not at or not size.strip().isdecimal() or len(size) > 9:
            raise FormatError(f"cluster {text!r}: {part!r} is not devices@bandwidth such as 4@12GB/s")
        try:
            levels.append(Level(size=int(size), bytes_per_s=units.parse_bytes_per_s(rate)))
        except PenstockError as error:
            raise type(error)(f"cluster {text!r}: {error}") from None
    count = math.prod(level.size for level in levels)
    _check_count(count, f"cluster {text!r}")
    return Cluster(name=text, devices=(Device(),) * count, levels=tuple(levels))


def _from_toml(data: dict[str, Any]) -> Cluster:
    """A cluster from TOML, where sizes have units and equal devices are given once with a ``count``."""
    devices, count = [], 0
    for i, item in enumerate(_tables(data, "devices")):
        equal, device = _toml_device(item, f"devices[{i}]")
        count += equal
        _check_count(count, f"devices[{i}].count")
        devices.append([device] * equal)
    levels = [_toml_level(item, f"levels[{i}]") for i, item in enumerate(_tables(data, "levels"))]
    plain = _with_units(data, Cluster, _CLUSTER_UNITS, "", others=("format",)) | {
        "devices": list(itertools.chain.from_iterable(devices)),
        "levels": levels,
    }
    return codec.decode(Cluster, {"format": Cluster.FORMAT, "name": "cluster"} | plain)


def _tables(data: dict[str, Any], key: str) -> list[dict[str, Any]]:
    items = data.get(key)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise FormatError(f"{key}: missing; write one or more [[{key}]] tables")
    return items


def _toml_device(item: dict[str, Any], where: str) -> tuple[int, dict[str, Any]]:
    """How many such devices there are, and one of them."""
    item = _with_units(item, Device, _DEVICE_UNITS, where, others=("count",))
    count = item.pop("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise FormatError(f"{where}.count: expected a whole number of at least 1, found {count!r}")
    return count, item


def _check_count(devices: int, where: str) -> None:
    if devices > MOST_DEVICES:
        raise FormatError(f"{where}: {devices} devices; a cluster has at most {MOST_DEVICES}")


def _toml_level(item: dict[str, Any], where: str) -> dict[str, Any]:
    return _with_units(item, Level, _LEVEL_UNITS, where)


def _with_units(
    item: dict[str, Any], cls: Any, units_of: dict[str, tuple[str, Any]], where: str, others: Sequence[str] = ()
) -> dict[str, Any]:
    """The fields of ``cls`` from a table. Keys of ``units_of`` have other names in TOML, and their values are texts
    with units."""
    renamed = {field for field, _ in units_of.values()}
    keys = (*others, *(each.name for each in fields(cls) if each.name not in renamed), *units_of)
    plain: dict[str, Any] = {}
    for key, value in item.items():
        place = f"{where}.{key}" if where else key
        if key not in keys:
            close = difflib.get_close_matches(key, keys, n=1)
            meant = f"did you mean {close[0]}? " if close else ""
            raise FormatError(f"{place}: unknown key; {meant}there are {', '.join(keys)}")
        field, parse = units_of.get(key, (key, None))
        plain[field] = value if parse is None else _with_field(parse, value, place)
    return plain


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise FormatError(f"expected true or false, found {value!r}")
    return value


_LEVEL_UNITS: dict[str, tuple[str, Any]] = {
    "bandwidth": ("bytes_per_s", units.parse_bytes_per_s),
    "latency": ("latency_s", units.parse_seconds),
    "all_reduce_bandwidth": ("ring_bytes_per_s", units.parse_bytes_per_s),
    "all_reduce_latency": ("ring_latency_s", units.parse_seconds),
    "all_reduce_by_workers": ("ring_by_workers", _flag),
}
_DEVICE_UNITS = {"memory": ("memory_bytes", units.parse_bytes)}
_CLUSTER_UNITS = {
    "handling": ("handling_s", units.parse_seconds),
    "copying": ("copying_bytes_per_s", units.parse_bytes_per_s),
}


def _with_field(parse: Any, value: Any, where: str) -> Any:
    try:
        return parse(value)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
