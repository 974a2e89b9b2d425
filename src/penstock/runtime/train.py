"""Training as one worker process sees it: join the others, run the epochs, keep checkpoints, hand in the trace."""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock import codec
from penstock.clocks import Alignment
from penstock.errors import JobError, PlanError, WorkerError
from penstock.job import Job
from penstock.limits import is_usable
from penstock.plan import Plan
from penstock.plan_costs import PlanCosts
from penstock.record import Mark, Start, Writer
from penstock.run import Evaluation, Result, RunDirectory
from penstock.runtime.assemble import Assembly, assemble, make_epoch
from penstock.runtime.checkpoint import Checkpoint, clean
from penstock.runtime.clocks import Clocks, clocks_of
from penstock.runtime.evaluate import Evaluator
from penstock.runtime.events import EventLog, beginning_and_newest
from penstock.runtime.handed_in import edge_errors, of_stage, on_one_clock, per_minibatch
from penstock.runtime.keeper import Keeper, Save, save_together
from penstock.runtime.links import Links, make_links, talking_pairs
from penstock.runtime.losses import LossLog
from penstock.runtime.machine import share_of_machine
from penstock.runtime.measure import device_kind
from penstock.runtime.memory import MemoryMeter
from penstock.runtime.progress import Listener, Progress, ProgressLine
from penstock.runtime.scalars import Scalars
from penstock.runtime.state import state_of
from penstock.runtime.sync import sync_groups
from penstock.runtime.transport import short_reason
from penstock.sampling import Epoch
from penstock.schedule import Action, Kind
from penstock.trace import Event, merge

MOST_AT_ONCE = 100_000
"""microbatches times workers"""


@dataclass(frozen=True, kw_only=True)
class Options:
    run: RunDirectory
    resume: Path | None = None
    """a checkpoint to go on from"""
    init: Path | None = None
    """a file of weights to start from"""
    timeout_s: float = 300.0
    checkpoint_every: int = 500
    """minibatches"""
    keep_checkpoints: int = 3
    """the newest that stay"""
    quiet: bool = False
    tensorboard: Path | None = None
    """a directory for TensorBoard, if it is to follow"""

    def __post_init__(self) -> None:
        if self.resume is not None and self.init is not None:
            raise JobError("--resume goes on with a run, --init starts one from given weights; give one of them")


def train_worker(job: Job, plan: Plan, options: Options) -> None:
    """Run this process's part of the plan; the launcher (or torchrun) has said which, in the environment."""
    say_at_first("the workers meet", options)
    with worker_process(plan, options.timeout_s) as device:
        groups = sync_groups(plan, together=job.updates_together or job.evaluation is not None)
        links = make_links(groups, talking_pairs(plan), device=device, timeout_s=options.timeout_s)
        say_at_first("the workers capture the model and build their stages", options)
        assembly = assemble(
            job,
            plan,
            transport=links.transport,
            clock=time.perf_counter,
            device=device,
            timeout_s=options.timeout_s,
        )
        # gloo also where the workers compute on GPUs: what checkpoints exchange and write is in host memory
        aside = dist.new_group(backend="gloo", timeout=timedelta(seconds=options.timeout_s))
        gc.freeze()  # the model and torch itself will not become garbage: spare the collector from looking at them
        _Training(assembly, options, links, save_together(aside), clocks_of(aside)).run()


