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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from penstock import codec
from penstock.bench.hosts import make_hosts, why_not
from penstock.bench.network import SLOW, measured_cluster
from penstock.bench.plays import CORES, Play
from penstock.bench.rows import Column, Findings
from penstock.bench.why import config_of
from penstock.cluster import Cluster, Level
from penstock.plan import Plan
from penstock.planner import Hints, make_plan
from penstock.profile import Profile
from penstock.runtime.process.launch import launch_workers
from penstock.simulate import simulate
from penstock.units import show_bits_per_s

CASES = ("vgg", "transformer", "resnet", "gpt2", "unet", "experts", "lstm")
CROWDED_CASES = ("vgg", "transformer")
"""Models that also run over a slow network, and with three workers on two cores."""
MICROBATCHES = 4
"""to a minibatch there, under synchronous schedules"""
PLANS = (
    ((1, 1), ("pipedream", "1f1b", "gpipe", "zb-h1")),
    ((1, 2), ("pipedream", "1f1b")),
    ((2, 1), ("pipedream", "1f1b")),
)
CHOICES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("1f1b", (1, 1)),
    ("gpipe", (1, 1)),
    ("zb-h1", (1, 1)),
    ("interleaved", (1, 1, 1, 1)),
    ("zb-v", (1, 1, 1, 1)),
)
"""Pipelines of two workers for which the number of microbatches is chosen, and all numbers are run."""
COUNTS = (1, 2, 4, 8)
FREE = ("pipedream", "1f1b")
"""Schedules under which everything is left to the planner."""
ROUND_S = 0.8
"""about how long a plan runs at a time"""
ROUNDS = 3
FEWEST, MOST = 12, 60
"""minibatches at a time"""
MEDIAN_ERROR, WORST_ERROR, CHOICE_LOSS = 0.05, 0.12, 0.05
TIMEOUT_S = 600.0

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
    microbatches: int = 1
    chosen: str = ""
    """what the planner chose of this plan: the number of its "microbatches", or "all" of it"""
    note: str = ""
    """on all rows, under the last"""

    COLUMNS: ClassVar[tuple[Column, ...]] = (
        *(Column(title) for title in ("model", "network", "plan", "schedule")),
        Column("micro-\nbatches", right=True),
        Column("chosen"),
        *(Column(title, right=True) for title in ("measured\nsamples/s", "simulated", "error")),
    )
    CAPTION: ClassVar[str] = "samples/s of runs on this machine, and what the simulator says of the same plans"

    @property
    def cells(self) -> tuple[str, ...]:
        numbers = f"{self.measured:.1f}", f"{self.simulated:.1f}", f"{self.error:+.1%}"
        return self.case, self.network, self.plan, self.schedule, str(self.microbatches), self.chosen, *numbers

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
    def read(cls, directory: Path) -> Known:
        return cls(codec.load(Profile, directory / "profile.json"), float((directory / "step").read_text()))


@dataclass(frozen=True)
class Case:
    """A plan to run, and what the planner chose of it."""

    plan: Plan
    chosen: str = ""


def run() -> Findings:
    rows = [row for case in CASES for row in _of_model(case)]
    return Findings([*rows[:-1], replace(rows[-1], note=verdict(rows))])


def _of_model(case: str) -> Iterator[SimulatorRow]:
    with tempfile.TemporaryDirectory() as name:
        _say(f"{case}: profile and links")
        for what in ("profile", "cluster"):
            _run_here(["-m", "penstock.bench.plays", what, case, name], range(CORES))
        known, link = Known.read(Path(name)), codec.load(Cluster, Path(name) / "cluster.json")
    yield from _chosen(case, known, link)
    if case not in CROWDED_CASES:
        return
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


def _chosen(case: str, known: Known, link: Cluster) -> Iterator[SimulatorRow]:
    """Pipelines of two workers with every number of microbatches, the planner's own among them; and its own plans."""
    cases: list[Case] = []
    link = _cores_as_hosts(link, link.levels[0], 1)
    for schedule, replicas in CHOICES:
        hints = Hints(replicas=replicas)
        chosen = make_plan(known.profile, link, schedule=schedule, hints=hints)
        others = [count for count in COUNTS if count <= known.profile.batch_size and count != chosen.microbatches]
        plans = [make_plan(known.profile, link, schedule=schedule, hints=hints, microbatches=n) for n in others]
        cases += [Case(chosen, "microbatches"), *map(Case, plans)]
    cases += [Case(make_plan(known.profile, link, schedule="pipedream", hints=Hints(replicas=(1, 1))))]
    free = [make_plan(known.profile, link, schedule=schedule) for schedule in FREE]
    cases += [Case(plan, "all") for plan in free if len(plan.devices) == CORES]
    yield from _compared(case, "loopback", known, cases, _run_here)


