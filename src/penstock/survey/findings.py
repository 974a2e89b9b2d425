"""From timings to a cluster file, and remarks about it."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.cluster import Cluster, Level, cluster_toml, parse_cluster_toml
from penstock.cost import Traffic, message, ring_allreduce
from penstock.survey.fit import Handling, Sample, fit_handling, fit_link
from penstock.survey.hosts import Host, WorkerFacts, group_hosts, level_sizes, make_devices
from penstock.survey.trials import Pattern, Reach, Timing, Trial
from penstock.units import write_bytes_per_s, write_seconds

WORTH_SAYING = 0.8
"""A rate below this share of the one it is compared with gets a remark."""
FAR_SLOWER = 0.5
NOISY = 0.15
"""A speed that varies by more than this share while it is measured gets a remark."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A measured time and the cluster file's prediction of it."""

    what: str
    num_bytes: int
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, kw_only=True)
class LevelFindings:
    reach: str
    level: Level
    """The level in the file: messages, and all-reduces by the ring model."""
    handling: Handling
    checks: tuple[Check, ...]
    pairs_at_once: int
    share_at_once: float | None
    """The share of its rate that each pair keeps when all pairs send at once; None if there is only one pair."""
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Survey:
    cluster: Cluster
    hosts: tuple[Host, ...]
    levels: tuple[LevelFindings, ...]
    remarks: tuple[str, ...]
    toml: str


def conclude(
    facts: Sequence[WorkerFacts],
    trials: Sequence[Trial],
    timings: Sequence[Timing],
    backend: str,
    *,
    by_workers: bool = False,
) -> Survey:
    """``by_workers`` says that the workers of a host sum in shared memory themselves, and compute nothing meanwhile."""
    hosts, devices = group_hosts(facts), make_devices(facts)
    sizes = level_sizes(hosts)
    reaches = [reach for reach in Reach if any(trial.reach is reach for trial in trials)]
    levels = tuple(
        _findings(reach, size, trials, timings, by_workers=by_workers and reach is Reach.INSIDE)
        for reach, size in zip(reaches, sizes, strict=True)
    )
    handling = levels[-1].handling  # of the outermost measured level, where messages take most time
    measured = Cluster(
        name=_name(hosts),
        devices=devices,
        levels=tuple(found.level for found in levels),
        handling_s=handling.seconds,
        copying_bytes_per_s=handling.bytes_per_s,
    )
    remarks = (
        *_noise_remark(facts),
        *_host_remarks(hosts, sizes),
        *(remark for found in levels for remark in found.remarks),
    )
    toml = cluster_toml(measured, _about(hosts, levels, remarks, backend), [found.reach for found in levels])
    # Return the cluster as the file has it, which planning will see, without more digits.
    return Survey(cluster=parse_cluster_toml(toml, "cluster"), hosts=hosts, levels=levels, remarks=remarks, toml=toml)


def _findings(
    reach: Reach, size: int, trials: Sequence[Trial], timings: Sequence[Timing], *, by_workers: bool
) -> LevelFindings:
    by_pattern: dict[Pattern, list[Timing]] = defaultdict(list)
    for timing in timings:
        if trials[timing.trial].reach is reach:
            by_pattern[trials[timing.trial].pattern].append(timing)
    messages, rings = by_pattern[Pattern.HAND_OVER], by_pattern[Pattern.ALL_REDUCE]
    message_medians, ring_medians = _medians(messages, trials), _medians(rings, trials)
    of_messages, of_rings = (fit_link([m.sample for m in part]) for part in (message_medians, ring_medians))
    level = Level(
        size=size,
        bytes_per_s=_two_digits(of_messages.bytes_per_s),
        latency_s=_two_digits(of_messages.latency_s),
        ring_bytes_per_s=_two_digits(of_rings.bytes_per_s),
        ring_latency_s=_two_digits(of_rings.latency_s),
        ring_by_workers=by_workers,
    )
    exact = fit_handling(_handled(by_pattern[Pattern.HANDLING]))
    copying = None if exact.bytes_per_s is None else _two_digits(exact.bytes_per_s)
    pairs, share = _at_once(by_pattern[Pattern.STREAM], trials)
    remarks = [
        *_sharing_remark(reach, pairs, share),
        *_slow_pair_remark(reach, messages, trials, of_messages),
    ]
    return LevelFindings(
        reach=reach.value,
        level=level,
        handling=Handling(_two_digits(exact.seconds), copying),
        checks=(
            *(median.check(level) for median in message_medians),
            *(median.check(level.ring) for median in ring_medians),
        ),
        pairs_at_once=pairs,
        share_at_once=share,
        remarks=tuple(remarks),
    )


class _Median(NamedTuple):
    what: str
    num_bytes: int
    sample: Sample

    def check(self, level: Level) -> Check:
        predicted_s = self.sample.traffic.seconds(level)
        return Check(what=self.what, num_bytes=self.num_bytes, measured_s=self.sample.seconds, predicted_s=predicted_s)


