"""Workers by host, their hardware, and the levels that they form."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cluster import ANY_KIND, Device
from penstock.errors import ClusterError

EQUAL_SPEED = 0.9
"""Devices whose speeds differ by less count as equal, so that noise does not make a cluster unequal."""


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """What a worker reports about itself."""

    host: str
    host_id: str
    """Equal for workers that communicate without a network, and only for those."""
    host_memory_bytes: int
    device_memory_bytes: int | None = None
    """None if the device is the host's processor, with the host's memory."""
    kind: str = ANY_KIND
    work_per_s: float
    """The rate of a fixed computation while all workers of the host run it."""
    spread: float = 0.0
    """How much that rate varied during measuring: the distance of the quartiles as a share of it."""


@dataclass(frozen=True, kw_only=True)
class Host:
    name: str
    workers: tuple[int, ...]


def group_hosts(facts: Sequence[WorkerFacts]) -> tuple[Host, ...]:
    """The hosts in the order of their workers, which must be numbered host by host."""
    workers: dict[str, list[int]] = {}
    for worker, fact in enumerate(facts):
        workers.setdefault(fact.host_id, []).append(worker)
    for members in workers.values():
        if members[-1] - members[0] >= len(members):
            host = facts[members[0]].host
            stranger = next(w for w in range(members[0], members[-1]) if w not in members)
            raise ClusterError(
                f"worker {stranger} is on {facts[stranger].host}, between workers {members[0]} and {members[-1]} of "
                f"{host}; number the workers host by host, as torchrun does (srun: --distribution=block)"
            )
    return tuple(Host(name=facts[members[0]].host, workers=tuple(members)) for members in workers.values())


def level_sizes(hosts: Sequence[Host]) -> tuple[int, ...]:
    """Level sizes, inner first. Levels join equal groups; if hosts differ, the largest group that divides all of them
    is used."""
    count = sum(len(host.workers) for host in hosts)
    inner = math.gcd(*(len(host.workers) for host in hosts))
    return (count,) if inner in (1, count) else (inner, count // inner)


def make_devices(facts: Sequence[WorkerFacts]) -> tuple[Device, ...]:
    """The memory of a host is divided among its workers. Speeds are relative to the fastest device of the same kind."""
    on_host = Counter(fact.host_id for fact in facts)
    speeds: dict[tuple[str, float], float] = {}
    for kind in {fact.kind for fact in facts}:
        rates = [fact.work_per_s for fact in facts if fact.kind == kind]
        speeds |= {(kind, rate): speed for rate, speed in zip(rates, even_speeds(rates), strict=True)}
    return tuple(
        Device(
            kind=fact.kind,
            memory_bytes=fact.device_memory_bytes or fact.host_memory_bytes // on_host[fact.host_id],
            speed=speeds[fact.kind, fact.work_per_s],
        )
        for fact in facts
    )


def even_speeds(rates: Sequence[float]) -> list[float]:
    """Each rate relative to the fastest, to two digits. A rate close to a faster one gets the same speed."""
    fastest = max(rates)
    speeds: dict[float, float] = {}
    leader = fastest
    for rate in sorted(set(rates), reverse=True):
        if rate < EQUAL_SPEED * leader:
            leader = rate
        speeds[rate] = float(f"{leader / fastest:.2g}")
    return [speeds[rate] for rate in rates]
