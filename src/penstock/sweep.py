"""Combinations of schedules, plans and clusters, simulated and ranked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from penstock.cluster import Cluster
from penstock.errors import PenstockError
from penstock.plan import Plan
from penstock.planner import make_plan
from penstock.profile import Profile
from penstock.simulate import play, verdict_of, what_if


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination, by the names of its parts."""

    source: str
    """The profile to plan, or the plan to use as it is."""
    cluster: str
    schedule: str

    def __str__(self) -> str:
        return f"{self.source}, {self.schedule} on {self.cluster}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    case: Case
    replicas: tuple[int, ...] = ()
    """Replicas of each stage."""
    microbatches: int = 0
    samples_per_s: float = 0.0
    bubble: float = 0.0
    """The mean over the workers."""
    peak_memory_bytes: float = 0.0
    """The memory of the worker that holds most."""
    limit: str = ""
    """What limits the speed."""
    text: str = ""
    """The limit as a sentence; or why this combination is not possible."""
    possible: bool = True


def sweep(
    sources: Mapping[str, Profile | Plan],
    clusters: Sequence[Cluster],
    schedules: Sequence[str],
    *,
    minibatches: int,
    tell: Callable[[int, int, Case], None] = lambda at, total, case: None,
) -> list[Outcome]:
    """Simulate every combination. The fastest come first, impossible ones last.

    A profile is planned for each combination. A plan keeps its stages and devices and, if no cluster or schedule is
    given, its own. ``tell`` is called before each combination.
    """
    cases = [
        (name, source, cluster, schedule)
        for name, source in sources.items()
        for cluster in clusters or ([source.cluster] if isinstance(source, Plan) else [])
        for schedule in schedules or [source.schedule if isinstance(source, Plan) else "pipedream"]
    ]
    outcomes = []
    for at, (name, source, cluster, schedule) in enumerate(cases):
        case = Case(source=name, cluster=cluster.name, schedule=schedule)
        tell(at, len(cases), case)
        try:
            outcomes.append(_outcome(case, _planned(source, cluster, schedule), minibatches))
        except PenstockError as error:
            outcomes.append(Outcome(case=case, text=str(error), possible=False))
    return sorted(outcomes, key=lambda outcome: (not outcome.possible, -outcome.samples_per_s))


def _planned(source: Profile | Plan, cluster: Cluster, schedule: str) -> Plan:
    if isinstance(source, Profile):
        return make_plan(source, cluster, schedule=schedule)
    moved = replace(source, cluster=cluster)
    return moved if schedule == source.schedule else what_if(f"schedule={schedule}", moved)[0]


def _outcome(case: Case, plan: Plan, minibatches: int) -> Outcome:
    played = play(plan, minibatches)
    verdict = verdict_of(played)
    return Outcome(
        case=case,
        replicas=tuple(len(stage.devices) for stage in plan.stages),
        microbatches=plan.microbatches,
        samples_per_s=played.trace.samples_per_s,
        bubble=fmean(map(played.bubble, range(len(plan.devices)))),
        peak_memory_bytes=max(played.peak_bytes),
        limit=verdict.limit,
        text=verdict.text,
    )
