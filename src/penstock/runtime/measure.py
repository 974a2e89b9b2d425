"""Measures every layer of a captured model: seconds, bytes, what autograd keeps. Leaves the model untouched.

Bytes are counted one layer after another, and of a model without values only the layer at hand is given them: what is
held at a time is one layer, the values that layers to come will read, and a bundle of parameters whose update is timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.graph import Layer, LayerGraph, Parameter, Value
from penstock.job import Job
from penstock.profile import LayerSeconds, Profile
from penstock.runtime.blueprint import Blueprint, blueprint_of
from penstock.runtime.capture import capture
from penstock.runtime.data import inputs_of_other_shapes, load_batch
from penstock.runtime.fidelity import untouched
from penstock.runtime.layer_times import LayerTimes, StepTimes, Timer, as_leaf, tensors_in
from penstock.runtime.optimizers import Optimizers
from penstock.runtime.payload import obstacle
from penstock.runtime.precision import autocast_for
from penstock.runtime.split import Section, Splitter
from penstock.runtime.worker import Clock

Progress = Callable[[int, int], None]
BUNDLE_BYTES = 2**25
"""Of parameters updated together: enough that an optimizer's step is its arithmetic."""


def profile_job(
    job: Job,
    *,
    clock: Clock,
    device: torch.device,
    microbatch_size: int,
    threads: int,
    repeats: int,
    progress: Progress,
) -> Profile:
    """Capture a job's model and measure it on the first ``microbatch_size`` samples of its data."""
    inputs, target = load_batch(job, range(min(microbatch_size, len(job.data))), seed=0)
    blueprint = blueprint_of(job, device)
    inputs, target = to_device((inputs, target), device)
    captured = capture(blueprint.model, inputs, to_device(inputs_of_other_shapes(job, inputs), device))
    with untouched(blueprint.model):
        blueprint.model.train()
        timer = Timer(
            job=job,
            blueprint=blueprint,
            captured=captured,
            splitter=Splitter(captured),
            clock=clock,
            device=device,
            autocast=autocast_for(job.precision, device),
            repeats=repeats,
        )
        measurement = Measurement(timer)
        measurement.run(inputs, target, microbatches=max(1, job.batch_size // microbatch_size), progress=progress)
        per_parameter = measurement.parameter_costs()
    return Profile(
        model=type(blueprint.model).__name__,
        front_end=captured.front_end,
        reason=captured.reason,
        batch_size=job.batch_size,
        microbatch_size=min(microbatch_size, len(job.data)),
        threads=threads,
        precision=job.precision,
        graph=measurement.graph(per_parameter),
        seconds={device_kind(device): measurement.seconds(per_parameter)},
    )


def device_kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def to_device(tree: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


@dataclass(frozen=True, kw_only=True)
class ParameterCosts:
    """What a parameter costs besides its part in forward and backward."""

    update_s: float = 0.0
    copy_s: float = 0.0
    state_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class _Made:
    """What is to be known of a value when it is gone."""

    num_bytes: int
    differentiable: bool
    dtype: str
    opaque: str


@dataclass
class Measurement:
    timer: Timer
    _times: list[LayerTimes] = field(default_factory=list)
    _step: StepTimes | None = None
    _saved: list[int] = field(default_factory=list)
    """bytes that autograd keeps of each layer"""
    _values: dict[str, Any] = field(default_factory=dict)
    """those that a layer to come reads"""
    _made: dict[str, _Made] = field(default_factory=dict)
    _counted: set[int] = field(default_factory=set)
    """memory that autograd is known to keep, of what is in use"""

    @property
    def splitter(self) -> Splitter:
        return self.timer.splitter

    @property
    def blueprint(self) -> Blueprint:
        return self.timer.blueprint

    def run(self, inputs: Any, target: Any, *, microbatches: int, progress: Progress) -> None:
        """``microbatches`` is how many a minibatch has."""
        given, count = self.timer.captured.bind(inputs), len(self.timer.captured.layers)
        if self.blueprint.recording is not None:  # there may be no room for it whole
            self._one_by_one(given, target, timed=True, progress=progress)
            return
        total = count + self.timer.passes
        self._one_by_one(given, target, timed=False, progress=lambda done, _: progress(done, total))
        passed = itertools.count(count + 1)
        try:
            self._times, self._step = self.timer.in_passes(
                given, target, microbatches=microbatches, progress=lambda: progress(next(passed), total)
            )
        except torch.OutOfMemoryError:
            self._one_by_one(given, target, timed=True, progress=progress)

    def _one_by_one(self, given: list[Any], target: Any, *, timed: bool, progress: Progress) -> None:
        """Every layer in turn, on the values that the layers before it made."""
        self._saved, self._values, self._counted = [], {}, _memory_of(given)
        last_reader = {node.name: max(layers) for node, layers in self.splitter.consumers.items()}
        count = len(self.timer.captured.layers)
        for index in range(count):
            section = self.blueprint.filled(self.splitter.section([index]), self.timer.device)
            self._look_at(section, given, target)
            if timed:
                self._times.append(self.timer.alone(section, given, self._values, target))
            self._values = {name: value for name, value in self._values.items() if last_reader[name] > index}
            self._counted &= _memory_of((given, self._values))
            progress(index + 1, count)

    def graph(self, per_parameter: Mapping[str, ParameterCosts]) -> LayerGraph:
        layers = tuple(
            Layer(
                id=index,
                name=layer.name,
                kind=layer.kind,
                parameters=self.splitter.parameters_of(index),
                saved_bytes=self._saved[index],
            )
            for index, layer in enumerate(self.timer.captured.layers)
        )
        values = tuple(
            Value(
                name=node.name,
                producer=self.splitter.layer_of[node],
                consumers=consumers,
                num_bytes=self._made[node.name].num_bytes,
                differentiable=self._made[node.name].differentiable,
                dtype=self._made[node.name].dtype,
                opaque=self._made[node.name].opaque,
            )
            for node, consumers in self.splitter.consumers.items()
        )
        used = {name for layer in layers for name in layer.parameters}
        parameters = tuple(
            Parameter(name=name, num_bytes=p.nbytes, state_bytes=per_parameter[name].state_bytes)
            for name, p in self.blueprint.model.named_parameters()
            if name in used
        )
        return LayerGraph(layers=layers, values=values, parameters=parameters)

    def seconds(self, per_parameter: Mapping[str, ParameterCosts]) -> tuple[LayerSeconds, ...]:
        updates_s = sum(costs.update_s for costs in per_parameter.values())
        copies_s = sum(costs.copy_s for costs in per_parameter.values())
        update = self._step.update_s / updates_s if self._step is not None and updates_s else 1.0
        copy = self._step.copy_s / copies_s if self._step is not None and copies_s else 1.0
        charged: set[str] = set()  # a tied parameter is updated once
        rows = []
        for index, times in enumerate(self._times):
            own = [name for name in self.splitter.parameters_of(index) if name not in charged]
            charged.update(own)
            rows.append(
                LayerSeconds(
                    forward_s=times.forward_s,
                    backward_input_s=times.input_s,
                    backward_weight_s=times.weight_s,
                    halving_s=times.halving_s,
                    update_s=sum(per_parameter[name].update_s for name in own) * update,
                    copy_s=sum(per_parameter[name].copy_s for name in own) * copy,
                )
            )
        return tuple(rows)

    def parameter_costs(self) -> dict[str, ParameterCosts]:
        """Measured for many parameters together, seconds shared out by size; a frozen one costs nothing."""
        named = list(self.blueprint.model.named_parameters())
        costs = {name: ParameterCosts() for name, _ in named}
        for bundle in _bundles([(name, parameter) for name, parameter in named if parameter.requires_grad]):
            costs |= self._bundle_costs(bundle)
        return costs

    def _bundle_costs(self, bundle: Sequence[tuple[str, nn.Parameter]]) -> dict[str, ParameterCosts]:
        copies = {name: self.blueprint.copy_of(parameter, self.timer.device) for name, parameter in bundle}
        optimizers = Optimizers(self.timer.job.optimizer, None, list(copies.items()))
        for parameter in copies.values():
            parameter.grad = torch.randn_like(parameter)  # zeros take another time: fewer and slower numbers
        update_s = self.timer.typical_s(lambda: optimizers.step(0))
        sources = [p.data for p in copies.values()]
        targets = [torch.empty_like(source) for source in sources]
        copy_s = self.timer.typical_s(lambda: torch._foreach_copy_(targets, sources))
        total = sum(source.nbytes for source in sources)
        costs = {}
        for name, p in copies.items():
            state = sum(t.nbytes for t in tensors_in(list(optimizers.state_of(p).values())))
            share = p.nbytes / total
            costs[name] = ParameterCosts(update_s=update_s * share, copy_s=copy_s * share, state_bytes=state)
        return costs

    def _look_at(self, section: Section, given: list[Any], target: Any) -> None:
        """The values that a layer makes, and what autograd keeps of them."""
        buffers = {name: buffer.clone() for name, buffer in section.module.named_buffers()}
        leaves = {name: p.data.requires_grad_(p.requires_grad) for name, p in section.parameters.items()}
        arguments = [given[position] for position in section.reads]
        arguments += [self._values[name] for name in section.receives]
        saved = _SavedBytes(self._counted, _memory_of(leaves))
        with torch.autograd.graph.saved_tensors_hooks(saved.count, lambda nothing: nothing):  # there is no backward
            sent, _ = self.timer.compute(section, leaves, arguments, buffers, target)
        self._counted |= saved.seen
        self._saved.append(saved.num_bytes)
        for name, value in zip(section.sends, sent, strict=True):
            self._values[name] = pytree.tree_map(as_leaf, value)
            self._made[name] = _Made(
                num_bytes=sum(t.nbytes for t in tensors_in(value)),
                differentiable=any(t.requires_grad for t in tensors_in(value)),
                dtype=", ".join(sorted({str(t.dtype).partition(".")[2] for t in tensors_in(value)})),
                opaque=obstacle(value),
            )


class _SavedBytes:
    """Counts what autograd keeps, each piece of memory once, at the first layer that keeps it."""

    def __init__(self, counted: set[int], parameters: set[int]) -> None:
        self.seen = counted | parameters
        self.num_bytes = 0
        self._kept: list[Tensor] = []

    def count(self, tensor: Tensor) -> None:
        """In place of keeping it in the graph, which would keep an operation's own result, and so itself, for ever."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.seen:
            self.seen.add(storage.data_ptr())
            self._kept.append(tensor.detach())  # else its address could be given to another tensor and go uncounted
            self.num_bytes += storage.nbytes()


def _bundles(named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[list[tuple[str, nn.Parameter]]]:
    bundle: list[tuple[str, nn.Parameter]] = []
    for name, parameter in named:
        if bundle and sum(p.nbytes for _, p in bundle) + parameter.nbytes > BUNDLE_BYTES:
            yield bundle
            bundle = []
        bundle.append((name, parameter))
    if bundle:
        yield bundle


def _memory_of(tree: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(tree)}
