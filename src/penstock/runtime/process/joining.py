"""How a worker process takes its place among the workers of a plan, and leaves it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.runtime.machine.machine import descriptors_explained, share_of_machine
from penstock.runtime.peers.peers import Peers
from penstock.runtime.peers.store import find_others, join, leave
from penstock.runtime.process.launch import end_with_launcher


@contextmanager
def worker_process(plan: Plan, timeout_s: float) -> Iterator[tuple[Peers, torch.device]]:
    """Join the others with a share of the machine that matches what was profiled; leave them at the end."""
    world = int(os.environ["WORLD_SIZE"])
    if world != len(plan.devices):
        raise PlanError(
            f"{world} processes were started for a plan of {len(plan.devices)} workers; start one per worker "
            f"(torchrun --nnodes ... --nproc-per-node ... so that the product is {len(plan.devices)})"
        )
    with join_workers(plan.profile.threads, timeout_s) as place:
        yield place


@contextmanager
def join_workers(threads: int, timeout_s: float) -> Iterator[tuple[Peers, torch.device]]:
    """A share of the machine and a place among the workers that were started together: its peers and its device."""
    end_with_launcher()
    local, local_workers = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with descriptors_explained(), share_of_machine(threads, local, local_workers) as device:
        peers = join(find_others(timeout_s), "nccl" if device.type == "cuda" else "gloo", timeout_s)
        yield peers, device
    # Only a worker that has done its part says goodbye: one that fails reports first, and its exit tells the others.
    leave(peers)
