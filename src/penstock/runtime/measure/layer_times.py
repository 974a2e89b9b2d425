"""Seconds of a captured model's layers: forward, backward, and a backward taken in halves.

A model that has its values is timed as it trains: forward through all layers, then backward through all, again and
again. So a layer finds its weights as far from the cache as in training, gradients add up where they will, and a slow
moment of the machine befalls all layers and not the one whose turn it is. Going layer by layer costs something itself:
the sums are stretched to those of whole steps, taken in between.

A model without values has them one layer at a time, so its layers are timed one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.clocks import Clock
from penstock.job import Job
from penstock.profile import WorkerSeconds
from penstock.runtime.capture.blueprint import Blueprint
from penstock.runtime.capture.capture import Captured
from penstock.runtime.capture.randomness import drawing
from penstock.runtime.capture.split import Section, Splitter
from penstock.runtime.measure.part_times import (
    LARGEST_BYTES,
    LayerTimes,
    Part,
    PartedSteps,
    divided,
    places_to_cut,
    scaled_to_steps,
)
from penstock.runtime.measure.worker_times import SameMessages, StepTimes, TrialWorker, empty_section, typical
from penstock.runtime.messages.values import Gradient, detached, gradient_of, rebuilt, tensors_in
from penstock.runtime.stage.deferred import Deferring, PutOff
from penstock.runtime.stage.losses import WeightedLoss, loss_of
from penstock.runtime.stage.precision import Autocast
from penstock.runtime.stage.stage import StageModule
from penstock.runtime.stage.weights import Weights

BLOCKS = 2
EMPTY_RUNS = 2
"""Of a layer that computes next to nothing, in each pass through the layers."""
QUICK_S, MOST_REPEATS = 0.6, 60
"""What takes little time is repeated for so long, but not more often than this."""
Values = dict[str, Any]
"""what layers have made, by name, as leaves that gradients are found for"""


@dataclass(frozen=True, slots=True)
class SizeTrial:
    """A microbatch size to time, and where whole steps get their microbatches."""

    samples: int
    microbatches: int
    """of a minibatch"""
    given: Sequence[Any]
    """the model inputs of a microbatch, in placeholder order"""
    target: Any
    next_microbatch: Callable[[], tuple[Sequence[Any], Any]]
    """loads the inputs and the target of another one"""

    def key(self, microbatch: int) -> int:
        """Any random numbers will do."""
        return microbatch

    def load(self, microbatch: int, *, inputs: bool = True, target: bool = True) -> tuple[Sequence[Any], Any]:
        return self.next_microbatch()

    @property
    def adds(self) -> bool:
        """Whether gradients of a minibatch's microbatches add up."""
        return self.microbatches > 1


@dataclass(frozen=True, slots=True)
class _Run:
    """Of one layer, once. A backward that is not in halves is all input's."""

    forward_s: float
    input_s: float
    weight_s: float

    def less(self, other: _Run) -> _Run:
        """Without what another takes; what is left of a second is a tenth of it at least."""
        pairs = zip(
            (self.forward_s, self.input_s, self.weight_s), (other.forward_s, other.input_s, other.weight_s), strict=True
        )
        return _Run(*(max(mine - others, mine / 10) for mine, others in pairs))


