"""Compares what a plan's workers compute with the model in a single process: the loss and every gradient."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.compression import COMPRESSIONS
from penstock.errors import WorkerError
from penstock.graph import Parameter
from penstock.job import Job, Precision
from penstock.plan import Plan
from penstock.runtime.assemble import Assembly, assemble
from penstock.runtime.data import load_microbatch, microbatch_key
from penstock.runtime.grouping import LOSS
from penstock.runtime.links import make_links, talking_pairs
from penstock.runtime.measure import to_device
from penstock.runtime.precision import autocast_for
from penstock.runtime.randomness import drawing, generators_put_back, keyed_function
from penstock.runtime.reference import joined, reference_of
from penstock.runtime.sync import sync_groups
from penstock.runtime.train import worker_process
from penstock.runtime.worker import Segment
from penstock.sampling import Epoch
from penstock.schedule import Kind, Schedule, build_schedule

TOLERANCES: dict[Precision, float] = {"float32": 1e-4, "fp16": 4e-3, "bf16": 2e-2}
"""A weight used twice in one process sums its gradients in the job's precision, and in two stages in its own."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    microbatches: int
    loss: float
    loss_difference: float
    gradients: int
    """how many were compared, on all workers together"""
    largest_difference: float
    """of any gradient element, beside the largest element of that gradient (or, if that is less, beside a hundredth of
    the largest of all; a tenth in low precision and where values are compressed)"""
    worst_parameter: str
    tolerance: float
    """what the job's precision and the plan's compression allow; docs/plans.md"""
    loss_tolerance: float
    compression: str
    """the coarsest way in which values travelled between workers"""

    @property
    def passed(self) -> bool:
        return self.largest_difference <= self.tolerance and self.loss_difference <= self.loss_tolerance


def verify_worker(job: Job, plan: Plan, directory: Path, timeout_s: float) -> None:
    """Run one minibatch without updating any weight; leave gradients and losses in ``directory``."""
    with worker_process(plan, timeout_s) as device:
        links = make_links(sync_groups(plan), talking_pairs(plan), device=device, timeout_s=timeout_s)
        assembly = assemble(
            job, plan, transport=links.transport, clock=time.perf_counter, device=device, timeout_s=timeout_s
        )
        save_gradients(assembly, directory)


def save_gradients(assembly: Assembly, directory: Path) -> None:
    worker, epoch = assembly.worker, verification_epoch(assembly.job, assembly.plan)
    segment: Segment = replace(assembly.segment(epoch), schedule=_without_steps(assembly.plan, epoch))
    worker.scaler = None  # no update follows that would take the scale out of the gradients again
    worker.run(segment)
    tensors = {
        f"{index}/{name}": gradient.cpu().clone(memory_format=torch.contiguous_format)
        for index, stage in worker.stages.items()
        for name, gradient in stage.weights.gradients.items()
    }
    save_file(tensors, directory / f"worker-{worker.rank}.safetensors")
    losses = {str(m): loss for stage in worker.stages.values() for m, loss in stage.module.losses.items()}
    (directory / f"worker-{worker.rank}.json").write_text(json.dumps(losses))


def verification_epoch(job: Job, plan: Plan) -> Epoch:
    """One minibatch: the plan's own, or for an asynchronous plan enough microbatches that every replica has one."""
    count = plan.microbatches if not plan.is_asynchronous else max(plan.pipeline.round_sizes) + 1
    batch_size = job.batch_size if not plan.is_asynchronous else job.batch_size * count
    num_samples = min(len(job.data), batch_size)
    return Epoch(num_samples=num_samples, batch_size=batch_size, microbatches=count, seed=job.seed)


