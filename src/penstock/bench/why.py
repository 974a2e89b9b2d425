"""Why a plan or its speed-up differs from the published one, in a sentence computed from the plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.bench.published import Measured, Published
from penstock.plan import Plan
from penstock.plan_costs import PlanCosts
from penstock.planner.pipedream import PipeDreamAnswer
from penstock.units import show_bytes, show_seconds

ALIKE = 0.05
"""Speed-ups that differ by less need no reason."""
NOTABLE = 0.05
"""The least share of a stage's time that is worth a word."""
ONE_LAYER = 0.9
"""The share of a stage's computing above which a single layer is the stage."""
SLOWEST_ALL_REDUCE = 64.0
"""times slower than assumed, at most"""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The plans of a published row, all for the same profile and cluster."""

    published: Published
    measured: Measured
    data_parallel: Plan
    as_published: Plan
    """the published configuration, with Penstock's cuts"""
    chosen: Plan
    by_formulas: PipeDreamAnswer
    """what PipeDream's formulas choose"""
    other_length: tuple[Plan, Plan] | None = None
    """data parallelism and the published configuration for sentences of the other length"""

    @property
    def data_parallel_s(self) -> float:
        return self.data_parallel.prediction.seconds_per_minibatch

    @property
    def all_reduce_share(self) -> float:
        """Of data parallelism's time."""
        plan = self.data_parallel
        return PlanCosts(plan).sync_s(0) / len(plan.devices) / self.data_parallel_s

    def speedup(self, plan: Plan) -> float:
        """Over data parallelism, by Penstock's model."""
        return self.data_parallel_s / plan.prediction.seconds_per_minibatch


def config_of(plan: Plan) -> str:
    """The replicas of each stage, as PipeDream writes them."""
    return "-".join(str(len(stage.devices)) for stage in plan.stages)


def why(compared: Compared) -> str:
    """Nothing where both agree."""
    clauses = [*_other_plan(compared), *_other_speedup(compared)]
    if not clauses:
        return ""
    sentence = "; ".join(clauses)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _other_plan(compared: Compared) -> Iterator[str]:
    """Why Penstock chooses something else."""
    if config_of(compared.chosen) == config_of(compared.as_published):
        return
    if len(compared.as_published.stages) == 1:
        yield from _rather_than_data_parallelism(compared)
    else:
        yield _bottleneck(compared)
        yield from _waiting(compared.as_published)


def _rather_than_data_parallelism(compared: Compared) -> Iterator[str]:
    plan, share = compared.data_parallel, f"{compared.all_reduce_share:.0%}"
    costs = PlanCosts(plan)
    hidden_s = min(costs.sync_s(0), costs.layers_s(0, plan.stages[0].layers)[1]) / len(plan.devices)
    least_s, chosen_s = compared.data_parallel_s - hidden_s, compared.chosen.prediction.seconds_per_minibatch
    left = f"hidden behind the backward, {show_seconds(least_s)} would be left"
    times = f"{left}, and {config_of(compared.chosen)} takes {show_seconds(chosen_s)}"
    if least_s <= chosen_s:
        yield f"all-reduce is {share} of data parallelism, since the model hides none of it; {times}"
        return
    yield f"all-reduce is {share} of data parallelism; even {times}"
    if len(compared.by_formulas.stages) > 1:
        yield "PipeDream's formulas prefer a pipeline too, so the published choice does not follow from this profile"


