"""Measures every layer of a captured model: seconds, bytes, what autograd keeps. Leaves the model untouched.

One layer after another, and of a model without values only the layer at hand is given them: what is held at a time is
one layer, the values that layers to come will read, and a bundle of parameters whose update is timed.

A layer that runs again and again finds its weights in the cache, which in training others have been through in between.
So a model that has its values also takes a few whole steps, and the layers' seconds are stretched to add up to those.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.graph import Layer, LayerGraph, Parameter, Value
from penstock.job import Job
from penstock.profile import LayerSeconds, Profile
from penstock.runtime.blueprint import Blueprint, blueprint_of
from penstock.runtime.capture import Captured, capture, untouched
from penstock.runtime.data import inputs_of_other_shapes, load_batch
from penstock.runtime.optimizers import Optimizers
from penstock.runtime.precision import Autocast, autocast_for
from penstock.runtime.split import Section, Splitter

Clock = Callable[[], float]
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
        measurement = Measurement(
            job=job,
            blueprint=blueprint,
            captured=captured,
            clock=clock,
            repeats=repeats,
            device=device,
            autocast=autocast_for(job.precision, device),
        )
        measurement.run(inputs, target, progress)
        per_parameter = measurement.parameter_costs()
        stretch = measurement.stretch(inputs, target, per_parameter, adds=microbatch_size < job.batch_size)
    return Profile(
        model=type(blueprint.model).__name__,
        front_end=captured.front_end,
        batch_size=job.batch_size,
        microbatch_size=min(microbatch_size, len(job.data)),
        threads=threads,
        precision=job.precision,
        graph=measurement.graph(per_parameter),
        seconds={device_kind(device): measurement.seconds(per_parameter, stretch)},
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
class Stretch:
    """How many times as long as its layers one by one a whole step takes."""

    forward: float = 1.0
    backward: float = 1.0
    update: float = 1.0


@dataclass(frozen=True, kw_only=True)
class _Made:
    """What is to be known of a value when it is gone."""

    num_bytes: int
    differentiable: bool
    dtype: str


@dataclass(kw_only=True)
class Measurement:
    job: Job
    blueprint: Blueprint
    captured: Captured
    clock: Clock
    repeats: int
    autocast: Autocast
    device: torch.device
    _rows: list[tuple[float, float, float, int]] = field(default_factory=list)
    _values: dict[str, Any] = field(default_factory=dict)
    """those that a layer to come reads"""
    _made: dict[str, _Made] = field(default_factory=dict)
    _counted: set[int] = field(default_factory=set)
    """memory that autograd is known to keep, of what is in use"""

    @cached_property
    def splitter(self) -> Splitter:
        return Splitter(self.captured)

    def run(self, inputs: Any, target: Any, progress: Progress) -> None:
        """Every layer in turn, on the values that the layers before it made."""
        given = self.captured.bind(inputs)
        self._counted = _memory_of(given)
        last_reader = {node.name: max(layers) for node, layers in self.splitter.consumers.items()}
        count = len(self.captured.layers)
        for index in range(count):
            section = self.blueprint.filled(self.splitter.section([index]), self.device)
            self._rows.append(self._measure(section, given, target))
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
                saved_bytes=self._rows[index][3],
            )
            for index, layer in enumerate(self.captured.layers)
        )
        values = tuple(
            Value(
                name=node.name,
                producer=self.splitter.layer_of[node],
                consumers=consumers,
                num_bytes=self._made[node.name].num_bytes,
                differentiable=self._made[node.name].differentiable,
                dtype=self._made[node.name].dtype,
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

    def stretch(self, inputs: Any, target: Any, per_parameter: Mapping[str, ParameterCosts], *, adds: bool) -> Stretch:
        """``adds`` says that a minibatch has several microbatches: a gradient is then added to those before it."""
        if self.blueprint.recording is not None:  # there may be no room for it whole
            return Stretch()
        try:
            forward_s, backward_s, update_s = self._whole_step_s(inputs, target, adds=adds)
        except torch.OutOfMemoryError:
            return Stretch()
        forwards, backwards = sum(row[0] for row in self._rows), sum(row[1] + row[2] for row in self._rows)
        updates = sum(costs.update_s for costs in per_parameter.values())
        return Stretch(
            forward=forward_s / forwards if forwards else 1.0,
            backward=backward_s / backwards if backwards else 1.0,
            update=update_s / updates if updates else 1.0,
        )

    def _whole_step_s(self, inputs: Any, target: Any, *, adds: bool) -> tuple[float, float, float]:
        """Forward, backward and update of all layers, as one worker with the whole model would take them."""
        section = self.splitter.section(range(len(self.captured.layers)))
        given = self.captured.bind(inputs)
        arguments = [given[position] for position in section.reads]
        buffers = {name: buffer.clone() for name, buffer in section.module.named_buffers()}
        copies = {
            name: self.blueprint.copy_of(parameter, self.device) for name, parameter in section.parameters.items()
        }
        leaves = {name: copy.data.requires_grad_(copy.requires_grad) for name, copy in copies.items()}
        optimizers = Optimizers(
            self.job.optimizer, None, [(n, copy) for n, copy in copies.items() if copy.requires_grad]
        )
        times = []
        for _ in range(self.repeats + 1):
            moments = [self.clock()]
            with torch.enable_grad(), self.autocast():
                _, output = section.run(leaves, arguments, buffers)
                loss = self.job.loss(self.captured.rebuild_output(output), target)
            self._synchronise()
            moments.append(self.clock())
            if loss.requires_grad:
                torch.autograd.backward(loss)
            self._synchronise()
            moments.append(self.clock())
            for name, leaf in leaves.items():
                copies[name].grad = leaf.grad
            optimizers.step(0)
            self._synchronise()
            moments.append(self.clock())
            for leaf in leaves.values() if not adds else ():
                leaf.grad = None
            times.append([end_s - start_s for start_s, end_s in itertools.pairwise(moments)])
        forward_s, backward_s, update_s = (statistics.median(column) for column in zip(*times[1:], strict=True))
        return forward_s, backward_s, update_s

    def seconds(self, per_parameter: Mapping[str, ParameterCosts], stretch: Stretch) -> tuple[LayerSeconds, ...]:
        charged: set[str] = set()  # a tied parameter is updated once
        rows = []
        for index, (forward_s, backward_input_s, backward_weight_s, _) in enumerate(self._rows):
            own = [name for name in self.splitter.parameters_of(index) if name not in charged]
            charged.update(own)
            rows.append(
                LayerSeconds(
                    forward_s=forward_s * stretch.forward,
                    backward_input_s=backward_input_s * stretch.backward,
                    backward_weight_s=backward_weight_s * stretch.backward,
                    update_s=sum(per_parameter[name].update_s for name in own) * stretch.update,
                    copy_s=sum(per_parameter[name].copy_s for name in own) * stretch.update,
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
        copies = {name: self.blueprint.copy_of(parameter, self.device) for name, parameter in bundle}
        optimizers = Optimizers(self.job.optimizer, None, list(copies.items()))
        for parameter in copies.values():
            parameter.grad = torch.randn_like(parameter)  # zeros take another time: fewer and slower numbers
        update_s = self._median(lambda: optimizers.step(0))
        sources = [p.data for p in copies.values()]
        targets = [torch.empty_like(source) for source in sources]
        copy_s = self._median(lambda: torch._foreach_copy_(targets, sources))
        total = sum(source.nbytes for source in sources)
        costs = {}
        for name, p in copies.items():
            state = sum(t.nbytes for t in _tensors(list(optimizers.state_of(p).values())))
            share = p.nbytes / total
            costs[name] = ParameterCosts(update_s=update_s * share, copy_s=copy_s * share, state_bytes=state)
        return costs

    def _measure(self, section: Section, given: list[Any], target: Any) -> tuple[float, float, float, int]:
        buffers = {name: buffer.clone() for name, buffer in section.module.named_buffers()}
        leaves = {name: p.data.requires_grad_(p.requires_grad) for name, p in section.parameters.items()}
        received = [pytree.tree_map(_as_leaf, self._values[name]) for name in section.receives]
        arguments = [given[position] for position in section.reads] + received

        def forward() -> tuple[tuple[Any, ...], Any]:
            with torch.enable_grad(), self.autocast():
                sent, output = section.run(leaves, arguments, buffers)
                if not section.makes_output:
                    return sent, None
                return sent, self.job.loss(self.captured.rebuild_output(output), target)

        saved = _SavedBytes(self._counted, _memory_of(leaves))
        with torch.autograd.graph.saved_tensors_hooks(saved.count, lambda nothing: nothing):  # there is no backward
            outputs = forward()
        self._counted |= saved.seen
        for name, value in zip(section.sends, outputs[0], strict=True):
            self._values[name] = pytree.tree_map(_as_leaf, value)
            self._made[name] = _Made(
                num_bytes=sum(t.nbytes for t in _tensors(value)),
                differentiable=any(t.requires_grad for t in _tensors(value)),
                dtype=", ".join(sorted({str(t.dtype).partition(".")[2] for t in _tensors(value)})),
            )
        num_saved = saved.num_bytes
        del outputs, saved  # what was kept is only in the way of the timings
        forward_s = self._median(forward)
        weights = [leaf for leaf in leaves.values() if leaf.requires_grad]
        ins = [t for t in _tensors(received) if t.requires_grad]
        backward_s = self._backward_s(forward, ins + weights)
        input_s = self._backward_s(forward, ins) if weights else backward_s
        return forward_s, min(input_s, backward_s), max(0.0, backward_s - input_s), num_saved

    def _backward_s(self, forward: Callable[[], Any], wanted: list[Tensor]) -> float:
        """Seconds of the backward to ``wanted``; each repeat on a graph of its own, as in training."""
        times = []
        seeds: list[Tensor] = []
        for repeat in range(self.repeats + 1):
            roots = [t for t in _tensors(forward()) if t.requires_grad]
            if not wanted or not roots:
                return 0.0
            seeds = seeds or [torch.ones_like(root) for root in roots]
            start_s = self.clock()
            torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
            self._synchronise()
            if repeat > 0:
                times.append(self.clock() - start_s)
        return statistics.median(times)

    def _median(self, compute: Callable[[], Any]) -> float:
        compute()
        times = []
        for _ in range(self.repeats):
            start_s = self.clock()
            compute()
            self._synchronise()
            times.append(self.clock() - start_s)
        return statistics.median(times)

    def _synchronise(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


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
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors(tree)}


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _as_leaf(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
