"""One of the worker processes of ``penstock bench runtime``: measures every contender in turn, several rounds."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from penstock import codec
from penstock.bench.contenders import TORCH_SCHEDULES, Alone, Contender, Ours, TorchDataParallel, TorchPipeline
from penstock.bench.jobs import bench_job
from penstock.plan import Plan
from penstock.runtime.links.choice import choose_links
from penstock.runtime.process.joining import worker_process
from penstock.runtime.transport.base import Transport

ROUNDS = 5
ROUND_S = 1.5
"""about how long each contender runs at a time"""
FEWEST, MOST = 8, 100
"""minibatches at a time, so that filling the pipeline weighs little"""
TIMEOUT_S = 120.0


def main(case: str, directory: Path) -> None:
    plans = {path.stem: codec.load(Plan, path) for path in sorted(directory.glob("*.json"))}
    some = next(iter(plans.values()))
    with worker_process(some, TIMEOUT_S) as (peers, device):
        everybody = tuple(range(len(some.devices)))
        links = choose_links(peers, [everybody], [(0, 1)], device=device)
        contenders: dict[str, Contender] = {}
        for name, plan in plans.items():
            contenders.update(_of_plan(case, name, plan, links.transport))
        gc.freeze()  # as in training
        minibatches = min(MOST, max(FEWEST, round(ROUND_S / some.prediction.seconds_per_minibatch)))
        for contender in contenders.values():  # warms caches and learns the shapes
            run_together(contender, minibatches)
        rates = by_turns(contenders, dict.fromkeys(contenders, minibatches), ROUNDS)
        if dist.get_rank() == 0:
            chosen = ", ".join(sorted(set(links.chosen.values())))
            (directory / "found").write_text(json.dumps({"rates": rates, "transport": chosen}))
        dist.barrier()


def _of_plan(case: str, name: str, plan: Plan, transport: Transport) -> Iterator[tuple[str, Contender]]:
    """Plans are known by the names of their files; each brings what it is compared with."""
    ours = Ours(bench_job(case), plan, transport)
    yield name, ours
    if name == "pipedream":
        yield "limit", Alone(ours)
    if name in TORCH_SCHEDULES:
        yield f"torch {name}", TorchPipeline(ours)
    if name == "data parallel":
        yield "torch data parallel", TorchDataParallel(bench_job(case), len(plan.devices), plan.profile.batch_size)


def by_turns(
    contenders: Mapping[str, Contender], minibatches: Mapping[str, int], rounds: int
) -> dict[str, list[float]]:
    """Samples per second of each, round by round, so that what else the machine does befalls all alike."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            rates[name].append(run_together(contender, minibatches[name]))
    return rates


def run_together(contender: Contender, minibatches: int) -> float:
    """Samples per second of all workers together: a pipeline is as fast as its slowest."""
    dist.barrier()
    tensor = torch.tensor([contender.run(minibatches)], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return float(tensor)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
