"""All that is known of a finished run, with what the simulator predicts for it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock import codec
from penstock.errors import FormatError
from penstock.plan import Plan
from penstock.record import Record
from penstock.run import Result, RunDirectory
from penstock.simulate import simulate
from penstock.trace import Event, Trace

MOST_SIMULATED = 200
"""minibatches: enough for a steady rate"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    plan: Plan
    measured: Trace
    simulated: Trace
    result: Result
    record: Record
    beginning: Trace | None = None
    """of a run too long for its trace to have all of it, the first actions"""

    @property
    def measured_events(self) -> tuple[Event, ...]:
        """All that is known, in order of start."""
        return (*(self.beginning.events if self.beginning else ()), *self.measured.events)

    def __post_init__(self) -> None:
        for trace in (self.measured, self.simulated):
            if len(trace.workers) != len(self.plan.devices):
                raise FormatError(
                    f"the {trace.origin} trace has {len(trace.workers)} workers but the plan has "
                    f"{len(self.plan.devices)}; give the traces of this plan"
                )


def outcome_of(run: RunDirectory) -> Outcome:
    plan, measured, result = run.load()
    simulated = simulate(plan, min(MOST_SIMULATED, max(1, len(result.losses))))
    beginning = codec.load(Trace, run.beginning) if run.beginning.exists() else None
    return Outcome(
        plan=plan, measured=measured, simulated=simulated, result=result, record=run.record(), beginning=beginning
    )
