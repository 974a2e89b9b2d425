"""How long planning takes, beside what PipeDream's own optimizer needs on its own profiles.

Where those profiles are not at hand (see bench/reference.py), the rows that need them are left out.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from penstock.bench.reference import VARIABLE, pipedream_reference
from penstock.bench.rows import Findings, Row, at_least, at_most
from penstock.cluster import Cluster, Device, Level, parse_cluster
from penstock.formats import read_profile
from penstock.graph import Layer, LayerGraph, Parameter, Value
from penstock.planner import make_plan
from penstock.planner.pipedream import PipeDreamOptions, solve
from penstock.profile import LayerSeconds, Profile

T = TypeVar("T")

LONG_S = 10.0
"""Where PipeDream's optimizer takes longer than this, ours should be a hundred times faster."""


def run() -> Findings:
    rows = [_chain(layers, devices) for layers, devices in ((100, 8), (100, 16), (400, 16))]
    reference = pipedream_reference()
    if reference is not None:
        rows += _beside_pipedream(reference)
        rows += _raw_inception(reference)
    else:
        sys.stderr.write(f"{VARIABLE} names no directory with pipedream/profiles; their rows are left out\n")
    return Findings(rows)


def _beside_pipedream(reference: Path) -> list[Row]:
    rows = []
    for run_ in json.loads((reference / "optimizer_results.json").read_text())["runs"]:
        profile = read_profile(reference / "profiles" / run_["profile"] / "graph.txt")
        cluster, options = reference_cluster(run_), reference_options(run_["flags"])
        _, cpu_s = _timed(lambda p=profile, c=cluster, o=options: solve(p, c, o))  # type: ignore[misc]
        case = f"{run_['profile']} {run_['machines_inner_to_outer']} {' '.join(run_['flags'][2:])}".strip()
        target = 100.0 if run_["cpu_s"] > LONG_S else None
        rows.append(at_least(case, "PipeDream's CPU seconds / ours, its formulas", run_["cpu_s"], cpu_s, target))
    return rows


def _raw_inception(reference: Path) -> list[Row]:
    """326 layers in parallel branches: PipeDream's optimizer does not end."""
    profile = read_profile(reference / "profiles" / "inception_v3" / "graph.txt")
    plan, cpu_s = _timed(lambda: make_plan(profile, parse_cluster("16@12GB/s")))
    gap = plan.prediction.gap
    return [
        at_most("inception_v3, 16 devices", "CPU seconds", cpu_s, 5.0),
        at_most("inception_v3, 16 devices", "gap to the lower bound", gap, 0.05),
    ]


def _chain(layers: int, devices: int) -> Row:
    plan, cpu_s = _timed(lambda: make_plan(_chain_profile(layers), parse_cluster(f"{devices}@12GB/s")))
    case = f"chain of {layers} layers, {devices} devices, gap {plan.prediction.gap:.1%}"
    return at_most(case, "CPU seconds", cpu_s)


def _chain_profile(layers: int) -> Profile:
    """Layers of unequal cost, the weights in the last ones, as in a convolutional net."""
    graph = LayerGraph(
        layers=tuple(Layer(id=i, name=f"l{i}", kind="Any", parameters=(f"w{i}",)) for i in range(layers)),
        values=tuple(Value(name=f"v{i}", producer=i, consumers=(i + 1,), num_bytes=10**6) for i in range(layers - 1)),
        parameters=tuple(Parameter(name=f"w{i}", num_bytes=10**4 * (1 + i * i // layers)) for i in range(layers)),
    )
    costs = [1e-3 * (1 + (i * 7919 % 13) / 13) for i in range(layers)]
    rows = tuple(LayerSeconds(forward_s=c, backward_input_s=c, backward_weight_s=c) for c in costs)
    return Profile(
        model="chain", front_end="made", batch_size=32, microbatch_size=32, graph=graph, seconds={"any": rows}
    )


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    start_s = time.process_time()
    result = work()
    return result, time.process_time() - start_s


def reference_cluster(run_: dict[str, Any]) -> Cluster:
    pairs = zip(run_["machines_inner_to_outer"], run_["bandwidths_bytes_per_s_inner_to_outer"], strict=True)
    levels = tuple(Level(size=size, bytes_per_s=rate) for size, rate in pairs)
    return Cluster(name="reference", devices=(Device(),) * math.prod(level.size for level in levels), levels=levels)


def reference_options(flags: list[str]) -> PipeDreamOptions:
    """PipeDream's own command line."""

    def value(flag: str) -> float | None:
        return float(flags[flags.index(flag) + 1]) if flag in flags else None

    return PipeDreamOptions(
        straight="--straight_pipeline" in flags,
        memory_bytes=value("-s") if "--use_memory_constraint" in flags else None,
        fewer_machines="--use_fewer_machines" in flags,
        compression=value("--activation_compression_ratio"),
    )
