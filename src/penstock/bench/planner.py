"""How long planning takes: of chains, small to large; and of PipeDream's profiles, beside what its own optimizer needs.

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

from penstock.bench.growth import growth_rows, growth_svg, measure_growth
from penstock.bench.reference import VARIABLE, pipedream_reference
from penstock.bench.rows import Findings, Row, at_least, at_most
from penstock.cluster import Cluster, Device, Level, parse_cluster
from penstock.formats import read_profile
from penstock.planner import make_plan
from penstock.planner.pipedream import PipeDreamOptions, solve

T = TypeVar("T")

ROUNDS = 3
LONG_S = 10.0
"""Where PipeDream's optimizer takes longer than this, ours should be a hundred times faster."""


def run() -> Findings:
    points = measure_growth()
    rows = growth_rows(points)
    reference = pipedream_reference()
    if reference is not None:
        rows += _beside_pipedream(reference)
        rows += _resnet50(reference)
        rows += _raw_inception(reference)
    else:
        sys.stderr.write(f"{VARIABLE} names no directory with pipedream/profiles; their rows are left out\n")
    return Findings(rows, growth_svg(points))


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


def _resnet50(reference: Path) -> list[Row]:
    """Two hosts of eight: PipeDream's optimizer takes minutes."""
    profile = read_profile(reference / "profiles" / "resnet50" / "graph.txt")
    cluster = parse_cluster("8@25GB/s,2@3.125GB/s")
    work: dict[str, Callable[[], object]] = {
        "PipeDream's formulas": lambda: solve(profile, cluster),
        "default planner": lambda: make_plan(profile, cluster),
    }
    return [
        at_most("resnet50 [8, 2]", f"CPU seconds, {name}, best of {ROUNDS}", _best_s(each), 0.5)
        for name, each in work.items()
    ]


def _raw_inception(reference: Path) -> list[Row]:
    """326 layers in parallel branches: PipeDream's optimizer does not end."""
    profile = read_profile(reference / "profiles" / "inception_v3" / "graph.txt")
    plan, cpu_s = _timed(lambda: make_plan(profile, parse_cluster("16@12GB/s")))
    return [
        at_most("inception_v3, 16 devices", "CPU seconds", cpu_s, 5.0),
        at_most("inception_v3, 16 devices", "gap to the lower bound", plan.prediction.gap, 0.05),
    ]


def _best_s(work: Callable[[], object]) -> float:
    return min(_timed(work)[1] for _ in range(ROUNDS))


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