def _medians(timings: Sequence[Timing], trials: Sequence[Trial]) -> list[_Median]:
    """Medians by size, over all pairs or all hosts. All-reduces with different numbers of members are kept apart."""
    found: dict[tuple[str, int, Traffic], list[float]] = defaultdict(list)
    for timing in timings:
        trial = trials[timing.trial]
        what, traffic = trial.pattern.value, message(timing.num_bytes)
        if trial.pattern is Pattern.ALL_REDUCE:
            members = len(trial.groups[timing.group])
            what, traffic = f"{what} of {members}", ring_allreduce(timing.num_bytes, members)
        found[what, timing.num_bytes, traffic].append(timing.seconds)
    return [
        _Median(what, num_bytes, Sample(traffic, statistics.median(seconds)))
        for (what, num_bytes, traffic), seconds in found.items()
    ]


def _handled(timings: Sequence[Timing]) -> list[tuple[int, float]]:
    """Bytes of a message, and the median of a worker's own time for it."""
    found: dict[int, list[float]] = defaultdict(list)
    for timing in timings:
        found[timing.num_bytes].append(timing.seconds)
    return [(num_bytes, statistics.median(seconds)) for num_bytes, seconds in found.items()]


def _at_once(streams: Sequence[Timing], trials: Sequence[Trial]) -> tuple[int, float | None]:
    """How many pairs sent at the same time, and the rate of each relative to a pair alone."""
    if not streams:
        return 1, None
    alone, together = sorted({timing.trial for timing in streams}, key=lambda trial: len(trials[trial].groups))
    median_s = {
        trial: statistics.median(timing.seconds for timing in streams if timing.trial == trial)
        for trial in (alone, together)
    }
    return len(trials[together].groups), median_s[alone] / median_s[together]


def _sharing_remark(reach: Reach, pairs: int, share: float | None) -> list[str]:
    if share is None or share >= WORTH_SAYING:
        return []
    return [
        f"{reach.value}: {pairs} pairs at once get {share:.0%} each of what one gets alone; plans take every pair's "
        "link for its own, so lower the bandwidth if many replicas will talk over it at once"
    ]


def _slow_pair_remark(reach: Reach, messages: Sequence[Timing], trials: Sequence[Trial], median: Level) -> list[str]:
    samples: dict[tuple[int, ...], list[Sample]] = defaultdict(list)
    for timing in messages:
        samples[trials[timing.trial].groups[timing.group]].append(Sample(message(timing.num_bytes), timing.seconds))
    rates = {pair: fit_link(found).bytes_per_s for pair, found in samples.items()}
    slowest = min(rates, key=rates.__getitem__)
    if rates[slowest] >= FAR_SLOWER * median.bytes_per_s:
        return []
    return [
        f"{reach.value}: workers {slowest[0]} and {slowest[1]} get {write_bytes_per_s(_two_digits(rates[slowest]))} "
        f"where all pairs together get {_rate(median)}; the file has one figure for all: look after that link"
    ]


def _noise_remark(facts: Sequence[WorkerFacts]) -> list[str]:
    noisiest = max(range(len(facts)), key=lambda worker: facts[worker].spread)
    if facts[noisiest].spread <= NOISY:
        return []
    return [
        f"the speed of worker {noisiest} on {facts[noisiest].host} varied by {facts[noisiest].spread:.0%} within a "
        "second, as on a machine that is busy with something else; measure again when it is quiet"
    ]


def _host_remarks(hosts: Sequence[Host], sizes: Sequence[int]) -> list[str]:
    counts = [len(host.workers) for host in hosts]
    if len(set(counts)) == 1:
        return []
    groups = f"groups of {sizes[0]} workers" if len(sizes) > 1 else "single workers"
    return [
        f"the hosts have {', '.join(map(str, counts))} workers; levels join equal groups, so the file has {groups}, "
        "and links between two groups of one host count as links between hosts"
    ]


def _name(hosts: Sequence[Host]) -> str:
    counts = [len(host.workers) for host in hosts]
    if len(counts) == 1:
        return f"{counts[0]} workers, measured"
    each = f"x {counts[0]}" if len(set(counts)) == 1 else f"with {'+'.join(map(str, counts))}"
    return f"{len(hosts)} hosts {each} workers, measured"


def _about(hosts: Sequence[Host], levels: Sequence[LevelFindings], remarks: Sequence[str], backend: str) -> list[str]:
    lines = [f"Measured by `penstock cluster measure` over {backend}, one process per worker. Devices host by host:"]
    lines += [f"  {host.name}: {_range(host.workers)}" for host in hosts]
    for found in levels:
        lines.append(f"Links {found.reach}:")
        handled = f"  a message takes {write_seconds(found.handling.seconds)} of a worker's own time"
        copied = found.handling.bytes_per_s
        lines.append(f"{handled}, and copying at {write_bytes_per_s(copied)}" if copied else handled)
        if found.share_at_once is not None:
            lines.append(f"  {found.pairs_at_once} pairs at once: each {found.share_at_once:.0%} of its rate alone")
    for remark in remarks:
        lines += textwrap.wrap(f"Note: {remark}.", width=100, subsequent_indent="  ")
    return lines


def _range(workers: Sequence[int]) -> str:
    return f"{workers[0]}-{workers[-1]}" if len(workers) > 1 else str(workers[0])


def _link(level: Level) -> str:
    return f"{_rate(level)}, {write_seconds(_two_digits(level.latency_s))}"


def _rate(level: Level) -> str:
    return write_bytes_per_s(_two_digits(level.bytes_per_s))


def _two_digits(number: float) -> float:
    """Rounded to two digits, which is all that a few seconds of measuring can claim."""
    return float(f"{number:.2g}") if math.isfinite(number) else number
