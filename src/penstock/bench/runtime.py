"""Two workers on this machine: Penstock's pipelines against the limit of their stages, torch.distributed.pipelining and
DistributedDataParallel. All contenders of a model run in the same two processes, by turns, on the same cuts."""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from penstock import codec
from penstock.bench import memory
from penstock.bench.jobs import bench_job, bench_profile
from penstock.bench.rows import Findings, Row, at_least, at_most
from penstock.cluster import local_cluster
from penstock.graph import LayerGraph
from penstock.plan import Plan, Stage
from penstock.plan_costs import PlanCosts
from penstock.planner import Hints, make_plan
from penstock.profile import Profile
from penstock.runtime.machine.machine import share_of_machine
from penstock.runtime.process.launch import launch_workers
from penstock.schedule import Pipeline, usual_depth
from penstock.schedule.builders import position_on

CASES = ("vgg", "transformer")
MICROBATCHES = 4
WORKERS = 2
TINY, TINY_MICROBATCHES = "tiny", 32


def run() -> Findings:
    rows: list[Row] = []
    for case in CASES:
        rows += _compared(case, _plans(case))
        rows += _memory(case)
    rows += _overhead()
    return Findings(rows)


def _compared(case: str, plans: dict[str, Plan]) -> Iterator[Row]:
    median, transport = _measured(case, plans)
    pipedream = plans["pipedream"]
    label = f"{case}, asynchronous"
    yield at_least(label, "samples/s / slower stage's own compute", median["pipedream"], median["limit"], 0.97)
    yield at_least(label, "samples/s / torch 1F1B, 4 microbatches", median["pipedream"], median["torch 1f1b"], 1.2)
    yield at_least(label, "samples/s / predicted", median["pipedream"], _predicted(pipedream))
    for name in ("1f1b", "gpipe", "zb-h1", "zb-v"):
        yield at_least(f"{case}, {name}", "samples/s / torch's", median[name], median[f"torch {name}"], 1.0)
    ddp = median["torch data parallel"]
    yield at_least(f"{case}, data parallel", "samples/s / DistributedDataParallel", median["data parallel"], ddp, 1.0)
    best = plans["best"]
    shape = "-".join(str(len(stage.devices)) for stage in best.stages)
    yield at_least(f"{case}, best plan ({shape})", "samples/s / DistributedDataParallel", median["best"], ddp, 1.0)
    yield at_most(f"{case}, messages through {transport}", "samples/s, asynchronous", median["pipedream"])


def _overhead() -> Iterator[Row]:
    """A model whose layers take next to no time: what is left is what an action costs to run."""
    plans = {name: plan for name, plan in _plans(TINY, TINY_MICROBATCHES).items() if name == "1f1b"}
    median, _ = _measured(TINY, plans)
    batch_size = plans["1f1b"].profile.batch_size
    each_s = {name: batch_size / rate / (2 * TINY_MICROBATCHES) for name, rate in median.items()}
    ratio = each_s["1f1b"] / each_s["torch 1f1b"]
    yield at_least("tiny, 1f1b", "us per action; torch's", 1e6 * each_s["1f1b"], 1e6 * each_s["torch 1f1b"])
    yield at_most("tiny, 1f1b", "of torch's time per action", ratio, 0.5)


def _memory(case: str) -> Iterator[Row]:
    """Each worker's peak against what the plan says, with all of a worker's tensors counted as they come and go."""
    plans = _plans(case)
    for name in ("pipedream", "1f1b"):
        plan = plans[name]
        measured = memory.peak_bytes(case, plan)
        predicted = PlanCosts(plan)
        for worker, peak in enumerate(measured):
            expected = predicted.memory_bytes(worker)
            yield Row(
                case=f"{case}, {name}, worker {worker}",
                metric="peak MB / predicted",
                value=peak / 1e6,
                baseline=expected / 1e6,
                ratio=peak / expected,
                target=1.1,
                met=abs(peak / expected - 1) <= 0.1,
            )


def _measured(case: str, plans: dict[str, Plan]) -> tuple[dict[str, float], str]:
    sys.stderr.write(f"bench runtime: {case}\n")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for file, plan in plans.items():
            codec.save(plan, directory / f"{file}.json")
        launch_workers(["-m", "penstock.bench.pair", case, name], WORKERS, threads=1)
        found = json.loads((directory / "found").read_text())
    return {each: statistics.median(rates) for each, rates in found["rates"].items()}, found["transport"]


def _predicted(plan: Plan) -> float:
    return plan.predicted_samples_per_s or 0.0


def _plans(case: str, microbatches: int = MICROBATCHES) -> dict[str, Plan]:
    """The best straight cut, under every schedule; and the same layers in four stages, there and back."""
    profile, cluster = _profile(case), local_cluster(WORKERS)
    straight = make_plan(profile, cluster, hints=Hints(replicas=(1, 1)))
    plans = {"pipedream": straight}
    plans |= {name: _synchronous(straight, name, microbatches) for name in ("1f1b", "gpipe", "zb-h1")}
    plans["zb-v"] = _there_and_back(straight, microbatches)
    plans["data parallel"] = make_plan(profile, cluster, hints=Hints(replicas=(WORKERS,)))
    plans["best"] = make_plan(profile, cluster)
    return plans


@functools.cache
def _profile(case: str) -> Profile:
    with share_of_machine(threads=1):
        return bench_profile(bench_job(case), repeats=10)


def _there_and_back(plan: Plan, microbatches: int) -> Plan:
    """Both workers' stages in four, cut where one value crosses: torch's stages pass values to the next one only."""
    graph, device = plan.profile.graph, plan.devices[0]
    costs = PlanCosts(plan).model
    order = graph.order
    total_s = sum(costs.forward_s([layer], device) for layer in order)
    cuts = [0]
    for part in (1, 2, 3):
        places = [at for at in range(cuts[-1] + 1, len(order)) if _one_crosses(graph, order[:at], order[at:])]
        cuts.append(min(places, key=lambda at: abs(costs.forward_s(order[:at], device) - total_s * part / 4)))
    cuts.append(len(order))
    stages = tuple(
        Stage(layers=order[begin:end], devices=(position_on("there and back", index, WORKERS),), in_flight=WORKERS)
        for index, (begin, end) in enumerate(itertools.pairwise(cuts))
    )
    return replace(plan, stages=stages, schedule="zb-v", microbatches=microbatches)


def _one_crosses(graph: LayerGraph, before: Sequence[int], after: Sequence[int]) -> bool:
    return len(list(filter(graph.is_sent, graph.crossing(before, after)))) == 1


def _synchronous(plan: Plan, schedule: str, microbatches: int) -> Plan:
    pipeline: Pipeline = plan.pipeline
    depths = [microbatches if schedule == "gpipe" else usual_depth(schedule, pipeline, s) for s in (0, 1)]
    stages = [replace(stage, in_flight=depth) for stage, depth in zip(plan.stages, depths, strict=True)]
    return replace(plan, stages=tuple(stages), schedule=schedule, microbatches=microbatches)
