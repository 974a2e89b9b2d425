"""Chooses a plan: candidates from the dynamic program, each scored by the simulator, never worse than the baselines."""

from __future__ import annotations

from dataclasses import replace

from penstock.cluster import Cluster
from penstock.cost import CostModel, PlanCosts
from penstock.errors import PlanError
from penstock.plan import Plan, Prediction, Stage
from penstock.planner.downsets import find_downsets, layer_weights
from penstock.planner.search import StageSearch
from penstock.profile import Profile
from penstock.schedule import default_depth, depths_with_slack, family
from penstock.simulate import simulate
from penstock.units import show_bytes

SIMULATED = 4
"""Cuts that are simulated: those that promise most by the cost model alone."""
CLOSE_ENOUGH = 1.01
"""A hundredth is not worth more memory."""

Scored = tuple[float, Plan]
"""Seconds per minibatch, and the plan that takes them."""


def make_plan(
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: str = "pipedream",
    microbatches: int | None = None,
    straight: bool = False,
) -> Plan:
    """The fastest plan found for this schedule; plain data parallelism and a single device are always candidates.

    ``microbatches`` per minibatch applies to synchronous schedules; by default four for each device. ``straight``
    asks for a pipeline with one replica per stage over as many devices as pay.
    """
    count = _microbatches(profile, cluster, schedule, microbatches)
    costs = CostModel(profile=profile, cluster=cluster, microbatch_size=profile.batch_size / count)
    kind = family(schedule)
    weights = layer_weights(profile.graph, profile.compute_s(cluster.devices[0].kind))
    search = StageSearch(
        costs=costs,
        downsets=find_downsets(profile.graph, weights),
        asynchronous=kind.asynchronous,
        microbatches=count,
        straight=straight,
        all_forwards_first=kind.all_forwards_first,
    )
    whole = profile.graph.order
    fastest = _fastest_device(costs, in_flight=count if kind.all_forwards_first else 1)
    baselines = {
        "data_parallel_s": (Stage(layers=whole, devices=tuple(range(len(cluster.devices)))),),
        "one_device_s": (Stage(layers=whole, devices=(fastest,)),),
    }
    bound_s = _lower_bound_s(costs) * count
    draft = Plan(
        profile=profile,
        cluster=cluster,
        stages=baselines["one_device_s"],
        schedule=schedule,
        microbatches=count,
        prediction=Prediction(
            seconds_per_minibatch=0.0, lower_bound_s=bound_s, data_parallel_s=None, one_device_s=None
        ),
    )
    cuts = [plan for stages in search.candidates() if (plan := _complete(draft, stages, costs))]
    cuts.sort(key=lambda plan: (PlanCosts(plan).minibatch_s(), len(plan.devices)))
    known = {name: _complete(draft, stages, costs) for name, stages in baselines.items()}
    plain = {name: _simulated(plan) for name, plan in known.items() if plan}
    scored = [*plain.values(), *(_deepened(plan, costs) for plan in cuts[:SIMULATED])]
    if not scored:
        raise PlanError(_explain_too_large(costs))
    eligible = [item for item in scored if not straight or all(len(stage.devices) == 1 for stage in item[1].stages)]
    seconds, best = min(eligible or scored, key=lambda item: (item[0], len(item[1].devices)))
    beside = {name: plain[name][0] if name in plain else None for name in baselines}
    return replace(best, prediction=Prediction(seconds_per_minibatch=seconds, lower_bound_s=bound_s, **beside))


def _deepened(plan: Plan, costs: CostModel) -> Scored:
    """More microbatches in flight than PipeDream's rule, where that brings an uneven pipeline nearer its bottleneck."""
    best = _simulated(plan)
    if not plan.is_asynchronous or len({len(stage.devices) for stage in plan.stages}) == 1:
        return best
    goal_s = PlanCosts(plan).bottleneck_s()
    for rounds in (1, 2, 3):
        if best[0] <= goal_s * CLOSE_ENOUGH:
            break
        depths = depths_with_slack(plan.pipeline, rounds)
        stages = tuple(replace(s, in_flight=depth) for s, depth in zip(plan.stages, depths, strict=True))
        if not all(_fits(stage, costs, asynchronous=True) for stage in stages):
            break
        deeper = _simulated(replace(plan, stages=stages))
        if deeper[0] < best[0] / CLOSE_ENOUGH:
            best = deeper
    return best