@dataclass(frozen=True, kw_only=True)
class Timer:
    """How a model's layers are run, and the clock that they are timed by."""

    job: Job
    blueprint: Blueprint
    captured: Captured
    splitter: Splitter
    clock: Clock
    device: torch.device
    autocast: Autocast
    repeats: int

    def compute(
        self, section: Section, leaves: Mapping[str, Tensor], arguments: Sequence[Any], buffers: Values, target: Any
    ) -> tuple[tuple[Any, ...], Tensor | WeightedLoss | None]:
        """Forward: the values that a section sends, and the loss if it makes the model's output."""
        with torch.enable_grad(), self.autocast(), drawing(0):  # seeded as in training, which takes time too
            sent, output = section.run(leaves, arguments, buffers)
            return sent, self._loss(output, target) if section.makes_output else None

    def seconds(self, compute: Callable[[], Any]) -> float:
        start_s = self.clock()
        compute()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.clock() - start_s

    def typical_s(self, compute: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> float:
        """After a first time that does not count. What is quick is repeated more often, to be as sure of it."""
        prepare()
        first_s = self.seconds(compute)
        times_s = []
        for _ in range(self.repeats_of(first_s)):
            prepare()
            times_s.append(self.seconds(compute))
        return typical(times_s)

    def repeats_of(self, once_s: float) -> int:
        """How often to repeat what takes so long."""
        return max(self.repeats, min(MOST_REPEATS, round(QUICK_S / max(once_s, 1e-9))))

    def alone(self, section: Section, given: Sequence[Any], values: Values, target: Any) -> LayerTimes:
        """One layer, again and again."""
        leaves = {name: p.data.requires_grad_(p.requires_grad) for name, p in section.parameters.items()}
        layer = _Layer(self, section, leaves)
        whole: list[_Run] = []
        halves: list[_Run] = []
        for _ in range(self.repeats + 1):
            for runs, in_halves in ((whole, False), (halves, True)):
                forward_s = layer.forward(given, values, target, in_halves=in_halves)
                runs.append(layer.backward(forward_s, None))
                _forget(leaves | {name: values[name] for name in section.receives})
        empty = [self.empty_layer.run(in_halves=in_halves) for in_halves in (False, True) for _ in whole]
        return _times(whole[1:], halves[1:], empty[: len(whole)], empty[len(whole) :])

    @cached_property
    def empty_layer(self) -> _EmptyLayer:
        return _EmptyLayer(self)

    def in_passes(
        self,
        sizes: Sequence[SizeTrial],
        progress: Callable[[int, int], None],
        *,
        opaque: Collection[str],
        weighted: bool,
    ) -> Steps:
        """All layers, and whole steps, at every size, in blocks of passes: a slow moment befalls more than one size.

        ``opaque`` names the values that cannot be sent; ``weighted`` says whether the loss is a sum with a weight.
        """
        trial = _Trial(self, opaque, weighted)
        # a worker's own time is found at the smallest size: beside large microbatches it does not count
        found = [_Passes(size, trial, finds_own=size is sizes[-1]) for size in sizes]
        for block, (_, passes) in enumerate(itertools.product(range(BLOCKS), found)):
            passes.take_block()
            progress(block + 1, BLOCKS * len(sizes))
        own = found[-1].steps.own
        return Steps(
            own=own,
            parts=tuple(trial.parts),
            at=tuple(passes.steps for passes in found),
            layers=tuple(scaled_to_steps(passes.layers, trial.parts, passes.steps, own) for passes in found),
        )

    def _loss(self, output: Any, target: Any) -> Tensor | WeightedLoss:
        return loss_of(self.job, self.captured.rebuild_output(output), target)


@dataclass(frozen=True)
class Steps:
    """What was found in passes: of layers, of whole steps, and of the worker that takes them."""

    own: WorkerSeconds
    parts: tuple[range, ...]
    """The layers of the smallest parts that took steps."""
    at: tuple[PartedSteps, ...]
    """At each size."""
    layers: tuple[list[LayerTimes], ...]
    """At each size."""


class _Turn(NamedTuple):
    """A way to take steps."""

    divisions: Sequence[int]
    """0 is the whole model as one stage, 1 its halves, 2 its quarters."""
    in_halves: bool
    beside: bool = False
    """Whether a stage that computes next to nothing runs beside it."""


_TURNS = (_Turn([0], False), _Turn([-1], False), _Turn([-1], True))
_TURNS_FOR_OWN_TIME = (
    _Turn([0], False),
    _Turn([1, 2], False),
    _Turn([1, 2], True),
    _Turn([0], False, beside=True),
    _Turn([0], True, beside=True),
)
"""What halves and quarters take is compared, so they have their turn at about the same time."""


class _Trial:
    """A model that takes whole steps: as one stage, and where it can be divided, by parts of it."""

    def __init__(self, timer: Timer, opaque: Collection[str], weighted: bool) -> None:
        self.timer, self.weighted, self._opaque = timer, weighted, opaque
        every = range(len(timer.captured.layers))
        self.whole = self._part(every)
        copies = self.whole.section.parameters
        self.leaves = {name: copy.data.requires_grad_(copy.requires_grad) for name, copy in copies.items()}
        self.sums = {name: torch.zeros_like(leaf) for name, leaf in self.leaves.items() if leaf.requires_grad}
        self.layers = [_Layer(timer, timer.splitter.section([index]), self.leaves) for index in every]
        self.divisions: list[list[Part]] = [[self.whole]]
        self._is_divided = sum(leaf.nbytes for leaf in self.leaves.values()) > LARGEST_BYTES

    @property
    def parts(self) -> list[range]:
        """The layers of the smallest."""
        return [part.layers for part in self.divisions[-1]]

    def divide(self, seconds: Sequence[float]) -> None:
        """By the seconds of each layer, once."""
        if self._is_divided:
            return
        self._is_divided = True
        places = places_to_cut(self.timer.splitter, self._opaque)
        self.divisions += [list(map(self._part, ranges)) for ranges in divided(seconds, places) if ranges]

    def _part(self, layers: range) -> Part:
        timer, section = self.timer, self.timer.splitter.section(layers)
        copies = {name: timer.blueprint.copy_of(p, timer.device) for name, p in section.parameters.items()}
        weights = Weights(copies, timer.job.optimizer)
        whole, halved = (
            StageModule(section, weights, timer._loss, in_halves=in_halves, autocast=timer.autocast)
            for in_halves in (False, True)
        )
        worker = TrialWorker(whole, halved, timer.clock, timer.device, weighted=self.weighted)
        return Part(layers, replace(section, parameters=copies), worker)


class _Passes:
    """All that was timed at one size."""

    def __init__(self, size: SizeTrial, trial: _Trial, *, finds_own: bool) -> None:
        self.size, self.trial, self.finds_own, self.taken = size, trial, finds_own, 0
        self.runs: dict[bool, list[list[_Run]]] = {False: [], True: []}
        """by whether backwards were in halves, of every pass the runs of all layers"""
        self.empty: dict[bool, list[_Run]] = {False: [], True: []}
        """by whether backwards were in halves, runs of a layer that computes next to nothing"""
        self._steps: list[list[StepTimes]] = []
        self._messages: list[list[SameMessages]] = []

    @property
    def layers(self) -> list[LayerTimes]:
        by_layer = (zip(*self.runs[halves], strict=True) for halves in (False, True))
        return [_times(whole, halves, *self.empty.values()) for whole, halves in zip(*by_layer, strict=True)]

    @property
    def steps(self) -> PartedSteps:
        (whole,), *parts = self._steps
        return PartedSteps(whole, *parts)

    def take_block(self) -> None:
        """Passes, as many as every turn needs to be sure of it; more where they are quick."""
        timer, turns = self.trial.timer, len(self._turns)
        self._warm_up()  # memory of this size finds its place, too
        fewest, start_s = turns * -(-timer.repeats // (turns * BLOCKS)), timer.clock()
        for taken in itertools.count():
            is_quick = timer.clock() - start_s < QUICK_S / BLOCKS and taken < MOST_REPEATS / BLOCKS
            if taken >= fewest and not is_quick:
                break
            self._take()

    def _warm_up(self) -> None:
        """Not counted. The first of all tells where to divide the model."""
        runs, kept = self._pass(in_halves=False)
        if self._steps:
            return
        self.trial.divide([run.forward_s + run.input_s for run in runs])
        divisions, weighted = self.trial.divisions, self.trial.weighted
        self._messages = [[part.messages(*kept, weighted=weighted) for part in parts] for parts in divisions]
        self._steps = self._no_steps()
        self._step(self._turns[1])
        self._steps = self._no_steps()

    def _no_steps(self) -> list[list[StepTimes]]:
        return [[StepTimes(self.size.microbatches) for _ in parts] for parts in self.trial.divisions]

    def _take(self) -> None:
        """A pass through the layers, with every other backward in halves, and the steps whose turn it is."""
        in_halves = self.taken % 2 == 1
        runs, _ = self._pass(in_halves=in_halves)
        self.runs[in_halves].append(runs)
        empty = self.trial.timer.empty_layer
        self.empty[in_halves] += [empty.run(in_halves=in_halves) for _ in range(EMPTY_RUNS)]
        self._step(self._turns[self.taken % len(self._turns)])
        self.taken += 1

    @property
    def _turns(self) -> Sequence[_Turn]:
        return _TURNS_FOR_OWN_TIME if self.finds_own else _TURNS

    def _pass(self, *, in_halves: bool) -> tuple[list[_Run], _Kept]:
        trial, size = self.trial, self.size
        _forget(trial.leaves, trial.sums if size.adds else {})
        return _there_and_back(trial.layers, size.given, size.target, in_halves=in_halves)

    def _step(self, turn: _Turn) -> None:
        divisions = list(zip(self.trial.divisions, self._messages, self._steps, strict=True))
        for number in turn.divisions if len(divisions) > 1 else [0]:
            for part, messages, times in zip(*divisions[number], strict=True):
                part.worker.run(self.size, times, messages, in_halves=turn.in_halves, beside=turn.beside)


class _Kept(NamedTuple):
    values: Values
    gradients: dict[str, Gradient]


class _Layer:
    """One layer, between its forward and its backward."""

    def __init__(self, timer: Timer, section: Section, leaves: Mapping[str, Tensor]) -> None:
        self.timer, self.section = timer, section
        self.leaves = {name: leaves[name] for name in section.parameters}
        self.trained = frozenset(id(leaf) for leaf in self.leaves.values() if leaf.requires_grad)
        self.buffers = {name: buffer.clone() for name, buffer in section.module.named_buffers()}
        self.sent: tuple[Any, ...] = ()
        self.loss: Tensor | None = None
        self.later: PutOff | None = None

    def forward(self, given: Sequence[Any], values: Values, target: Any, *, in_halves: bool) -> float:
        arguments = [given[position] for position in self.section.reads]
        arguments += [rebuilt(values[name]) for name in self.section.receives]
        self.later = PutOff(self.trained) if in_halves else None

        def compute() -> None:
            with nullcontext() if self.later is None else Deferring(self.later):
                self.sent, loss = self.timer.compute(self.section, self.leaves, arguments, self.buffers, target)
                self.loss = loss.total if isinstance(loss, WeightedLoss) else loss

        return self.timer.seconds(compute)

    def backward(self, forward_s: float, values: Values | None) -> _Run:
        """From the gradients of its values, or where none are known from ones."""
        roots, seeds = [], []
        for name, value in zip(self.section.sends, self.sent, strict=True):
            leaves = itertools.repeat(None) if values is None else tensors_in(values.pop(name))
            for tensor, leaf in zip(tensors_in(value), leaves, strict=False):
                seed = torch.ones_like(tensor) if leaf is None else leaf.grad
                if tensor.requires_grad and seed is not None:
                    roots.append(tensor)
                    seeds.append(seed)
        if self.loss is not None and self.loss.requires_grad:
            roots.append(self.loss)
            seeds.append(torch.ones_like(self.loss))
        later, self.sent, self.loss, self.later = self.later, (), None, None
        input_s = self.timer.seconds(lambda: torch.autograd.backward(roots, seeds)) if roots else 0.0
        return _Run(forward_s, input_s, self.timer.seconds(later.make) if later else 0.0)


class _EmptyLayer(_Layer):
    """Computes next to nothing: what it takes is what it costs to go layer by layer, which stages do not."""

    def __init__(self, timer: Timer) -> None:
        section, self._inputs = empty_section(timer.device)
        leaves = {name: p.data.requires_grad_() for name, p in section.parameters.items()}
        super().__init__(timer, section, leaves)

    def run(self, *, in_halves: bool) -> _Run:
        forward_s = self.forward(self._inputs, {}, None, in_halves=in_halves)
        found = self.backward(forward_s, None)
        _forget(self.leaves)
        return found


def _there_and_back(
    layers: Sequence[_Layer], given: Sequence[Any], target: Any, *, in_halves: bool
) -> tuple[list[_Run], _Kept]:
    """Forward through all layers, then backward; with the values that they made and the gradients of these."""
    values: Values = {}
    forwards_s = []
    for layer in layers:
        forwards_s.append(layer.forward(given, values, target, in_halves=in_halves))
        values.update(zip(layer.section.sends, map(detached, layer.sent), strict=True))
    made = dict(values)
    runs = [layer.backward(seconds, values) for layer, seconds in zip(layers[::-1], forwards_s[::-1], strict=True)]
    gradients = {name: gradient_of(value) for name, value in made.items()}
    return runs[::-1], _Kept(made, gradients)


def _times(
    whole: Sequence[_Run], halves: Sequence[_Run], empty_whole: Sequence[_Run], empty_halves: Sequence[_Run]
) -> LayerTimes:
    joined = _typical_run(whole).less(_typical_run(empty_whole))
    apart = _typical_run(halves).less(_typical_run(empty_halves))
    return LayerTimes(
        forward_s=joined.forward_s,
        backward_s=joined.input_s,
        halved_forward_s=apart.forward_s,
        input_s=apart.input_s,
        weight_s=apart.weight_s,
    )


def _typical_run(runs: Sequence[_Run]) -> _Run:
    return _Run(*(typical(getattr(run, name) for run in runs) for name in ("forward_s", "input_s", "weight_s")))


def _forget(leaves: Mapping[str, Any], sums: Mapping[str, Tensor] | None = None) -> None:
    """Let gradients go; the next ones will be added to ``sums``, where there is one."""
    for name, value in leaves.items():
        for leaf in tensors_in(value):
            leaf.grad = (sums or {}).get(name)
