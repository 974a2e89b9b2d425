"""Runs a plan's workers as threads of the test process, over the local transport: the real worker, quickly."""

from __future__ import annotations

import functools
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models import make_job
from penstock.cluster import local_cluster
from penstock.job import Job
from penstock.plan import Plan, Prediction, Stage
from penstock.profile import Profile
from penstock.run import RunDirectory
from penstock.runtime.checkpoint.checkpoint import save_shard
from penstock.runtime.checkpoint.keeper import Save
from penstock.runtime.machine.memory import MemoryMeter
from penstock.runtime.measure.measure import profile_job
from penstock.runtime.peers.threads import Board, ThreadPeers
from penstock.runtime.process.clocks import Clocks
from penstock.runtime.process.options import TrainOptions
from penstock.runtime.process.train import Training
from penstock.runtime.process.verify import compare, save_gradients
from penstock.runtime.transport.threads import LocalExchange, LocalTransport
from penstock.runtime.worker.assemble import Assembly, assemble
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


class Vanished(BaseException):
    """A worker ends and nobody is told, as where a machine loses power."""


def run_in_threads(
    plan: Plan,
    make: Callable[[], Job],
    *,
    prepare: Callable[[Assembly], None] = lambda assembly: None,
    work: Callable[[Assembly], None] | None = None,
    then: Callable[[Assembly], None] = lambda assembly: None,
    timeout_s: float = 30.0,
    transport: Callable[[int, LocalExchange], LocalTransport] = LocalTransport,
    bucket_bytes: int = FEW_BYTES,
    errors: dict[int, BaseException] | None = None,
) -> list[Assembly]:
    """Every worker assembled from a job of its own, at ``work`` and ``then``; by default it trains, and nothing stays
    on disk. Raises the first error of any; ``errors`` has all of them.

    ``prepare`` is what one thread does for all, one after another, as capture must be.
    """
    if work is None:
        with tempfile.TemporaryDirectory() as directory:
            return _Threads(plan, timeout_s, errors).train(
                make,
                RunDirectory(Path(directory)),
                TrainOptions(quiet=True, timeout_s=timeout_s),
                prepare=prepare,
                then=then,
                transport=transport,
                bucket_bytes=bucket_bytes,
            )
    threads = _Threads(plan, timeout_s, errors)
    assemblies = threads.assemble(make, prepare, transport, bucket_bytes)
    threads.run({assembly.worker.rank: partial(work, assembly) for assembly in assemblies})
    return assemblies


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

    def abort(self) -> None:
        """A worker is gone: nobody waits for it any longer."""
        self._everyone.abort()


