"""Plays a schedule's actions with a plan's costs. What comes out has the form of a real run's trace."""

from __future__ import annotations

from penstock.cost import PlanCosts
from penstock.plan import Plan
from penstock.sampling import Epoch
from penstock.schedule import Action, Kind, Schedule, dependencies, execution_order
from penstock.trace import Event, Trace, merge


def simulate(plan: Plan, minibatches: int) -> Trace:
    """The trace of so many full minibatches under the plan's own costs."""
    batch_size = plan.profile.batch_size
    epoch = Epoch(num_samples=batch_size * minibatches, batch_size=batch_size, microbatches=plan.microbatches, seed=0)
    return simulate_schedule(plan, plan.schedule_for(epoch.minibatches), epoch.samples)


def simulate_schedule(plan: Plan, schedule: Schedule, samples: tuple[int, ...]) -> Trace:
    """The trace of a schedule; ``samples`` says how many are in each microbatch."""
    costs = PlanCosts(plan)
    pipeline = schedule.pipeline
    free_s = [0.0] * pipeline.num_workers
    ended_s: dict[Action, float] = {}
    link_free_s: dict[tuple[int, int, Kind], float] = {}
    events: list[list[Event]] = [[] for _ in range(pipeline.num_workers)]

    def arrival_s(need: Action, action: Action, worker: int) -> float:
        """When the result of ``need`` is here. Messages of one direction between two workers queue up."""
        sender = pipeline.worker_of(need.stage, need.index)
        if sender == worker:
            return ended_s[need]
        link = (sender, worker, need.kind)
        leaves_s = max(ended_s[need], link_free_s.get(link, 0.0))
        link_free_s[link] = leaves_s + costs.message_s(need, sender, action.stage, worker)
        return link_free_s[link]

    for moment in execution_order(schedule):
        if moment[0][1].kind is Kind.SYNC:
            met_s = max(free_s[worker] for worker, _ in moment)
            end_s = met_s + max(costs.sync_s(action.stage) for _, action in moment)
            for worker, action in moment:
                events[worker].append(Event(worker=worker, action=action, start_s=free_s[worker], end_s=end_s))
                free_s[worker] = end_s
            continue
        ((worker, action),) = moment
        arrivals = [arrival_s(need, action, worker) for need in dependencies(action, pipeline)]
        start_s = max([free_s[worker], *arrivals])
        ended_s[action.result] = free_s[worker] = start_s + costs.compute_s(action, worker)
        events[worker].append(Event(worker=worker, action=action, start_s=start_s, end_s=free_s[worker]))
    return merge("simulated", plan.worker_names, samples, events)