def _simulated(plan: Plan) -> Scored:
    return _seconds_per_minibatch(plan), plan


def _microbatches(profile: Profile, cluster: Cluster, schedule: str, asked: int | None) -> int:
    if family(schedule).asynchronous:
        if asked not in (None, 1):
            raise PlanError(f"schedule {schedule} updates after every microbatch; leave --microbatches out")
        return 1
    count = asked or min(profile.batch_size, 4 * len(cluster.devices))
    if not 1 <= count <= profile.batch_size:
        raise PlanError(f"{count} microbatches from a batch of {profile.batch_size}; choose 1 to {profile.batch_size}")
    return count


def _complete(draft: Plan, stages: tuple[Stage, ...], costs: CostModel) -> Plan | None:
    """The plan with these stages and their depths, or None where a device is too small for its stage."""
    plan = replace(draft, stages=stages)
    own = [-(-plan.microbatches // len(stage.devices)) for stage in stages]
    depths = [default_depth(plan.pipeline, index) for index in range(len(stages))]
    kind = family(plan.schedule)
    if kind.all_forwards_first:
        depths = own
    elif not kind.asynchronous:
        depths = [min(depth, limit) for depth, limit in zip(depths, own, strict=True)]
    stages = tuple(replace(stage, in_flight=depth) for stage, depth in zip(stages, depths, strict=True))
    fits = all(_fits(stage, costs, asynchronous=kind.asynchronous) for stage in stages)
    return replace(plan, stages=stages) if fits else None


def _fits(stage: Stage, costs: CostModel, *, asynchronous: bool) -> bool:
    need = costs.stage_memory_bytes(stage, versions=stage.in_flight if asynchronous else 1)
    return all(need <= (costs.cluster.devices[device].memory_bytes or need) for device in stage.devices)


def _seconds_per_minibatch(plan: Plan) -> float:
    """Simulated long enough for a steady rate: filling and draining take what is in flight."""
    first = plan.stages[0]
    minibatches = len(plan.devices) + 4
    if plan.is_asynchronous:
        minibatches = 8 * len(plan.devices) + 6 * len(first.devices) * first.in_flight + 16
    rate = simulate(plan, minibatches).samples_per_s
    return plan.profile.batch_size / rate if rate > 0 else 0.0


def _lower_bound_s(costs: CostModel) -> float:
    """Seconds per microbatch if all devices shared all work perfectly and nothing had to be moved."""
    graph = costs.profile.graph
    ids = [layer.id for layer in graph.layers]
    alone_s = [costs.forward_s(ids, d) + costs.backward_s(ids, d) for d in range(len(costs.cluster.devices))]
    return 1 / sum(1 / seconds for seconds in alone_s) if min(alone_s) > 0 else 0.0


def _fastest_device(costs: CostModel, in_flight: int) -> int:
    """The device that is fastest with the whole model, among those that can hold it if there are any."""
    ids, devices = costs.profile.graph.order, costs.cluster.devices
    need = costs.stage_memory_bytes(Stage(layers=ids, devices=(0,), in_flight=in_flight), versions=1)

    def rank(device: int) -> tuple[bool, float]:
        too_small = need > (devices[device].memory_bytes or need)
        return too_small, costs.forward_s(ids, device) + costs.backward_s(ids, device)

    return min(range(len(devices)), key=rank)


def _explain_too_large(costs: CostModel) -> str:
    whole = Stage(layers=costs.profile.graph.order, devices=(0,))
    need = costs.stage_memory_bytes(whole, versions=1)
    have = [device.memory_bytes for device in costs.cluster.devices if device.memory_bytes is not None]
    return (
        f"{costs.profile.model} needs {show_bytes(need)} on one device, and no cut of it fits {costs.cluster.name}, "
        f"whose largest device has {show_bytes(max(have))}; add devices, or lower the batch size"
    )
