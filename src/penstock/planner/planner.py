"""Chooses a plan: the best stages by the cost model, depths by the simulator, never worse than the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.cluster import Cluster
from penstock.compression import check_compression
from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.planner.hints import Hints
from penstock.planner.infeasible import explain_infeasible
from penstock.planner.request import CLOSE_ENOUGH, MOST_SIMULATED_WORKERS, Request, Scored
from penstock.profile import Profile
from penstock.schedule import check, family
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
    """The fastest plan found for this schedule; plain data parallelism and a single device are always candidates.

    ``microbatches`` per minibatch applies to synchronous schedules; by default they are chosen too. ``recompute``
    allows a stage that does not fit to compute its forward twice. Schedule ``inference`` asks for the lowest latency
    at ``samples_per_s`` or more. Schedule ``custom`` runs the lines of actions given, one for each worker, and so has
    as many workers, stages and microbatches as they say. ``compress`` names the coarsest way in which values may travel
    between workers; they do where that makes the plan faster by more than a hundredth.
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
    if custom:
        check(best[1].schedule_for([best[1].microbatches] * 2))
    return best[1]


def _best(request: Request, counts: Sequence[int]) -> Scored | None:
    """Over these numbers of microbatches, until fewer of them do worse twice in a row."""
    best: Scored | None = None
    worse = 0
    for count in counts:
        found = replace(request, microbatches=count).best()
        if best is None or (found and found[0] < best[0] * CLOSE_ENOUGH):
            best, worse = found or best, 0
        else:
            worse += 1
        if worse == 2:
            break
    return best


def _microbatch_counts(profile: Profile, cluster: Cluster, schedule: str, asked: int | None) -> list[int]:
    """Those to try, most first: they fill a synchronous pipeline best, but each has its own latencies."""
    if not family(schedule).accumulates:
        if asked not in (None, 1):
            raise PlanError(f"schedule {schedule} has no minibatch beyond the microbatch; leave --microbatches out")
        return [1]
    if asked is not None:
        if not 1 <= asked <= profile.batch_size:
            raise PlanError(
                f"{asked} microbatches from a batch of {profile.batch_size}; choose 1 to {profile.batch_size}"
            )
        return [asked]
    counts = [min(max(1, profile.batch_size // profile.smallest_microbatch), 4 * len(cluster.devices))]
    while counts[-1] > 1 and len(cluster.devices) <= MOST_SIMULATED_WORKERS:
        counts.append(counts[-1] // 2)
    return counts