def _bottleneck(compared: Compared) -> str:
    """What holds the published configuration up, and what the chosen one does about it."""
    plan, chosen = compared.as_published, compared.chosen
    costs = PlanCosts(plan)
    stage, behind = costs.bottleneck()
    mine, other, seconds = config_of(plan), config_of(chosen), show_seconds(costs.bottleneck_s())
    if stage != behind:
        sent = show_bytes(costs.output_bytes(stage))
        return f"the link behind stage {stage} sets the pace of {mine}, with {seconds} for {sent}"
    layers, replicas = plan.stages[stage].layers, len(plan.stages[stage].devices)
    heaviest = max(layers, key=lambda layer: sum(costs.layers_s(stage, [layer])))
    alone = sum(costs.layers_s(stage, [heaviest])) >= ONE_LAYER * sum(costs.layers_s(stage, layers))
    copies = len(chosen.stages[chosen.stage_of_layer[heaviest]].devices)
    if alone and replicas == 1 < copies:
        layer = plan.profile.graph.by_id[heaviest]
        kind = layer.kind.partition("(")[0]
        return (
            f"{kind} {layer.name} alone takes {seconds}, which no straight pipeline divides; {other} has {copies} of it"
        )
    averaging = costs.sync_s(stage) / replicas / costs.stage_s(stage)
    if averaging >= NOTABLE:
        weights = show_bytes(costs.model.parameter_bytes(layers))
        return (
            f"stage {stage} sets the pace of {mine}, {averaging:.0%} of it for averaging {weights} of gradients; "
            f"{other} averages {_between_hosts(chosen)} between hosts"
        )
    busy = [layer for layer in layers if sum(costs.layers_s(stage, [layer])) > 0]
    spread = sorted({chosen.stage_of_layer[layer] for layer in busy})
    devices = sum(len(chosen.stages[each].devices) for each in spread)
    return (
        f"stage {stage} sets the pace of {mine} with {seconds} of computing on {_count(replicas, 'device')}; "
        f"{other} has its layers in {_count(len(spread), 'stage')} on {_count(devices, 'device')}"
    )


def _waiting(plan: Plan) -> Iterator[str]:
    """Where the simulator found a plan slower than its slowest stage or link."""
    seconds, pace_s = plan.prediction.seconds_per_minibatch, PlanCosts(plan).bottleneck_s()
    if seconds > pace_s * (1 + ALIKE):
        depth = plan.stages[0].in_flight
        yield f"{config_of(plan)} with {depth} in flight also waits for links, and takes {show_seconds(seconds)}"


def _other_speedup(compared: Compared) -> Iterator[str]:
    """What would have to be otherwise for the model to give the published figure for the published configuration."""
    published, here = compared.published.speedup, compared.speedup(compared.as_published)
    if abs(here / published - 1) <= ALIKE:
        return
    if compared.other_length:
        plain, plan = (each.prediction.seconds_per_minibatch for each in compared.other_length)
        there = plain / plan
        between = (
            f", and the published {published:.2f} lies between" if (here < published) == (published < there) else ""
        )
        tokens, other = compared.measured.tokens, compared.measured.other_tokens
        yield f"with sentences of {other} tokens, not the profile's {tokens}, {here:.2f} becomes {there:.2f}{between}"
        return
    times = _all_reduce_slower(compared)
    if times is not None:
        assumed = compared.data_parallel.cluster.levels[-1].bytes_per_s / 1e9
        rates = f"{assumed / times:.2f} GB/s instead of {assumed:g}"
        yield f"the published {published:.2f} would take an all-reduce at {rates}"


def _all_reduce_slower(compared: Compared) -> float | None:
    """How many times slower averaging must be, messages being as they are, to give the published speed-up."""

    def speedup(times: float) -> float:
        return _seconds_with(compared.data_parallel, times) / _seconds_with(compared.as_published, times)

    low, high, goal = 1 / SLOWEST_ALL_REDUCE, SLOWEST_ALL_REDUCE, compared.published.speedup
    if not speedup(low) <= goal <= speedup(high):
        return None
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if speedup(middle) < goal else (low, middle)
    return low


def _seconds_with(plan: Plan, times: float) -> float:
    """Per minibatch, with averaging so many times slower."""
    costs = PlanCosts(plan)
    stages = [
        costs.stage_s(index) + (times - 1) * costs.sync_s(index) / sum(stage.shares)
        for index, stage in enumerate(plan.stages)
    ]
    waiting_s = plan.prediction.seconds_per_minibatch - costs.bottleneck_s()
    return max([*stages, *(costs.cut_s(index) for index in range(len(stages) - 1))]) + max(waiting_s, 0.0)


def _between_hosts(plan: Plan) -> str:
    """Weights whose gradients are averaged over the outermost links."""
    model, outermost = PlanCosts(plan).model, len(plan.cluster.levels) - 1
    replicated = [stage for stage in plan.stages if len(stage.devices) > 1]
    far = [stage for stage in replicated if plan.cluster.span(stage.devices) == outermost]
    return show_bytes(sum(model.parameter_bytes(stage.layers) for stage in far)) if far else "nothing"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
