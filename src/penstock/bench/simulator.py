"""The simulator against this machine: what it says of plans, and what they do when they run.

Everything it goes by is measured first, as a user would: the profile with all cores at work, links by
`penstock cluster measure`. Three workers share two cores, and the cluster says so.
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
from penstock.bench.hosts import Hosts, make_hosts, why_not
from penstock.bench.network import measured_cluster
from penstock.bench.plays import CORES, MICROBATCHES, Play
from penstock.bench.rows import Column, Findings
from penstock.bench.why import config_of
from penstock.cluster import Cluster
from penstock.plan import Plan
from penstock.planner import Hints, make_plan
from penstock.profile import Profile
from penstock.runtime.launch import launch_workers
from penstock.simulate import simulate

CASES = ("vgg", "transformer")
SLOW_BYTES_PER_S = 400e6 / 8
LOCAL = (
    ((1, 1), ("pipedream", "1f1b", "gpipe", "zb-h1")),
    ((1, 2), ("pipedream", "1f1b")),
    ((2, 1), ("pipedream", "1f1b")),
)
SHAPED = tuple((replicas, ("pipedream", "1f1b")) for replicas in ((1, 1), (1, 2), (2, 1)))
ROUND_S = 2.0
"""about how long a plan runs at a time"""
FEWEST, MOST = 12, 60
"""minibatches at a time"""
MEDIAN_ERROR, WORST_ERROR = 0.05, 0.10
TIMEOUT_S = 400.0

Wanted = Sequence[tuple[tuple[int, ...], Sequence[str]]]


@dataclass(frozen=True, kw_only=True)
class SimulatorRow:
    case: str
    network: str
    plan: str
    """replicas of each stage"""
    schedule: str
    measured: float
    """samples/s, the median of five"""
    simulated: float
    error: float
    """of the simulated rate, beside the measured one"""
    crowded: bool = False
    """more workers on a host than cores"""
    note: str = ""
    """of the last one, over all"""

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
            _run_here(CORES, ["-m", "penstock.bench.plays", what, case, name])
        known = {count: Known.read(Path(name), count) for count in (1, MICROBATCHES)}
        link = codec.load(Cluster, Path(name) / "cluster.json")
    for replicas, schedules in LOCAL:
        workers = sum(replicas)
        cluster = replace(
            link,
            name="this machine",
            devices=(replace(link.devices[0], memory_bytes=None),) * workers,
            levels=(replace(link.levels[0], size=workers),),
            cores=CORES,
        )
        yield from _compared(case, "loopback", known, cluster, [(replicas, schedules)], _run_here)
    for replicas, schedules in SHAPED if why_not() is None else ():
        with make_hosts(sum(replicas)) as hosts:
            hosts.set_rate(SLOW_BYTES_PER_S)
            with tempfile.TemporaryDirectory() as name:
                cluster = measured_cluster(hosts, Path(name) / "cluster.toml")

            def run_there(workers: int, arguments: Sequence[str], hosts: Hosts = hosts) -> None:
                hosts.run_workers(arguments, timeout_s=TIMEOUT_S)

            wanted = [(replicas, schedules)]
            yield from _compared(case, f"{8e-6 * SLOW_BYTES_PER_S:.0f} Mbit/s", known, cluster, wanted, run_there)


def _run_here(workers: int, arguments: Sequence[str]) -> None:
    launch_workers(arguments, workers, threads=1)


def _compared(
    case: str,
    network: str,
    known: Mapping[int, Known],
    cluster: Cluster,
    wanted: Wanted,
    run_workers: Callable[[int, Sequence[str]], None],
) -> Iterator[SimulatorRow]:
    plans = [_plan(known, cluster, replicas, schedule) for replicas, schedules in wanted for schedule in schedules]
    minibatches = {f"plan {i}": _minibatches(plan) for i, plan in enumerate(plans)}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for file, plan in zip(minibatches, plans, strict=True):
            codec.save(plan, directory / f"{file}.json")
        (directory / "minibatches").write_text(json.dumps(minibatches))
        steps_s = {file: known[plan.microbatches].step_s for file, plan in zip(minibatches, plans, strict=True)}
        (directory / "steps").write_text(json.dumps(steps_s))
        _say(f"{case}, {network}, {', '.join(f'{config_of(plan)} {plan.schedule}' for plan in plans)}")
        run_workers(len(cluster.devices), ["-m", "penstock.bench.plays", "run", case, name])
        found: dict[str, list[Play]] = json.loads((directory / "found").read_text())
    for file, plan in zip(minibatches, plans, strict=True):
        measured = [rate for rate, _ in found[file]]
        simulated = [simulate(_at_speeds(plan, speeds), minibatches[file]).samples_per_s for _, speeds in found[file]]
        yield SimulatorRow(
            case=case,
            network=network,
            plan=config_of(plan),
            schedule=plan.schedule,
            crowded=cluster.cores is not None and len(cluster.devices) > cluster.cores,
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
