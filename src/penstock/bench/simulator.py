"""The simulator against this machine: what it says of plans, and what they do when they run.

Everything it goes by is measured first, as a user would: the profile with all cores at work, links by
`penstock cluster measure`. A core stands for a host. Of three workers two share one, and the cluster says so.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from penstock import codec
from penstock.bench.hosts import make_hosts, why_not
from penstock.bench.network import SLOW, measured_cluster
from penstock.bench.plays import CORES, MICROBATCHES, Play
from penstock.bench.rows import Column, Findings
from penstock.bench.why import config_of
from penstock.cluster import Cluster, Level
from penstock.plan import Plan
from penstock.planner import Hints, make_plan
from penstock.profile import Profile
from penstock.runtime.launch import launch_workers
from penstock.simulate import simulate
from penstock.units import show_bits_per_s

CASES = ("vgg", "transformer")
PLANS = (
    ((1, 1), ("pipedream", "1f1b", "gpipe", "zb-h1")),
    ((1, 2), ("pipedream", "1f1b")),
    ((2, 1), ("pipedream", "1f1b")),
)
ROUND_S = 1.2
"""about how long a plan runs at a time"""
FEWEST, MOST = 12, 60
"""minibatches at a time"""
MEDIAN_ERROR, WORST_ERROR = 0.05, 0.10
TIMEOUT_S = 400.0

Runs = Callable[[Sequence[str], Sequence[int]], None]
"""Runs ``python ARGUMENTS`` as workers on these cores."""


@dataclass(frozen=True, kw_only=True)
class SimulatorRow:
    case: str
    network: str
    plan: str
    """replicas of each stage"""
    schedule: str
    measured: float
    """samples/s, the median of all rounds"""
    simulated: float
    error: float
    """of the simulated rate, beside the measured one"""
    crowded: bool = False
    """two of its workers share a core"""
    note: str = ""
    """on all rows, under the last"""

    COLUMNS: ClassVar[tuple[Column, ...]] = (
        *(Column(title) for title in ("model", "network", "plan", "schedule")),
        *(Column(title, right=True) for title in ("measured\nsamples/s", "simulated", "error")),
    )
    CAPTION: ClassVar[str] = "samples/s of runs on this machine, and what the simulator says of the same plans"

    @property
    def cells(self) -> tuple[str, ...]:
        numbers = f"{self.measured:.1f}", f"{self.simulated:.1f}", f"{self.error:+.1%}"
        return self.case, self.network, self.plan, self.schedule, *numbers

    @property
    def footnote(self) -> str:
        return self.note


@dataclass(frozen=True)
class Known:
    """What was measured of a model before it runs."""

    profile: Profile
    step_s: float
    """that plain torch took for a step of it at that time: when it takes less, the machine is that much faster"""

    @classmethod
    def read(cls, directory: Path, microbatches: int) -> Known:
        profile = codec.load(Profile, directory / f"profile {microbatches}.json")
        return cls(profile, float((directory / f"step {microbatches}").read_text()))


def run() -> Findings:
    rows = [row for case in CASES for row in _of_model(case)]
    return Findings([*rows[:-1], replace(rows[-1], note=verdict(rows))])


def _of_model(case: str) -> Iterator[SimulatorRow]:
    with tempfile.TemporaryDirectory() as name:
        _say(f"{case}: profile and links")
        for what in ("profile", "cluster"):
            _run_here(["-m", "penstock.bench.plays", what, case, name], range(CORES))
        known = {count: Known.read(Path(name), count) for count in (1, MICROBATCHES)}
        link = codec.load(Cluster, Path(name) / "cluster.json")
    yield from _on_network(case, "loopback", known, link, link.levels[0], _run_here)
    if why_not() is not None:
        return
    with make_hosts(CORES) as hosts, tempfile.TemporaryDirectory() as name:
        hosts.set_rate(SLOW)
        apart = measured_cluster(hosts, Path(name) / "cluster.toml")

        def run_there(arguments: Sequence[str], cores: Sequence[int]) -> None:
            hosts.run_workers(arguments, on=cores, timeout_s=TIMEOUT_S)

        network = show_bits_per_s(SLOW)
        yield from _on_network(case, network, known, apart, link.levels[0], run_there)


def _run_here(arguments: Sequence[str], cores: Sequence[int]) -> None:
    launch_workers(arguments, len(cores), threads=1)


def _on_network(
    case: str, network: str, known: Mapping[int, Known], between: Cluster, within: Level, run_workers: Runs
) -> Iterator[SimulatorRow]:
    """With a core for a host: joined as ``between`` has it, and ``within`` what joins two workers on one of them."""
    for replicas, schedules in PLANS:
        room = max(replicas)
        cluster = replace(
            between,
            name=network,
            devices=(replace(between.devices[0], memory_bytes=None),) * (CORES * room),
            levels=(replace(within, size=room), replace(between.levels[-1], size=CORES)),
            cores=1,
        )
        plans = [_plan(known, cluster, replicas, schedule) for schedule in schedules]
        yield from _compared(case, network, known, plans, run_workers)


def _compared(
    case: str,
    network: str,
    known: Mapping[int, Known],
    plans: Sequence[Plan],
    run_workers: Runs,
) -> Iterator[SimulatorRow]:
    """Plans that have their workers on the same hosts, run by turns."""
    (cores,) = {tuple(map(plan.cluster.host, plan.devices)) for plan in plans}
    minibatches = {f"plan {i}": _minibatches(plan) for i, plan in enumerate(plans)}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for file, plan in zip(minibatches, plans, strict=True):
            codec.save(plan, directory / f"{file}.json")
        (directory / "minibatches").write_text(json.dumps(minibatches))
        steps_s = {file: known[plan.microbatches].step_s for file, plan in zip(minibatches, plans, strict=True)}
        (directory / "steps").write_text(json.dumps(steps_s))
        _say(f"{case}, {network}, {', '.join(f'{config_of(plan)} {plan.schedule}' for plan in plans)}")
        run_workers(["-m", "penstock.bench.plays", "run", case, name], cores)
        found: dict[str, list[Play]] = json.loads((directory / "found").read_text())
    for file, plan in zip(minibatches, plans, strict=True):
        measured = [rate for rate, _ in found[file]]
        simulated = [simulate(_at_speeds(plan, speeds), minibatches[file]).samples_per_s for _, speeds in found[file]]
        yield SimulatorRow(
            case=case,
            network=network,
            plan=config_of(plan),
            schedule=plan.schedule,
            crowded=len(plan.devices) > CORES,
            measured=statistics.median(measured),
            simulated=statistics.median(simulated),
            error=statistics.median(s / m - 1 for s, m in zip(simulated, measured, strict=True)),
        )


def _plan(known: Mapping[int, Known], cluster: Cluster, replicas: tuple[int, ...], schedule: str) -> Plan:
    microbatches = 1 if schedule == "pipedream" else MICROBATCHES
    return make_plan(
        known[microbatches].profile,
        cluster,
        schedule=schedule,
        microbatches=microbatches,
        hints=Hints(replicas=replicas),
    )


def _at_speeds(plan: Plan, speeds: Sequence[float]) -> Plan:
    """The plan on devices as fast as its workers were."""
    devices = list(plan.cluster.devices)
    for device, speed in zip(plan.devices, speeds, strict=True):
        devices[device] = replace(devices[device], speed=speed)
    return replace(plan, cluster=replace(plan.cluster, devices=tuple(devices)))


def _minibatches(plan: Plan) -> int:
    return min(MOST, max(FEWEST, round(ROUND_S / plan.prediction.seconds_per_minibatch)))


def verdict(rows: Sequence[SimulatorRow]) -> str:
    """Of all, and of those whose workers do not crowd the cores of a host."""
    parts = [_verdict(rows, "runs")]
    roomy = [row for row in rows if not row.crowded]
    if len(roomy) < len(rows):
        parts.append(_verdict(roomy, "of them do not crowd their cores"))
    return " ".join(parts)


def _verdict(rows: Sequence[SimulatorRow], what: str) -> str:
    errors = sorted(abs(row.error) for row in rows)
    median, worst = statistics.median(errors), errors[-1]
    apart = [
        (one, two)
        for one, two in itertools.combinations(rows, 2)
        if one.case == two.case and abs(one.measured / two.measured - 1) > MEDIAN_ERROR
    ]
    crossed = sum((one.measured < two.measured) != (one.simulated < two.simulated) for one, two in apart)
    met = median <= MEDIAN_ERROR and worst <= WORST_ERROR and not crossed
    return (
        f"{len(rows)} {what}: median error {median:.1%}, worst {worst:.1%}; of {len(apart)} pairs of a model that "
        f"differ by more than {MEDIAN_ERROR:.0%}, {crossed} are in another order when simulated. "
        f"Wanted: {MEDIAN_ERROR:.0%}, {WORST_ERROR:.0%} and none: {'met' if met else 'NOT met'}."
    )


def _say(what: str) -> None:
    sys.stderr.write(f"bench simulator: {what}\n")
