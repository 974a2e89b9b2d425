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
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.clocks import Clock
from penstock.job import Job
from penstock.runtime.capture.blueprint import Blueprint
from penstock.runtime.capture.capture import Captured
from penstock.runtime.capture.randomness import drawing
from penstock.runtime.capture.split import Section, Splitter
from penstock.runtime.measure.part_times import LayerTimes
from penstock.runtime.measure.worker_times import empty_section, typical
from penstock.runtime.messages.values import Gradient, detached, gradient_of, rebuilt, tensors_in
from penstock.runtime.stage.deferred import Deferring, PutOff
from penstock.runtime.stage.losses import WeightedLoss, loss_of
from penstock.runtime.stage.precision import Autocast

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
class LayerRun:
    """Of one layer, once. A backward that is not in halves is all input's."""

    forward_s: float
    input_s: float
    weight_s: float

    def less(self, other: LayerRun) -> LayerRun:
        """Without what another takes; what is left of a second is a tenth of it at least."""
        pairs = zip(
            (self.forward_s, self.input_s, self.weight_s), (other.forward_s, other.input_s, other.weight_s), strict=True
        )
        return LayerRun(*(max(mine - others, mine / 10) for mine, others in pairs))


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
            return sent, self.loss(output, target) if section.makes_output else None

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
        layer = LayerTrial(self, section, leaves)
        whole: list[LayerRun] = []
        halves: list[LayerRun] = []
        for _ in range(self.repeats + 1):
            for runs, in_halves in ((whole, False), (halves, True)):
                forward_s = layer.forward(given, values, target, in_halves=in_halves)
                runs.append(layer.backward(forward_s, None))
                forget(leaves | {name: values[name] for name in section.received_names})
        empty = [self.empty_layer.run(in_halves=in_halves) for in_halves in (False, True) for _ in whole]
        return times_of(whole[1:], halves[1:], empty[: len(whole)], empty[len(whole) :])

    @cached_property
    def empty_layer(self) -> EmptyLayer:
        return EmptyLayer(self)

    def loss(self, output: Any, target: Any) -> Tensor | WeightedLoss:
        return loss_of(self.job, self.captured.rebuild_output(output), target)


class Kept(NamedTuple):
    values: Values
    gradients: dict[str, Gradient]


class LayerTrial:
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
        arguments += [rebuilt(values[name]) for name in self.section.received_names]
        self.later = PutOff(self.trained) if in_halves else None

        def compute() -> None:
            with nullcontext() if self.later is None else Deferring(self.later):
                self.sent, loss = self.timer.compute(self.section, self.leaves, arguments, self.buffers, target)
                self.loss = loss.total if isinstance(loss, WeightedLoss) else loss

        return self.timer.seconds(compute)

    def backward(self, forward_s: float, values: Values | None) -> LayerRun:
        """From the gradients of its values, or where none are known from ones."""
        roots, seeds = [], []
        for name, value in zip(self.section.sent_names, self.sent, strict=True):
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
        return LayerRun(forward_s, input_s, self.timer.seconds(later.make) if later else 0.0)


class EmptyLayer(LayerTrial):
    """Computes next to nothing: what it takes is what it costs to go layer by layer, which stages do not."""

    def __init__(self, timer: Timer) -> None:
        section, self._inputs = empty_section(timer.device)
        leaves = {name: p.data.requires_grad_() for name, p in section.parameters.items()}
        super().__init__(timer, section, leaves)

    def run(self, *, in_halves: bool) -> LayerRun:
        forward_s = self.forward(self._inputs, {}, None, in_halves=in_halves)
        found = self.backward(forward_s, None)
        forget(self.leaves)
        return found


def through_all_layers(
    layers: Sequence[LayerTrial], given: Sequence[Any], target: Any, *, in_halves: bool
) -> tuple[list[LayerRun], Kept]:
    """Forward through all layers, then backward; with the values that they made and the gradients of these."""
    values: Values = {}
    forwards_s = []
    for layer in layers:
        forwards_s.append(layer.forward(given, values, target, in_halves=in_halves))
        values.update(zip(layer.section.sent_names, map(detached, layer.sent), strict=True))
    made = dict(values)
    runs = [layer.backward(seconds, values) for layer, seconds in zip(layers[::-1], forwards_s[::-1], strict=True)]
    gradients = {name: gradient_of(value) for name, value in made.items()}
    return runs[::-1], Kept(made, gradients)


def times_of(
    whole: Sequence[LayerRun],
    halves: Sequence[LayerRun],
    empty_whole: Sequence[LayerRun],
    empty_halves: Sequence[LayerRun],
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


def _typical_run(runs: Sequence[LayerRun]) -> LayerRun:
    return LayerRun(*(typical(getattr(run, name) for run in runs) for name in ("forward_s", "input_s", "weight_s")))


def forget(leaves: Mapping[str, Any], sums: Mapping[str, Tensor] | None = None) -> None:
    """Let gradients go; the next ones will be added to ``sums``, where there is one."""
    for name, value in leaves.items():
        for leaf in tensors_in(value):
            leaf.grad = (sums or {}).get(name)
