"""Clocks of different machines, brought together."""

from __future__ import annotations

import os
import queue
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import law
from penstock.clocks import Alignment, RoundTrip, align
from penstock.run import RunDirectory
from penstock.runtime.process import clocks
from penstock.schedule import dependencies
from test_processes import write_job, write_plan


@given(
    ahead_s=st.floats(-1e6, 1e6),
    drift=st.floats(-1e-4, 1e-4),
    seed=st.integers(0, 1000),
    lasts_s=st.floats(1.0, 1e5),
)
@law
def test_aligned_times_are_off_by_no_more_than_the_error_says(
    ahead_s: float, drift: float, seed: int, lasts_s: float
) -> None:
    """Whatever the ways there and back take, alike or not."""
    delays = random.Random(seed)

    def reference(own_s: float) -> float:
        return own_s + ahead_s + drift * own_s

    def trip(at_s: float) -> RoundTrip:
        there_s, back_s = delays.expovariate(1e3), delays.expovariate(1e3)
        return RoundTrip(sent_s=at_s, read_s=reference(at_s + there_s), back_s=at_s + there_s + back_s)

    found = align((1,), [trip(0.01 * i) for i in range(20)], [trip(lasts_s + 0.01 * i) for i in range(20)])
    slack_s = 1e-3 * abs(drift) + 1e-8  # the drift on the way, and what a float of this size can tell
    for share in (0.0, 0.3, 1.0):
        own_s = 0.2 + share * (lasts_s - 0.2)
        assert abs(found.to_reference(own_s) - reference(own_s)) <= found.error_s + slack_s


def test_the_quickest_round_trip_counts() -> None:
    slow = RoundTrip(sent_s=0.0, read_s=109.0, back_s=10.0)
    quick = RoundTrip(sent_s=20.0, read_s=120.5, back_s=21.0)
    found = align((2, 3), [slow, quick], [quick])
    assert found == Alignment(workers=(2, 3), ahead_s=100.0, since_s=20.5, drift=0.0, error_s=0.5)
    assert found.to_reference(5.0) == 105.0


class QueueWire:
    """Between threads."""

    def __init__(self, rank: int, queues: dict[tuple[int, int], queue.Queue[float]]) -> None:
        self.rank, self.queues = rank, queues

    def send(self, moment_s: float, to: int) -> None:
        self.queues[self.rank, to].put(moment_s)

    def receive(self, source: int) -> float:
        return self.queues[source, self.rank].get(timeout=10)


def test_one_worker_of_each_other_machine_asks_for_all() -> None:
    machines = ["a", "b", "b", "a", "c"]
    offsets = {"a": 0.0, "b": 500.0, "c": -3.0}
    queues: dict[tuple[int, int], queue.Queue[float]] = {(i, j): queue.Queue() for i in range(5) for j in range(5)}
    found: dict[int, list[Alignment]] = {}

    def work(rank: int) -> None:
        def clock() -> float:
            return time.perf_counter() + offsets[machines[rank]]

        mine = clocks.Clocks(rank, machines, QueueWire(rank, queues), clock)
        mine.start()
        found[rank] = mine.finish()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [[each.workers for each in found[rank]] for rank in range(5)] == [[(0, 3)], [(1, 2)], [], [], [(4,)]]
    assert found[0] == [Alignment(workers=(0, 3))]
    for rank, ahead_s in ((1, -500.0), (4, 3.0)):
        (alignment,) = found[rank]
        assert abs(alignment.ahead_s - ahead_s) <= alignment.error_s


def time_namespaces() -> str:
    """Why there are none to be had, or nothing."""
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    tried = subprocess.run(["unshare", "-T", "--monotonic", "5", "--fork", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "no time namespace can be made here (needs root)"


@pytest.mark.processes
def test_a_run_on_two_clocks_has_one_time(tmp_path: Path) -> None:
    """The second worker lives in a time namespace whose clock is 5,000 seconds ahead."""
    if reason := time_namespaces():
        pytest.skip(reason)
    job, plan = write_job(tmp_path, "conv"), write_plan(tmp_path, "conv", (1, 1), "1f1b", 2)
    run = RunDirectory(tmp_path / "run")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "penstock", "train", str(job), str(plan), "--run-dir", str(run.path)]
    workers = [
        subprocess.Popen(
            [*(["unshare", "-T", "--monotonic", "5000", "--fork", "--kill-child"] if rank else []), *command],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        errors = [worker.communicate(timeout=120)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], errors
    loaded, trace, result = run.load()
    assert [clock.workers for clock in result.clocks] == [(0,), (1,)]
    aligned = result.clocks[1]
    assert abs(aligned.ahead_s + 5000) <= aligned.error_s < 1.0
    ended_s = {event.action.result: event.end_s for event in trace.events if event.action.of_microbatch}
    for event in trace.events:
        for need in dependencies(event.action, loaded.pipeline):
            assert event.start_s >= ended_s[need] - aligned.error_s