class _Threads:
    """The workers of a plan as threads, and what ties them to each other."""

    def __init__(self, plan: Plan, timeout_s: float, errors: dict[int, BaseException] | None = None) -> None:
        self.plan, self.timeout_s = plan, timeout_s
        self.workers = len(plan.devices)
        self.exchange, self.board, self.together = LocalExchange(), Board(), Together(self.workers)
        self.errors = {} if errors is None else errors

    def assemble(
        self,
        make: Callable[[], Job],
        prepare: Callable[[Assembly], None],
        transport: Callable[[int, LocalExchange], LocalTransport],
        bucket_bytes: int,
    ) -> list[Assembly]:
        assemblies = [
            assemble(
                make(),
                self.plan,
                transport=transport(rank, self.exchange),
                clock=time.perf_counter,
                device=CPU,
                timeout_s=self.timeout_s,
            )
            for rank in range(self.workers)
        ]
        for assembly in assemblies:
            assembly.worker.sync.bucket_bytes = bucket_bytes
            prepare(assembly)
        return assemblies

    def run(self, work: Mapping[int, Callable[[], None]]) -> None:
        def run(rank: int) -> None:
            try:
                work[rank]()
            except BaseException as error:
                self.errors[rank] = error
                if not isinstance(error, Vanished):
                    self.fail(f"worker {rank}: {error}")

        threads = [threading.Thread(target=run, args=(rank,)) for rank in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in self.errors.values():
            raise error

    def fail(self, reason: str) -> None:
        self.exchange.fail(reason)
        self.board.fail(reason)
        self.together.abort()

    def train(
        self,
        make: Callable[[], Job],
        run: RunDirectory,
        options: TrainOptions,
        *,
        save: Save | None = None,
        prepare: Callable[[Assembly], None] = lambda assembly: None,
        then: Callable[[Assembly], None] = lambda assembly: None,
        transport: Callable[[int, LocalExchange], LocalTransport] = LocalTransport,
        bucket_bytes: int = FEW_BYTES,
    ) -> list[Assembly]:
        """The training loop of the worker processes."""
        assemblies = self.assemble(make, prepare, transport, bucket_bytes)
        trainings = [self._training(assembly, run, options, save) for assembly in assemblies]

        def work(training: Training) -> None:
            training.run()
            then(training.assembly)

        try:
            self.run({training.rank: partial(work, training) for training in trainings})
        finally:
            self.together.abort()
            for training in trainings:
                if training.keeper._writing is not None:  # of a run that failed
                    training.keeper._writing.join(self.timeout_s)
        return assemblies

    def _training(self, assembly: Assembly, run: RunDirectory, options: TrainOptions, save: Save | None) -> Training:
        rank = assembly.worker.rank
        return Training(
            assembly,
            run,
            options,
            peers=ThreadPeers(self.board, rank, self.workers, timeout_s=self.timeout_s),
            links={},
            save=save or self.together.save,
            clocks=Clocks(rank, ["one for all"] * self.workers, _NoWire()),
            meter=lambda: MemoryMeter(CPU, 0),
        )


class _NoWire:
    """Threads read the same clock, so none is compared."""

    def send(self, moment_s: float, to: int) -> None:
        raise AssertionError

    def receive(self, source: int) -> float:
        raise AssertionError


class Losses(dict[int, Any]):
    """The loss of each microbatch as the last stage finds it, given as ``prepare``; of the last epoch in the end."""

    def __call__(self, assembly: Assembly) -> None:
        for stage in assembly.worker.stages.values():
            stage.module.take_loss = partial(self._take, stage.module.take_loss, stage.module.losses)  # type: ignore[method-assign]

    def _take(self, take: Callable[[int, int], Any], losses: Mapping[int, Any], microbatch: int, samples: int) -> Any:
        if microbatch in losses:
            self[microbatch] = losses[microbatch]
        return take(microbatch, samples)


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
    timeout_s: float = 30.0,
    errors: dict[int, BaseException] | None = None,
) -> list[Assembly]:
    """Train all epochs, or what is left of them, with checkpoints."""

    def prepare(assembly: Assembly) -> None:
        assembly.worker.on_action = partial(on_action, assembly)

    options = TrainOptions(
        quiet=True, timeout_s=timeout_s, resume=resume, init=init, checkpoint_every=every, keep_checkpoints=keep
    )
    return _Threads(plan, timeout_s, errors).train(make, run, options, save=save, prepare=prepare)


def fail_at(worker: int, action: str, error: BaseException | None = None) -> Callable[[Assembly, Action], None]:
    """A fault for ``train_keeping(on_action=...)``: the worker fails right after the action, such as 1B3."""

    def after(assembly: Assembly, done: Action) -> None:
        if assembly.worker.rank == worker and str(done) == action:
            raise error or ValueError(f"injected at {action}")

    return after


def check_same_gradients(plan: Plan, make: Callable[[], Job], tolerance: float = 1e-5) -> None:
    """What `penstock verify` does, on threads: the loss and every gradient are those of one process."""

    with tempfile.TemporaryDirectory() as directory:
        run_in_threads(plan, make, work=lambda assembly: save_gradients(assembly, Path(directory)))
        found = compare(make(), plan, Path(directory))
    assert found.passed, found
    assert found.largest_difference < tolerance, found
    assert found.gradients >= len(plan.profile.graph.parameters)
