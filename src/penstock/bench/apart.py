"""One of the two workers of ``penstock bench network``, each on a host of its own: measures every contender in turn."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch.distributed as dist

from penstock import codec
from penstock.bench.contenders import TORCH_SCHEDULES, Contender, Ours, TorchDataParallel, TorchPipeline
from penstock.bench.jobs import bench_job
from penstock.bench.pair import by_turns, run_together
from penstock.plan import Plan
from penstock.runtime.links.choice import choose_links
from penstock.runtime.process.joining import worker_process

ROUNDS = 3
ROUND_S = 1.0
"""about how long each contender runs at a time"""
FEWEST, FEWEST_SYNCHRONOUS, FEWEST_ASYNCHRONOUS = 1, 4, 8
"""minibatches at a time: ours are timed from update to update once the pipeline is full"""
MOST = 60
TIMEOUT_S = 120.0


def main(case: str, directory: Path) -> None:
    plans = {path.stem: codec.load(Plan, path) for path in sorted(directory.glob("*.json"))}
    profile = plans["penstock"].profile
    with worker_process(plans["penstock"], TIMEOUT_S) as (peers, device):
        workers = dist.get_world_size()
        links = choose_links(peers, [tuple(range(workers))], [(0, 1)], device=device)
        contenders: dict[str, Contender] = {}
        for name, plan in plans.items():
            ours = contenders[name] = Ours(bench_job(case), plan, links.transport)
            if plan.schedule in TORCH_SCHEDULES:
                contenders[f"torch {name}"] = TorchPipeline(ours)
        contenders["torch data parallel"] = TorchDataParallel(bench_job(case), workers, profile.batch_size // workers)
        gc.freeze()  # as in training
        fewest = {name: _fewest(plans.get(name)) for name in contenders}
        warm = {name: run_together(contender, fewest[name]) for name, contender in contenders.items()}
        minibatches = {
            name: min(MOST, max(fewest[name], round(ROUND_S * rate / profile.batch_size)))
            for name, rate in warm.items()
        }
        rates = by_turns(contenders, minibatches, ROUNDS)
        if dist.get_rank() == 0:
            (directory / "rates").write_text(json.dumps(rates))
        dist.barrier()


def _fewest(plan: Plan | None) -> int:
    if plan is None:
        return FEWEST
    return FEWEST_ASYNCHRONOUS if plan.is_asynchronous else FEWEST_SYNCHRONOUS


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
