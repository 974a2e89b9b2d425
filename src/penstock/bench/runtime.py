"""Two workers on this machine: Penstock's asynchronous pipeline against the limit of its stages and against
torch.distributed.pipelining. All alternatives run in the same two processes, by turns, on the same cut."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from penstock import codec
from penstock.bench.jobs import bench_job, bench_profile
from penstock.bench.rows import Findings, Row, at_least
from penstock.cluster import local_cluster
from penstock.plan import Plan
from penstock.planner import Hints, make_plan
from penstock.runtime.launch import launch_workers
from penstock.runtime.machine import share_of_machine

CASES = ("vgg", "transformer")


def run() -> Findings:
    rows: list[Row] = []
    for case in CASES:
        sys.stderr.write(f"bench runtime: {case}\n")
        with tempfile.TemporaryDirectory() as directory:
            rows += _case(case, Path(directory))
    return Findings(rows)


def _case(case: str, directory: Path) -> list[Row]:
    plan = _plan(case)
    codec.save(plan, directory / "plan.json")
    launch_workers(["-m", "penstock.bench.pair", case, str(directory)], len(plan.devices), threads=1)
    rates: dict[str, list[float]] = json.loads((directory / "rates.json").read_text())
    median = {name: statistics.median(values) for name, values in rates.items()}
    label = f"{case}, {len(plan.stages)} stages, asynchronous"
    return [
        at_least(label, "samples/s / slower stage's own compute", median["penstock"], median["limit"], 0.95),
        at_least(
            label,
            "samples/s / torch.distributed.pipelining 1F1B, 4 microbatches",
            median["penstock"],
            median["torch"],
            1.10,
        ),
        at_least(label, "samples/s / predicted", median["penstock"], _predicted(plan)),
    ]


def _predicted(plan: Plan) -> float:
    return plan.profile.batch_size / plan.prediction.seconds_per_minibatch


def _plan(case: str) -> Plan:
    with share_of_machine(threads=1):
        profile = bench_profile(bench_job(case), repeats=10)
    return make_plan(profile, local_cluster(2), hints=Hints(straight=True))
