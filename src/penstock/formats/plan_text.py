"""A plan in the file formats of other systems."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.errors import FormatError
from penstock.formats.dynpipe import partition_of, partition_text
from penstock.formats.pipedream_graph import graph_text
from penstock.formats.pipedream_stages import data_parallel_map, hybrid_map, model_parallel_map, stage_map_text
from penstock.plan import Plan

PLAN_FORMATS: Mapping[str, Callable[[Plan], str]] = {
    "graph": lambda plan: graph_text(plan.profile, plan.stage_of_layer),
    "hybrid": lambda plan: stage_map_text(hybrid_map(plan)),
    "dp": lambda plan: stage_map_text(data_parallel_map(plan)),
    "mp": lambda plan: stage_map_text(model_parallel_map(plan)),
    "dynpipe": lambda plan: partition_text(partition_of(plan)),
}


def plan_text(plan: Plan, name: str) -> str:
    """The plan as the format ``name`` writes it."""
    if name not in PLAN_FORMATS:
        raise FormatError(f"format {name!r} is unknown; choose one of {', '.join(PLAN_FORMATS)}")
    return PLAN_FORMATS[name](plan)