def compare(job: Job, plan: Plan, directory: Path) -> Verification:
    """The reference: the same microbatches one after another through the whole model, in this process."""
    epoch = verification_epoch(job, plan)
    together = len(plan.pipeline.workers[0]) if job.sync_batch_norm else 1
    with generators_put_back():
        expected_loss, expected = reference_gradients(job, plan, epoch, together)
    losses: dict[int, float] = {}
    compared, worst, worst_name = 0, 0.0, ""
    # A gradient that is zero but for rounding has no size of its own to compare with.
    compression, low = COMPRESSIONS[plan.compression], job.precision != "float32"
    noise = max(compression.noise, 0.1 if low else 0.0)
    smallest_size = noise * max((float(gradient.abs().max()) for gradient in expected.values()), default=0.0)
    for rank, stages in enumerate(plan.pipeline.stages_of):
        found = load_file(directory / f"worker-{rank}.safetensors")
        losses |= {int(m): loss for m, loss in json.loads((directory / f"worker-{rank}.json").read_text()).items()}
        owned = [(stage, p.name) for stage in stages for p in _parameters(plan, stage)]
        for stage, name in owned:
            difference = _relative_difference(found.get(f"{stage}/{name}"), expected.get(name), smallest_size)
            compared += 1
            if difference >= worst:
                worst, worst_name = difference, name
    total = sum(epoch.samples)
    if len(losses) != len(epoch.samples):
        raise WorkerError(f"the workers reported {len(losses)} losses for {len(epoch.samples)} microbatches")
    loss = sum(losses[m] * samples for m, samples in enumerate(epoch.samples)) / total
    return Verification(
        microbatches=len(epoch.samples),
        loss=loss,
        loss_difference=abs(loss - expected_loss) / max(abs(expected_loss), 1e-12),
        gradients=compared,
        largest_difference=worst,
        worst_parameter=worst_name,
        tolerance=max(compression.tolerance, TOLERANCES[job.precision]),
        loss_tolerance=max(compression.loss_tolerance, TOLERANCES[job.precision]),
        compression=plan.compression,
    )


def reference_gradients(job: Job, plan: Plan, epoch: Epoch, together: int = 1) -> tuple[float, dict[str, Tensor]]:
    """The mean loss and the gradients, with so many microbatches at a time."""
    reference, compute_loss = reference_of(job, plan), keyed_function(job.loss, LOSS)
    for parameter in reference.parameters.values():
        parameter.grad = None
    total, mean_loss = sum(epoch.samples), 0.0
    autocast = autocast_for(job.precision, reference.device)
    for first in range(0, len(epoch.samples), together):
        members = range(first, first + together)
        samples = sum(epoch.samples[m] for m in members)
        batches = [load_microbatch(job, epoch, m) for m in members]
        keys = [microbatch_key(epoch, m) for m in members]
        target = to_device(joined([target for _, target in batches]), reference.device)
        with autocast(), drawing(keys[0]):
            loss = compute_loss(reference.forward([inputs for inputs, _ in batches], keys), target)
        torch.autograd.backward(loss * (samples / total))
        mean_loss += float(loss.detach()) * samples / total
    gradients = {name: p.grad.cpu() for name, p in reference.parameters.items() if p.grad is not None}
    return mean_loss, gradients


def _without_steps(plan: Plan, epoch: Epoch) -> Schedule:
    depths = [stage.in_flight for stage in plan.stages]
    if plan.is_asynchronous:  # one update, as all gradients are of the same weights
        schedule = build_schedule("1f1b", plan.pipeline, epoch.minibatches, depths)
    else:
        schedule = plan.schedule_for(epoch.minibatches)
    programs = tuple(
        tuple(action for action in program if action.kind is not Kind.STEP) for program in schedule.programs
    )
    return replace(schedule, programs=programs)


def _parameters(plan: Plan, stage: int) -> Sequence[Parameter]:
    return plan.profile.graph.parameters_of(plan.stages[stage].layers)


def _relative_difference(found: Tensor | None, expected: Tensor | None, smallest_size: float) -> float:
    if found is None or expected is None:
        return 0.0 if found is expected else math.inf
    size = max(float(expected.abs().max()), smallest_size, 1e-30)
    return float((found - expected).abs().max()) / size
