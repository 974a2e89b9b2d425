"""Chooses a plan: the best stages by the cost model, depths by the simulator, never worse than the baselines."""

from __future__ import annotations

from penstock.cluster import Cluster
from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.planner.hints import Hints
from penstock.planner.infeasible import explain_infeasible
from penstock.planner.request import CLOSE_ENOUGH, MOST_SIMULATED_WORKERS, Request, Scored
from penstock.profile import Profile
from penstock.schedule import family


def make_plan(
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: str = "pipedream",
    microbatches: int | None = None,
    hints: Hints | None = None,
    recompute: bool = True,
    samples_per_s: float | None = None,
) -> Plan:
    """The fastest plan found for this schedule; plain data parallelism and a single device are always candidates.

    ``microbatches`` per minibatch applies to synchronous schedules; by default they are chosen too. ``recompute``
    allows a stage that does not fit to compute its forward twice. Schedule ``inference`` asks for the lowest latency
    at ``samples_per_s`` or more.
    """
    if (samples_per_s is not None) != (not family(schedule).trains):
        raise PlanError(
            "schedule inference needs the samples per second to serve (--samples-per-s), and no other takes them"
        )
    best: Scored | None = None
    for count in _microbatch_counts(profile, cluster, schedule, microbatches):
        request = Request(profile, cluster, schedule, count, hints or Hints(), recompute, samples_per_s)
        found = request.best()
        if best and not (found and found[0] < best[0] * CLOSE_ENOUGH):
            break
        best = found or best
    if best is None:
        raise PlanError(explain_infeasible(request))
    return best[1]


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
    counts = [min(profile.batch_size, 4 * len(cluster.devices))]
    while counts[-1] > 1 and len(cluster.devices) <= MOST_SIMULATED_WORKERS:
        counts.append(counts[-1] // 2)
    return counts
