"""What it costs to record a run: the same pipeline by turns with and without, in the same two processes.

Without, nothing is timed or kept. With, every action is timed and logged, memory is looked at, workers tell how it
goes, and worker 0 writes it down: all that training does for reports and watchers.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from penstock import codec
from penstock.bench.contenders import TIMEOUT_S, Ours
from penstock.bench.jobs import bench_job, bench_profile
from penstock.bench.rows import Findings, Row, at_least, at_most
from penstock.cluster import local_cluster
from penstock.plan import Plan
from penstock.planner import Hints, make_plan
from penstock.record import Start, Writer
from penstock.runtime.links.choice import choose_links
from penstock.runtime.machine.machine import share_of_machine
from penstock.runtime.machine.memory import MemoryMeter
from penstock.runtime.peers.peers import Peers
from penstock.runtime.process.joining import worker_process
from penstock.runtime.process.launch import launch_workers
from penstock.runtime.process.progress import Progress
from penstock.runtime.worker.events import EventLog
from penstock.runtime.worker.worker import Segment
from penstock.schedule import Action, Kind

CASES = ("vgg", "transformer")
WORKERS = 2
ROUNDS = 32
ROUND_S = 0.7
"""about how long each runs at a time"""
TARGET = 0.99
ALONE = 2000
"""actions to time the recording of"""


def run() -> Findings:
    rows: list[Row] = []
    for case in CASES:
        rows += _compared(case)
    return Findings(rows)


def _compared(case: str) -> Iterator[Row]:
    sys.stderr.write(f"bench trace: {case}\n")
    with share_of_machine(threads=1):
        profile = bench_profile(bench_job(case), repeats=5)
    plan = make_plan(profile, local_cluster(WORKERS), hints=Hints(replicas=(1, 1)))
    with tempfile.TemporaryDirectory() as name:
        codec.save(plan, Path(name) / "plan.json")
        launch_workers(["-m", "penstock.bench.trace", case, name], WORKERS, threads=1)
        found = json.loads((Path(name) / "found").read_text())
    recorded, bare = (statistics.median(found[which]) for which in ("recorded", "bare"))
    yield at_least(f"{case}, asynchronous", "samples/s recorded / not recorded", recorded, bare, TARGET)
    share = found["each_s"] * found["actions"] * bare / plan.profile.batch_size
    yield at_most(f"{case}, asynchronous", "us to record an action, by itself", found["each_s"] * 1e6)
    yield at_most(f"{case}, asynchronous", "share of a worker's time, from that", share, 1 - TARGET)


class _Nowhere(EventLog):
    def add(self, action: Action, offset: int, start_s: float, end_s: float) -> None:
        pass


def main(case: str, directory: Path) -> None:
    plan = codec.load(Plan, directory / "plan.json")
    with worker_process(plan, TIMEOUT_S) as (peers, device):
        links = choose_links(peers, [tuple(range(WORKERS))], [(0, 1)], device=device)
        ours = Ours(bench_job(case), plan, links.transport)
        minibatches = max(8, round(ROUND_S / plan.prediction.seconds_per_minibatch))
        ways = {"recorded": partial(_recorded, ours, peers, directory / "progress.jsonl"), "bare": partial(_bare, ours)}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for round_index in range(ROUNDS + 1):
            # each goes first every other time, so that a machine that speeds up or slows down favours none
            for name in sorted(ways, reverse=round_index % 2 == 0):
                ways[name]()
                rate = _rate(ours, minibatches)
                if round_index > 0:  # the first round warms caches and learns the shapes
                    rates[name].append(rate)
        ways["recorded"]()
        each_s = _seconds_to_record(ours)
        if dist.get_rank() == 0:
            actions = len(ours.assembly.plan.schedule_for([1] * minibatches).programs[0]) / minibatches
            found = {**rates, "actions": actions, "each_s": each_s}
            (directory / "found").write_text(json.dumps(found))
        dist.barrier()


def _bare(ours: Ours) -> None:
    worker = ours.assembly.worker
    worker.clock, worker.events, worker.on_action = lambda: 0.0, _Nowhere(), lambda action: None


def _recorded(ours: Ours, peers: Peers, path: Path) -> None:
    """As training does it."""
    worker, device = ours.assembly.worker, ours.assembly.worker.device
    origin_s = time.perf_counter()
    worker.clock, worker.events = lambda: time.perf_counter() - origin_s, EventLog.one_of(WORKERS)
    start = Start(
        model="",
        schedule="",
        workers=ours.plan.worker_names,
        samples=1,
        minibatches=1,
        first_minibatch=0,
        began_unix_s=0.0,
        samples_per_s=None,
        memory_bytes=(0,) * WORKERS,
    )
    listeners = [Writer(path, start)] if worker.rank == 0 else []
    progress = Progress(peers, MemoryMeter(device, 0), listeners)
    peers.meet("record")

    def after(action: Action) -> None:
        now_s = worker.clock()
        if action.kind is Kind.FORWARD:
            progress.memory.look(now_s)
        if progress.is_due(now_s):
            progress.tell(now_s, busy_s=worker.busy_s, samples=0, loss=None, done=str(action))
            progress.pass_on(now_s)

    worker.on_action = after


def _seconds_to_record(ours: Ours) -> float:
    """What a worker does for an action besides doing it, at the pace of actions of a millisecond."""
    worker, action, spent_s = ours.assembly.worker, Action(0, Kind.FORWARD, 0), 0.0
    for index in range(ALONE):
        begin_s = time.perf_counter()
        start_s, end_s = worker.clock(), worker.clock()
        worker.events.add(action, index, start_s, end_s)
        worker.on_action(action)
        spent_s += time.perf_counter() - begin_s
        time.sleep(1e-3)
    return spent_s / ALONE


def _rate(ours: Ours, minibatches: int) -> float:
    """Samples per second from the moment all begin to the moment the last has ended."""
    worker, schedule = ours.assembly.worker, ours.plan.schedule_for([1] * minibatches)
    segment = Segment(schedule=schedule, samples=[ours.size] * schedule.microbatches, feed=ours.feed)
    dist.barrier()
    start_s = time.perf_counter()
    worker.run(segment)
    dist.barrier()
    seconds = time.perf_counter() - start_s
    for stage in worker.stages.values():
        stage.module.losses.clear()
    return minibatches * ours.size / seconds


if __name__ == "__main__":
    torch.manual_seed(0)
    main(sys.argv[1], Path(sys.argv[2]))
