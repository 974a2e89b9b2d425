"""The worker: a loop over its action list. Takes the next action, waits for its inputs, computes, hands on, records."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.runtime.mailbox import Mailbox
from penstock.runtime.precision import LossScaler
from penstock.runtime.stage import StageModule
from penstock.runtime.sync import GlobalClip, GradientSync
from penstock.schedule import Action, Kind, Schedule
from penstock.trace import Event

Clock = Callable[[], float]

MOST_EVENTS = 200_000
"""A worker keeps its newest events; a long run does not grow without bound."""


class Feed(Protocol):
    """Where a stage gets the part of a microbatch that it reads for itself."""

    def load(self, microbatch: int) -> tuple[Sequence[Any], Any]:
        """The model inputs in placeholder order, and the target."""
        ...


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A schedule with what its microbatches mean: one epoch, or part of one."""

    schedule: Schedule
    samples: Sequence[int]
    feed: Feed
    first_microbatch: int = 0
    """where its microbatches stand in the whole run; traces number them through"""
    first_round: int = 0
    scheduler_steps: Sequence[int] = ()
    """of each microbatch, how often the learning rate's scheduler has stepped before it; never, if not given"""

    def steps_before(self, stage: int, round_index: int) -> int:
        """The scheduler's steps before a round: those before its first microbatch, at every stage alike."""
        return self.scheduler_steps[self.schedule.rounds[stage][round_index]] if self.scheduler_steps else 0

    def round_samples(self, stage: int, microbatch: int) -> int:
        """Samples of all microbatches whose gradients are applied together with this one's."""
        members = self.schedule.round_members(stage, self.schedule.round_of(stage, microbatch))
        return sum(self.samples[m] for m in members)


@dataclass(kw_only=True)
class Worker:
    rank: int
    stage_index: int
    stage: StageModule
    mailbox: Mailbox
    sync: GradientSync
    clock: Clock
    device: torch.device
    sends_to: dict[int, tuple[str, ...]]
    """later stages -> the values they read from this one, in the order both ends know"""
    receives_from: dict[int, tuple[str, ...]]
    clip: GlobalClip | None = None
    scaler: LossScaler | None = None
    on_action: Callable[[Action], None] = lambda action: None
    """called after every action: progress, faults injected by tests"""
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    busy_s: float = 0.0
    _first_version: int = 0
    """of the weights when the segment began"""

    def run(self, segment: Segment) -> None:
        """Do every action of this worker's program, then see the last messages out."""
        self.mailbox.begin(segment.schedule, segment.samples)
        program = segment.schedule.programs[self.rank]
        self._first_version = self.stage.weights.version
        wanted = versions_wanted(program, segment.schedule)
        for action, wanted_next in zip(program, wanted, strict=True):
            self.mailbox.post_receives()
            if action.kind is Kind.FORWARD:
                self._forward(action, segment)
            elif action.kind is Kind.BACKWARD:
                self._backward(action, segment)
            elif action.kind is Kind.SYNC:
                self._timed(action, segment, partial(self.sync.run, self.stage.weights, action.index))
            else:
                # a forward still to come may want the weights as they are now
                now = self.stage.weights.version - self._first_version
                self._step(action, segment, keep=wanted_next <= now)
            self.on_action(action)
        self.mailbox.finish()

    def _forward(self, action: Action, segment: Segment) -> None:
        received: dict[str, Tensor] = {}
        for source, names in self.receives_from.items():
            tensors = self.mailbox.take(Action(source, Kind.FORWARD, action.index))
            received.update((name, tensor) for name, tensor in zip(names, tensors, strict=True) if tensor is not None)
        inputs, target = segment.feed.load(action.index)
        version = self._first_version + segment.schedule.versions[self.stage_index][action.index]
        made = self._timed(action, segment, lambda: self.stage.forward(action.index, inputs, received, target, version))
        for target_stage, names in self.sends_to.items():
            self.mailbox.send(action, target_stage, [made[name] for name in names])

    def _backward(self, action: Action, segment: Segment) -> None:
        gradients: dict[str, list[Tensor | None]] = defaultdict(list)
        for reader, names in self.sends_to.items():
            tensors = self.mailbox.take(Action(reader, Kind.BACKWARD, action.index))
            for name, tensor in zip(names, tensors, strict=True):
                gradients[name].append(tensor)
        loss_weight, scale = self._gradient_weights(action.index, segment)
        found = self._timed(
            action,
            segment,
            lambda: self.stage.backward(action.index, gradients, loss_weight=loss_weight, scale=scale),
        )
        for source, names in self.receives_from.items():
            self.mailbox.send(action, source, [found.get(name) for name in names])

    def _step(self, action: Action, segment: Segment, *, keep: bool) -> None:
        weights = self.stage.weights
        for meeting in (self.scaler, self.clip):
            if meeting is not None:  # not timed, as waiting for a message is not
                meeting.run(weights)
        self._timed(action, segment, partial(weights.step, segment.steps_before(action.stage, action.index), keep=keep))

    def _gradient_weights(self, microbatch: int, segment: Segment) -> tuple[float, float]:
        """A round's gradient is the mean over its samples, however they fall into microbatches.

        The last stage weighs its loss by the microbatch's share of the last stage's round; a stage whose rounds
        are larger or smaller corrects by the ratio. Under a synchronous schedule all rounds are alike and it is 1.
        """
        last = segment.round_samples(segment.schedule.pipeline.num_stages - 1, microbatch)
        loss_scale = self.scaler.scale if self.scaler is not None else 1.0
        return loss_scale * segment.samples[microbatch] / last, last / segment.round_samples(
            self.stage_index, microbatch
        )

    def _timed(self, action: Action, segment: Segment, compute: Callable[[], Any]) -> Any:
        start_s = self.clock()
        result = compute()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        end_s = self.clock()
        first = segment.first_microbatch if action.kind in (Kind.FORWARD, Kind.BACKWARD) else segment.first_round
        numbered = action._replace(index=first + action.index)
        self.events.append(Event(worker=self.rank, action=numbered, start_s=start_s, end_s=end_s))
        if action.kind is not Kind.SYNC:
            self.busy_s += end_s - start_s
        return result


def versions_wanted(program: Sequence[Action], schedule: Schedule) -> list[float]:
    """For each action, the version that the next forward after it wants; none wants an older one after that."""
    wanted, found = math.inf, []
    for action in reversed(program):
        found.append(wanted)
        if action.kind is Kind.FORWARD:
            wanted = schedule.versions[action.stage][action.index]
    return found[::-1]
