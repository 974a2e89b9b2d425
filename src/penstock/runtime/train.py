"""Training as one worker process sees it: join the others, run the epochs, keep checkpoints, hand in the trace."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock import codec
from penstock.errors import JobError, PlanError, WorkerError
from penstock.job import Job
from penstock.plan import Plan
from penstock.run import Result, RunDirectory
from penstock.runtime import checkpoint
from penstock.runtime.assemble import Assembly, assemble, make_epoch
from penstock.runtime.machine import share_of_machine
from penstock.runtime.measure import device_kind
from penstock.runtime.progress import ProgressLine, Report
from penstock.runtime.sync import sync_groups
from penstock.runtime.transport import TorchTransport, short_reason
from penstock.sampling import Epoch
from penstock.schedule import Action, Kind, Staleness
from penstock.trace import Event, merge


@dataclass(frozen=True, kw_only=True)
class Options:
    run: RunDirectory
    resume: Path | None = None
    timeout_s: float = 300.0
    checkpoint_every: int = 500
    """minibatches; the pipeline drains for a checkpoint"""
    quiet: bool = False


def train_worker(job: Job, plan: Plan, options: Options) -> None:
    """Run this process's part of the plan; the launcher (or torchrun) has said which, in the environment."""
    with worker_process(plan, options.timeout_s) as device:
        transport = TorchTransport(sync_groups(plan, clips=job.clip_norm is not None))
        assembly = assemble(
            job,
            plan,
            transport=transport,
            clock=time.perf_counter,
            device=device,
            timeout_s=options.timeout_s,
        )
        torch.manual_seed(hash((job.seed, transport.rank)) % 2**63)  # else replicas would drop out the same units
        gc.freeze()  # the model and torch itself will not become garbage: spare the collector from looking at them
        _Training(assembly, options).run()


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
    local, local_workers = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with share_of_machine(threads, local, local_workers) as device:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s))
        yield device
    # Only a worker that has done its part says goodbye: one that fails reports first, and its exit tells the others.
    dist.destroy_process_group()


