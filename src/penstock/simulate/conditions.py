"""Devices that are slower than profiled: permanently, at random, or as recorded."""

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
"""From this time on, this cause makes a device take so many times as long."""

SHORTEST_S = 1e-6
"""The shortest mean time of random slowdowns. A simulation takes a step for each one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One slowdown of one device; permanent if it has no end."""

    device: int
    times: float
    """How many times as long as profiled everything takes: 2.0 is half the speed."""
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
    """Transient slowdowns at random, independent for each device. Their lengths and the times between them are
    exponential."""

    times: float
    every_s: float
    """Mean seconds from the end of one slowdown to the start of the next."""
    lasting_s: float
    """Mean seconds of a slowdown."""
    devices: tuple[int, ...] = ()
    """The devices concerned; all devices if empty."""

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
    """The slowdowns of devices while a plan is simulated. The same seed gives the same slowdowns."""

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
        """The pace of a device, or None if it is never slower than profiled."""
        own = [each for each in self.episodes if each.device == device]
        causes = itertools.count()
        changes = [episode.changes(next(causes)) for episode in own]
        for number, each in enumerate(self.stragglers):
            if not each.devices or device in each.devices:
                changes.append(each.changes(next(causes), (self.seed % 2**64, device, number)))
        return Pace(heapq.merge(*changes)) if changes else None


CALM = Conditions()


def parse_conditions(text: str, source: str) -> Conditions:
    """Read conditions from TOML text, or from JSON with a format tag. ``source`` names the file in errors."""
    if not source.endswith(".toml"):
        return codec.loads(Conditions, text, source)
    data = codec.parse_toml(text, source, "see docs/simulator.md for an example")
    return codec.decode_from(source, Conditions, {"format": Conditions.FORMAT} | data)


class Pace:
    """The speed of one device over time. It must be asked in the order of time. Slowdowns at the same time multiply."""

    def __init__(self, changes: Iterator[Change]) -> None:
        self._changes = changes
        self._causes: dict[int, float] = {}
        self._times = 1.0
        self._next: Change = next(changes)

    def end_s(self, start_s: float, seconds: float) -> float:
        """When something ends that takes ``seconds`` at full speed."""
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
