"""Texts about a stage and its actions, the same in tables, drawings, figures and the report."""

from __future__ import annotations

from penstock.plan_costs import PlanCosts
from penstock.schedule import Kind
from penstock.units import show_bytes

KIND_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward for inputs",
    Kind.WEIGHT: "backward for weights",
    Kind.SYNC: "sync",
    Kind.STEP: "update",
}


def bottleneck_text(costs: PlanCosts, stage: int) -> str:
    """Not empty if the stage, or the cut after it, is the bottleneck."""
    slowest, behind = costs.bottleneck()
    if slowest != stage or len(costs.plan.stages) == 1:
        return ""
    return "bottleneck" if behind == stage else f"bottleneck: link to {behind}"


def show_memory(costs: PlanCosts, stage: int) -> str:
    share = costs.memory_share(stage)
    return show_bytes(costs.stage_memory_bytes(stage)) + (f" ({share:.0%})" if share is not None else "")
