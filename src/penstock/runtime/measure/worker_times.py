"""A worker's own time: what its actions take beside their layers, and what loading and updates take.

The worker that trains takes whole steps here, with the whole model or with a part of it as its one stage. After each
action of the whole model, a stage that computes next to nothing may have its turn: what that takes is the least that
any further stage costs. These are tens of microseconds for an action, which is much beside small microbatches.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.clocks import Clock
from penstock.profile import WorkerSeconds
from penstock.runtime.capture.capture import capture
from penstock.runtime.capture.split import Section, Splitter
from penstock.runtime.messages.mailbox import Mailbox
from penstock.runtime.messages.values import Gradient, detached
from penstock.runtime.stage.stage import StageModule
from penstock.runtime.stage.weights import Version, Weights
from penstock.runtime.sync.sync import GradientSync
from penstock.runtime.transport.threads import LocalExchange, LocalTransport
from penstock.runtime.worker.events import EventLog
from penstock.runtime.worker.worker import Feed, OwnStage, Segment, Worker
from penstock.schedule import Action, Kind, Pipeline, Schedule, build_schedule
from penstock.sync import sync_policy

NO_DEADLINE_S = 60.0
"""nobody is waited for"""
ALONE = Pipeline(workers=((0,),), reads=((),))
TWO_STAGES = Pipeline(workers=((0,), (0,)), reads=((), (0,)))


STASHED = 1
"""Of a trial's minibatches of one microbatch, the one whose update must leave a version in flight as it is."""


def typical(seconds: Iterable[float]) -> float:
    """The mean of the middle half. A median jumps between the two speeds of a machine that is now fast, now slow."""
    ordered = sorted(seconds)
    aside = len(ordered) // 4
    return statistics.fmean(ordered[aside : len(ordered) - aside])


@dataclass
class StepTimes:
    """All that whole steps took so far.

    What an action takes depends on the action before it, since each leaves its own code and data in the caches. A
    forward may come *in a row*, right after another forward; after a backward; or after an update, which is slowest.
    Where a minibatch is one microbatch, every forward comes after an update, and there is nothing to tell apart.
    """

    microbatches: int = 1
    """Microbatches of a minibatch. Of more than one, each but the first adds its gradients to those before."""
    forwards_s: list[float] = field(default_factory=list)
    """Forwards after a backward, or after an update where every forward comes after one."""
    forwards_in_a_row_s: list[float] = field(default_factory=list)
    forwards_after_update_s: list[float] = field(default_factory=list)
    """Forwards after an update, where others are not."""
    backwards_s: list[float] = field(default_factory=list)
    """Backwards of the first microbatch of a minibatch, after a forward."""
    adding_s: list[float] = field(default_factory=list)
    """Backwards that add their gradients to those before, after a forward."""
    adding_in_a_row_s: list[float] = field(default_factory=list)
    """Backwards that add their gradients to those before, after another backward."""
    halved_forwards_s: list[float] = field(default_factory=list)
    """Forwards, where the backward is taken in halves."""
    inputs_s: list[float] = field(default_factory=list)
    weights_s: list[float] = field(default_factory=list)
    """The two halves of backwards."""
    updates_s: list[float] = field(default_factory=list)
    stashed_s: list[float] = field(default_factory=list)
    """Updates beside a microbatch in flight, which keeps the weights as they were."""
    empty_s: dict[Kind, list[float]] = field(default_factory=lambda: {kind: [] for kind in Kind})
    """Actions of a stage that computes next to nothing."""
    between_s: list[float] = field(default_factory=list)
    """from one action to the next, where nothing is loaded"""
    loading_s: list[float] = field(default_factory=list)
    """from one action to the next, where a microbatch is loaded"""

    @property
    def forward_s(self) -> float:
        """A forward in a row with others, if there are any."""
        return min(typical(each) for each in (self.forwards_s, self.forwards_in_a_row_s) if each)

    @property
    def forward_switch_s(self) -> float:
        """What a forward takes more after a backward than after another forward."""
        return typical(self.forwards_s) - self.forward_s

    @property
    def first_forward_s(self) -> float:
        """What the first forward after an update takes more than one in a row with others."""
        cold_s = self.forwards_after_update_s
        return max(0.0, typical(cold_s) - self.forward_s) if cold_s else 0.0

    @property
    def backward_s(self) -> float:
        """A backward in a row with others, if there are any; the mean over a minibatch."""
        return self.backward_after_forward_s - self.backward_switch_s

    @property
    def backward_after_forward_s(self) -> float:
        """The mean over a minibatch."""
        if not self.adding_s:
            return typical(self.backwards_s)
        adding = 1 - 1 / self.microbatches
        return (1 - adding) * typical(self.backwards_s) + adding * typical(self.adding_s)

    @property
    def backward_switch_s(self) -> float:
        """What a backward takes more after a forward than after another backward."""
        if not self.adding_in_a_row_s:
            return 0.0
        return max(0.0, typical(self.adding_s) - typical(self.adding_in_a_row_s))

    @property
    def halved_forward_s(self) -> float:
        return typical(self.halved_forwards_s)

    @property
    def input_s(self) -> float:
        return typical(self.inputs_s)

    @property
    def weight_s(self) -> float:
        return typical(self.weights_s)

    @property
    def update_s(self) -> float:
        return typical(self.updates_s)

    @property
    def copy_s(self) -> float | None:
        """None where no update was beside a microbatch in flight, since minibatches had several microbatches."""
        return None if not self.stashed_s else max(0.0, typical(self.stashed_s) - self.update_s)

    @property
    def load_s(self) -> float:
        return max(0.0, typical(self.loading_s) - typical(self.between_s))

    @property
    def own(self) -> WorkerSeconds:
        """Without updates, which depend on what there is to update."""
        return WorkerSeconds(
            forward_s=typical(self.empty_s[Kind.FORWARD]),
            backward_s=typical(self.empty_s[Kind.BACKWARD]),
            backward_input_s=typical(self.empty_s[Kind.INPUT]),
            backward_weight_s=typical(self.empty_s[Kind.WEIGHT]),
            between_s=typical(self.between_s),
        )


