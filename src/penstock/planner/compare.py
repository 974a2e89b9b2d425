"""The objectives of other systems by name, for comparison; docs/costs.md says what each counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.cluster import Cluster
from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.planner.max_load import max_load_plan
from penstock.planner.pipedream import PipeDreamOptions, pipedream_plan
from penstock.planner.sparsepipe import sparsepipe_plan
from penstock.profile import Profile

_PLANNERS: Mapping[str, Callable[[Profile, Cluster, bool], Plan]] = {
    "pipedream": lambda profile, cluster, straight: pipedream_plan(
        profile, cluster, PipeDreamOptions(straight=straight)
    ),
    "sparsepipe": lambda profile, cluster, straight: sparsepipe_plan(profile, cluster, straight=straight),
    "max-load": lambda profile, cluster, straight: max_load_plan(profile, cluster),  # it never replicates
}
COSTS = tuple(_PLANNERS)


def plan_by(cost: str, profile: Profile, cluster: Cluster, *, straight: bool = False) -> Plan:
    """The best plan by another system's objective, which also predicts it; under PipeDream's schedule."""
    if cost not in _PLANNERS:
        raise PlanError(f"cost {cost!r} is unknown; choose one of {', '.join(COSTS)}")
    return _PLANNERS[cost](profile, cluster, straight)
