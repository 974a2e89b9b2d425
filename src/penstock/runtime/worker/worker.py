"""The worker: a loop over its action list. Takes the next action, waits for its inputs, computes, hands on, records."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.clocks import Clock
from penstock.remedy import Remedy
from penstock.runtime.capture.randomness import seed_by
from penstock.runtime.messages.mailbox import Edge, Mailbox
from penstock.runtime.messages.values import Gradient
from penstock.runtime.stage.precision import LossScaler
from penstock.runtime.stage.stage import StageModule
from penstock.runtime.stage.weights import Weights
from penstock.runtime.sync.sync import GlobalClip, GradientSync
from penstock.runtime.worker.events import EventLog
from penstock.schedule import Action, Kind, Schedule


class Feed(Protocol):
    """Where a stage gets the part of a microbatch that it reads for itself."""

    def key(self, microbatch: int) -> int:
        """By which layers draw random numbers for it."""
        ...

    def load(self, microbatch: int, *, inputs: bool = True, target: bool = True) -> tuple[Sequence[Any], Any]:
        """The model inputs in placeholder order, and the target; an empty list or None for what is not wanted."""
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
    minibatches_before: Sequence[int] = ()
    """of each microbatch, how many minibatches of the run come before its own; asked for by a remedy alone"""
    remedy: Remedy | None = None

    def steps_before(self, stage: int, round_index: int) -> int:
        """The scheduler's steps before a round: those before its first microbatch, at every stage alike."""
        return self.scheduler_steps[self.schedule.rounds[stage][round_index]] if self.scheduler_steps else 0

    def rate(self, stage: int, round_index: int) -> float:
        """What the remedy makes of a round's learning rate, by its oldest gradient; alike where a weight is shared."""
        if self.remedy is None:
            return 1.0
        members, together = self.schedule.round_members(stage, round_index), self.schedule.pipeline.sync_stages[stage]
        oldest = max(self.schedule.staleness(each, microbatch) for each in together for microbatch in members)
        return self.remedy.rate(oldest, self.minibatches_before[members.start])

    def round_samples(self, stage: int, microbatch: int) -> int:
        """Samples of all microbatches whose gradients are applied together with this one's."""
        return self._round_samples[stage][self.schedule.round_of(stage, microbatch)]

    @cached_property
    def _round_samples(self) -> list[list[int]]:
        """[stage][round]"""
        before = list(itertools.accumulate(self.samples, initial=0))
        ends = [(*rounds[1:], self.schedule.microbatches) for rounds in self.schedule.rounds]
        return [
            [before[end] - before[start] for start, end in zip(starts, behind, strict=True)]
            for starts, behind in zip(self.schedule.rounds, ends, strict=True)
        ]


@dataclass(kw_only=True)
class OwnStage:
    """One of a worker's stages."""

    index: int
    module: StageModule
    sends_to: dict[int, tuple[str, ...]]
    """later stages -> the values they read from this one, in the order both ends know"""
    receives_from: dict[int, tuple[str, ...]]
    first_version: int = 0
    """of the weights when the segment began"""

    @property
    def weights(self) -> Weights:
        return self.module.weights

    def load(self, feed: Feed, microbatch: int) -> tuple[Sequence[Any], Any]:
        """The model inputs and the target, as far as this stage reads them."""
        inputs, target = bool(self.module.section.reads), self.module.section.makes_output
        return feed.load(microbatch, inputs=inputs, target=target) if inputs or target else ((), None)


def sent_by(stage: int, edges: Mapping[Edge, tuple[str, ...]]) -> dict[int, tuple[str, ...]]:
    return {target: names for (source, target), names in sorted(edges.items()) if source == stage}


def received_by(stage: int, edges: Mapping[Edge, tuple[str, ...]]) -> dict[int, tuple[str, ...]]:
    return {source: names for (source, target), names in sorted(edges.items()) if target == stage}