class _Training:
    def __init__(self, assembly: Assembly, options: Options) -> None:
        self.job, self.plan, self.worker = assembly.job, assembly.plan, assembly.worker
        self.assembly, self.options, self.run_directory = assembly, options, options.run
        self.rank = self.worker.rank
        self.store = dist.distributed_c10d._get_default_store()
        self.losses: dict[int, tuple[float, int]] = {}
        """microbatch of the run -> loss and samples"""
        self.sizes: tuple[int, ...] = ()
        """samples of each microbatch so far"""
        self.minibatches: tuple[int, ...] = ()
        """microbatches of each minibatch so far"""
        self.samples_done = 0
        self.seconds = 0.0
        self._published_s = 0.0
        self._segment_start_s = 0.0
        self._origin_s = 0.0
        self._rounds = 0
        self._meetings = 0
        self._line: ProgressLine | None = None

    def run(self) -> None:
        done = self._restore()
        if self.rank == 0 and not self.options.quiet:
            self._line = ProgressLine(self._samples_left(done))
        self._origin_s = self._meet()
        self.worker.clock = lambda: time.perf_counter() - self._origin_s
        for number in range(done.epoch, self.job.epochs):
            epoch = make_epoch(self.job, self.plan, number)
            if number == done.epoch:
                epoch = replace(epoch, first_minibatch=done.minibatches)
            for part in epoch.parts(self.options.checkpoint_every):
                self._run_part(part)
                done = self._checkpoint(part, done.steps)
        if self._line:
            self._line.close()
        if not self.sizes:
            raise JobError(
                f"nothing is left to train: the checkpoint has all {self.job.epochs} epochs; raise Job.epochs"
            )
        self._hand_in()

    def _run_part(self, part: Epoch) -> None:
        """Fill the pipeline, run, and drain it."""
        segment = self.assembly.segment(part, len(self.sizes), self._rounds)
        self._segment_start_s = self.worker.clock()
        self.worker.on_action = partial(self._after, samples=part.samples, base=len(self.sizes))
        self.worker.run(segment)
        self._meet()
        self.seconds += self.worker.clock() - self._segment_start_s
        self.sizes += part.samples
        self.minibatches += part.minibatches
        self._rounds += max(len(rounds) for rounds in segment.schedule.rounds)

    def _after(self, action: Action, samples: tuple[int, ...], base: int) -> None:
        losses = self.worker.stages[action.stage].module.losses
        if action.of_microbatch and action.index in losses:
            self.losses[base + action.index] = (losses.pop(action.index), samples[action.index])
        if action.result.kind is Kind.BACKWARD and action.stage == 0:
            self.samples_done += samples[action.index]
        now_s = self.worker.clock()
        if now_s - self._published_s > 0.25 and not self.options.quiet:
            self._published_s = now_s
            self._publish(now_s)

    def _publish(self, now_s: float) -> None:
        """Tell worker 0 how it goes; worker 0 shows what all have told."""
        elapsed_s = self.seconds + now_s - self._segment_start_s
        recent = [loss for loss, _ in itertools.islice(reversed(self.losses.values()), 20)]
        report = Report(
            samples=self.samples_done,
            busy=self.worker.busy_s / elapsed_s if elapsed_s > 0 else 0.0,
            loss=sum(recent) / len(recent) if recent else None,
        )
        self.store.set(f"penstock/progress/{self.rank}", json.dumps(report._asdict()))
        if self._line:
            keys = [f"penstock/progress/{rank}" for rank in range(len(self.plan.devices))]
            reports = [Report(**json.loads(self.store.get(key))) for key in keys if self.store.check([key])]
            self._line.show(reports, elapsed_s)

    def _samples_left(self, done: checkpoint.Checkpoint) -> int:
        under_way = len(self.job.data) - min(done.minibatches * self.job.batch_size, len(self.job.data))
        return under_way + len(self.job.data) * (self.job.epochs - done.epoch - 1)

    def _meet(self) -> float:
        """Wait for all workers; returns the moment, which all take as the same."""
        self._meetings += 1
        keys = [f"penstock/meeting-{self._meetings}/{rank}" for rank in range(len(self.plan.devices))]
        self.store.set(keys[self.rank], "here")
        try:
            dist.barrier()
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            whom = f"worker {', '.join(map(str, missing))}" if missing else "a worker that came and then ended"
            raise WorkerError(
                f"worker {self.rank} waited for {whom} at the end of a part "
                f"(at most {self.options.timeout_s:g} s): {short_reason(error)}"
            ) from error
        return time.perf_counter()

    def _restore(self) -> checkpoint.Checkpoint:
        if self.options.resume is None:
            return checkpoint.Checkpoint(epoch=0, minibatches=0, steps=0, files={})
        for stage in self.worker.stages.values():
            index = checkpoint.restore(self.options.resume, stage.module.section, stage.weights)
        return index

    def _checkpoint(self, part: Epoch, steps_before: int) -> checkpoint.Checkpoint:
        """The first replica of every stage writes; a tied parameter is written by the first stage that has it."""
        steps = steps_before + len(part.minibatches)
        directory = checkpoint.directory_of(self.run_directory.checkpoints, steps)
        written: dict[int, list[str]] = {}
        for index, stage in self.worker.stages.items():
            if self.rank == self.plan.pipeline.workers[index][0]:
                earlier = [layer for before in self.plan.stages[:index] for layer in before.layers]
                skip = frozenset(parameter.name for parameter in self.plan.profile.graph.parameters_of(earlier))
                section = stage.module.section
                written[index] = checkpoint.write_shard(directory, index, section, stage.weights, skip=skip)
        parts = self._gather(f"checkpoint-{steps}", written)
        files = checkpoint.shard_files({int(stage): names for part in parts for stage, names in part.items()})
        done = checkpoint.Checkpoint(
            epoch=part.number, minibatches=part.first_minibatch + len(part.minibatches), steps=steps, files=files
        )
        if self.rank == 0:
            checkpoint.commit(directory, done)
        self._meet()
        return done

    def _gather(self, name: str, part: Any) -> list[Any]:
        """Everybody's part at worker 0 (elsewhere nothing), through the store, as JSON."""
        self.store.set(f"penstock/{name}/{self.rank}", json.dumps(part))
        if self.rank != 0:
            return []
        return [json.loads(self.store.get(f"penstock/{name}/{rank}")) for rank in range(len(self.plan.devices))]

    def _hand_in(self) -> None:
        """Worker 0 writes what all have recorded."""
        events = self._gather("events", [codec.encode(event) for event in self.worker.events])
        losses = self._gather("losses", [[m, *pair] for m, pair in self.losses.items()])
        kinds = self._gather("kinds", device_kind(self.worker.device))
        ages = self._gather("staleness", {i: stage.weights.staleness for i, stage in self.worker.stages.items()})
        if self.rank == 0:
            parts = [[codec.decode(Event, item) for item in part] for part in events]
            newest = self.run_directory.newest_checkpoint()
            result = Result(
                samples=sum(self.sizes),
                seconds=self.seconds,
                losses=_per_minibatch(itertools.chain.from_iterable(losses), self.minibatches),
                checkpoint=str(newest.relative_to(self.run_directory.path)) if newest else None,
                device_kinds={str(rank): kind for rank, kind in enumerate(kinds)},
                staleness=tuple(_of_stage(ages, index) for index in range(len(self.plan.stages))),
            )
            codec.save(self.plan, self.run_directory.plan)
            codec.save(merge("measured", self.plan.worker_names, self.sizes, parts), self.run_directory.trace)
            codec.save(result, self.run_directory.result)
        self._meet()


def _of_stage(ages: Sequence[dict[str, dict[str, int]]], stage: int) -> Staleness:
    """What all replicas of a stage have counted."""
    total = Counter[int]()
    for part in ages:
        total.update({int(age): count for age, count in part.get(str(stage), {}).items()})
    return Staleness.counted(total)


def _per_minibatch(losses: Any, minibatches: Sequence[int]) -> tuple[float | None, ...]:
    """The mean loss of each minibatch over its samples."""
    by_microbatch = {int(m): (loss, samples) for m, loss, samples in losses}
    means: list[float | None] = []
    first = 0
    for count in minibatches:
        rows = [by_microbatch[m] for m in range(first, first + count) if m in by_microbatch]
        total = sum(samples for _, samples in rows)
        mean = sum(loss * samples for loss, samples in rows) / total
        means.append(mean if math.isfinite(mean) else None)
        first += count
    return tuple(means)