def say_at_first(words: str, options: Options) -> None:
    """What is under way before there is any progress to show, once for all workers."""
    if os.environ["RANK"] == "0" and not options.quiet:
        sys.stderr.write(f"{words}\n")
        sys.stderr.flush()


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
    def __init__(self, assembly: Assembly, options: Options, links: Links, save: Save, clocks: Clocks) -> None:
        self.job, self.plan, self.worker = assembly.job, assembly.plan, assembly.worker
        self.assembly, self.options, self.run_directory = assembly, options, options.run
        self.rank, self.links, self.clocks = self.worker.rank, links, clocks
        self.worker.events = EventLog.one_of(len(self.plan.devices))
        self.store = dist.distributed_c10d._get_default_store()
        self.state = state_of(assembly)
        self.keeper = Keeper(
            self.state,
            options.run,
            rank=self.rank,
            save=save,
            every=options.checkpoint_every,
            keep=options.keep_checkpoints,
            timeout_s=options.timeout_s,
            complete=self._complete,
        )
        self.losses = LossLog(self.job.on_nonfinite_loss, options.run.newest_checkpoint)
        self.sizes: tuple[int, ...] = ()
        """samples of each microbatch so far"""
        self.minibatches: tuple[int, ...] = ()
        """microbatches of each minibatch so far"""
        self.samples_done = 0
        self.seconds = 0.0
        self._segment_start_s = 0.0
        self._origin_s = 0.0
        self._rounds = 0
        self.evaluator = None if self.job.evaluation is None else Evaluator(assembly, self.job.evaluation)
        self.evaluations: tuple[Evaluation, ...] = ()
        self.stopped_early = False
        self._meetings = 0

    def run(self) -> None:
        done = self._start()
        self.progress = self._make_progress(done)
        self.clocks.start()
        self._origin_s = self._meet()
        self.worker.clock = lambda: time.perf_counter() - self._origin_s
        stops = self._is_evaluation_due(done) and self._evaluate(done)  # the checkpoint was taken just before
        for part in () if stops else parts_left(self.job, self.plan, done):
            done = self._run_part(part, done)
            if self._is_evaluation_due(done) and self._evaluate(done):
                self.keeper.take(done)
                break
        self.keeper.finish()
        if not self.sizes:
            raise JobError(
                f"nothing is left to train: the checkpoint has all {self.job.epochs} epochs; raise Job.epochs"
            )
        self._tell(done="")
        self._meet()
        self.progress.pass_on(self.worker.clock())  # with everybody's last word
        self._hand_in()
        self.progress.end("stopped early" if self.stopped_early else "finished")

    def _make_progress(self, done: Checkpoint) -> Progress:
        """At worker 0 with those who are to hear of it."""
        listeners: list[Listener] = []
        if self.rank == 0:
            start = what_is_to_come(self.job, self.plan, done)
            listeners.append(Writer(self.run_directory.progress, start))
            if not self.options.quiet:
                listeners.append(ProgressLine(start.samples))
            if self.options.tensorboard is not None:
                listeners.append(Scalars(self.options.tensorboard, start))
        weights = [
            parameter for stage in self.worker.stages.values() for parameter in stage.weights.parameters.values()
        ]
        memory = MemoryMeter(self.worker.device, sum(parameter.nbytes for parameter in weights))
        return Progress(self.store, self.rank, len(self.plan.devices), memory, listeners)

    def _is_evaluation_due(self, done: Checkpoint) -> bool:
        if self.evaluator is None or (self.evaluations and self.evaluations[-1].steps >= done.steps):
            return False
        every = self.job.evaluate_every or sys.maxsize
        at_end = done.minibatches == len(make_epoch(self.job, self.plan, done.epoch).minibatches)
        return at_end or (done.minibatches > 0 and done.minibatches % every == 0)

    def _evaluate(self, done: Checkpoint) -> bool:
        """Whether to stop. All workers find the same values, so they all stop or none does."""
        assert self.evaluator is not None
        found = {name: value if is_usable(value) else None for name, value in self.evaluator.run().items()}
        self.evaluations += (Evaluation(epoch=done.epoch, steps=done.steps, values=found),)
        stop = self.job.early_stop
        self.stopped_early = stop is not None and stop.stops([e.values.get(stop.metric) for e in self.evaluations])
        words = str(self.evaluations[-1]) + ("; stopped early" if self.stopped_early else "")
        now_s = self.worker.clock()
        self.progress.mark(Mark(at_s=now_s, kind="evaluation", text=words, minibatch=done.steps, values=found))
        return self.stopped_early

    def _run_part(self, part: Epoch, before: Checkpoint) -> Checkpoint:
        """Fill the pipeline, run, and drain it; checkpoints are taken as it runs."""
        segment = self.assembly.segment(part, len(self.sizes), self._rounds)
        is_last = part.number == self.job.epochs - 1 and part.is_end
        done = self.keeper.expect(segment.schedule, part, before, is_last=is_last)
        self._segment_start_s = self.worker.clock()
        self.worker.on_action = partial(self._after, part=part, base=len(self.sizes))
        self.worker.run(segment)
        self._meet()
        self.seconds += self.worker.clock() - self._segment_start_s
        self.sizes += part.samples
        self.minibatches += part.minibatches
        self._rounds += max(len(rounds) for rounds in segment.schedule.rounds)
        return done

    def _after(self, action: Action, part: Epoch, base: int) -> None:
        self.keeper.after(action)
        if action.result.kind is Kind.BACKWARD:
            samples = part.samples[action.index]
            found = self.worker.stages[action.stage].module.take_loss(action.index, samples)
            if found is not None:
                self.losses.add(base + action.index, found, part.minibatches_before[action.index])
            if action.stage == 0:
                self.samples_done += samples
        now_s = self.worker.clock()
        if action.kind is Kind.FORWARD:  # when most is kept for backwards to come
            self.progress.memory.look(now_s)
        if self.progress.is_due(now_s):
            first = base if action.of_microbatch else self._rounds
            self._tell(str(action._replace(index=first + action.index)))
            self.progress.pass_on(now_s)

    def _tell(self, done: str) -> None:
        self.progress.tell(
            self.worker.clock(),
            busy_s=self.worker.busy_s,
            samples=self.samples_done,
            loss=self.losses.recent(),
            done=done,
        )

    def _complete(self, done: Checkpoint) -> Checkpoint:
        """With what else a run that goes on must know."""
        now_s, words = self.worker.clock(), f"checkpoint after {done.steps} minibatches"
        self.progress.mark(Mark(at_s=now_s, kind="checkpoint", text=words, minibatch=done.steps))
        scaler = self.worker.scaler
        scale = (scaler.scale, scaler.good_updates) if scaler is not None else None
        return replace(done, loss_scale=scale, evaluations=self.evaluations)

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

    def _start(self) -> Checkpoint:
        """Where training begins, with the weights that it begins with."""
        if self.rank == 0:
            clean(self.run_directory.checkpoints)
        if self.options.resume is not None:
            done = self.state.restore(self.options.resume)
            done.check_job(self.job, self.options.resume)
            if self.worker.scaler is not None and done.loss_scale is not None:
                self.worker.scaler.scale, self.worker.scaler.good_updates = done.loss_scale
            self.evaluations = done.evaluations
            return replace(done, names=self.state.names)
        if self.options.init is not None:
            self.state.initialise(self.options.init)
        return Checkpoint.at_start(self.job, self.state.names)

    def _gather(self, name: str, part: Any) -> list[Any]:
        """Everybody's part at worker 0 (elsewhere nothing), through the store, as JSON."""
        self.store.set(f"penstock/{name}/{self.rank}", json.dumps(part))
        if self.rank != 0:
            return []
        return [json.loads(self.store.get(f"penstock/{name}/{rank}")) for rank in range(len(self.plan.devices))]

    def _hand_in(self) -> None:
        """Worker 0 writes what all have recorded."""
        events = self._gather("events", [self._origin_s, self.worker.events.packed()])
        clocks = self._gather("clocks", codec.encode(self.clocks.finish()))
        losses = self._gather("losses", [[m, *each] for m, each in self.losses.terms.items()])
        links = self._gather("links", {f"{low}-{high}": name for (low, high), name in self.links.chosen.items()})
        kinds = self._gather("kinds", device_kind(self.worker.device))
        lost = self._gather("compression", [[*key, errors] for key, errors in self.worker.mailbox.meter.errors.items()])
        ages = self._gather("staleness", {i: stage.weights.staleness for i, stage in self.worker.stages.items()})
        if self.rank == 0:
            aligned = [codec.decode(Alignment, each) for found in clocks for each in found]
            beginning, newest_events = beginning_and_newest(on_one_clock(events, aligned))
            newest = self.run_directory.newest_checkpoint()
            result = Result(
                samples=sum(self.sizes),
                seconds=self.seconds,
                losses=per_minibatch(itertools.chain.from_iterable(losses), self.minibatches),
                checkpoint=str(newest.relative_to(self.run_directory.path)) if newest else None,
                device_kinds={str(rank): kind for rank, kind in enumerate(kinds)},
                links={pair: name for part in links for pair, name in part.items()},
                evaluations=self.evaluations,
                stopped_early=self.stopped_early,
                compression=tuple(edge_errors(self.plan, itertools.chain.from_iterable(lost))),
                staleness=tuple(of_stage(ages, index) for index in range(len(self.plan.stages))),
                clocks=tuple(aligned),
            )
            codec.save(self.plan, self.run_directory.plan)
            self._save_trace(newest_events, self.run_directory.trace)
            self._save_trace(beginning, self.run_directory.beginning)
            codec.save(result, self.run_directory.result)
        self._meet()

    def _save_trace(self, events: Iterable[Iterable[Event]] | None, path: Path) -> None:
        if events is None:
            path.unlink(missing_ok=True)
        else:
            codec.save(merge("measured", self.plan.worker_names, self.sizes, events), path)


