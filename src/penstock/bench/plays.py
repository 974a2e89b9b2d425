"""One of the workers of ``penstock bench simulator``: measures a job or the links, or runs plans by turns.

A machine is now faster, now slower. So around the profile and around each run of a plan the workers take plain steps of
the whole model, and the plan is played as much faster or slower.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist

from penstock import codec
from penstock.bench.contenders import CPU, Alone, Ours, Whole, steps_per_s
from penstock.bench.jobs import bench_job, bench_profile
from penstock.plan import Plan
from penstock.plan_costs import PlanCosts
from penstock.runtime.links.choice import choose_links, talking_pairs
from penstock.runtime.process.joining import join_workers, worker_process
from penstock.runtime.process.survey import survey_cluster
from penstock.runtime.sync.sync import sync_groups
from penstock.runtime.worker.assemble import capture_for_plan
from penstock.schedule import Kind
from penstock.trace import Event, merge

CORES = 2
REPEATS = 10
"""of the profile's passes"""
BESIDE_S = 0.2
"""of plain steps, before and after"""
TIMEOUT_S = 120.0

Play = tuple[float, list[float]]
"""Samples per second, and how fast each worker was about that time beside the profile."""


def profile(case: str, directory: Path) -> None:
    """As training finds the machine: all cores at work, which share caches and the way to memory."""
    job = bench_job(case)
    with join_workers(1, TIMEOUT_S):
        whole = Whole(job, job.batch_size)
        dist.barrier()
        steps_per_s(whole, BESIDE_S)  # memory finds its place
        before = steps_per_s(whole, BESIDE_S)
        made = bench_profile(job, repeats=REPEATS)
        dist.barrier()
        step_s = 2 / (before + steps_per_s(whole, BESIDE_S))
        if dist.get_rank() == 0:
            codec.save(made, directory / "profile.json")
            (directory / "step").write_text(json.dumps(step_s))
        dist.barrier()


def cluster(case: str, directory: Path) -> None:
    """The links of this machine."""
    found = survey_cluster(TIMEOUT_S, lambda done, total, what: None)
    if found is not None:
        codec.save(found.cluster, directory / "cluster.json")


def run(case: str, directory: Path) -> None:
    """The plans in ``directory``, all of one profile and for as many workers, as the file ``runs`` says: for each its
    minibatches at a time, the rounds, and the seconds of a plain step when the profile was taken."""
    plans = {path.stem: codec.load(Plan, path) for path in sorted(directory.glob("plan*.json"))}
    orders = json.loads((directory / "runs").read_text())
    minibatches: dict[str, int] = orders["minibatches"]
    some, job = next(iter(plans.values())), bench_job(case)
    _stay_on_a_core(some.cluster.host(some.devices[int(os.environ["RANK"])]))
    with worker_process(some, TIMEOUT_S) as (peers, device):
        groups = sorted({group for plan in plans.values() for group in sync_groups(plan)})
        pairs = sorted({pair for plan in plans.values() for pair in talking_pairs(plan)})
        links = choose_links(peers, groups, pairs, device=device)
        captured = capture_for_plan(job, some, CPU)
        contenders = {name: Ours(job, plan, links.transport, captured).loading() for name, plan in plans.items()}
        gc.freeze()  # as in training
        for name, contender in contenders.items():  # warms caches and learns the shapes
            _rate(contender, min(3, minibatches[name]))
        found: dict[str, list[Play]] = {name: [] for name in plans}
        for _ in range(orders["rounds"]):
            for name, contender in contenders.items():
                before = _speeds(case, contender, orders["step_s"])
                rate = _rate(contender, minibatches[name])
                after = _speeds(case, contender, orders["step_s"])
                found[name].append((rate, [statistics.mean(pair) for pair in zip(before, after, strict=True)]))
        if dist.get_rank() == 0:
            (directory / "found").write_text(json.dumps(found))
        dist.barrier()


def _rate(ours: Ours, minibatches: int) -> float:
    """Samples per second by the trace of all workers, as a simulated one tells it."""
    dist.barrier()
    ours.run(minibatches)
    worker = ours.assembly.worker
    events: list[list[Event]] = [[] for _ in ours.plan.devices]
    dist.all_gather_object(
        events, [Event(worker=worker.rank, action=a, start_s=s, end_s=e) for a, s, e in worker.events]
    )
    samples = (ours.size,) * (minibatches * ours.plan.microbatches)
    return merge("measured", ours.plan.worker_names, samples, events).samples_per_s


def _stay_on_a_core(number: int) -> None:
    """Which stands for a host. Those who share one share it whatever Linux thinks best."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def _speeds(case: str, ours: Ours, step_s: float) -> list[float]:
    """Beside the profile, all workers at work. On a core of its own a worker steps through the whole model, as it did
    when the profile was taken. Those who share cores crowd caches and memory too, which no profile taken with fewer
    at work knows: each steps through its own stage, by the time that it had a core."""
    dist.barrier()
    if dist.get_world_size() <= CORES:
        return _shared(step_s * steps_per_s(_whole(case), BESIDE_S))
    return _shared(_stage_s(ours) * steps_per_s(Alone(ours), BESIDE_S, clock=time.thread_time))


def _stage_s(ours: Ours) -> float:
    """What the profile says of a worker's stage by itself."""
    costs, ((index, _),) = PlanCosts(ours.plan), ours.assembly.worker.stages.items()
    stage, worker = ours.plan.stages[index], dist.get_rank()
    seconds = costs.seconds_of(index, worker)
    update_s = costs.model.update_s(stage.layers, ours.plan.devices[worker], stashed=False)
    return seconds[Kind.FORWARD] + seconds[Kind.BACKWARD] + update_s


def _shared(mine: float) -> list[float]:
    """Everybody's."""
    all_of_them = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    all_of_them[dist.get_rank()] = mine
    dist.all_reduce(all_of_them)
    return [float(each) for each in all_of_them]


@lru_cache
def _whole(case: str) -> Whole:
    job = bench_job(case)
    return Whole(job, job.batch_size)


if __name__ == "__main__":
    {"profile": profile, "cluster": cluster, "run": run}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
