"""How a worker process takes its place among the workers of a plan, and leaves it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.runtime.machine.machine import descriptors_explained, share_of_machine
from penstock.runtime.peers.meeting import join, leave
from penstock.runtime.process.launch import end_with_launcher


@contextmanager
def worker_process(plan: Plan, timeout_s: float) -> Iterator[torch.device]:
    """Join the process group with a share of the machine that matches what was profiled; leave it at the end."""
    world = int(os.environ["WORLD_SIZE"])
    if world != len(plan.devices):
        raise PlanError(
            f"{world} processes were started for a plan of {len(plan.devices)} workers; start one per worker "
            f"(torchrun --nnodes ... --nproc-per-node ... so that the product is {len(plan.devices)})"
        )
    with join_workers(plan.profile.threads, timeout_s) as device:
        yield device


@contextmanager
def join_workers(threads: int, timeout_s: float) -> Iterator[torch.device]:
    """A share of the machine and a place among the workers that were started together."""
    end_with_launcher()
    local, local_workers = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with descriptors_explained(), share_of_machine(threads, local, local_workers) as device:
        join("nccl" if device.type == "cuda" else "gloo", timeout_s)
        yield device
    # Only a worker that has done its part says goodbye: one that fails reports first, and its exit tells the others.
    leave(timeout_s)
