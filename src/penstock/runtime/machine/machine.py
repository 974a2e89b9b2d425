"""A worker's share of its machine: the device, the cores, the memory allocator."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock.errors import PlanError, WorkerError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h


@contextmanager
def share_of_machine(threads: int, local_rank: int = 0, local_workers: int = 1) -> Iterator[torch.device]:
    """The GPU of this local rank where there is one; else so many threads on cores of their own, if there are enough.

    Profiling takes the same share as training will, so that its seconds hold there.
    """
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise PlanError(
                f"worker {local_rank} of this host has no GPU of its own: there are {torch.cuda.device_count()}; "
                "plan for as many, or start fewer workers here"
            )
        torch.cuda.set_device(local_rank)
        yield torch.device("cuda", local_rank)
        return
    torch.set_num_threads(threads)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if cores_for(threads, local_workers):
        os.sched_setaffinity(0, cores[local_rank * threads : (local_rank + 1) * threads])
    _keep_freed_memory()
    try:
        yield torch.device("cpu")
    finally:
        if cores:
            os.sched_setaffinity(0, cores)


@contextmanager
def descriptors_explained() -> Iterator[None]:
    """Say what to do where this process may open no more files, whoever wanted one: gloo, say, or shared memory."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if "Too many open files" not in str(error):
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise WorkerError(
            f"worker {os.environ.get('RANK', '0')} has {limit} files open, and may open no more; raise the limit where "
            f"workers are started (ulimit -n {max(4096, 4 * limit)})"
        ) from error


def cores_for(threads: int, local_workers: int) -> bool:
    """Whether the cores that this process may use are enough for each worker to have its own."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) >= local_workers * threads


def clock_of_cores() -> Callable[[], float] | None:
    """Seconds that the cores of this process have been busy, be it for nobody, as with what comes from a network; None
    where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    tick_s = 1 / os.sysconf("SC_CLK_TCK")

    def busy_s() -> float:
        rows = [line.split() for line in stat.read_text().splitlines() if line.startswith("cpu")]
        idle = sum(int(row[4]) + int(row[5]) for row in rows if row[0] in names)
        return time.monotonic() * len(names) - idle * tick_s

    return busy_s


def host_id() -> str:
    """Workers that share a boot and a network namespace talk over loopback; containers of one machine need not."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    parts = [socket.gethostname()]
    if boot.exists() and network.exists():
        parts += [boot.read_text().strip(), str(network.stat().st_ino)]
    return " ".join(parts)


def clock_id() -> str:
    """Workers under one boot and in one time namespace read the same clock."""
    parts = [socket.gethostname()]
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")
    if boot.exists():
        parts = [boot.read_text().strip()]  # containers of one machine have names of their own
    if namespace.exists():
        parts.append(str(namespace.stat().st_ino))
    return " ".join(parts)


def _keep_freed_memory() -> None:
    """Have glibc keep large blocks that are freed instead of giving them back to the kernel.

    Every microbatch allocates the same activations and gradients again; without this each one is a fresh mapping
    whose pages fault in one by one (10-25% of a convolutional model's step).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # another libc: nothing to tune
    mallopt(_M_MMAP_THRESHOLD, 2**30)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def device_kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
