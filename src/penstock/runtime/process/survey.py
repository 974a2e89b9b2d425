"""Measuring a cluster as one worker process sees it: say what it has, take part in the trials, hand in the times."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from penstock import codec
from penstock.clocks import Clock
from penstock.cluster import ANY_KIND
from penstock.errors import ClusterError
from penstock.runtime.links.choice import around, choose_links
from penstock.runtime.links.message_times import OwnTime
from penstock.runtime.links.trials import Prober
from penstock.runtime.machine.machine import clock_of_cores, cores_for, device_kind, host_id
from penstock.runtime.process.joining import join_workers
from penstock.survey import Pattern, Survey, Timing, Trial, WorkerFacts, conclude, group_hosts, make_trials

THREADS = 1
"""Of each worker, as profiles are measured unless asked otherwise."""
WORK_S, WORK_ROUND_S = 0.8, 0.1


def survey_cluster(timeout_s: float, progress: Callable[[int, int, str], None]) -> Survey | None:
    """This process's part in measuring the cluster; worker 0 returns what all have found, the others None."""
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise ClusterError("one worker has no link to measure; start at least two (--workers 2, or by torchrun)")
    has_cores = cores_for(THREADS, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    with join_workers(THREADS, timeout_s) as (peers, device):
        progress(0, 1, "devices")
        work = FixedWork(device, time.perf_counter)
        peers.meet("measure its device")
        mine = _facts(device, work.rates())
        facts = [codec.decode(WorkerFacts, part) for part in peers.gather("tell what it has", codec.encode(mine))]
        trials, everyone = make_trials(group_hosts(facts)), tuple(range(len(facts)))
        pairs = [pair for trial in trials for group in trial.groups for pair in around(group)]
        links = choose_links(peers, _groups(trials, everyone), pairs, device=device)
        prober = Prober(
            transport=links.transport,
            clock=time.perf_counter,
            device=device,
            timeout_s=timeout_s,
            own_time=OwnTime(work=LightWork(device).run, core_s=clock_of_cores() if has_cores else None),
        )
        timings = []
        for number, trial in enumerate(trials):
            progress(1 + number, 1 + len(trials), f"{trial.pattern.value}s {trial.reach.value}")
            prober.meet(everyone)
            timings += prober.run(number, trial)
        parts = peers.gather("hand in its times", [codec.encode(timing) for timing in timings])
        backend = ", ".join(sorted({links.backend, *links.chosen.values()}))
        rank = peers.rank
        own = [group for group in _groups(trials, everyone) if rank in group and len(group) > 1]
        by_workers = not all(map(links.transport.carries, own))
    if rank != 0:
        return None
    found = [codec.decode(Timing, item) for part in parts for item in part]
    return conclude(facts, trials, found, backend, by_workers=by_workers)


def _groups(trials: tuple[Trial, ...], everyone: tuple[int, ...]) -> list[tuple[int, ...]]:
    rings = [group for trial in trials if trial.pattern is Pattern.ALL_REDUCE for group in trial.groups]
    return list(dict.fromkeys([everyone, *rings]))


def _facts(device: torch.device, rates: Sequence[float]) -> WorkerFacts:
    gpu, median = device.type == "cuda", statistics.median(rates)
    quarters = statistics.quantiles(rates) if len(rates) > 1 else [median] * 3
    return WorkerFacts(
        host=socket.gethostname(),
        host_id=host_id(),
        host_memory_bytes=_host_memory_bytes(),
        device_memory_bytes=torch.cuda.get_device_properties(device).total_memory if gpu else None,
        kind=device_kind(device) if gpu else ANY_KIND,
        work_per_s=median,
        spread=(quarters[2] - quarters[0]) / median,
    )


def _host_memory_bytes() -> int:
    """What the machine has, or less where a container may not use all of it."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(physical, int(text)) if text.isdecimal() else physical


class LightWork:
    """The forward and backward of a few small layers: about what small actions of training leave in the caches."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4))).to(device)
        self.vectors = torch.randn(64, 128, device=device)

    def run(self) -> None:
        torch.autograd.backward(self.layers(self.vectors).mean())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class FixedWork:
    """The forward and backward of a convolution and a product: the same on every device."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.device, self.clock = device, clock
        self.convolution = nn.Conv2d(32, 64, 3, padding=1, device=device)
        self.images = torch.randn(16, 32, 32, 32, device=device)
        self.matrix = torch.randn(512, 512, device=device, requires_grad=True)
        self.run()  # what torch sets up once

    def run(self) -> None:
        torch.autograd.backward(self.convolution(self.images).mean() + (self.matrix @ self.matrix).mean())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rates(self) -> list[float]:
        """How often in a second, round by round. Workers that start together end together, by the clock, so
        that those who share cores share them to the end."""
        rates, end_s = [], self.clock() + WORK_S
        while self.clock() < end_s:
            start_s, count = self.clock(), 0
            while count == 0 or self.clock() - start_s < WORK_ROUND_S:
                self.run()
                count += 1
            rates.append(count / (self.clock() - start_s))
        return rates
