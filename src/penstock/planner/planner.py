"""Chooses a plan: stages by the cost model, depths by the simulator, never predicted slower than the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.cluster import Cluster
from penstock.compression import check_compression
from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.planner.hints import Hints
from penstock.planner.infeasible import explain_infeasible
from penstock.planner.request import CLOSE_ENOUGH, MOST_SIMULATED_WORKERS, Request, Scored, fastest
from penstock.profile import Profile
from penstock.schedule import family
from penstock.schedule.custom import custom_lines, custom_microbatches, numbered_by_stage, parse_custom


def make_plan(
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: str = "pipedream",
    microbatches: int | None = None,
    hints: Hints | None = None,
    recompute: bool = True,
    samples_per_s: float | None = None,
    custom: Sequence[str] = (),
    compress: str = "exact",
) -> Plan:
    """The fastest plan found for this schedule. Plain data parallelism and a single device are always candidates.

    ``microbatches`` per minibatch applies to synchronous schedules; by default the planner chooses them. ``recompute``
    allows a stage that does not fit to compute its forward twice. Schedule ``inference`` minimises latency at
    ``samples_per_s`` or more. Schedule ``custom`` runs the given lines of actions, one per worker, which also decide
    the numbers of workers, stages and microbatches. ``compress`` is the coarsest compression allowed between workers;
    it is used if it makes the plan faster by more than 1%.
    """
    check_compression(compress)
    if (schedule == "custom") != bool(custom):
        raise PlanError("schedule custom needs the actions of each worker: give --schedule the file that has them")
    if custom:
        programs = numbered_by_stage(parse_custom(custom))
        custom = custom_lines(programs)
        if len(programs) > len(cluster.devices):
            raise PlanError(
                f"the schedule is for {len(programs)} workers, and {cluster.name} has {len(cluster.devices)} devices"
            )
        written_for = custom_microbatches(programs)
        if microbatches not in (None, written_for):
            raise PlanError(f"the schedule is written for {written_for} microbatches; leave --microbatches out")
        microbatches = written_for
    if (samples_per_s is not None) != (not family(schedule).trains):
        raise PlanError(
            "schedule inference needs the samples per second to serve (--samples-per-s), and no other takes them"
        )
    counts = _microbatch_counts(profile, cluster, schedule, microbatches)
    request = Request(profile, cluster, schedule, counts[-1], hints or Hints(), recompute, samples_per_s, tuple(custom))
    best = _best(request, counts)
    if compress != "exact":
        request = replace(request, compress=compress)
        compressed = _best(request, counts)
        if compressed and not (best and best[0] <= compressed[0] * CLOSE_ENOUGH):
            best = compressed
    if best is None:
        raise PlanError(explain_infeasible(request))
    return best[1]


def _best(request: Request, counts: Sequence[int]) -> Scored | None:
    """The best plan over these numbers of microbatches, which come in falling order. No more cuts are tried once fewer
    microbatches have been slower twice in a row."""
    requests = {count: replace(request, microbatches=count) for count in counts}
    chosen: Scored | None = None
    scored: list[Scored] = []
    worse = 0
    for asked in requests.values():
        found = asked.scored() if worse < 2 else asked.baselines
        scored += found
        best = fastest(found)
        if chosen is None or (best and best[0] < chosen[0] * CLOSE_ENOUGH):
            chosen, worse = best or chosen, 0
        else:
            worse += 1
    if chosen is None:
        return None
    seconds, plan = _simplest(chosen, scored, request.profile.uncertainty)
    return requests[plan.microbatches].finished((seconds, plan))


def _simplest(chosen: Scored, scored: Sequence[Scored], uncertainty: float) -> Scored:
    """The chosen plan, unless a simpler one is slower by less than the uncertainty of predictions."""
    near = [item for item in scored if item[0] <= chosen[0] * (1 + uncertainty)]
    seconds, plan = min(near, key=lambda item: (_complexity(item[1]), item[0]), default=chosen)
    if _complexity(plan) == _complexity(chosen[1]):
        return chosen
    if seconds <= chosen[0]:
        return seconds, plan
    gain, stages = seconds / chosen[0] - 1, len(chosen[1].stages)
    words = (
        f"{'data parallelism' if stages == 1 else f'{stages} stages'} on {len(chosen[1].devices)} devices "
        f"promised {gain:.1%} more, less than the {uncertainty:.0%} that predictions are off by"
    )
    return seconds, replace(plan, prediction=replace(plan.prediction, passed_over=words))


def _complexity(plan: Plan) -> int:
    """One device is simpler than several, and one stage than several."""
    return 0 if len(plan.devices) == 1 else min(len(plan.stages), 2)


def _microbatch_counts(profile: Profile, cluster: Cluster, schedule: str, asked: int | None) -> list[int]:
    """The numbers of microbatches to try, largest first. Many fill a synchronous pipeline best, but each one adds
    latency."""
    if not family(schedule).accumulates:
        if asked not in (None, 1):
            raise PlanError(f"schedule {schedule} has no minibatch beyond the microbatch; leave --microbatches out")
        return [1]
    most = max(1, profile.batch_size // profile.smallest_microbatch)
    if asked is not None:
        if not 1 <= asked <= profile.batch_size:
            raise PlanError(
                f"{asked} microbatches from a batch of {profile.batch_size}; choose 1 to {profile.batch_size}"
            )
        if asked > most:
            raise PlanError(
                f"{asked} microbatches from a batch of {profile.batch_size} are of {profile.batch_size // asked} "
                f"samples, and {profile.model} needs {profile.smallest_microbatch}; choose 1 to {most}"
            )
        return [asked]
    counts = [min(most, 4 * len(cluster.devices))]
    while counts[-1] > 1 and len(cluster.devices) <= MOST_SIMULATED_WORKERS:
        counts.append(counts[-1] // 2)
    return counts
