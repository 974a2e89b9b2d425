"""Measures every layer of a captured model: seconds, bytes, what autograd keeps. Leaves the model untouched.

Bytes are counted one layer after another, and of a model without values only the layer at hand is given them: what is
held at a time is one layer, the values that layers to come will read, and a bundle of parameters whose update is timed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.clocks import Clock
from penstock.graph import Layer, LayerGraph, Parameter, Value
from penstock.job import Job
from penstock.profile import NO_TIME, LayerSeconds, Profile, SizeCosts, WorkerSeconds
from penstock.runtime.capture.blueprint import Blueprint, blueprint_of
from penstock.runtime.capture.capture import call_arguments, capture
from penstock.runtime.capture.fidelity import untouched
from penstock.runtime.capture.randomness import drawing
from penstock.runtime.capture.split import Section, Splitter
from penstock.runtime.machine.machine import device_kind
from penstock.runtime.measure.layer_times import SizeTrial, Timer
from penstock.runtime.measure.made_values import MadeValue, made_value
from penstock.runtime.measure.part_times import LayerTimes
from penstock.runtime.measure.passes import Steps, take_passes
from penstock.runtime.measure.update_times import average_times, fit_updates, step_times
from penstock.runtime.measure.worker_times import StepTimes, TrialStage, TrialWorker, nearly_nothing
from penstock.runtime.messages.values import detached, rebuilt, tensors_in
from penstock.runtime.stage.losses import WeightedLoss
from penstock.runtime.stage.optimizers import Optimizers
from penstock.runtime.stage.precision import autocast_for
from penstock.runtime.worker.data import inputs_of_other_shapes, load_batch, to_device

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
UNCERTAINTY = 0.05
"""What predictions from a measured profile are off by, at the median of many models (docs/simulator.md)."""
STEPS_ALONE = 50
"""of a worker with nearly nothing to compute"""
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
    """Capture a job's model and measure it on the first ``microbatch_size`` samples of its data, and on fewer."""
    largest = min(microbatch_size, len(job.data))
    inputs, _ = to_device(load_batch(job, range(largest), seed=0), device)
    blueprint = blueprint_of(job, device)
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
        measurement.run(sizes_to_measure(largest), progress)
        updates = measurement.updates()
    first, *others = measurement.sizes
    kind, graph = device_kind(device), measurement.graph(updates)
    return Profile(
        model=type(blueprint.model).__name__,
        front_end=captured.front_end,
        reason=captured.reason,
        batch_size=job.batch_size,
        microbatch_size=first.trial.samples,
        threads=threads,
        precision=job.precision,
        weighted_loss=measurement.is_loss_weighted and job.weigh is None,
        sync_batch_norm=job.sync_batch_norm,
        graph=graph,
        seconds={kind: measurement.seconds(first, updates)},
        load_s=first.load_s,
        worker={
            kind: replace(
                measurement.own,
                update_s=updates.call_s,
                copy_s=updates.copy_call_s,
                average_s=updates.average_call_s,
            )
        },
        other_sizes=tuple(
            SizeCosts(
                microbatch_size=size.trial.samples,
                seconds={kind: measurement.seconds(size, updates)},
                saved_bytes=tuple(size.saved),
                value_bytes=tuple(size.made[value.name].num_bytes for value in graph.values),
                load_s=size.load_s,
            )
            for size in others
        ),
        smallest_microbatch=measurement.smallest_microbatch,
        uncertainty=UNCERTAINTY,
    )