def parts_left(job: Job, plan: Plan, done: Checkpoint) -> Iterator[Epoch]:
    """What is left to train, in parts of which a schedule is made each.

    Every worker makes the action lists of all. Between two parts the pipeline drains, which costs little beside them.
    """
    most = max(1, MOST_AT_ONCE // (plan.microbatches * len(plan.devices)))
    for number in range(done.epoch, job.epochs):
        epoch = make_epoch(job, plan, number)
        first = done.minibatches if number == done.epoch else 0
        yield from replace(epoch, first_minibatch=first).parts(most, job.evaluate_every or most)


def what_is_to_come(job: Job, plan: Plan, done: Checkpoint) -> Start:
    costs = PlanCosts(plan)
    epochs, per_epoch = job.epochs - done.epoch, len(make_epoch(job, plan, 0).minibatches)
    return Start(
        model=plan.profile.model,
        schedule=plan.schedule,
        workers=plan.worker_names,
        samples=epochs * len(job.data) - min(done.minibatches * job.batch_size, len(job.data)),
        minibatches=epochs * per_epoch - done.minibatches,
        first_minibatch=done.steps,
        began_unix_s=time.time(),
        samples_per_s=plan.predicted_samples_per_s,
        memory_bytes=tuple(round(costs.memory_bytes(worker)) for worker in range(len(plan.devices))),
    )
