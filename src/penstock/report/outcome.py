"""All that is known about a finished run, and the simulator's prediction for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from penstock import codec
from penstock.errors import FormatError
from penstock.plan import Plan
from penstock.record import Record
from penstock.run import Result, RunDirectory
from penstock.simulate import Explanation, Simulation, explain, headline, play
from penstock.trace import Event, Trace

MOST_SIMULATED = 200
"""Minibatches to simulate: enough for a steady rate."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    measured: Trace
    played: Simulation
    result: Result
    record: Record
    beginning: Trace | None = None
    """The first actions of a run that is too long for its trace to have all."""

    @property
    def plan(self) -> Plan:
        return self.played.plan

    @property
    def simulated(self) -> Trace:
        return self.played.trace

    @property
    def minibatches(self) -> int:
        """The number of minibatches trained in this run."""
        return -(-self.result.samples // self.plan.profile.batch_size)

    @cached_property
    def headline(self) -> str:
        """One line: what limited the run, how much workers idled, and how fast the machine was."""
        return headline(self.played, self.measured)

    @cached_property
    def explanation(self) -> Explanation:
        """Why the run was faster or slower than predicted."""
        return explain(self.plan, self.measured, self.simulated)

    @property
    def measured_events(self) -> tuple[Event, ...]:
        """All known events, in order of start."""
        return (*(self.beginning.events if self.beginning else ()), *self.measured.events)

    def __post_init__(self) -> None:
        for trace in (self.measured, self.simulated):
            if len(trace.workers) != len(self.plan.devices):
                raise FormatError(
                    f"the {trace.origin} trace has {len(trace.workers)} workers but the plan has "
                    f"{len(self.plan.devices)}; give the traces of this plan"
                )
            stages = int(trace.columns.stage.max(initial=-1)) + 1
            if stages > len(self.plan.stages):
                raise FormatError(
                    f"the {trace.origin} trace has actions of stage {stages - 1} but the plan has "
                    f"{len(self.plan.stages)} stages; give the traces of this plan"
                )


def outcome_of(run: RunDirectory) -> Outcome:
    plan, measured, result = run.load()
    minibatches = -(-result.samples // plan.profile.batch_size)
    played = play(plan, min(MOST_SIMULATED, max(1, minibatches)))
    beginning = codec.load(Trace, run.beginning) if run.beginning.exists() else None
    return Outcome(measured=measured, played=played, result=result, record=run.record(), beginning=beginning)
