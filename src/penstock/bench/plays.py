"""One of the workers of ``penstock bench simulator``: measures a job or the links, or runs plans by turns."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch.distributed as dist

from penstock import codec
from penstock.bench.contenders import Contender, Ours
from penstock.bench.jobs import bench_job, bench_profile
from penstock.bench.pair import by_turns, run_together
from penstock.plan import Plan
from penstock.runtime.links import make_links, talking_pairs
from penstock.runtime.survey import survey_cluster
from penstock.runtime.sync import sync_groups
from penstock.runtime.train import join_workers, worker_process

MICROBATCHES = 4
"""to a minibatch, under synchronous schedules"""
ROUNDS = 3
REPEATS = 10
TIMEOUT_S = 120.0


def profile(case: str, directory: Path) -> None:
    """As training finds the machine: all cores at work, which share caches and the way to memory. One for each count of
    microbatches, since small ones use large layers badly."""
    with join_workers(1, TIMEOUT_S):
        for microbatches in (1, MICROBATCHES):
            dist.barrier()
            found = bench_profile(bench_job(case), repeats=REPEATS, microbatches=microbatches)
            if dist.get_rank() == 0:
                codec.save(found, directory / f"profile {microbatches}.json")
        dist.barrier()


def cluster(case: str, directory: Path) -> None:
    """The links of this machine."""
    found = survey_cluster(TIMEOUT_S, lambda done, total, what: None)
    if found is not None:
        codec.save(found.cluster, directory / "cluster.json")


def run(case: str, directory: Path) -> None:
    """The plans in ``directory``, all for as many workers, for the minibatches that a file there has of each."""
    plans = {path.stem: codec.load(Plan, path) for path in sorted(directory.glob("plan*.json"))}
    minibatches: dict[str, int] = json.loads((directory / "minibatches").read_text())
    some = next(iter(plans.values()))
    with worker_process(some, TIMEOUT_S) as device:
        groups = sorted({group for plan in plans.values() for group in sync_groups(plan)})
        pairs = sorted({pair for plan in plans.values() for pair in talking_pairs(plan)})
        links = make_links(groups, pairs, device=device, timeout_s=TIMEOUT_S)
        contenders: dict[str, Contender] = {
            name: Ours(bench_job(case), plan, links.transport) for name, plan in plans.items()
        }
        gc.freeze()  # as in training
        for name, contender in contenders.items():  # warms caches and learns the shapes
            run_together(contender, minibatches[name])
        rates = by_turns(contenders, minibatches, ROUNDS)
        if dist.get_rank() == 0:
            (directory / "rates").write_text(json.dumps(rates))
        dist.barrier()


if __name__ == "__main__":
    {"profile": profile, "cluster": cluster, "run": run}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
