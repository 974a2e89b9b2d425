"""Evaluation between updates: held-out data through the same workers, forwards only, with the model in eval mode.

A captured graph has its mode written into it, so there is a second one of eval mode over the same parameters and
buffers. It is cut where the plan cuts the first: a layer runs where the one of its name does, and where
what it reads and the tensors it uses allow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CaptureError, PlanError
from penstock.job import Job, Samples
from penstock.plan import Plan
from penstock.runtime.capture.capture import capture
from penstock.runtime.capture.randomness import drawing
from penstock.runtime.capture.split import Section, Splitter
from penstock.runtime.messages.mailbox import Mailbox
from penstock.runtime.stage.compiling import compiled
from penstock.runtime.stage.losses import WeightedLoss, keyed_loss, loss_of, term
from penstock.runtime.stage.precision import Autocast, autocast_for
from penstock.runtime.stage.stage import StageModule
from penstock.runtime.stage.weights import Weights
from penstock.runtime.worker.assemble import Assembly, JobFeed
from penstock.runtime.worker.data import inputs_of_other_shapes, load_batch, to_device
from penstock.runtime.worker.events import EventLog
from penstock.runtime.worker.worker import OwnStage, Segment, Worker, received_by, sent_by
from penstock.sampling import Epoch
from penstock.schedule import build_schedule

MOST_AHEAD = 64
"""Microbatches after which workers wait for each other: a fast first stage does not fill its memory with results."""


class Evaluator:
    """One worker's part of the evaluations. All workers make and run theirs together."""

    def __init__(self, assembly: Assembly, data: Samples) -> None:
        job, plan, trained = assembly.job, assembly.plan, assembly.worker
        self.job, self.plan, self.buffers = job, plan, assembly.buffers
        self.held_out = replace(job, data=data)
        self.transport, self.timeout_s = trained.mailbox.transport, trained.mailbox.timeout_s
        inputs, _ = to_device(
            load_batch(job, range(min(plan.profile.microbatch_size, len(job.data))), seed=0), trained.device
        )
        self.splitter = _capture(self.held_out, assembly, inputs)
        stages = place_layers(plan, assembly.splitter, self.splitter)
        edges = self.splitter.edge_values(stages)
        sources: dict[int, list[int]] = defaultdict(list)
        for source, target in sorted(edges):
            sources[target].append(source)
        self.pipeline = replace(plan.pipeline, reads=tuple(tuple(sources[s]) for s in range(len(stages))))
        rebuild, keyed = self.splitter.captured.rebuild_output, keyed_loss(job)
        self.layers = [layer for index in trained.stages for layer in stages[index]]
        """of the evaluation's graph, those that this worker runs"""
        self.stages: dict[int, _EvaluationStage] = {}
        for index, own in trained.stages.items():
            section = self.splitter.section(stages[index])
            section = assembly.blueprint.filled(section, trained.device, own.module.section.buffers)
            self.stages[index] = _EvaluationStage(
                compiled(section) if job.compile else section,
                own.weights,
                lambda output, target: loss_of(keyed, rebuild(output), target),
                metrics=lambda output, target: [each(rebuild(output), target) for each in job.metrics.values()],
                autocast=autocast_for(job.precision, trained.device),
            )
        self.worker: Worker = replace(
            trained,
            stages={
                index: OwnStage(
                    index=index, module=module, sends_to=sent_by(index, edges), receives_from=received_by(index, edges)
                )
                for index, module in self.stages.items()
            },
            mailbox=Mailbox(
                self.pipeline,
                {edge: len(names) for edge, names in edges.items()},
                transport=self.transport,
                device=trained.device,
                timeout_s=self.timeout_s,
            ),
            events=EventLog(first=1, newest=1),
        )

    def run(self) -> dict[str, float]:
        """The mean of the loss and of every metric over all samples, or by their weights, the same to the last bit at
        all workers."""
        for buffers in self.buffers:
            buffers.average()
        names = {"loss": "Job.loss"} | {name: f"Job.metrics[{name!r}]" for name in self.job.metrics}
        sums = torch.zeros(len(self.plan.devices), len(names), 2, dtype=torch.float64, device=self.worker.device)
        epoch = Epoch(
            num_samples=len(self.held_out.data),
            batch_size=self.job.batch_size,
            microbatches=self.plan.microbatches,
            seed=self.job.seed,
        )
        modules = [stage.section.module for stage in self.stages.values()]
        with _eval_mode(modules):
            for part in epoch.parts(max(1, MOST_AHEAD // self.plan.microbatches)):
                self._meet()  # the messages of all that came before have arrived
                self.worker.run(self._segment(part))
                for stage in self.stages.values():
                    for microbatch, found in stage.measured.items():
                        terms = [
                            term(value, part.samples[microbatch], name)
                            for value, name in zip(found, names.values(), strict=True)
                        ]
                        sums[self.worker.rank] += sums.new_tensor(terms)
                    stage.measured.clear()
        # Each worker's in a row of its own, which the others leave at zero; so everyone adds them in the same order.
        self._all_reduce(sums)
        totals, weights = sums.sum(0).unbind(1)
        return dict(zip(names, (totals / weights).tolist(), strict=True))

    def _segment(self, part: Epoch) -> Segment:
        return Segment(
            schedule=build_schedule("inference", self.pipeline, part.minibatches),
            samples=part.samples,
            feed=JobFeed(
                job=self.held_out,
                epoch=part,
                captured=self.splitter.captured,
                device=self.worker.device,
            ),
        )

    def _meet(self) -> None:
        self._all_reduce(torch.zeros(1, device=self.worker.device))

    def _all_reduce(self, tensor: Tensor) -> None:
        everybody = tuple(range(len(self.plan.devices)))
        if len(everybody) > 1:
            self.transport.all_reduce(tensor, everybody, self.timeout_s)


class _EvaluationStage(StageModule):
    """Keeps nothing for a backward; where the output is made, measures it."""

    def __init__(
        self,
        section: Section,
        weights: Weights,
        loss: Callable[[Any, Any], Tensor | WeightedLoss],
        *,
        metrics: Callable[[Any, Any], list[Any]],
        autocast: Autocast,
    ) -> None:
        super().__init__(section, weights, loss, autocast=autocast)
        self._metrics = metrics
        self.measured: dict[int, list[Any]] = {}
        """of each microbatch, the loss, then the metrics, as the job returned them"""

    def forward(
        self,
        microbatch: int,
        inputs: Sequence[Any],
        received: Mapping[str, Any],
        target: Any,
        version_number: int | None = None,
        staleness: int = 0,
        *,
        key: int = 0,
    ) -> dict[str, Any]:
        arguments = [inputs[position] for position in self.section.reads]
        arguments += [received[name] for name in self.section.received_names]
        version = self.weights.acquire(version_number)
        with torch.no_grad(), self._autocast(), drawing(key):
            values, output = self.section.run(version.leaves, arguments)
            if self.section.makes_output:
                self.measured[microbatch] = [self._loss(output, target), *self._metrics(output, target)]
        self.weights.release(version)
        return self._by_name(values)


def _capture(held_out: Job, assembly: Assembly, inputs: Any) -> Splitter:
    """The model in eval mode, by the front end that captured it for training: others divide it into other layers."""
    others = to_device(inputs_of_other_shapes(held_out, inputs), assembly.worker.device)
    front_end = assembly.splitter.captured.front_end
    try:
        return Splitter(capture(assembly.blueprint.model, inputs, others, mode="eval", only=front_end))
    except CaptureError as error:
        raise CaptureError(
            f"for Job.evaluation: in eval mode {error}; make forward alike in both modes, or leave evaluation out"
        ) from error


def place_layers(plan: Plan, training: Splitter, evaluated: Splitter) -> list[list[int]]:
    """Of each stage, the layers of the evaluation's graph that it runs."""
    place_of = {layer.name: plan.stage_of_layer[index] for index, layer in enumerate(training.captured.layers)}
    holders: dict[str, set[int]] = defaultdict(set)
    for index in plan.stage_of_layer:
        for name in training.tensors_of(index):
            holders[name].add(plan.stage_of_layer[index])
    sources: dict[int, set[int]] = defaultdict(set)
    for node, readers in evaluated.consumers.items():
        for reader in readers:
            sources[reader].add(evaluated.layer_of[node])
    stages: list[list[int]] = [[] for _ in plan.stages]
    placed: dict[int, int] = {}
    for index, layer in enumerate(evaluated.captured.layers):
        lowest = max((placed[source] for source in sources[index]), default=0)
        # A buffer that training never uses is the same everywhere; a parameter is where training has it.
        wanted = [name for name in evaluated.tensors_of(index) if name in holders]
        wanted += evaluated.parameters_of(index)
        able = [s for s in range(lowest, len(stages)) if all(s in holders.get(name, ()) for name in wanted)]
        if not able:
            raise PlanError(
                f"for Job.evaluation the model in eval mode cannot be cut where the plan cuts it: layer {layer.name!r} "
                f"reads what stage {lowest} makes and uses {', '.join(wanted[:3])}, which no stage from there on has; "
                "plan with those layers in one stage (--no-cut), or make forward alike in both modes"
            )
        wished = place_of.get(layer.name)
        placed[index] = wished if wished in able else able[0]
        stages[placed[index]].append(index)
    return stages


@contextmanager
def _eval_mode(sections: Sequence[nn.Module]) -> Iterator[None]:
    """For modules that a graph calls whole; operations have their mode written into them."""
    modes = {module: module.training for section in sections for module in section.modules()}
    for module in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
