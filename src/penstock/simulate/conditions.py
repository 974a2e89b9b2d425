"""Devices that are slower for a while: for good, now and then, or just as somebody has recorded it."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from penstock import codec
from penstock.cluster import Cluster
from penstock.errors import ClusterError
from penstock.limits import is_seconds, is_speed

Change = tuple[float, int, float]
"""From when on, which cause makes a device take how many times as long."""

SHORTEST_S = 1e-6
"""of what comes and goes at random: a simulation takes a step for each time"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One slowdown of one device: persistent where it has no end. A recording has many."""

    device: int
    times: float
    """as long as the profile says: 2.0 is half the speed"""
    start_s: float = 0.0
    end_s: float | None = None

    def __post_init__(self) -> None:
        _check_times(self.times)
        if not is_seconds(self.start_s) or not self.start_s < (math.inf if self.end_s is None else self.end_s):
            raise ClusterError(f"a slowdown from {self.start_s} to {self.end_s} s; it must end after it starts")

    def changes(self, cause: int) -> Iterator[Change]:
        yield self.start_s, cause, self.times
        if self.end_s is not None:
            yield self.end_s, cause, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """Transient slowdowns that come and go at random, of each device for itself; both times are exponential."""

    times: float
    every_s: float
    """from the end of one to the start of the next, on average"""
    lasting_s: float
    """on average"""
    devices: tuple[int, ...] = ()
    """all, if none is given"""

    def __post_init__(self) -> None:
        _check_times(self.times)
        if not all(seconds >= SHORTEST_S and is_seconds(seconds) for seconds in (self.every_s, self.lasting_s)):
            raise ClusterError(
                f"stragglers every {self.every_s} s for {self.lasting_s} s; both must be at least {SHORTEST_S:g} s"
            )

    def changes(self, cause: int, seed: tuple[int, ...]) -> Iterator[Change]:
        random, now_s = np.random.default_rng(seed), 0.0
        while True:
            now_s += random.exponential(self.every_s)
            yield now_s, cause, self.times
            now_s += random.exponential(self.lasting_s)
            yield now_s, cause, 1.0


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What the devices go through while a plan is simulated. The same seed gives the same slowdowns."""

    episodes: tuple[Episode, ...] = ()
    stragglers: tuple[Stragglers, ...] = ()
    seed: int = 0

    FORMAT: ClassVar[str] = "penstock.conditions/1"

    def check(self, cluster: Cluster) -> None:
        named = {each.device for each in self.episodes} | {d for each in self.stragglers for d in each.devices}
        for device in sorted(named):
            if not 0 <= device < len(cluster.devices):
                raise ClusterError(
                    f"a slowdown of device {device}, and {cluster.name} has {len(cluster.devices)}; "
                    "devices are numbered from 0"
                )

    def pace_of(self, device: int) -> Pace | None:
        """None where it is never slower."""
        own = [each for each in self.episodes if each.device == device]
        causes = itertools.count()
        changes = [episode.changes(next(causes)) for episode in own]
        for number, each in enumerate(self.stragglers):
            if not each.devices or device in each.devices:
                changes.append(each.changes(next(causes), (self.seed % 2**64, device, number)))
        return Pace(heapq.merge(*changes)) if changes else None


CALM = Conditions()


def parse_conditions(text: str, source: str) -> Conditions:
    """From a TOML file, or from JSON with its format tag; ``source`` names the file."""
    if not source.endswith(".toml"):
        return codec.loads(Conditions, text, source)
    data = codec.parse_toml(text, source, "see docs/simulator.md for an example")
    return codec.decode_from(source, Conditions, {"format": Conditions.FORMAT} | data)


class Pace:
    """How long a device takes for things, asked for in the order of time. Causes that come together multiply."""

    def __init__(self, changes: Iterator[Change]) -> None:
        self._changes = changes
        self._causes: dict[int, float] = {}
        self._times = 1.0
        self._next: Change = next(changes)

    def end_s(self, start_s: float, seconds: float) -> float:
        """Of what would take so many seconds at full speed."""
        now_s = start_s
        while self._next[0] < now_s + seconds * self._times:
            if self._next[0] > now_s:
                seconds -= (self._next[0] - now_s) / self._times
                now_s = self._next[0]
            self._change()
        return now_s + seconds * self._times

    def _change(self) -> None:
        _, cause, times = self._next
        if times == 1.0:
            self._causes.pop(cause, None)
        else:
            self._causes[cause] = times
        self._times = math.prod(self._causes.values())
        self._next = next(self._changes, (math.inf, 0, 1.0))


def _check_times(times: float) -> None:
    if not is_speed(times):
        raise ClusterError(f"a slowdown of {times} times; it must be above 0, above 1 to be slower, and not a million")
