"""A worker's own time: what its actions take beside their layers, and what loading and updates take.

The worker that trains takes whole steps here, with the whole model as its one stage. After each of its actions a stage
that computes next to nothing has its turn: what that takes is what every further stage costs, whatever its layers, with
caches as a model leaves them. These are tens of microseconds for an action, which is much beside small microbatches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from penstock.profile import WorkerSeconds
from penstock.runtime.capture import capture
from penstock.runtime.events import EventLog
from penstock.runtime.mailbox import Mailbox
from penstock.runtime.optimizers import MakeOptimizer
from penstock.runtime.split import Section, Splitter
from penstock.runtime.stage import StageModule
from penstock.runtime.sync import GradientSync
from penstock.runtime.transport import LocalExchange, LocalTransport
from penstock.runtime.weights import Version, Weights
from penstock.runtime.worker import Clock, Feed, OwnStage, Segment, Worker
from penstock.schedule import Action, Kind, Pipeline, build_schedule
from penstock.sync import sync_policy

NO_DEADLINE_S = 60.0
"""nobody is waited for"""
ALONE = Pipeline(workers=((0,),), reads=((),))
FEWEST_RUNS = 3
"""Of a ``TrialWorker``, after which all of ``StepTimes`` is known."""


def typical(seconds: Iterable[float]) -> float:
    """The mean of the middle half. A median jumps between the two speeds of a machine that is now fast, now slow."""
    ordered = sorted(seconds)
    aside = len(ordered) // 4
    return statistics.fmean(ordered[aside : len(ordered) - aside])


@dataclass
class StepTimes:
    """All that whole steps took so far."""

    microbatches: int = 1
    """Microbatches of a minibatch. Of more than one, each but the first adds its gradients to those before."""
    runs: int = 0
    forwards_s: list[float] = field(default_factory=list)
    """Forwards as most of them are: after a backward, or after an update where every forward comes after one."""
    cold_s: list[float] = field(default_factory=list)
    """Forwards after an update, where others are not."""
    backwards_s: list[float] = field(default_factory=list)
    """Backwards of the first microbatch of a minibatch."""
    adding_s: list[float] = field(default_factory=list)
    """Backwards that add their gradients to those before."""
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
        return typical(self.forwards_s)

    @property
    def first_forward_s(self) -> float:
        """What the first forward after an update takes more than others."""
        return max(0.0, typical(self.cold_s) - self.forward_s) if self.cold_s else 0.0

    @property
    def backward_s(self) -> float:
        """The mean over a minibatch."""
        if not self.adding_s:
            return typical(self.backwards_s)
        adding = 1 - 1 / self.microbatches
        return (1 - adding) * typical(self.backwards_s) + adding * typical(self.adding_s)

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

    def take(self, kind: Kind, seconds: Callable[[Callable[[], Any]], float], times: StepTimes) -> None:
        """Its turn after an action of this kind."""
        if kind is Kind.FORWARD:
            forward_s = seconds(lambda: self.module.forward(0, self.inputs, {}, None))
            if not self.in_halves:
                times.empty_s[kind].append(forward_s)
        elif kind is Kind.INPUT:
            first = lambda: self.module.backward_input(0, {}, loss_weight=1.0, scale=1.0)  # noqa: E731
            times.empty_s[kind].append(seconds(first))
        elif kind is Kind.WEIGHT:
            times.empty_s[kind].append(seconds(lambda: self.module.backward_weight(0)))
        elif kind is Kind.BACKWARD:
            whole = lambda: self.module.backward(0, {}, loss_weight=1.0, scale=1.0)  # noqa: E731
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


class TrialWorker:
    """Takes whole steps as training does, and times them."""

    def __init__(
        self, stage: StageModule, halved: StageModule, clock: Clock, device: torch.device, *, weighted: bool = False
    ) -> None:
        """``halved`` is the same stage with the same weights, whose backwards can be taken in halves."""
        self.stages, self.clock, self.device, self.weighted = (stage, halved), clock, device, weighted
        self._workers = tuple(map(self._worker, self.stages))
        self._turns = (*(_EmptyStage(device, in_halves=halves) for halves in (False, True)), None)

    def _worker(self, stage: StageModule) -> Worker:
        transport = LocalTransport(0, LocalExchange())
        return Worker(
            rank=0,
            stages={0: OwnStage(index=0, module=stage, sends_to={}, receives_from={})},
            mailbox=Mailbox(ALONE, {}, transport=transport, device=self.device, timeout_s=NO_DEADLINE_S),
            sync=GradientSync({}, sync_policy("all-reduce"), transport=transport, timeout_s=NO_DEADLINE_S),
            clock=self.clock,
            device=self.device,
            weighted=self.weighted,
        )

    def run(self, feed: Feed, times: StepTimes) -> None:
        """Two minibatches, of two microbatches each or of one, as ``times`` has it.

            one each    F0 B0 STEP F1 B1 STEP           the first update is beside a microbatch in flight
            two each    F0 B0 F1 B1 STEP F2 B2 F3 B3 STEP

        The first forward is not counted: what came before it is no part of training. A third of the runs take backwards
        in halves. In a third nothing comes between the actions, and what is between them counts. In the others a stage
        that computes next to nothing has its turn after each action.
        """
        held: list[Version] = []
        each = min(times.microbatches, 2)
        empty = self._turns[times.runs % FEWEST_RUNS]
        times.runs += 1
        in_halves = empty is not None and empty.in_halves
        stage, worker = self.stages[in_halves], self._workers[in_halves]

        def after(action: Action) -> None:
            if empty is not None:
                empty.take(action.kind, self._seconds, times)
            if action.kind is Kind.STEP:
                stage.losses.clear()
                if held:
                    stage.weights.release(held.pop())
            elif each == 1 and action == Action(0, Kind.BACKWARD, 0):
                held.append(stage.weights.acquire())

        worker.on_action, worker.events = after, EventLog()
        schedule = build_schedule("zb-h1" if in_halves else "1f1b", ALONE, (each, each))
        worker.run(Segment(schedule=schedule, samples=(1,) * (2 * each), feed=feed))
        last_s: float | None = None
        for action, start_s, end_s in worker.events:
            if in_halves:
                self._halves_list_for(action, each, times).append(end_s - start_s)
                continue
            self._list_for(action, each, times).append(end_s - start_s)
            if last_s is not None and empty is None:
                (times.loading_s if action.kind is Kind.FORWARD else times.between_s).append(start_s - last_s)
            last_s = end_s

    @staticmethod
    def _list_for(action: Action, each: int, times: StepTimes) -> list[float]:
        """Where the seconds of an action belong, in minibatches of so many microbatches each."""
        if action.kind is Kind.STEP:
            return times.stashed_s if each == 1 and action.index == 0 else times.updates_s
        if action.kind is Kind.BACKWARD:
            return times.adding_s if action.index % each else times.backwards_s
        if action.index == 0:
            return []
        return times.cold_s if each > 1 and action.index % each == 0 else times.forwards_s

    @staticmethod
    def _halves_list_for(action: Action, each: int, times: StepTimes) -> list[float]:
        if action.kind is Kind.INPUT:
            return times.inputs_s
        if action.kind is Kind.WEIGHT:
            return times.weights_s
        counts = action.kind is Kind.FORWARD and action.index > 0 and (each == 1 or action.index % each != 0)
        return times.halved_forwards_s if counts else []

    def _seconds(self, compute: Callable[[], Any]) -> float:
        start_s = self.clock()
        compute()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock() - start_s


TypicalSeconds = Callable[[Callable[[], Any], Callable[[], Any]], float]
"""Times its first argument again and again, each time after calling the second."""


class UpdateCosts(NamedTuple):
    """Seconds of an update of some tensors: for calling the optimizer, for each tensor and for each byte."""

    call_s: float
    tensor_s: float
    byte_s: float

    def parameter_s(self, num_bytes: int) -> float:
        return self.tensor_s + num_bytes * self.byte_s


def step_times(
    parameters: Mapping[str, nn.Parameter], make_optimizer: MakeOptimizer, typical_s: TypicalSeconds, *, stashed: bool
) -> list[tuple[int, int, float]]:
    """Number, bytes and seconds of updates of the parameters, and of the smaller ones among them.

    With ``stashed``, a microbatch in flight keeps the weights as they were, so that the update makes a copy of them.
    """
    return [
        (len(part), _nbytes(part), _step_s(part, make_optimizer, typical_s, stashed=stashed))
        for part in _parts(parameters)
    ]


def _step_s(
    parameters: Mapping[str, nn.Parameter], make_optimizer: MakeOptimizer, typical_s: TypicalSeconds, *, stashed: bool
) -> float:
    weights = Weights(parameters, make_optimizer)
    gradients = {name: torch.randn_like(p) for name, p in parameters.items()}  # zeros take another time
    held: list[Version] = []

    def prepare() -> None:
        weights.gradients.update(gradients)
        if stashed:  # as a stage with two microbatches in flight
            held.append(weights.acquire())
            if len(held) > 1:
                weights.release(held.pop(0))

    return typical_s(weights.step, prepare)


class _NothingMoves(LocalTransport):
    """Gradients are gathered and put back; that they travel is not part of a worker's own time."""

    def all_reduce(self, tensor: Tensor, workers: tuple[int, ...], timeout_s: float) -> None:
        return

    def carries(self, workers: tuple[int, ...]) -> bool:
        return False


