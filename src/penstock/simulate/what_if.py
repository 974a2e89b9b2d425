"""A plan with something changed: ``bandwidth=x10``, ``speed@device:3=x0.5,schedule=1f1b``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock import units
from penstock.cluster import Cluster, Device, Level
from penstock.compression import check_compression
from penstock.errors import PlanError
from penstock.limits import is_usable
from penstock.plan import Plan
from penstock.schedule import family, planned_depth
from penstock.simulate.conditions import CALM, Conditions

GRAMMAR = (
    "write bandwidth, latency (of all links, or @level:N), speed, memory (of all devices, or @device:N, @host:N, "
    "@kind:NAME), microbatches, schedule, compress or conditions, each with =VALUE or =xFACTOR, and a comma between"
)


@dataclass(frozen=True)
class _Change:
    text: str
    name: str
    where: tuple[str, str] | None
    value: str

    @classmethod
    def parse(cls, text: str) -> _Change:
        left, equals, value = text.strip().partition("=")
        name, at, where = left.strip().partition("@")
        kind, colon, which = where.partition(":")
        if not (equals and value and name) or (at and not (colon and which)):
            raise PlanError(f"what if {text!r}: not a change; {GRAMMAR}")
        return cls(text.strip(), name, (kind, which) if at else None, value.strip())

    def number(self, now: float | None, parse: Callable[[str], float]) -> float:
        """The value itself or, if it is written as ``x2``, that many times the present one."""
        number = self._number(now, parse)
        if not is_usable(number):
            raise self.wrong("a finite number of usual size")
        return number

    def _number(self, now: float | None, parse: Callable[[str], float]) -> float:
        factor = self.value.removeprefix("x")
        if factor == self.value:
            return parse(self.value)
        if now is None:
            raise PlanError(f"what if {self.text!r}: there is no limit to multiply; give a size such as 16GB")
        try:
            return now * float(factor)
        except ValueError:
            raise self.wrong("xFACTOR with a number such as x2 or x0.5") from None

    def wrong(self, expected: str) -> PlanError:
        return PlanError(f"what if {self.text!r}: expected {expected}; {GRAMMAR}")


def what_if(
    text: str, plan: Plan, conditions: Conditions = CALM, read: Callable[[str], Conditions] | None = None
) -> tuple[Plan, Conditions]:
    """The plan with these changes; stages keep their layers and devices. ``read`` turns the name of a file into
    conditions."""
    changes = [_Change.parse(part) for part in text.split(",")]
    for change in changes:
        if change.name in ("bandwidth", "latency"):
            plan = replace(plan, cluster=_links(plan.cluster, change))
        elif change.name in ("speed", "memory"):
            plan = replace(plan, cluster=_devices(plan.cluster, change))
        elif change.name == "compress":
            check_compression(change.value)
            stages = (replace(stage, sends=change.value) for stage in plan.stages[:-1])
            plan = replace(plan, stages=(*stages, plan.stages[-1]))
        elif change.name == "conditions" and read is not None:
            conditions = read(change.value)
        elif change.name not in ("schedule", "microbatches"):
            raise PlanError(f"what if {change.text!r}: {change.name!r} is unknown; {GRAMMAR}")
    named = {change.name: change for change in changes if change.name in ("schedule", "microbatches")}
    return (_scheduled(plan, named) if named else plan), conditions


def _links(cluster: Cluster, change: _Change) -> Cluster:
    chosen = range(len(cluster.levels))
    if change.where is not None:
        kind, which = change.where
        if kind != "level" or not which.isdecimal() or int(which) not in chosen:
            raise change.wrong(f"@level:N with N from 0, the innermost, to {len(cluster.levels) - 1}")
        chosen = range(int(which), int(which) + 1)

    def changed(level: Level) -> Level:
        names = ("bytes_per_s", "ring_bytes_per_s") if change.name == "bandwidth" else ("latency_s", "ring_latency_s")
        parse = units.parse_bytes_per_s if change.name == "bandwidth" else units.parse_seconds
        known = {name: getattr(level, name) for name in names if getattr(level, name) is not None}
        changes: dict[str, Any] = {name: change.number(value, parse) for name, value in known.items()}
        return replace(level, **changes)

    levels = tuple(changed(level) if at in chosen else level for at, level in enumerate(cluster.levels))
    return replace(cluster, levels=levels)


def _devices(cluster: Cluster, change: _Change) -> Cluster:
    chosen = _chosen(cluster, change)

    def changed(device: Device) -> Device:
        if change.name == "speed":
            return replace(device, speed=change.number(device.speed, _plain))
        return replace(device, memory_bytes=round(change.number(device.memory_bytes, units.parse_bytes)))

    devices = tuple(changed(device) if at in chosen else device for at, device in enumerate(cluster.devices))
    return replace(cluster, devices=devices)


def _chosen(cluster: Cluster, change: _Change) -> set[int]:
    everyone = range(len(cluster.devices))
    if change.where is None:
        return set(everyone)
    kind, which = change.where
    tests: dict[str, Callable[[int], Any]] = {
        "device": lambda device: str(device) == which,
        "host": lambda device: str(device // cluster.reach[0]) == which,
        "kind": lambda device: cluster.devices[device].kind == which,
    }
    found = {device for device in everyone if tests[kind](device)} if kind in tests else set()
    if not found:
        kinds = ", ".join(dict.fromkeys(device.kind for device in cluster.devices))
        hosts = len(cluster.devices) // cluster.reach[0]
        raise change.wrong(
            f"@device:N up to {len(cluster.devices) - 1}, @host:N up to {hosts - 1}, or @kind:NAME among {kinds}"
        )
    return found


def _plain(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise PlanError(f"what if speed={text}: expected a number such as 0.5, or a factor such as x2") from None


def _scheduled(plan: Plan, changes: dict[str, _Change]) -> Plan:
    """The plan under another schedule, or with another number of microbatches. The depth is the usual one for that
    schedule."""
    if plan.custom:
        raise PlanError("what if: the plan's schedule was read from a file; plan again to change it")
    schedule = changes["schedule"].value if "schedule" in changes else plan.schedule
    microbatches = plan.microbatches if family(schedule).accumulates else 1
    if "microbatches" in changes:
        microbatches = round(changes["microbatches"].number(microbatches, _plain))
    if not 1 <= microbatches <= plan.profile.batch_size:
        raise PlanError(
            f"what if: {microbatches} microbatches from a minibatch of {plan.profile.batch_size} samples; take 1 to "
            f"{plan.profile.batch_size}"
        )
    depths = [planned_depth(schedule, plan.pipeline, stage, microbatches) for stage in range(len(plan.stages))]
    stages = tuple(replace(stage, in_flight=depth) for stage, depth in zip(plan.stages, depths, strict=True))
    return replace(plan, schedule=schedule, microbatches=microbatches, stages=stages)
