"""Seconds of a captured model's layers: forward, backward, and a backward taken in halves.

A model that has its values is timed as it trains: forward through all layers, then backward through all, again and
again. So a layer finds its weights as far from the cache as in training, gradients add up where they will, and a slow
moment of the machine befalls all layers and not the one whose turn it is. Going layer by layer costs something itself:
the sums are stretched to those of whole steps, taken in between.

A model without values has them one layer at a time, so its layers are timed one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.job import Job
from penstock.profile import WorkerSeconds
from penstock.runtime.blueprint import Blueprint
from penstock.runtime.capture import Captured
from penstock.runtime.deferred import Deferring, PutOff
from penstock.runtime.losses import WeightedLoss, loss_of
from penstock.runtime.precision import Autocast
from penstock.runtime.randomness import drawing
from penstock.runtime.split import Section, Splitter
from penstock.runtime.stage import StageModule
from penstock.runtime.weights import Weights
from penstock.runtime.worker import Clock
from penstock.runtime.worker_times import FEWEST_RUNS, StepTimes, TrialWorker, empty_section, typical

BLOCKS = 2
EMPTY_RUNS = 2
"""Of a layer that computes next to nothing, in each pass through the layers."""
QUICK_S, MOST_REPEATS = 0.6, 60
"""What takes little time is repeated for so long, but not more often than this."""
Values = dict[str, Any]
"""what layers have made, by name, as leaves that gradients are found for"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    forward_s: float
    backward_s: float
    halved_forward_s: float
    """The forward, where the backward is taken in halves."""
    input_s: float
    weight_s: float
    """The two halves of the backward."""
    cold_s: float = 0.0
    """What the first forward after an update takes more."""

    @property
    def weight_share(self) -> float:
        """Of the backward."""
        return self.weight_s / (self.input_s + self.weight_s) if self.weight_s else 0.0


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
        empty = [self._empty_layer.run(in_halves=in_halves) for in_halves in (False, True) for _ in whole]
        return _times(whole[1:], halves[1:], empty[: len(whole)], empty[len(whole) :])

    @cached_property
    def _empty_layer(self) -> _EmptyLayer:
        return _EmptyLayer(self)

    def in_passes(
        self, sizes: Sequence[SizeTrial], progress: Callable[[int, int], None], *, weighted: bool
    ) -> list[tuple[list[LayerTimes], StepTimes]]:
        """All layers, and whole steps, at every size, in blocks of passes: a slow moment befalls more than one size.

        ``weighted`` says whether the loss is a sum with a weight.
        """
        every = range(len(self.captured.layers))
        section = self.splitter.section(every)
        copies = {name: self.blueprint.copy_of(p, self.device) for name, p in section.parameters.items()}
        weights = Weights(copies, self.job.optimizer)
        whole, halved = (
            StageModule(section, weights, self._loss, in_halves=in_halves, autocast=self.autocast)
            for in_halves in (False, True)
        )
        worker = TrialWorker(whole, halved, self.clock, self.device, weighted=weighted)
        leaves = {name: copy.data.requires_grad_(copy.requires_grad) for name, copy in copies.items()}
        sums = {name: torch.zeros_like(leaf) for name, leaf in leaves.items() if leaf.requires_grad}
        layers = [_Layer(self, self.splitter.section([index]), leaves) for index in every]

        def take_pass(size: SizeTrial, passes: _Passes) -> None:
            for in_halves, runs in passes.runs.items():
                _forget(leaves, sums if size.adds else {})
                given, target = size.given, size.target
                runs.append(_there_and_back(layers, given, target, in_halves=in_halves))
                passes.empty[in_halves] += [self._empty_layer.run(in_halves=in_halves) for _ in range(EMPTY_RUNS)]
            worker.run(size, passes.steps)

        found = [_Passes(StepTimes(size.microbatches)) for size in sizes]
        for block, (_, (size, passes)) in enumerate(itertools.product(range(BLOCKS), zip(sizes, found, strict=True))):
            warm_up_s = self.seconds(
                partial(take_pass, size, _Passes(StepTimes(size.microbatches)))
            )  # memory of this size finds its place, too
            for _ in range(-(-max(self.repeats_of(warm_up_s), FEWEST_RUNS) // BLOCKS)):
                take_pass(size, passes)
            progress(block + 1, BLOCKS * len(sizes))
        own = found[-1].steps.own
        return [(_stretched(passes.layers, passes.steps, own), passes.steps) for passes in found]

    def _loss(self, output: Any, target: Any) -> Tensor | WeightedLoss:
        return loss_of(self.job, self.captured.rebuild_output(output), target)


@dataclass(frozen=True)
class _Passes:
    """All that was timed at one size."""

    steps: StepTimes
    runs: dict[bool, list[list[_Run]]] = field(default_factory=lambda: {False: [], True: []})
    """by whether backwards were in halves, of every pass the runs of all layers"""
    empty: dict[bool, list[_Run]] = field(default_factory=lambda: {False: [], True: []})
    """by whether backwards were in halves, runs of a layer that computes next to nothing"""

    @property
    def layers(self) -> list[LayerTimes]:
        by_layer = (zip(*self.runs[halves], strict=True) for halves in (False, True))
        return [_times(whole, halves, *self.empty.values()) for whole, halves in zip(*by_layer, strict=True)]


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
        arguments += [values[name] for name in self.section.receives]
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


def _there_and_back(layers: Sequence[_Layer], given: Sequence[Any], target: Any, *, in_halves: bool) -> list[_Run]:
    values: Values = {}
    forwards_s = []
    for layer in layers:
        forwards_s.append(layer.forward(given, values, target, in_halves=in_halves))
        values.update(zip(layer.section.sends, (pytree.tree_map(as_leaf, value) for value in layer.sent), strict=True))
    runs = [layer.backward(seconds, values) for layer, seconds in zip(layers[::-1], forwards_s[::-1], strict=True)]
    return runs[::-1]


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


def _stretched(layers: Sequence[LayerTimes], step: StepTimes, own: WorkerSeconds) -> list[LayerTimes]:
    """So that they add up to a whole step, but for the worker's own part of it."""
    totals_s = {
        "forward_s": step.forward_s - own.forward_s,
        "backward_s": step.backward_s - own.backward_s,
        "halved_forward_s": step.halved_forward_s - own.forward_s,
        "input_s": step.input_s - own.backward_input_s,
        "weight_s": step.weight_s - own.backward_weight_s,
    }
    sums_s = {name: sum(getattr(times, name) for times in layers) for name in totals_s}
    factors = {name: max(0.0, totals_s[name]) / sum_s if sum_s else 1.0 for name, sum_s in sums_s.items()}
    return [
        LayerTimes(
            **{name: getattr(times, name) * factor for name, factor in factors.items()},
            cold_s=step.first_forward_s * times.forward_s / sums_s["forward_s"] if sums_s["forward_s"] else 0.0,
        )
        for times in layers
    ]


def _forget(leaves: Mapping[str, Any], sums: Mapping[str, Tensor] | None = None) -> None:
    """Let gradients go; the next ones will be added to ``sums``, where there is one."""
    for name, value in leaves.items():
        for leaf in tensors_in(value):
            leaf.grad = (sums or {}).get(name)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def as_leaf(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
