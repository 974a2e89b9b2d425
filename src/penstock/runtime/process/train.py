"""Training as one worker process sees it: join the others, run the epochs, keep checkpoints, hand in the trace."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from penstock import codec
from penstock.errors import JobError
from penstock.job import Job
from penstock.limits import is_usable
from penstock.plan import Plan
from penstock.plan_costs import PlanCosts
from penstock.record import Mark, Start, Writer
from penstock.run import Evaluation, Result, RunDirectory
from penstock.runtime.checkpoint.checkpoint import Checkpoint
from penstock.runtime.checkpoint.keeper import Keeper, Save, save_together
from penstock.runtime.checkpoint.state import state_of
from penstock.runtime.links.choice import Pair, choose_links, talking_pairs
from penstock.runtime.machine.machine import device_kind
from penstock.runtime.machine.memory import MemoryMeter, held_bytes
from penstock.runtime.peers.peers import Peers
from penstock.runtime.process.clocks import Clocks, GroupWire, clocks_of
from penstock.runtime.process.joining import worker_process
from penstock.runtime.process.loss_file import LossFile, LossLog, per_minibatch, read_rows
from penstock.runtime.process.opening import open_together
from penstock.runtime.process.options import TrainOptions
from penstock.runtime.process.placement import check_placement
from penstock.runtime.process.progress import Listener, Progress, ProgressLine
from penstock.runtime.process.scalars import Scalars
from penstock.runtime.process.worker_files import (
    Account,
    accounts_of,
    clear,
    edge_error,
    edge_errors,
    events_of,
    leave_files,
    losses_file,
    staleness_of,
)
from penstock.runtime.sync.sync import sync_groups
from penstock.runtime.worker.assemble import Assembly, assemble, make_epoch
from penstock.runtime.worker.evaluate import Evaluator
from penstock.runtime.worker.events import EventLog, beginning_and_newest
from penstock.runtime.worker.release import Share, release_other_layers
from penstock.sampling import Epoch
from penstock.schedule import Action, Kind
from penstock.trace import trace_of

MOST_AT_ONCE = 100_000
"""microbatches times workers"""

OpenRun = Callable[[Job, Plan, Path | None], AbstractContextManager[RunDirectory]]
"""Makes the directory of a run of this job under this plan, from that checkpoint if any, or takes a given one."""


def train_worker(
    job: Job,
    plan: Plan,
    options: TrainOptions,
    open_run: OpenRun,
    *,
    opened: Callable[[RunDirectory], object] = lambda run: None,
) -> RunDirectory:
    """Run this process's part of the plan; the launcher (or torchrun) has said which, in the environment.

    Worker 0 opens the directory of the run; returns it, at every worker. ``opened`` is told of it before
    training begins.
    """
    say_at_first("the workers meet", options)
    with worker_process(plan, options.timeout_s) as (peers, device), ExitStack() as stack:
        check_placement(plan, device, peers)
        run = open_together(peers, lambda: stack.enter_context(open_run(job, plan, options.resume)))
        opened(run)
        groups = sync_groups(plan, together=job.updates_together or job.evaluation is not None)
        links = choose_links(peers, groups, talking_pairs(plan), device=device)
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
        with peers.together("build its stages"):
            aside = dist.new_group(backend="gloo", timeout=timedelta(seconds=options.timeout_s))
        training = Training(
            assembly,
            run,
            options,
            peers=peers,
            links=links.chosen,
            save=save_together(peers, aside),
            clocks=clocks_of(peers, GroupWire(aside, peers.rank)),
            meter=lambda: _meter_and_freeze(device),
        )
        release_other_layers(training.shares)
        training.run()
    return run


def _meter_and_freeze(device: torch.device) -> MemoryMeter:
    """Called when everything is loaded."""
    meter = MemoryMeter(device, held_bytes(device))  # which asks the collector for all tensors, so it comes first
    gc.freeze()  # the model and torch itself will not become garbage: spare the collector from looking at them
    return meter


def say_at_first(words: str, options: TrainOptions) -> None:
    """What is under way before there is any progress to show, once for all workers."""
    if os.environ["RANK"] == "0" and not options.quiet:
        sys.stderr.write(f"{words}\n")
        sys.stderr.flush()


class Training:
    """The training loop of one worker. It is handed all that ties it to the others and to its process, so that workers
    may be processes or, in tests, threads."""

    def __init__(
        self,
        assembly: Assembly,
        run: RunDirectory,
        options: TrainOptions,
        *,
        peers: Peers,
        links: Mapping[Pair, str],
        save: Save,
        clocks: Clocks,
        meter: Callable[[], MemoryMeter],
    ) -> None:
        """``links`` says what carries the messages of each pair. ``meter`` is called when everything is loaded. A hook
        that the worker has already (``Worker.on_action``) is still called after every action."""
        self.job, self.plan, self.worker = assembly.job, assembly.plan, assembly.worker
        self.assembly, self.options, self.run_directory = assembly, options, run
        self.rank, self.peers, self.links, self.clocks, self.meter = peers.rank, peers, links, clocks, meter
        self.worker.events = EventLog.one_of(len(self.plan.devices))
        self._hook = self.worker.on_action
        self.state = state_of(assembly)
        self.keeper = Keeper(
            self.state,
            run,
            rank=self.rank,
            save=save,
            every=options.checkpoint_every,
            keep=options.keep_checkpoints,
            timeout_s=options.timeout_s,
            complete=self._complete,
            announce=self._announce,
        )
        self.losses = LossLog(self.job.on_nonfinite_loss, LossFile(losses_file(run, self.rank)))
        self.samples = self.microbatches = 0
        """trained so far, by all workers together, in whole parts"""
        self.samples_done = 0
        self.seconds = 0.0
        self._segment_start_s = 0.0
        self._origin_s = 0.0
        self._rounds = 0
        self.evaluator = None if self.job.evaluation is None else Evaluator(assembly, self.job.evaluation)
        self.evaluations: tuple[Evaluation, ...] = ()
        self.stopped_early = False

    @property
    def shares(self) -> list[Share]:
        """What this worker runs of the captured graphs, of training and of evaluation."""
        evaluated = [] if self.evaluator is None else [Share(self.evaluator.splitter, self.evaluator.layers)]
        return [Share(self.assembly.splitter, self.assembly.layers), *evaluated]

    def run(self) -> None:
        before = done = self._start()
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
        if not self.microbatches:
            raise JobError(
                f"nothing is left to train: the checkpoint has all {self.job.epochs} epochs; raise Job.epochs"
            )
        self._tell(done="")
        self._meet()
        self.progress.pass_on(self.worker.clock())  # with everybody's last word
        self._hand_in(before, done)
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
        return Progress(self.peers, self.meter(), listeners)

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
        segment = self.assembly.segment(part, self.microbatches, self._rounds)
        is_last = part.number == self.job.epochs - 1 and part.is_end
        done = self.keeper.expect(segment.schedule, part, before, is_last=is_last)
        self._segment_start_s = self.worker.clock()
        self.worker.on_action = partial(self._after, part=part, base=self.microbatches)
        self.worker.run(segment)
        self._meet()
        self.seconds += self.worker.clock() - self._segment_start_s
        self.samples += sum(part.samples)
        self.microbatches += len(part.samples)
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
        self._hook(action)

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
        scaler = self.worker.scaler
        scale = (scaler.scale, scaler.good_updates) if scaler is not None else None
        return replace(done, loss_scale=scale, evaluations=self.evaluations)

    def _announce(self, done: Checkpoint) -> None:
        now_s, words = self.worker.clock(), f"checkpoint after {done.steps} minibatches"
        self.progress.mark(Mark(at_s=now_s, kind="checkpoint", text=words, minibatch=done.steps))

    def _meet(self) -> float:
        """Wait for all workers; returns the moment, which all take as the same."""
        self.peers.meet("end a part")
        return time.perf_counter()

    def _start(self) -> Checkpoint:
        """Where training begins, with the weights that it begins with."""
        if self.options.resume is not None:
            done = self.state.restore(self.options.resume)
            done.check_job(self.job, self.options.resume)
            if self.worker.scaler is not None and done.loss_scale is not None:
                self.worker.scaler.scale, self.worker.scaler.good_updates = done.loss_scale
            self.evaluations = done.evaluations
            return replace(done, names=self.state.names, job=self.options.job_name)
        if self.options.init is not None:
            self.state.initialise(self.options.init)
        return replace(Checkpoint.at_start(self.job, self.state.names), job=self.options.job_name)

    def _hand_in(self, before: Checkpoint, after: Checkpoint) -> None:
        """Every worker leaves what it has recorded, and worker 0 makes the run's result and trace of it."""
        if self.losses.file is not None:
            self.losses.file.flush()
        leave_files(self.run_directory, self.rank, self._account(), self.worker.events)
        self._meet()
        if self.rank == 0:
            self._write_result(list(parts_between(self.job, self.plan, before, after)))
            clear(self.run_directory)
        self._meet()

    def _account(self) -> Account:
        lost = self.worker.mailbox.meter.errors
        return Account(
            origin_s=self._origin_s,
            clocks=tuple(self.clocks.finish()),
            links={f"{low}-{high}": name for (low, high), name in self.links.items()},
            device_kind=device_kind(self.worker.device),
            compression=tuple(edge_error(self.plan, edge, *found) for edge, found in lost.items()),
            staleness={
                str(stage): {str(age): count for age, count in own.weights.staleness.items()}
                for stage, own in self.worker.stages.items()
            },
        )

    def _write_result(self, parts: Sequence[Epoch]) -> None:
        run, workers = self.run_directory, range(len(self.plan.devices))
        accounts = accounts_of(run, len(workers))
        rows = itertools.chain.from_iterable(read_rows(losses_file(run, worker)) for worker in workers)
        newest = run.newest_checkpoint()
        result = Result(
            samples=self.samples,
            seconds=self.seconds,
            losses=per_minibatch(rows, [count for part in parts for count in part.minibatches]),
            checkpoint=str(newest.relative_to(run.path)) if newest else None,
            device_kinds={str(worker): account.device_kind for worker, account in enumerate(accounts)},
            links={pair: name for account in accounts for pair, name in account.links.items()},
            evaluations=self.evaluations,
            stopped_early=self.stopped_early,
            compression=tuple(edge_errors(accounts)),
            staleness=tuple(staleness_of(accounts, index) for index in range(len(self.plan.stages))),
            clocks=tuple(clock for account in accounts for clock in account.clocks),
        )
        sizes = tuple(itertools.chain.from_iterable(part.samples for part in parts))
        beginning, newest_events = beginning_and_newest(events_of(run, accounts))
        codec.save(trace_of("measured", self.plan.worker_names, sizes, newest_events), run.trace)
        run.beginning.unlink(missing_ok=True)
        if beginning is not None:
            codec.save(trace_of("measured", self.plan.worker_names, sizes, beginning), run.beginning)
        codec.save(result, run.result)


def parts_left(job: Job, plan: Plan, done: Checkpoint) -> Iterator[Epoch]:
    """What is left to train, in parts of which a schedule is made each.

    Every worker makes the action lists of all. Between two parts the pipeline drains, which costs little beside them.
    """
    most = max(1, MOST_AT_ONCE // (plan.microbatches * len(plan.devices)))
    for number in range(done.epoch, job.epochs):
        epoch = make_epoch(job, plan, number)
        first = done.minibatches if number == done.epoch else 0
        yield from replace(epoch, first_minibatch=first).parts(most, job.evaluate_every or most)


def parts_between(job: Job, plan: Plan, before: Checkpoint, after: Checkpoint) -> Iterator[Epoch]:
    """What was trained, an epoch or the part of one at a time. It is computed again rather than kept."""
    for number in range(before.epoch, after.epoch + 1):
        first = before.minibatches if number == before.epoch else 0
        last = after.minibatches if number == after.epoch else None
        yield replace(make_epoch(job, plan, number), first_minibatch=first, last_minibatch=last)


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
