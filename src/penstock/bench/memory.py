"""The peak memory of a plan's workers, counted by torch's own allocator while they train a few minibatches.

What a process takes of the machine says little: an allocator keeps what is freed. So every tensor that comes and goes
is counted, beginning with the weights of the worker's own stages: the rest of the model and the data are there anyway.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from penstock import codec
from penstock.bench.contenders import TIMEOUT_S, Ours
from penstock.bench.jobs import bench_job
from penstock.plan import Plan
from penstock.runtime.process.joining import worker_process
from penstock.runtime.process.launch import launch_workers
from penstock.runtime.transport.process_group import TorchTransport

MINIBATCHES = 8
TRAINING = "training"


def peak_bytes(case: str, plan: Plan) -> list[int]:
    with tempfile.TemporaryDirectory() as name:
        codec.save(plan, Path(name) / "plan.json")
        launch_workers(["-m", "penstock.bench.memory", case, name], len(plan.devices), threads=1)
        return [json.loads((Path(name) / f"peak-{rank}").read_text()) for rank in range(len(plan.devices))]


def main(case: str, directory: Path) -> None:
    plan = codec.load(Plan, directory / "plan.json")
    with worker_process(plan, TIMEOUT_S):
        transport = TorchTransport([], TIMEOUT_S)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            job = bench_job(case)
            ours = Ours(job, plan, transport)
            with record_function(TRAINING):
                ours.run(MINIBATCHES)
        stages = ours.assembly.worker.stages.values()
        weights = sum(parameter.nbytes for stage in stages for parameter in stage.weights.parameters.values())
        trace = directory / f"trace-{dist.get_rank()}.json"
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
        begun = next(event["ts"] for event in events if event.get("name") == TRAINING)
        totals = sorted((e["ts"], e["args"]["Total Allocated"]) for e in events if e.get("name") == "[memory]")
        before = max(total for total in totals if total[0] < begun)[1]
        peak = max(total for moment, total in totals if moment >= begun)
        (directory / f"peak-{dist.get_rank()}").write_text(json.dumps(peak - before + weights))


if __name__ == "__main__":
    torch.manual_seed(0)
    main(sys.argv[1], Path(sys.argv[2]))
