"""Measures every layer of a captured model: seconds, bytes, what autograd keeps. Leaves the model untouched."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.graph import Layer, LayerGraph, Parameter, Value
from penstock.job import Job
from penstock.profile import LayerSeconds, Profile
from penstock.runtime.capture import Captured, capture, untouched
from penstock.runtime.data import inputs_of_other_shapes, load_batch
from penstock.runtime.optimizers import Optimizers
from penstock.runtime.split import Section, Splitter

Clock = Callable[[], float]
Progress = Callable[[int, int], None]


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
    job.model.to(device)
    inputs, target = to_device((inputs, target), device)
    captured = capture(job.model, inputs, to_device(inputs_of_other_shapes(job, inputs), device))
    with untouched(job.model):
        job.model.train()
        measurement = Measurement(job=job, captured=captured, clock=clock, repeats=repeats)
        measurement.run(inputs, target, progress)
        per_parameter = measurement.parameter_costs()
    return Profile(
        model=type(job.model).__name__,
        front_end=captured.front_end,
        batch_size=job.batch_size,
        microbatch_size=min(microbatch_size, len(job.data)),
        threads=threads,
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


@dataclass
class Measurement:
    job: Job
    captured: Captured
    clock: Clock
    repeats: int
    _rows: list[tuple[float, float, float, int]] = field(default_factory=list)
    _values: dict[str, Any] = field(default_factory=dict)
    _seen_storages: set[int] = field(default_factory=set)
    _kept: list[Tensor] = field(default_factory=list)

    @cached_property
    def splitter(self) -> Splitter:
        return Splitter(self.captured)

    def __post_init__(self) -> None:
        self._seen_storages.update(p.untyped_storage().data_ptr() for p in self.job.model.parameters())

    def run(self, inputs: Any, target: Any, progress: Progress) -> None:
        """Every layer in turn, on the values that the layers before it made."""
        given = self.captured.bind(inputs)
        self._seen_storages.update(
            t.untyped_storage().data_ptr() for t in pytree.tree_leaves(given) if isinstance(t, Tensor)
        )
        count = len(self.captured.layers)
        for index in range(count):
            section = self.splitter.section([index])
            self._rows.append(self._measure(section, given, target))
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
                num_bytes=sum(t.nbytes for t in _tensors(self._values[node.name])),
                differentiable=any(t.requires_grad for t in _tensors(self._values[node.name])),
                dtype=", ".join(sorted({str(t.dtype).partition(".")[2] for t in _tensors(self._values[node.name])})),
            )
            for node, consumers in self.splitter.consumers.items()
        )
        used = {name for layer in layers for name in layer.parameters}
        parameters = tuple(
            Parameter(name=name, num_bytes=p.nbytes, state_bytes=per_parameter[name].state_bytes)
            for name, p in self.job.model.named_parameters()
            if name in used
        )
        return LayerGraph(layers=layers, values=values, parameters=parameters)

    def seconds(self, per_parameter: Mapping[str, ParameterCosts]) -> tuple[LayerSeconds, ...]:
        charged: set[str] = set()  # a tied parameter is updated once
        rows = []
        for index, (forward_s, backward_input_s, backward_weight_s, _) in enumerate(self._rows):
            own = [name for name in self.splitter.parameters_of(index) if name not in charged]
            charged.update(own)
            rows.append(
                LayerSeconds(
                    forward_s=forward_s,
                    backward_input_s=backward_input_s,
                    backward_weight_s=backward_weight_s,
                    update_s=sum(per_parameter[name].update_s for name in own),
                    copy_s=sum(per_parameter[name].copy_s for name in own),
                )
            )
        return tuple(rows)

    def parameter_costs(self) -> dict[str, ParameterCosts]:
        """Measured for all parameters together, seconds shared out by size; a frozen one costs nothing."""
        costs = {name: ParameterCosts() for name, _ in self.job.model.named_parameters()}
        copies = {
            name: nn.Parameter(p.detach().clone()) for name, p in self.job.model.named_parameters() if p.requires_grad
        }
        if not copies:
            return costs
        optimizers = Optimizers(self.job.optimizer, None, list(copies.items()))
        for parameter in copies.values():
            parameter.grad = torch.randn_like(parameter)  # zeros take another time: fewer and slower numbers
        update_s = self._median(lambda: optimizers.step(0))
        sources = [p.data for p in copies.values()]
        targets = [torch.empty_like(source) for source in sources]
        copy_s = self._median(lambda: torch._foreach_copy_(targets, sources))
        total = sum(source.nbytes for source in sources)
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
            with torch.enable_grad():
                sent, output = section.run(leaves, arguments, buffers)
                if not section.makes_output:
                    return sent, None
                return sent, self.job.loss(self.captured.rebuild_output(output), target)

        saved = _SavedBytes(self._seen_storages, self._kept)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            outputs = forward()
        self._values.update(zip(section.sends, outputs[0], strict=True))
        forward_s = self._median(forward)
        weights = [leaf for leaf in leaves.values() if leaf.requires_grad]
        ins = [t for t in _tensors(received) if t.requires_grad]
        backward_s = self._backward_s(forward, ins + weights)
        input_s = self._backward_s(forward, ins) if weights else backward_s
        return forward_s, min(input_s, backward_s), max(0.0, backward_s - input_s), saved.num_bytes

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

    def __init__(self, seen: set[int], kept: list[Tensor]) -> None:
        self.seen, self.kept, self.num_bytes = seen, kept, 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.seen:
            self.seen.add(storage.data_ptr())
            self.kept.append(tensor.detach())  # else its address could be given to another tensor and go uncounted
            self.num_bytes += storage.nbytes()
        return tensor


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _as_leaf(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