def average_times(parameters: Mapping[str, nn.Parameter], typical_s: TypicalSeconds) -> list[tuple[int, int, float]]:
    """Number, bytes and seconds of averaging the parameters' gradients, and those of the smaller ones."""
    transport = _NothingMoves(0, LocalExchange())
    sync = GradientSync(
        dict.fromkeys(parameters, (0, 1)), sync_policy("all-reduce"), transport=transport, timeout_s=NO_DEADLINE_S
    )

    def seconds(part: Mapping[str, nn.Parameter]) -> float:
        weights = Weights(part, lambda named: ())
        weights.gradients.update({name: torch.zeros_like(p) for name, p in part.items()})
        return typical_s(lambda: sync.run([weights], 0), lambda: None)

    return [(len(part), _nbytes(part), seconds(part)) for part in _parts(parameters)]


def _parts(parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
    """The smallest, the smaller half, and all."""
    by_size = sorted(parameters, key=lambda name: parameters[name].nbytes)
    for count in sorted({1, len(by_size) // 2, len(by_size)} - {0}):
        yield {name: parameters[name] for name in by_size[:count]}


def _nbytes(parameters: Mapping[str, nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters.values())


def fit_updates(rows: Sequence[tuple[int, int, float]]) -> UpdateCosts:
    """Least squares of relative errors over (tensors, bytes, seconds), with no term below 0."""
    if not rows:
        return UpdateCosts(0.0, 0.0, 0.0)
    seconds = np.array([max(row[2], 1e-12) for row in rows])
    table = np.array([[1.0, row[0], row[1]] for row in rows]) / seconds[:, None]
    kept = np.flatnonzero(table.any(axis=0)).tolist()  # parameters may have no bytes
    while True:
        found, *_ = np.linalg.lstsq(table[:, kept] / table[:, kept].max(axis=0), np.ones(len(rows)), rcond=None)
        if (found >= 0).all() or len(kept) == 1:
            break
        kept.pop(int(np.argmin(found)))
    terms = np.zeros(3)
    terms[kept] = np.maximum(found, 0.0) / table[:, kept].max(axis=0)
    return UpdateCosts(*terms.tolist())
