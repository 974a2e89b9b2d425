"""What is said of a stage in the same words everywhere: in the table, in the drawing, in the report."""

from __future__ import annotations

from penstock.cost import PlanCosts
from penstock.units import show_bytes


def bottleneck_text(costs: PlanCosts, stage: int) -> str:
    """Set where a stage holds the others up, or what crosses the cut behind it does."""
    slowest, behind = costs.bottleneck()
    if slowest != stage or len(costs.plan.stages) == 1:
        return ""
    return "bottleneck" if behind == stage else f"bottleneck: link to {behind}"


def show_memory(costs: PlanCosts, stage: int) -> str:
    share = costs.memory_share(stage)
    return show_bytes(costs.stage_memory_bytes(stage)) + (f" ({share:.0%})" if share is not None else "")
