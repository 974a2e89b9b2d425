"""What limits the speed of a plan, in words, and what would help."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule import family
from penstock.simulate.simulation import LinkLoad, Simulation
from penstock.units import show_numbers, write_bytes_per_s

HALF = 0.5


@dataclass(frozen=True)
class Verdict:
    limit: str
    """One of computing, averaging, link and waiting."""
    share: float
    """The share of time in which the limiting part is busy."""
    subject: str
    """A short name of the limiting part, such as ``Stage 1``."""
    text: str


def verdict_of(played: Simulation) -> Verdict:
    """The limit is whatever is busy for the largest share of time. If nothing is busy for half of it, the limit is
    waiting."""
    found = [_stage(played, stage) for stage in range(len(played.plan.stages))]
    found += [_link(played, link) for link in played.links]
    busiest = max(found, key=lambda verdict: verdict.share)
    return busiest if busiest.share >= HALF else _waiting(played)


def _stage(played: Simulation, stage: int) -> Verdict:
    """A stage is judged by its busiest replica, for which the others wait when they average."""
    plan = played.plan
    computing = max(map(played.trace.utilisation, plan.pipeline.workers[stage]))
    averaging = played.rings(stage)
    devices = show_numbers(plan.stages[stage].devices)
    where = f"Stage {stage} on device{'s' if len(plan.stages[stage].devices) > 1 else ''} {devices}"
    if averaging > computing:
        return Verdict(
            "averaging",
            computing + averaging,
            f"Averaging at stage {stage}",
            f"{where} sets the pace, averaging gradients {averaging:.0%} of the time and computing {computing:.0%}: "
            "fewer replicas, more microbatches to an update or more bandwidth would help.",
        )
    also = f", averaging {averaging:.0%}" if averaging > 0.005 else ""
    return Verdict(
        "computing",
        computing + averaging,
        f"Stage {stage}",
        f"{where} sets the pace, computing {computing:.0%} of the time{also}: faster devices, another replica or "
        "fewer layers there would help.",
    )


def _link(played: Simulation, link: LinkLoad) -> Verdict:
    share, place = played.occupied(link), link.place
    cluster = played.plan.cluster
    devices = [device for device in played.plan.devices if cluster.member(place.level, device) == place.member]
    whose = f"device{'s' if len(devices) > 1 else ''} {show_numbers(devices)}"
    subject = f"The link {'out of' if place.out else 'into'} {whose}"
    return Verdict(
        "link",
        share,
        subject,
        f"{subject} (level {place.level}, "
        f"{write_bytes_per_s(link.bytes_per_s)}) sets the pace, full {share:.0%} of the time: more bandwidth, "
        "compression or a cut where less crosses would help.",
    )


def _waiting(played: Simulation) -> Verdict:
    workers = range(len(played.trace.workers))
    idle = 1 - sum(map(played.trace.utilisation, workers)) / len(workers)
    kind = family(played.plan.schedule)
    cure = "more microbatches in flight or links of less latency"
    if not kind.asynchronous and kind.trains:
        cure = "more microbatches to a minibatch, fewer stages or an asynchronous schedule"
    return Verdict(
        "waiting",
        idle,
        "Waiting",
        f"No stage and no link is busy for even half of the time; workers wait for each other {idle:.0%} of it, while "
        f"the pipeline fills and drains or messages are on their way: {cure} would help.",
    )