class Nearly(nn.Module):
    """Computes next to nothing, with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class _EmptyStage:
    """A stage that computes next to nothing, by whole backwards or by halves."""

    def __init__(self, device: torch.device, *, in_halves: bool) -> None:
        self.module, self.inputs = nearly_nothing(device, in_halves=in_halves)
        self.in_halves = in_halves

    def take(self, action: Action, seconds: Callable[[Callable[[], Any]], float], times: StepTimes) -> None:
        """Its turn after an action of another stage: an action of the same kind."""
        kind, index = action.kind, action.index
        if kind is Kind.FORWARD:
            forward_s = seconds(lambda: self.module.forward(index, self.inputs, {}, None))
            if not self.in_halves:
                times.empty_s[kind].append(forward_s)
        elif kind is Kind.INPUT:
            first = lambda: self.module.backward_input(index, {}, loss_weight=1.0, scale=1.0)  # noqa: E731
            times.empty_s[kind].append(seconds(first))
        elif kind is Kind.WEIGHT:
            times.empty_s[kind].append(seconds(lambda: self.module.backward_weight(index)))
        elif kind is Kind.BACKWARD:
            whole = lambda: self.module.backward(index, {}, loss_weight=1.0, scale=1.0)  # noqa: E731
            times.empty_s[kind].append(seconds(whole))


def empty_section(device: torch.device) -> tuple[Section, list[Any]]:
    """A layer that computes next to nothing, with a layer behind it, and inputs for it."""
    inputs = torch.ones(1, device=device)
    splitter = Splitter(capture(nn.Sequential(Nearly(), Nearly()).to(device), inputs, only="module"))
    return splitter.section([0]), splitter.captured.bind(inputs)


def nearly_nothing(device: torch.device, *, in_halves: bool = False) -> tuple[StageModule, list[Any]]:
    """A stage that computes next to nothing, and inputs for it."""
    inputs = torch.ones(1, device=device)
    splitter = Splitter(capture(Nearly().to(device), inputs, only="module"))
    section = splitter.section(range(len(splitter.captured.layers)))
    weights = Weights(section.parameters, lambda named: torch.optim.SGD(named, lr=0.0))
    stage = StageModule(section, weights, lambda output, target: output.sum(), in_halves=in_halves)
    return stage, splitter.captured.bind(inputs)


class Given(NamedTuple):
    """What a stage receives for every microbatch, as it would from other stages."""

    values: Sequence[Any] = ()
    gradients: Sequence[Gradient] = ()
    """Of the values that the stage sends."""


class SameMessages(Mailbox):
    """A mailbox that hands out the same values and gradients for every microbatch, and drops what is sent."""

    def __init__(self, given: Sequence[Given], *, weighted: bool = False) -> None:
        """``given`` has an entry for each stage of the worker."""
        self.pipeline, self._given, self._weighted = ALONE, given, weighted

    def begin(self, schedule: Schedule, samples: Sequence[int]) -> None:
        pass

    def post_receives(self) -> None:
        pass

    def take(self, need: Action, stage: int) -> list[Any]:
        values, gradients = self._given[stage]
        if need.kind is Kind.FORWARD:
            return [detached(value) for value in values]
        return [*gradients, torch.ones(1, dtype=torch.float64)] if self._weighted else list(gradients)

    def send(self, action: Action, target_stage: int, values: Sequence[Any]) -> None:
        pass

    def finish(self) -> None:
        pass


NO_MESSAGES = SameMessages([])


class TrialStage(NamedTuple):
    """A stage twice, with the same weights."""

    whole: StageModule
    halved: StageModule
    """Its backwards can be taken in halves."""


class TrialWorker:
    """Takes whole steps as training does, and times them."""

    def __init__(
        self, stages: Sequence[TrialStage], clock: Clock, device: torch.device, *, weighted: bool = False
    ) -> None:
        """``stages`` are one, or two that follow each other."""
        self.clock, self.device = clock, device
        self._workers = tuple(self._worker(modules, weighted) for modules in zip(*stages, strict=True))
        self._empty = tuple(_EmptyStage(device, in_halves=halves) for halves in (False, True))

    def _worker(self, modules: Sequence[StageModule], weighted: bool) -> Worker:
        """Stages before and behind those that are there are numbered as if they existed."""
        transport = LocalTransport(0, LocalExchange())
        stages = {
            index: OwnStage(
                index=index,
                module=module,
                sends_to={index + 1: module.section.sent_names} if module.section.sent_names else {},
                receives_from={index - 1: module.section.received_names} if module.section.received_names else {},
            )
            for index, module in enumerate(modules)
        }
        return Worker(
            rank=0,
            stages=stages,
            mailbox=NO_MESSAGES,
            sync=GradientSync({}, sync_policy("all-reduce"), transport=transport, timeout_s=NO_DEADLINE_S),
            clock=self.clock,
            device=self.device,
            weighted=weighted,
        )

    def run(
        self,
        feed: Feed,
        times: Sequence[StepTimes],
        messages: SameMessages = NO_MESSAGES,
        *,
        in_halves: bool = False,
        beside: bool = False,
    ) -> None:
        """Minibatches of two microbatches each or of one, as ``times`` of each stage has it.

            one each                 F B STEP F B STEP F B STEP          the second update is beside one in flight
            two each                 F B F B STEP F F B B STEP F B F B STEP
            two each, in halves      F I W F I W STEP F I W F I W STEP
            two each, two stages     0F 1F 1B 0F 0B 1F 1B 0B 0STEP 1STEP, twice

        The first forward is not counted: what came before it is no part of training. ``beside`` lets a stage that
        computes next to nothing have its turn after each action; only without it the time between actions counts.
        """
        worker, empty = self._workers[in_halves], self._empty[in_halves] if beside else None
        each, held = min(times[0].microbatches, 2), list[tuple[Weights, Version]]()

        def after(action: Action) -> None:
            if empty is not None:
                empty.take(action, self._seconds, times[0])
            if action.kind is Kind.STEP:
                stage = worker.stages[action.stage].module
                stage.losses.clear()
                stage.loss_weights.clear()

        worker.mailbox, worker.on_action, worker.events = messages, after, EventLog()
        for number, schedule in enumerate(_minibatches(each, len(times), in_halves=in_halves)):
            if each == 1 and not in_halves and number == STASHED:
                held = [(stage.weights, stage.weights.acquire()) for stage in worker.stages.values()]
            first = number * each
            worker.run(
                Segment(schedule=schedule, samples=(1,) * each, feed=feed, first_microbatch=first, first_round=number)
            )
            while held:
                weights, version = held.pop()
                weights.release(version)
        for (before, _, before_s), (action, start_s, end_s) in itertools.pairwise(worker.events):
            own = times[action.stage]
            _list_for(action, before, each, own, in_halves=in_halves).append(end_s - start_s)
            if empty is None and not in_halves:
                (own.loading_s if action.kind is Kind.FORWARD else own.between_s).append(start_s - before_s)

    def _seconds(self, compute: Callable[[], Any]) -> float:
        start_s = self.clock()
        compute()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock() - start_s


@lru_cache
def _minibatches(each: int, stages: int, *, in_halves: bool) -> list[Schedule]:
    if stages == 1:
        names, pipeline = (("zb-h1",) * 2 if in_halves else ("1f1b", "gpipe", "1f1b")), ALONE
    else:
        names, pipeline = ("zb-v" if in_halves else "interleaved",) * 2, TWO_STAGES
    return [build_schedule(name, pipeline, (each,)) for name in names]


def _list_for(action: Action, before: Action, each: int, times: StepTimes, *, in_halves: bool) -> list[float]:
    """Where the seconds of an action belong, in minibatches of so many microbatches each."""
    if action.kind is Kind.STEP:
        stashed = each == 1 and not in_halves and action.index == STASHED
        return times.stashed_s if stashed else times.updates_s
    if action.kind is Kind.INPUT:
        return times.inputs_s
    if action.kind is Kind.WEIGHT:
        return times.weights_s
    is_first, in_a_row = action.index % each == 0, before[:2] == action[:2]
    if action.kind is Kind.BACKWARD:
        if is_first:
            return times.backwards_s
        return times.adding_in_a_row_s if in_a_row else times.adding_s
    if is_first and each > 1:
        return [] if in_halves else times.forwards_after_update_s
    if in_halves:
        return times.halved_forwards_s
    return times.forwards_in_a_row_s if in_a_row else times.forwards_s