def sizes_to_measure(largest: int) -> list[int]:
    """A few microbatch sizes, largest first.

    The second is a half, since only microbatches that are parts of a minibatch add their gradients up.
    """
    return [size for size in (largest, *(largest // part for part in (2, 8, 32))) if size]


@dataclass(frozen=True, kw_only=True)
class Updates:
    """What updates cost."""

    update_s: Mapping[str, float]
    """of each parameter"""
    copy_s: Mapping[str, float]
    """of each parameter, where a version in flight must stay as it is"""
    state_bytes: Mapping[str, int]
    """that the optimizer keeps of each parameter"""
    call_s: float = 0.0
    """of each update, whatever its parameters"""
    copy_call_s: float = 0.0
    average_s: float = 0.0
    """a worker's own time to average a gradient"""
    average_call_s: float = 0.0
    """of each all-reduce, whatever its gradients"""


@dataclass
class _Size:
    """What is found out at one microbatch size."""

    trial: SizeTrial
    times: list[LayerTimes] = field(default_factory=list)
    load_s: float = 0.0
    saved: list[int] = field(default_factory=list)
    """bytes that autograd keeps of each layer"""
    made: dict[str, MadeValue] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    """those that a layer to come reads"""
    counted: set[int] = field(default_factory=set)
    """memory that autograd is known to keep, of what is in use"""


@dataclass
class Measurement:
    timer: Timer
    sizes: list[_Size] = field(default_factory=list)
    """largest first"""
    own: WorkerSeconds = NO_TIME
    _steps: Steps | None = None
    """Where there was room for the whole model."""
    smallest_microbatch: int = 1
    """the smallest size that the model is known to take, where it does not take the smallest that was tried"""
    _reads_data: list[bool] = field(default_factory=list)
    """of each layer"""
    is_loss_weighted: bool = False
    """known after ``run``"""

    @property
    def splitter(self) -> Splitter:
        return self.timer.splitter

    @property
    def blueprint(self) -> Blueprint:
        return self.timer.blueprint

    def run(self, sizes: Sequence[int], progress: Progress) -> None:
        """Measure at these sizes, largest first.

        A model may not take all of them: batch norm wants more than one sample, for instance.
        """
        for samples in sizes:
            try:
                self.sizes.append(_Size(self._trial(samples)))
            except Exception as error:
                if not self.sizes:
                    raise
                self._note_left_out(samples, error)
        count = len(self.timer.captured.layers)
        if self.blueprint.replay is not None:  # there may be no room for it whole
            self._one_by_one(timed=True, progress=progress)
            self._time_worker()
            return
        self._one_by_one(timed=False, progress=lambda done, _: progress(done, 2 * count))
        try:
            found = take_passes(
                self.timer,
                [size.trial for size in self.sizes],
                lambda done, passes: progress(count + count * done // passes, 2 * count),
                opaque={name for size in self.sizes for name, made in size.made.items() if made.opaque},
                weighted=self.is_loss_weighted,
            )
        except torch.OutOfMemoryError:
            self._one_by_one(timed=True, progress=progress)
            self._time_worker()
            return
        for size, times, steps in zip(self.sizes, found.layers, found.at, strict=True):
            size.times, size.load_s = times, steps.whole.load_s
        self.own, self._steps = found.own, found

    def _time_worker(self) -> None:
        """By itself, for want of room for the whole model beside it."""
        (stage, inputs), (halved, _) = (
            nearly_nothing(self.timer.device, in_halves=in_halves) for in_halves in (False, True)
        )
        steps, feed = StepTimes(), replace(self.sizes[0].trial, next_microbatch=lambda: (inputs, None))
        worker = TrialWorker([TrialStage(stage, halved)], self.timer.clock, self.timer.device)
        for number in range(STEPS_ALONE):
            worker.run(feed, [steps], in_halves=number % 3 == 1, beside=number % 3 > 0)
        self.own = steps.own
        for size in self.sizes:
            size.load_s = self.timer.typical_s(size.trial.next_microbatch)

    def _trial(self, samples: int) -> SizeTrial:
        job, device, bind = self.timer.job, self.timer.device, self.timer.captured.bind
        starts = itertools.cycle(range(0, max(1, len(job.data) - samples + 1), samples))

        def load_from(start: int) -> tuple[Any, Any]:
            loaded: tuple[Any, Any] = to_device(load_batch(job, range(start, start + samples), seed=start), device)
            return loaded

        def load() -> tuple[list[Any], Any]:
            inputs, target = load_from(next(starts))
            return bind(inputs), target

        self._try(load_from(0)[0])
        return SizeTrial(samples, max(1, job.batch_size // samples), *load(), load)

    def _try(self, inputs: Any) -> None:
        """Run the model itself, which may refuse inputs that its graph takes: torch checks some in Python."""
        if self.blueprint.replay is None:
            args, kwargs = call_arguments(inputs)
            with torch.no_grad(), self.timer.autocast(), drawing(0):
                self.blueprint.model(*args, **kwargs)

    def _one_by_one(self, *, timed: bool, progress: Progress) -> None:
        """Every layer in turn, at every size, on the values that the layers before it made."""
        self._reads_data = []
        for size in self.sizes:
            size.times, size.saved, size.values, size.counted = [], [], {}, _memory_of(size.trial.given)
        last_reader = {node.name: max(layers) for node, layers in self.splitter.consumers.items()}
        count = len(self.timer.captured.layers)
        for index in range(count):
            section = self.blueprint.filled(self.splitter.section([index]), self.timer.device)
            self._reads_data.append(bool(section.reads) or section.makes_output)
            for size in list(self.sizes):
                try:
                    self._look_at(section, size)
                    if timed:
                        trial = size.trial
                        size.times.append(self.timer.alone(section, trial.given, size.values, trial.target))
                except Exception as error:
                    if size is self.sizes[0]:
                        raise
                    self.sizes.remove(size)
                    self._note_left_out(size.trial.samples, error)
                    continue
                size.values = {name: value for name, value in size.values.items() if last_reader[name] > index}
                size.counted &= _memory_of((size.trial.given, size.values))
            progress(index + 1, count)

    def _note_left_out(self, samples: int, error: Exception) -> None:
        log.info("microbatches of %d samples are left out: %s", samples, error)
        self.smallest_microbatch = max(self.smallest_microbatch, samples + 1)

    def graph(self, updates: Updates) -> LayerGraph:
        made = self.sizes[0]
        layers = tuple(
            Layer(
                id=index,
                name=layer.name,
                kind=layer.kind,
                parameters=self.splitter.parameters_of(index),
                saved_bytes=made.saved[index],
                reads_data=self._reads_data[index],
            )
            for index, layer in enumerate(self.timer.captured.layers)
        )
        values = tuple(
            Value(
                name=node.name,
                producer=self.splitter.layer_of[node],
                consumers=consumers,
                **vars(made.made[node.name]),
            )
            for node, consumers in self.splitter.consumers.items()
        )
        used = {name for layer in layers for name in layer.parameters}
        parameters = tuple(
            Parameter(name=name, num_bytes=p.nbytes, state_bytes=updates.state_bytes.get(name, 0))
            for name, p in self.blueprint.model.named_parameters()
            if name in used
        )
        return LayerGraph(layers=layers, values=values, parameters=parameters)

    def seconds(self, size: _Size, updates: Updates) -> tuple[LayerSeconds, ...]:
        charged: set[str] = set()  # a tied parameter is updated once
        rows = []
        for index, times in enumerate(size.times):
            own = [name for name in self.splitter.parameters_of(index) if name not in charged]
            charged.update(own)
            rows.append(
                LayerSeconds(
                    forward_s=times.forward_s,
                    backward_input_s=times.backward_s * (1 - times.weight_share),
                    backward_weight_s=times.backward_s * times.weight_share,
                    halving_s=max(0.0, times.halved_forward_s - times.forward_s),
                    apart_s=max(0.0, times.input_s + times.weight_s - times.backward_s),
                    cold_s=times.cold_s,
                    forward_switch_s=times.forward_switch_s,
                    backward_switch_s=times.backward_switch_s,
                    crowded_s=times.crowded_s,
                    update_s=sum(updates.update_s.get(name, 0.0) for name in own),
                    copy_s=sum(updates.copy_s.get(name, 0.0) for name in own),
                    average_s=updates.average_s * sum(name in updates.update_s for name in own),
                )
            )
        return tuple(rows)

    def updates(self) -> Updates:
        """By bundles of parameters, fitted by their number and bytes, and brought in line with whole steps; a frozen
        parameter costs nothing."""
        trained = {name: p for name, p in self.blueprint.model.named_parameters() if p.requires_grad}
        state_bytes: dict[str, int] = {}
        rows: dict[bool, list[tuple[int, int, float]]] = {False: [], True: []}
        averages: list[tuple[int, int, float]] = []
        for bundle in _bundles(trained.items()):
            copies = {name: self.blueprint.copy_of(parameter, self.timer.device) for name, parameter in bundle}
            for in_flight, found in rows.items():
                found.extend(step_times(copies, self.timer.job.optimizer, self.timer.typical_s, stashed=in_flight))
            averages += average_times(copies, self.timer.typical_s)
            state_bytes |= self._state_bytes(copies)
        plain, stashed = (fit_updates(rows[which]) for which in (False, True))
        sizes = {name: parameter.nbytes for name, parameter in trained.items()}
        update_s = {name: plain.parameter_s(size) for name, size in sizes.items()}
        copy_s = {name: max(0.0, stashed.parameter_s(size) - update_s[name]) for name, size in sizes.items()}
        call_s, copy_call_s = plain.call_s, max(0.0, stashed.call_s - plain.call_s)
        if self._steps is not None:
            steps = self._steps.at[0]
            call_s = max(call_s, self.own.update_s)
            for part, step in zip(self._steps.division.parts, steps.parts, strict=True):
                own = {name for layer in part for name in self.splitter.parameters_of(layer) if name in trained}
                update_s |= _adding_up_to(step.update_s - call_s, {name: update_s[name] for name in own})
                if step.copy_s is not None:
                    copy_s |= _adding_up_to(step.copy_s - copy_call_s, {name: copy_s[name] for name in own})
        averaging = fit_updates(averages)  # of which the bytes are the all-reduce's own
        return Updates(
            update_s=update_s,
            copy_s=copy_s,
            state_bytes=state_bytes,
            call_s=call_s,
            copy_call_s=copy_call_s,
            average_s=averaging.tensor_s,
            average_call_s=averaging.call_s,
        )

    def _state_bytes(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
        optimizers = Optimizers(self.timer.job.optimizer, None, list(parameters.items()))
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        optimizers.step(0)
        return {
            name: sum(t.nbytes for t in tensors_in(list(optimizers.state_of(parameter).values())))
            for name, parameter in parameters.items()
        }

    def _look_at(self, section: Section, size: _Size) -> None:
        """The values that a layer makes, and what autograd keeps of them."""
        buffers = {name: buffer.clone() for name, buffer in section.module.named_buffers()}
        leaves = {name: p.data.requires_grad_(p.requires_grad) for name, p in section.parameters.items()}
        arguments = [size.trial.given[position] for position in section.reads]
        arguments += [rebuilt(size.values[name]) for name in section.received_names]
        saved = _SavedBytes(size.counted, _memory_of(leaves))
        with torch.autograd.graph.saved_tensors_hooks(saved.count, lambda nothing: nothing):  # there is no backward
            sent, loss = self.timer.compute(section, leaves, arguments, buffers, size.trial.target)
        self.is_loss_weighted |= isinstance(loss, WeightedLoss)
        size.counted |= saved.seen
        size.saved.append(saved.num_bytes)
        for name, value in zip(section.sent_names, sent, strict=True):
            size.values[name] = detached(value)
            size.made[name] = made_value(value)


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


def _adding_up_to(total_s: float, parts_s: Mapping[str, float]) -> dict[str, float]:
    """Stretched or shrunk."""
    sum_s = sum(parts_s.values())
    factor = max(0.0, total_s) / sum_s if sum_s else 1.0
    return {name: seconds * factor for name, seconds in parts_s.items()}


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
