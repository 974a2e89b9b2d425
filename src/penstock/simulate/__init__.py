"""Plays a plan's actions with its costs: throughput, waiting and memory before anything runs."""

from __future__ import annotations

from penstock.plan import Plan
from penstock.sampling import Epoch
from penstock.schedule import Schedule
from penstock.simulate.conditions import CALM, Conditions
from penstock.simulate.play import Player
from penstock.trace import Trace


def simulate(plan: Plan, minibatches: int, conditions: Conditions = CALM) -> Trace:
    """The trace of so many full minibatches under the plan's own costs."""
    batch_size = plan.profile.batch_size
    epoch = Epoch(num_samples=batch_size * minibatches, batch_size=batch_size, microbatches=plan.microbatches, seed=0)
    return simulate_schedule(plan, plan.schedule_for(epoch.minibatches), epoch.samples, conditions)


def simulate_schedule(
    plan: Plan, schedule: Schedule, samples: tuple[int, ...], conditions: Conditions = CALM
) -> Trace:
    """The trace of a schedule; ``samples`` says how many are in each microbatch."""
    return Player(plan, schedule, conditions).run(samples)
