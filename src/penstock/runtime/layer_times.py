"""Seconds of a captured model's layers: forward, backward, and a backward taken in halves.

A model that has its values is timed as it trains: forward through all layers, then backward through all, again and
again. So a layer finds its weights as far from the cache as in training, gradients add up where they will, and a slow
moment of the machine befalls all layers and not the one whose turn it is. Going layer by layer costs something itself:
the sums are stretched to those of whole steps, taken in between.

A model without values has them one layer at a time, so its layers are timed one after the other.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.job import Job
from penstock.runtime.blueprint import Blueprint
from penstock.runtime.capture import Captured
from penstock.runtime.deferred import Deferring, PutOff
from penstock.runtime.losses import WeightedLoss, loss_of
from penstock.runtime.precision import Autocast
from penstock.runtime.split import Section, Splitter
from penstock.runtime.stage import StageModule
from penstock.runtime.weights import Weights
from penstock.runtime.worker import Clock

MOST_ADDED = 4
"""Microbatches of a whole step: of more, nearly all add their gradients too."""
Values = dict[str, Any]
"""what layers have made, by name, as leaves that gradients are found for"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    forward_s: float
    input_s: float
    weight_s: float
    """these two are the backward's, shared out as its halves are"""
    halving_s: float
    """what forward and backward take more where the backward is taken in halves"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """A whole step: one microbatch of it, and its update."""

    forward_s: float
    backward_s: float
    update_s: float
    copy_s: float
    """that the update takes more where a microbatch in flight keeps the weights as they were"""


@dataclass(frozen=True, slots=True)
class _Run:
    """Of one layer, once. A backward that is not in halves is all input's."""

    forward_s: float
    input_s: float
    weight_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_s + self.weight_s


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

    @property
    def passes(self) -> int:
        """One to warm up; of the others, every second one with its update beside a microbatch in flight."""
        return 1 + max(self.repeats, 2)

    def compute(
        self, section: Section, leaves: Mapping[str, Tensor], arguments: Sequence[Any], buffers: Values, target: Any
    ) -> tuple[tuple[Any, ...], Tensor | WeightedLoss | None]:
        """Forward: the values that a section sends, and the loss if it makes the model's output."""
        with torch.enable_grad(), self.autocast():
            sent, output = section.run(leaves, arguments, buffers)
            return sent, self._loss(output, target) if section.makes_output else None

    def seconds(self, compute: Callable[[], Any]) -> float:
        start_s = self.clock()
        compute()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.clock() - start_s

    def typical_s(self, compute: Callable[[], Any]) -> float:
        compute()
        return typical(self.seconds(compute) for _ in range(self.repeats))

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
        return _times(whole[1:], halves[1:])

    def in_passes(
        self, given: Sequence[Any], target: Any, *, microbatches: int, progress: Callable[[], None]
    ) -> tuple[list[LayerTimes], StepTimes]:
        """All layers, and whole steps of so many microbatches, whose gradients add up."""
        every, adds = range(len(self.captured.layers)), microbatches > 1
        section = self.splitter.section(every)
        copies = {name: self.blueprint.copy_of(p, self.device) for name, p in section.parameters.items()}
        stage = StageModule(section, Weights(copies, self.job.optimizer), self._loss, autocast=self.autocast)
        leaves = {name: copy.data.requires_grad_(copy.requires_grad) for name, copy in copies.items()}
        layers = [_Layer(self, self.splitter.section([index]), leaves) for index in every]
        passes: dict[bool, list[list[_Run]]] = {False: [], True: []}
        steps = _Steps()
        for number in range(self.passes):
            for in_halves, runs in passes.items():
                runs.append(_there_and_back(layers, given, target, in_halves=in_halves))
                _forget(leaves, keep=adds)
            self._step(stage, given, target, min(microbatches, MOST_ADDED), steps, stashed=bool(number % 2))
            if number == 0:
                steps = _Steps()  # the first was to warm up
            progress()
        by_layer = (zip(*passes[halves][1:], strict=True) for halves in (False, True))
        found = [_times(whole, halves) for whole, halves in zip(*by_layer, strict=True)]
        return _stretched(found, steps.times), steps.times

    def _step(
        self, stage: StageModule, given: Sequence[Any], target: Any, microbatches: int, steps: _Steps, *, stashed: bool
    ) -> None:
        """As one worker with the whole model takes it: what its own doings cost is in there."""
        for microbatch in range(microbatches):
            steps.forwards_s.append(self.seconds(partial(stage.forward, microbatch, given, {}, target)))
            backward = partial(stage.backward, microbatch, {}, loss_weight=1.0, scale=1.0)
            steps.backwards_s.append(self.seconds(backward))
            stage.take_loss(microbatch, 1)
        held = stage.weights.acquire() if stashed else None
        steps.updates_s[stashed].append(self.seconds(stage.weights.step))
        if held is not None:
            stage.weights.release(held)

    def _loss(self, output: Any, target: Any) -> Tensor | WeightedLoss:
        return loss_of(self.job, self.captured.rebuild_output(output), target)


