"""Takes checkpoints while the pipeline runs: copies a worker's state at a cut, and writes it behind its back.

    worker 0   .. STEP | copy | F B STEP F B STEP ..           every worker copies at its own STEP before the cut,
      thread                  | meet  write  meet | appear     and no worker waits for another but in the thread
    worker 1   .. F B STEP F B STEP | copy | F B STEP ..
      thread                               | meet  write  meet |

One checkpoint at a time: a worker that comes to the next cut while its thread still writes waits for it there. The
thread in turn may wait for other workers to come to its own cut; all they need of this worker for that was sent
before the next cut, so nobody waits in a circle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from penstock.errors import PenstockError, WorkerError
from penstock.run import RunDirectory
from penstock.runtime.checkpoint import checkpoint
from penstock.runtime.checkpoint.checkpoint import Checkpoint, lacks_room
from penstock.runtime.checkpoint.state import WorkerState
from penstock.runtime.peers.peers import Peers
from penstock.runtime.peers.reason import short_reason
from penstock.sampling import Epoch
from penstock.schedule import Action, Kind, Schedule, cuts_of, due

log = logging.getLogger(__name__)

Save = Callable[[Path, Mapping[str, Tensor]], None]
"""Writes this worker's tensors for the checkpoint of that place; returns when every worker's are written. Raises
WorkerError where another worker does not come."""


GRACE_S = 3.0
"""What the pipeline has to find a lost peer for itself, once the thread has lost it."""


class _Moment(NamedTuple):
    done: Checkpoint
    """at the cut"""
    steps: tuple[int, ...]
    """of each stage, the STEP after which its state is that of the cut"""


class _Failure(NamedTuple):
    rank: int
    error: BaseException
    at_s: float

    @classmethod
    def of(cls, error: BaseException, rank: int) -> _Failure:
        """Of several, one that is more than want of room. All workers choose the same."""
        if isinstance(error, CheckpointException):
            rank, (error, _) = min(error.failures.items(), key=lambda item: (lacks_room(item[1][0]), item[0]))
        return cls(rank, error, time.monotonic())

    @property
    def is_a_lost_peer(self) -> bool:
        return isinstance(self.error, WorkerError)


def save_together(peers: Peers, group: dist.ProcessGroup) -> Save:
    """With all workers, over a group that nothing else uses, since it is used at moments of its own."""

    def save(directory: Path, tensors: Mapping[str, Tensor]) -> None:
        with peers.together("write a checkpoint"):
            checkpoint.save_shard(directory, tensors, group)

    return save


class Keeper:
    def __init__(
        self,
        state: WorkerState,
        run: RunDirectory,
        *,
        rank: int,
        save: Save,
        every: int,
        keep: int,
        timeout_s: float,
        complete: Callable[[Checkpoint], Checkpoint] = lambda done: done,
        announce: Callable[[Checkpoint], None] = lambda done: None,
    ) -> None:
        """``complete`` adds what else is known of the run at the moment of a checkpoint. ``announce`` is called at
        worker 0 for each that is complete on disk, by the thread that calls ``after`` and ``finish``."""
        self.state, self.run, self.rank = state, run, rank
        self.save, self.every, self.keep, self.timeout_s = save, every, keep, timeout_s
        self.complete, self.announce = complete, announce
        self._moments: deque[_Moment] = deque()
        self._taken: dict[int, dict[str, Tensor]] = {}
        """of the stages that this worker runs, those that are at the cut"""
        self._writing: threading.Thread | None = None
        self._deadline_s = 0.0
        """for the checkpoint that is being written"""
        self._committed: deque[Checkpoint] = deque()
        """those that are complete and have not been announced"""
        self._place = run.checkpoints
        self._failed: _Failure | None = None
        self._without_room: _Failure | None = None
        """why the last checkpoint is not there, if the disk was full"""

    def expect(self, schedule: Schedule, part: Epoch, before: Checkpoint, *, is_last: bool) -> Checkpoint:
        """Take the checkpoints of a part that are due, and that at the end of the run; returns where the part ends."""

        def done_at(cut: int) -> Checkpoint:
            return replace(before, epoch=part.number, minibatches=part.first_minibatch + cut, steps=before.steps + cut)

        cuts, end = cuts_of(schedule, part.minibatches), len(part.minibatches)
        chosen = due(cuts, before=before.steps, every=self.every)
        wanted = sorted({*chosen, end}) if is_last else chosen
        self._moments = deque(_Moment(done_at(cut), cuts[cut]) for cut in wanted)
        return done_at(end)

    def after(self, action: Action) -> None:
        """Call after every action."""
        self._announce()
        if not self._goes_on() or action.kind is not Kind.STEP or not self._moments:
            return
        if self._moments[0].steps[action.stage] == action.index:
            self._at_cut(action.stage)

    def _goes_on(self) -> bool:
        """A disk that fails is reported at once. That a peer is gone the pipeline soon finds out for itself, and then
        its error says what was waited for."""
        failed = self._failed
        if failed is not None and not (failed.is_a_lost_peer and time.monotonic() < failed.at_s + GRACE_S):
            self._raise(failed)
        return failed is None

    def _at_cut(self, stage: int) -> None:
        if not self._taken:
            self._wait()
            if not self._goes_on():
                return
        self._taken[stage] = self.state.snapshot(stage)
        if len(self._taken) == len(self.state.stages):
            self._start(self._moments.popleft().done)

    def take(self, done: Checkpoint) -> None:
        """A checkpoint of a pipeline that is at rest, unless it has just been taken."""
        if checkpoint.directory_of(self.run.checkpoints, done.steps) != self._place:
            self._wait()
            if self._failed is not None:
                self._raise(self._failed)
            self._taken = {stage: self.state.snapshot(stage) for stage in self.state.stages}
            self._start(done)

    def finish(self) -> None:
        """Wait until the last checkpoint is written. Without it the run would end with nothing to show for itself."""
        self._wait()
        self._announce()
        failed = self._failed or self._without_room
        if failed is not None:
            self._raise(failed)

    def _announce(self) -> None:
        while self._committed:
            self.announce(self._committed.popleft())

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.join(max(0.0, self._deadline_s - time.monotonic()))
            if self._writing.is_alive():
                raise WorkerError(
                    f"worker {self.rank} waited for {self._place} to be written by all workers (at most "
                    f"{self.timeout_s:g} s); see what the others report, or raise --timeout if the disk is only slow"
                )
            self._writing = None

    def _start(self, done: Checkpoint) -> None:
        tensors = self.state.snapshot_of_unused()
        for taken in self._taken.values():
            tensors |= taken
        self._taken = {}
        self._place = checkpoint.directory_of(self.run.checkpoints, done.steps)
        # A daemon: a worker that fails must not stay for its thread, which may wait for others that have ended.
        arguments = (self.complete(done), self._place, tensors)
        self._deadline_s = time.monotonic() + self.timeout_s + GRACE_S  # the thread's own error comes first
        self._writing = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._writing.start()

    def _write(self, done: Checkpoint, place: Path, tensors: Mapping[str, Tensor]) -> None:
        try:
            self.save(place, tensors)
            if self.rank == 0:
                checkpoint.commit(place, done)
                self._committed.append(done)
                checkpoint.prune(self.run.complete_checkpoints(), self.keep)
            self._without_room = None
        except BaseException as error:  # torch's own is no Exception
            failed = _Failure.of(error, self.rank)
            if lacks_room(failed.error):
                self._go_on_without(place, failed)
            else:
                self._failed = failed

    def _go_on_without(self, place: Path, failed: _Failure) -> None:
        """The disk is full: what there is of the checkpoint goes, the ones before it stay."""
        self._without_room = failed
        if self.rank == 0:
            checkpoint.withdraw(place)
            log.warning(
                "checkpoint %s could not be written by worker %d: %s; training goes on, and the checkpoints before it "
                "stay; make room for the next",
                place,
                failed.rank,
                getattr(failed.error, "strerror", ""),
            )

    def _raise(self, failed: _Failure) -> None:
        if isinstance(failed.error, PenstockError):
            raise failed.error
        raise WorkerError(
            f"checkpoint {self._place} could not be written by worker {failed.rank}: {short_reason(failed.error)}; "
            "see to that, then go on from the checkpoint before it with --resume"
        ) from failed.error
