"""Runs a plan's workers as threads of the test process, over the local transport: the real worker, quickly."""

from __future__ import annotations

import functools
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from models import make_job
from penstock.cluster import local_cluster
from penstock.job import Job
from penstock.plan import Plan, Prediction, Stage
from penstock.profile import Profile
from penstock.run import RunDirectory
from penstock.runtime.checkpoint.checkpoint import Checkpoint, save_shard
from penstock.runtime.checkpoint.keeper import Keeper, Save
from penstock.runtime.checkpoint.state import state_of
from penstock.runtime.measure.measure import profile_job
from penstock.runtime.process.train import parts_left
from penstock.runtime.process.verify import compare, save_gradients
from penstock.runtime.transport.threads import LocalExchange, LocalTransport
from penstock.runtime.worker.assemble import Assembly, assemble, make_epoch
from penstock.runtime.worker.worker import OwnStage
from penstock.schedule import Action, family
from penstock.schedule.builders import position_on

CPU = torch.device("cpu")
FEW_BYTES = 64
"""Of gradients that are summed together: so few that models as small as these have several times that."""


@functools.cache
def profile_of(name: str) -> Profile:
    return profile(make_job(name))


def profile(job: Job) -> Profile:
    torch.set_num_threads(1)
    return profile_job(
        job,
        clock=time.perf_counter,
        device=CPU,
        microbatch_size=job.batch_size,
        threads=1,
        repeats=1,
        progress=lambda done, total: None,
    )


def even_plan(profile: Profile, replicas: Sequence[int], schedule: str, microbatches: int = 1) -> Plan:
    """Layers shared out evenly over stages with these numbers of replicas."""
    return uneven_plan(profile, [(1,) * copies for copies in replicas], schedule, microbatches)


def looped_plan(
    profile: Profile, positions: int, laps: int, schedule: str, microbatches: int = 1, replicas: int = 1
) -> Plan:
    """Layers shared out evenly over so many stages on each worker, as the schedule lays them out."""
    plan = uneven_plan(profile, [(1,) * replicas] * (positions * laps), "gpipe", microbatches)
    stages = []
    for index, stage in enumerate(plan.stages):
        first = replicas * position_on(family(schedule).layout, index, positions)
        stages.append(replace(stage, devices=tuple(range(first, first + replicas)), in_flight=positions))
    return replace(plan, stages=tuple(stages), schedule=schedule)


def uneven_plan(profile: Profile, shares: Sequence[Sequence[int]], schedule: str, microbatches: int = 1) -> Plan:
    """Layers shared out evenly over stages whose replicas take these shares of the microbatches."""
    order, count = profile.graph.order, len(shares)
    sizes = [sum(each) for each in shares]
    cuts = [round(i * len(order) / count) for i in range(count + 1)]
    stages, device = [], 0
    for index, each in enumerate(shares):
        stages.append(
            Stage(
                layers=order[cuts[index] : cuts[index + 1]],
                devices=tuple(range(device, device + len(each))),
                in_flight=-(-sum(sizes[index:]) // sizes[index]),
                shares=tuple(each),
            )
        )
        device += len(each)
    return Plan(
        profile=profile,
        cluster=local_cluster(device),
        stages=tuple(stages),
        schedule=schedule,
        microbatches=microbatches,
        prediction=Prediction(seconds_per_minibatch=1.0, lower_bound_s=1.0, data_parallel_s=None, one_device_s=None),
    )


def only_stage(assembly: Assembly) -> OwnStage:
    (stage,) = assembly.worker.stages.values()
    return stage


def recomputing(plan: Plan, stages: Collection[int] | None = None) -> Plan:
    """The plan with these stages recomputing, by default all."""
    chosen = range(len(plan.stages)) if stages is None else stages
    return replace(plan, stages=tuple(replace(s, recompute=i in chosen) for i, s in enumerate(plan.stages)))


def with_batch_size(profile: Profile, batch_size: int) -> Profile:
    return replace(profile, batch_size=batch_size)


def run_in_threads(
    plan: Plan,
    make: Callable[[], Job],
    *,
    prepare: Callable[[Assembly], None] = lambda assembly: None,
    work: Callable[[Assembly], None] | None = None,
    timeout_s: float = 30.0,
    transport: Callable[[int, LocalExchange], LocalTransport] = LocalTransport,
    bucket_bytes: int = FEW_BYTES,
) -> list[Assembly]:
    """Every worker assembled from a job of its own and run for all epochs; raises the first error of any.

    ``prepare`` is what one thread does for all, one after another, as capture must be.
    """
    exchange, errors = LocalExchange(), []
    assemblies = [
        assemble(
            make(),
            plan,
            transport=transport(rank, exchange),
            clock=time.perf_counter,
            device=CPU,
            timeout_s=timeout_s,
        )
        for rank in range(len(plan.devices))
    ]

    for assembly in assemblies:
        assembly.worker.sync.bucket_bytes = bucket_bytes
        prepare(assembly)

    def run(assembly: Assembly) -> None:
        try:
            (work or train)(assembly)
        except BaseException as error:
            errors.append(error)
            exchange.fail(f"worker {assembly.worker.rank}: {error}")

    threads = [threading.Thread(target=run, args=(assembly,)) for assembly in assemblies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return assemblies


def train(assembly: Assembly) -> None:
    for number in range(assembly.job.epochs):
        assembly.worker.run(assembly.segment(make_epoch(assembly.job, assembly.plan, number)))


class Together:
    """Writes what all workers give, once all have come: what a process group does between processes."""

    def __init__(self, workers: int) -> None:
        self._everyone = threading.Barrier(workers, timeout=30.0)
        self._given: dict[str, Tensor] = {}

    def save(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        self._given |= tensors
        if self._everyone.wait() == 0:
            save_shard(directory, self._given, None)
            self._given = {}
        self._everyone.wait()


def train_keeping(
    plan: Plan,
    make: Callable[[], Job],
    run: RunDirectory,
    *,
    every: int = 1000,
    keep: int = 1000,
    resume: Path | None = None,
    init: Path | None = None,
    save: Save | None = None,
    on_action: Callable[[Assembly, Action], None] = lambda assembly, action: None,
) -> list[Assembly]:
    """Train all epochs, or what is left of them, with checkpoints."""
    together = save or Together(len(plan.devices)).save

    def work(assembly: Assembly) -> None:
        state, job, worker = state_of(assembly), assembly.job, assembly.worker
        keeper = Keeper(state, run, rank=worker.rank, save=together, every=every, keep=keep, timeout_s=30.0)
        done = Checkpoint.at_start(job, state.names) if resume is None else state.restore(resume)
        if init is not None:
            state.initialise(init)

        def after(action: Action) -> None:
            keeper.after(action)
            on_action(assembly, action)

        worker.on_action = after
        for part in parts_left(job, plan, done):
            segment = assembly.segment(part)
            is_last = part.number == job.epochs - 1 and part.is_end
            done = keeper.expect(segment.schedule, part, done, is_last=is_last)
            worker.run(segment)
        keeper.finish()

    return run_in_threads(plan, make, work=work)


def check_same_gradients(plan: Plan, make: Callable[[], Job], tolerance: float = 1e-5) -> None:
    """What `penstock verify` does, on threads: the loss and every gradient are those of one process."""

    with tempfile.TemporaryDirectory() as directory:
        run_in_threads(plan, make, work=lambda assembly: save_gradients(assembly, Path(directory)))
        found = compare(make(), plan, Path(directory))
    assert found.passed, found
    assert found.largest_difference < tolerance, found
    assert found.gradients >= len(plan.profile.graph.parameters)