@dataclass(frozen=True)
class _Steps:
    """Whole ones, so far."""

    forwards_s: list[float] = field(default_factory=list)
    backwards_s: list[float] = field(default_factory=list)
    updates_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    """by whether a microbatch in flight kept the weights"""

    @property
    def times(self) -> StepTimes:
        update_s = typical(self.updates_s[False])
        return StepTimes(
            forward_s=typical(self.forwards_s),
            backward_s=typical(self.backwards_s),
            update_s=update_s,
            copy_s=max(0.0, typical(self.updates_s[True]) - update_s),
        )


class _Layer:
    """One layer, between its forward and its backward."""

    def __init__(self, timer: Timer, section: Section, leaves: Mapping[str, Tensor]) -> None:
        self.timer, self.section = timer, section
        self.leaves = {name: leaves[name] for name in section.parameters}
        self.buffers = {name: buffer.clone() for name, buffer in section.module.named_buffers()}
        self.sent: tuple[Any, ...] = ()
        self.loss: Tensor | None = None
        self.later: PutOff | None = None

    def forward(self, given: Sequence[Any], values: Values, target: Any, *, in_halves: bool) -> float:
        arguments = [given[position] for position in self.section.reads]
        arguments += [values[name] for name in self.section.receives]
        self.later = PutOff() if in_halves else None

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


def _there_and_back(layers: Sequence[_Layer], given: Sequence[Any], target: Any, *, in_halves: bool) -> list[_Run]:
    values: Values = {}
    forwards_s = []
    for layer in layers:
        forwards_s.append(layer.forward(given, values, target, in_halves=in_halves))
        values.update(zip(layer.section.sends, (pytree.tree_map(as_leaf, value) for value in layer.sent), strict=True))
    runs = [layer.backward(seconds, values) for layer, seconds in zip(layers[::-1], forwards_s[::-1], strict=True)]
    return runs[::-1]


def typical(seconds: Iterable[float]) -> float:
    """The mean of the middle half. A median jumps between the two speeds of a machine that is now fast, now slow."""
    ordered = sorted(seconds)
    aside = len(ordered) // 4
    return statistics.fmean(ordered[aside : len(ordered) - aside])


def _times(whole: Sequence[_Run], halves: Sequence[_Run]) -> LayerTimes:
    backward_s = typical(run.input_s for run in whole)
    input_s, weight_s = typical(run.input_s for run in halves), typical(run.weight_s for run in halves)
    share = weight_s / (input_s + weight_s) if weight_s else 0.0
    return LayerTimes(
        forward_s=typical(run.forward_s for run in whole),
        input_s=backward_s * (1 - share),
        weight_s=backward_s * share,
        halving_s=max(0.0, typical(run.total_s for run in halves) - typical(run.total_s for run in whole)),
    )


def _stretched(layers: Sequence[LayerTimes], step: StepTimes) -> list[LayerTimes]:
    forwards_s, backwards_s = sum(t.forward_s for t in layers), sum(t.input_s + t.weight_s for t in layers)
    forward = step.forward_s / forwards_s if forwards_s else 1.0
    backward = step.backward_s / backwards_s if backwards_s else 1.0
    return [
        replace(
            times,
            forward_s=times.forward_s * forward,
            input_s=times.input_s * backward,
            weight_s=times.weight_s * backward,
        )
        for times in layers
    ]


def _forget(leaves: Mapping[str, Any], *, keep: bool = False) -> None:
    """Their gradients; with ``keep``, only what they are: the next will be added to them all the same."""
    for leaf in tensors_in(leaves):
        if keep and leaf.grad is not None:
            leaf.grad.zero_()
        else:
            leaf.grad = None


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def as_leaf(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