def _cores_as_hosts(between: Cluster, within: Level, workers: int) -> Cluster:
    """A core stands for a host, with so many workers on it."""
    return replace(
        between,
        devices=(replace(between.devices[0], memory_bytes=None),) * (CORES * workers),
        levels=(replace(within, size=workers), replace(between.levels[-1], size=CORES)),
        cores=1,
    )


def _run_here(arguments: Sequence[str], cores: Sequence[int]) -> None:
    launch_workers(arguments, len(cores), threads=1)


def _on_network(
    case: str, network: str, known: Known, between: Cluster, within: Level, run_workers: Runs
) -> Iterator[SimulatorRow]:
    """Cores joined as ``between`` has it, and ``within`` what joins two workers on one of them."""
    for replicas, schedules in PLANS:
        cluster = replace(_cores_as_hosts(between, within, max(replicas)), name=network)
        cases = [
            Case(
                make_plan(
                    known.profile,
                    cluster,
                    schedule=schedule,
                    microbatches=1 if schedule == "pipedream" else MICROBATCHES,
                    hints=Hints(replicas=replicas),
                )
            )
            for schedule in schedules
        ]
        yield from _compared(case, network, known, cases, run_workers)


def _compared(
    case: str, network: str, known: Known, cases: Sequence[Case], run_workers: Runs
) -> Iterator[SimulatorRow]:
    """Plans that have their workers on the same hosts, run by turns."""
    plans = {f"plan {i:02}": each.plan for i, each in enumerate(cases)}
    some = cases[0].plan
    cores = tuple(map(some.cluster.host, some.devices))
    minibatches = {name: _minibatches(plan) for name, plan in plans.items()}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for file, plan in plans.items():
            codec.save(plan, directory / f"{file}.json")
        orders = {"minibatches": minibatches, "rounds": ROUNDS, "step_s": known.step_s}
        (directory / "runs").write_text(json.dumps(orders))
        _say(f"{case}, {network}, {len(plans)} plans")
        run_workers(["-m", "penstock.bench.plays", "run", case, name], cores)
        found: dict[str, list[Play]] = json.loads((directory / "found").read_text())
    for file, each in zip(plans, cases, strict=True):
        plan = each.plan
        measured = [rate for rate, _ in found[file]]
        simulated = [simulate(_at_speeds(plan, speeds), minibatches[file]).samples_per_s for _, speeds in found[file]]
        yield SimulatorRow(
            case=case,
            network=network,
            plan=config_of(plan),
            schedule=plan.schedule,
            microbatches=plan.microbatches,
            chosen=each.chosen,
            measured=statistics.median(measured),
            simulated=statistics.median(simulated),
            error=statistics.median(s / m - 1 for s, m in zip(simulated, measured, strict=True)),
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
    """Of all plans, and of the chosen numbers of microbatches."""
    return f"{_accuracy(rows)} {_choices(rows)}".strip()


def _accuracy(rows: Sequence[SimulatorRow]) -> str:
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
        f"{len(rows)} runs: median error {median:.1%}, worst {worst:.1%}; of {len(apart)} pairs of a model that "
        f"differ by more than {MEDIAN_ERROR:.0%}, {crossed} are in another order when simulated. "
        f"Wanted: {MEDIAN_ERROR:.0%}, {WORST_ERROR:.0%} and none: {'met' if met else 'NOT met'}."
    )


def _choices(rows: Sequence[SimulatorRow]) -> str:
    """How far the chosen numbers of microbatches are from the best of those that were run."""
    best: dict[tuple[str, str, str], float] = {}
    for row in rows:
        if row.chosen != "all":
            key = row.case, row.schedule, row.plan
            best[key] = max(best.get(key, 0.0), row.measured)
    losses = [1 - row.measured / best[row.case, row.schedule, row.plan] for row in rows if row.chosen == "microbatches"]
    if not losses:
        return ""
    off = sum(loss > CHOICE_LOSS for loss in losses)
    return (
        f"The chosen number of microbatches is within {CHOICE_LOSS:.0%} of the best in {len(losses) - off} of "
        f"{len(losses)} cases, {max(losses):.1%} below it at worst. Wanted: all: {'NOT met' if off else 'met'}."
    )


def _say(what: str) -> None:
    sys.stderr.write(f"bench simulator: {what}\n")
