"""Profiles or trains a model of 768 MiB in processes that may not take that much memory; test_blueprint.py starts them.

python too_large.py profile PROFILE
python too_large.py train PLAN LOSSES       as each of a plan's workers, under a launcher
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from in_threads import profile
from penstock import Job, codec
from penstock.plan import Plan
from penstock.runtime.process.joining import worker_process
from penstock.runtime.sync.sync import sync_groups
from penstock.runtime.transport.process_group import TorchTransport
from penstock.runtime.worker.assemble import assemble, make_epoch

WIDTH, LAYERS = 2048, 48
MODEL_BYTES = 4 * WIDTH * WIDTH * LAYERS
LIMIT_BYTES = 192 * 2**20 + MODEL_BYTES * 7 // 10
"""Beyond what a process has when torch is loaded. Capturing and gloo take the first 192 MiB, whatever the model's size;
a quarter of the model and of its gradients then needs about 0.6 of the model, as freed memory is kept in pieces."""


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def build() -> nn.Module:
    return nn.Sequential(*(Dense() for _ in range(LAYERS)))


def job() -> Job:
    torch.manual_seed(0)
    inputs, targets = torch.randn(WIDTH).repeat(12, 1), torch.full((12, WIDTH), 0.5)
    return Job(
        model=build,
        data=list(zip(inputs, targets, strict=True)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.03),
        batch_size=4,
    )


def limit_memory() -> None:
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    limit = int(found[1]) * 1024 + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def train(plan: Plan, losses: Path) -> None:
    with worker_process(plan, timeout_s=60) as (_, device):
        transport = TorchTransport(sync_groups(plan), timeout_s=300.0)
        assembly = assemble(job(), plan, transport=transport, clock=time.perf_counter, device=device, timeout_s=60)
        worker = assembly.worker
        worker.run(assembly.segment(make_epoch(assembly.job, plan, 0)))
        (stage,) = worker.stages.values()
        if stage.module.losses:
            losses.write_text(json.dumps(list(stage.module.losses.values())))


if __name__ == "__main__":
    limit_memory()
    role, path = sys.argv[1], Path(sys.argv[2])
    if role == "profile":
        codec.save(profile(job()), path)
    else:
        train(codec.load(Plan, path), Path(sys.argv[3]))