@dataclass(kw_only=True)
class Worker:
    rank: int
    stages: dict[int, OwnStage]
    """by their place in the pipeline"""
    mailbox: Mailbox
    sync: GradientSync
    clock: Clock
    device: torch.device
    clip: GlobalClip | None = None
    scaler: LossScaler | None = None
    weighted: bool = False
    """whether gradients are of sums: the weight of a microbatch travels with them, and an update divides by it"""
    on_action: Callable[[Action], None] = lambda action: None
    """called after every action: progress, faults injected by tests"""
    events: EventLog = field(default_factory=EventLog)
    busy_s: float = 0.0

    def run(self, segment: Segment) -> None:
        """Do every action of this worker's program, then see the last messages out."""
        self.mailbox.begin(segment.schedule, segment.samples)
        program = segment.schedule.programs[self.rank]
        for stage in self.stages.values():
            stage.first_version = stage.weights.version
        wanted = versions_wanted(program, segment.schedule)
        for place, (action, wanted_next) in enumerate(zip(program, wanted, strict=True)):
            self.mailbox.post_receives()
            stage = self.stages[action.stage]
            if action.kind is Kind.FORWARD:
                self._forward(action, stage, segment)
            elif action.kind is Kind.WEIGHT:
                self._timed(action, segment, partial(stage.module.backward_weight, action.index))
            elif action.kind is Kind.SYNC:
                self._timed(action, segment, partial(self._sync, action))
            elif action.kind is Kind.STEP:
                # a forward still to come may want the weights as they are now
                keep = wanted_next <= stage.weights.version - stage.first_version
                self._step(action, stage, segment, keep=keep)
            else:
                if segment.schedule.overlaps_averaging(self.rank, place):
                    self.sync.begin(stage.weights, segment.schedule.round_of(action.stage, action.index))
                self._backward(action, stage, segment)
            self.on_action(action)
        self.mailbox.finish()

    def _forward(self, action: Action, stage: OwnStage, segment: Segment) -> None:
        received: dict[str, Any] = {}
        for source, names in stage.receives_from.items():
            values = self.mailbox.take(Action(source, Kind.FORWARD, action.index), stage.index)
            received.update(zip(names, values, strict=True))
        inputs, target = stage.load(segment.feed, action.index)
        version = stage.first_version + segment.schedule.versions[stage.index][action.index]
        staleness = segment.schedule.staleness(stage.index, action.index)
        key = segment.feed.key(action.index)
        compute = partial(stage.module.forward, action.index, inputs, received, target, version, staleness, key=key)
        made = self._timed(action, segment, compute)
        for target_stage, names in stage.sends_to.items():
            self.mailbox.send(action, target_stage, [made[name] for name in names])

    def _backward(self, action: Action, stage: OwnStage, segment: Segment) -> None:
        """All of it, or the half that earlier stages wait for."""
        gradients: dict[str, list[Gradient]] = defaultdict(list)
        weight: Tensor | None = None
        for reader, names in stage.sends_to.items():
            arrived = self.mailbox.take(Action(reader, Kind.BACKWARD, action.index), stage.index)
            if self.weighted:
                *arrived, weight = arrived
            for name, gradient in zip(names, arrived, strict=True):
                gradients[name].append(gradient)
        loss_weight, scale = self._gradient_weights(stage.index, action.index, segment)
        round_number = stage.first_version + segment.schedule.round_of(stage.index, action.index)
        compute = partial(
            stage.module.backward_input if action.kind is Kind.INPUT else stage.module.backward,
            action.index,
            gradients,
            loss_weight=loss_weight,
            scale=scale,
            round_number=round_number,
        )
        found = self._timed(action, segment, compute)
        beside: list[Tensor | None] = []
        if self.weighted:
            if weight is None:  # the stage that makes the loss
                weight = torch.tensor([stage.module.loss_weights[action.index]], dtype=torch.float64)
            stage.weights.add_weight(float(weight), round_number)
            beside = [weight.to(self.device)]
        for source, names in stage.receives_from.items():
            self.mailbox.send(action.result, source, [*(found.get(name) for name in names), *beside])

    def _sync(self, action: Action) -> None:
        pipeline = self.mailbox.pipeline
        together = pipeline.synced_with(self.rank, action.stage)
        self.sync.run([self.stages[stage].weights for stage in together], action.index)
        for stage in together if self.weighted else ():
            self.sync.sum_weight(self.stages[stage].weights, pipeline.workers[stage], action.index, self.device)

    def _step(self, action: Action, stage: OwnStage, segment: Segment, *, keep: bool) -> None:
        for meeting in (self.scaler, self.clip):
            if meeting is not None and action.stage == min(self.stages):  # not timed, as waiting for a message is not
                everything = [each.weights for each in self.stages.values()]
                for weights in everything:
                    weights.divide_by_weight()
                meeting.run(everything)
        count = segment.steps_before(action.stage, action.index)
        rate = segment.rate(action.stage, action.index)
        seed_by(segment.feed.key(segment.schedule.rounds[action.stage][action.index]))  # for all replicas alike
        self._timed(action, segment, partial(stage.weights.step, count, keep=keep, rate=rate))

    def _gradient_weights(self, stage: int, microbatch: int, segment: Segment) -> tuple[float, float]:
        """A round's gradient is the mean over its samples, however they fall into microbatches.

        The last stage weighs its loss by the microbatch's share of the last stage's round; a stage whose rounds
        are larger or smaller corrects by the ratio. Under a synchronous schedule all rounds are alike and it is 1.
        Gradients of weighted losses are sums until the update.
        """
        loss_scale = self.scaler.scale if self.scaler is not None else 1.0
        if self.weighted:
            return loss_scale, 1.0
        last = segment.round_samples(segment.schedule.pipeline.num_stages - 1, microbatch)
        weight = loss_scale * segment.samples[microbatch] / last
        return weight, last / segment.round_samples(stage, microbatch)

    def _timed(self, action: Action, segment: Segment, compute: Callable[[], Any]) -> Any:
        start_s = self.clock()
        result = compute()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        end_s = self.clock()
        first = segment.first_microbatch if action.of_microbatch else segment.first_round
        self.events.add(action, first, start_s, end_s)
        if action.kind is not Kind.SYNC:
            self.busy_s += end_s - start_s
        return result


def versions_wanted(program: Sequence[Action], schedule: Schedule) -> list[float]:
    """For each action, the version that its stage's next forward wants; none wants an older one after that."""
    wanted: dict[int, float] = {}
    found = []
    for action in reversed(program):
        found.append(wanted.get(action.stage, math.inf))
        if action.kind is Kind.FORWARD:
            wanted[action.stage] = schedule.versions[action.stage][action.index]
    return found[::-1]
