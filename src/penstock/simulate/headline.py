"""A run in one line: what bounded its pipeline, how much its workers idled, and how fast the machine was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from penstock.schedule import Kind
from penstock.simulate.explain import AGREED, slowdowns
from penstock.simulate.simulation import Simulation
from penstock.simulate.verdict import verdict_of
from penstock.trace import Trace

ALIKE = 0.1
"""Workers count as equally fast if their speeds differ by less than this share."""


def headline(played: Simulation, measured: Trace) -> str:
    """``played`` is a simulation of the plan that ``measured`` is a trace of, about equally long."""
    if not measured.events:
        return "The run left no trace, so nothing can be said of what bounded it."
    ran = as_measured(played, measured)
    whole = "the pipeline" if len(played.plan.stages) > 1 else "the run"
    idle = fmean(map(ran.bubble, range(len(measured.workers))))
    parts = [f"{verdict_of(ran).subject} bounds {whole}", f"workers were idle {idle:.0%} of the time"]
    speeds = {worker: 1 / times for worker, times in slowdowns(measured, played.trace).items() if times > 0}
    return "; ".join([*parts, *_machine(speeds, measured.workers)]) + "."


def as_measured(played: Simulation, measured: Trace) -> Simulation:
    """The simulation with the measured trace. What links carried is not measured: it is simulated, scaled to the
    microbatches of the run."""
    ran, simulated = (_forwards(trace) for trace in (measured, played.trace))
    share = ran / simulated if simulated else 0.0
    links = tuple(replace(link, carried_bytes=link.carried_bytes * share) for link in played.links)
    return replace(played, trace=measured, links=links)


def _forwards(trace: Trace) -> int:
    return int((trace.columns.of_kind(Kind.FORWARD) & (trace.columns.stage == 0)).sum())


def _machine(speeds: Mapping[int, float], names: Sequence[str]) -> list[str]:
    """How fast the workers computed, compared with the profile. A worker that is slower than the others is named."""
    if not speeds:
        return []
    slowest = min(speeds, key=speeds.__getitem__)
    others = [speed for worker, speed in speeds.items() if worker != slowest]
    if others and median(others) - speeds[slowest] > ALIKE:
        return [
            f"{names[slowest]} was {_beside_profile(speeds[slowest])}, the other workers {_in_short(median(others))}"
        ]
    return [f"the machine was {_beside_profile(median(speeds.values()))}"]


def _beside_profile(speed: float) -> str:
    return f"{_in_short(speed)} {'as' if _agrees(speed) else 'than'} when profiled"


def _in_short(speed: float) -> str:
    if _agrees(speed):
        return "as fast"
    return f"{abs(speed - 1):.0%} {'faster' if speed > 1 else 'slower'}"


def _agrees(speed: float) -> bool:
    return abs(speed - 1) <= AGREED
