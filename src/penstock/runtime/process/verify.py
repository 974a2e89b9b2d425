"""Compares what a plan's workers compute with the model in a single process: the loss and every gradient."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.compression import COMPRESSIONS
from penstock.errors import JobError, WorkerError
from penstock.job import Job, Precision
from penstock.plan import Plan
from penstock.runtime.capture.randomness import drawing, generators_put_back
from penstock.runtime.links.choice import choose_links, talking_pairs
from penstock.runtime.process.joining import worker_process
from penstock.runtime.stage.losses import Term, WeightedLoss, keyed_loss, loss_of, mean_of, term
from penstock.runtime.stage.precision import autocast_for
from penstock.runtime.sync.sync import sync_groups
from penstock.runtime.worker.assemble import Assembly, assemble
from penstock.runtime.worker.data import load_microbatch, microbatch_key, to_device
from penstock.runtime.worker.reference import Reference, reference_of
from penstock.runtime.worker.release import Share, release_other_layers
from penstock.runtime.worker.worker import Segment
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
    """of any gradient element, beside the largest element of that gradient, or beside what its rounding may be
    (``gradient_sizes``); infinite where one is not a finite number"""
    worst_parameter: str
    tolerance: float
    """what the job's precision and the plan's compression allow; docs/plans.md"""
    loss_tolerance: float
    compression: str
    """the coarsest way in which values travelled between workers"""
    apart_because: str = ""
    """why the reference took the loss of each microbatch; nothing where it took that of the whole minibatch"""
    reason: str = ""
    """what is wrong, where it is known"""

    @property
    def passed(self) -> bool:
        return self.largest_difference <= self.tolerance and self.loss_difference <= self.loss_tolerance


def verify_worker(job: Job, plan: Plan, directory: Path, timeout_s: float) -> None:
    """Run one minibatch without updating any weight; leave gradients and losses in ``directory``."""
    with worker_process(plan, timeout_s) as (peers, device):
        links = choose_links(peers, sync_groups(plan), talking_pairs(plan), device=device)
        assembly = assemble(
            job, plan, transport=links.transport, clock=time.perf_counter, device=device, timeout_s=timeout_s
        )
        release_other_layers([Share(assembly.splitter, assembly.layers)])
        save_gradients(assembly, directory)


def save_gradients(assembly: Assembly, directory: Path) -> None:
    worker, epoch = assembly.worker, verification_epoch(assembly.job, assembly.plan)
    segment: Segment = replace(assembly.segment(epoch), schedule=_without_steps(assembly.plan, epoch))
    worker.scaler = None  # no update follows that would take the scale out of the gradients again
    worker.run(segment)
    for stage in worker.stages.values():
        stage.weights.divide_by_weight()
    tensors = {
        f"{index}/{name}": gradient.cpu().clone(memory_format=torch.contiguous_format)
        for index, stage in worker.stages.items()
        for name, gradient in stage.weights.gradients.items()
    }
    save_file(tensors, directory / f"worker-{worker.rank}.safetensors")
    losses = {
        str(microbatch): stage.module.take_loss(microbatch, epoch.samples[microbatch])
        for stage in worker.stages.values()
        for microbatch in list(stage.module.losses)
    }
    (directory / f"worker-{worker.rank}.json").write_text(json.dumps(losses))


def verification_epoch(job: Job, plan: Plan) -> Epoch:
    """One minibatch: the plan's own, or for an asynchronous plan enough microbatches that every replica has one."""
    count = plan.microbatches if not plan.is_asynchronous else max(plan.pipeline.round_sizes) + 1
    batch_size = job.batch_size if not plan.is_asynchronous else job.batch_size * count
    num_samples = min(len(job.data), batch_size)
    return Epoch(num_samples=num_samples, batch_size=batch_size, microbatches=count, seed=job.seed)


def compare(job: Job, plan: Plan, directory: Path) -> Verification:
    """What the workers left in ``directory``, beside the model in this process and the loss of the whole minibatch."""
    epoch = verification_epoch(job, plan)
    with generators_put_back():
        found = _compare(job, plan, epoch, directory)
    if found.microbatches != len(epoch.samples):
        raise WorkerError(f"the workers reported {found.microbatches} losses for {len(epoch.samples)} microbatches")
    return found


def _compare(job: Job, plan: Plan, epoch: Epoch, directory: Path) -> Verification:
    found = _verification(job, plan, directory, reference(job, plan, epoch))
    if found.passed or found.reason or found.apart_because:
        return found
    apart = _verification(job, plan, directory, reference(job, plan, epoch, whole=False))
    return replace(found, reason=_PARTS_DO_NOT_ADD_UP) if apart.passed else found


_PARTS_DO_NOT_ADD_UP = (
    "the workers agree with the model run microbatch by microbatch, but the losses of the microbatches do not add up "
    "to that of the whole minibatch. A loss that is a mean over tokens, not over samples, must return (sum, weight), "
    "or Job.weigh must say what it divides by (docs/jobs.md)"
)


def _verification(job: Job, plan: Plan, directory: Path, expected: Expected) -> Verification:
    compression = COMPRESSIONS[plan.compression]
    sizes = gradient_sizes(expected.gradients, max(compression.noise, 0.1 if job.precision != "float32" else 0.0))
    losses: dict[int, Term] = {}
    differences: list[tuple[float, str]] = []
    not_finite: list[str] = []
    for rank, stages in enumerate(plan.pipeline.stages_of):
        written = json.loads((directory / f"worker-{rank}.json").read_text())
        losses.update((int(microbatch), Term(*pair)) for microbatch, pair in written.items())
        found = load_file(directory / f"worker-{rank}.safetensors")
        for stage in stages:
            for parameter in plan.profile.graph.parameters_of(plan.stages[stage].layers):
                name = parameter.name
                pair = found.get(f"{stage}/{name}"), expected.gradients.get(name)
                differences.append((_relative_difference(*pair, sizes.get(name, 0.0)), name))
                if not all(each is None or bool(each.isfinite().all()) for each in pair):
                    not_finite.append(name)
    worst, worst_name = max(differences, default=(0.0, ""), key=lambda pair: pair[0])
    loss = mean_of(losses.values())
    return Verification(
        microbatches=len(losses),
        loss=loss,
        loss_difference=_finite(abs(loss - expected.loss) / max(abs(expected.loss), 1e-12)),
        gradients=len(differences),
        largest_difference=worst,
        worst_parameter=worst_name,
        tolerance=max(compression.tolerance, TOLERANCES[job.precision]),
        loss_tolerance=max(compression.loss_tolerance, TOLERANCES[job.precision]),
        compression=plan.compression,
        apart_because=expected.apart_because,
        reason=f"gradients that are infinite or not a number: {len(not_finite)}, first {not_finite[0]}"
        if not_finite
        else "",
    )


class Expected(NamedTuple):
    """What one process computes."""

    loss: float
    gradients: dict[str, Tensor]
    apart_because: str = ""
    """why the loss was taken of each microbatch; nothing where it was taken of the whole minibatch"""


class _Batch(NamedTuple):
    """A batch that has gone through the model."""

    samples: int
    output: Any
    target: Any
    key: int
    """by which the loss draws, if it does"""


def reference(job: Job, plan: Plan, epoch: Epoch, *, whole: bool = True) -> Expected:
    """The loss and the gradients of a minibatch in one process.

    Microbatches go through the model one by one, since batch norm sees one at a time (or as many as replicas run
    together). Then the loss is taken once, of all outputs joined, unless they cannot be or ``whole`` says not to.
    """
    model, job = reference_of(job, plan), keyed_loss(job)
    for parameter in model.parameters.values():
        parameter.grad = None
    together = len(plan.pipeline.workers[0]) if job.sync_batch_norm else 1
    starts = range(0, len(epoch.samples), together)
    batches = [_forward(job, model, epoch, range(first, first + together)) for first in starts]
    apart_because = ""
    if whole:
        try:
            batches = [_joined(batches)]
        except CannotJoinError as error:
            apart_because = str(error)
    losses = []
    for batch in batches:
        with autocast_for(job.precision, model.device)(), drawing(batch.key):
            losses.append(loss_of(job, batch.output, batch.target))
    terms = [term(loss, batch.samples, "Job.loss") for loss, batch in zip(losses, batches, strict=True)]
    weight = sum(each.weight for each in terms)
    if not weight:
        raise JobError(
            "the minibatch that is compared has a weight of 0, so it has no gradients; change Job.seed or batch_size"
        )
    for loss, batch in zip(losses, batches, strict=True):
        part = loss.total / weight if isinstance(loss, WeightedLoss) else loss * (batch.samples / weight)
        if part.requires_grad:
            torch.autograd.backward(part)
    gradients = {name: p.grad.cpu() for name, p in model.parameters.items() if p.grad is not None}
    return Expected(mean_of(terms), gradients, apart_because)


def _forward(job: Job, model: Reference, epoch: Epoch, members: Sequence[int]) -> _Batch:
    """These microbatches, at once, through the model."""
    loaded = [load_microbatch(job, epoch, member) for member in members]
    samples, keys = [epoch.samples[m] for m in members], [microbatch_key(epoch, m) for m in members]
    targets = [target for _, target in loaded]
    target = to_device(targets[0] if len(targets) == 1 else _join(targets, samples), model.device)
    with autocast_for(job.precision, model.device)():
        return _Batch(sum(samples), model.forward([inputs for inputs, _ in loaded], keys), target, keys[0])


class CannotJoinError(JobError):
    """Batches do not make a larger one; says why."""


def _joined(batches: Sequence[_Batch]) -> _Batch:
    if len(batches) == 1:
        return batches[0]
    samples = [batch.samples for batch in batches]
    output = _join([batch.output for batch in batches], samples)
    return _Batch(sum(samples), output, _join([batch.target for batch in batches], samples), batches[0].key)


def _join(parts: Sequence[Any], samples: Sequence[int]) -> Any:
    """Batches of so many samples as one: tensors one after another, all else, if it is plain, as it is in each."""
    flat, specs = zip(*(pytree.tree_flatten(part) for part in parts), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise CannotJoinError("microbatches are nested in different ways")
    return pytree.tree_unflatten([_join_leaves(leaves, samples) for leaves in zip(*flat, strict=True)], specs[0])


def _join_leaves(leaves: Sequence[Any], samples: Sequence[int]) -> Any:
    if not isinstance(leaves[0], Tensor):
        if not isinstance(leaves[0], (int, float, bool, str)):
            return None  # as it is to the loss of a captured graph
        if any(leaf != leaves[0] for leaf in leaves):
            raise CannotJoinError(f"microbatches have different values ({leaves[0]!r}, ...) besides tensors")
        return leaves[0]
    for leaf, count in zip(leaves, samples, strict=True):
        if leaf.dim() == 0 or len(leaf) != count:
            raise CannotJoinError(f"a tensor of shape {list(leaf.shape)} has not a row for each of {count} samples")
        if leaf.shape[1:] != leaves[0].shape[1:]:
            raise CannotJoinError(f"microbatches differ in length: {list(leaves[0].shape)} and {list(leaf.shape)}")
    return torch.cat(list(leaves))


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


ROUNDING_OF_LAYER, ROUNDING_OF_ALL = 0.1, 1e-3
"""A gradient that is 0 but for rounding has no size of its own to be compared with. What is left of the terms that
cancelled was some 1e-6 of them, and terms are about as large as the gradients of the same layer (its weight's, for a
bias before batch norm or of keys in attention). With a tolerance of 1e-4, these allow 1e-5 of the largest gradient of
the layer, and 1e-7, the last bit of a float32, of the largest of all."""


def gradient_sizes(gradients: Mapping[str, Tensor], noise: float = 0.0) -> dict[str, float]:
    """What a difference in each gradient is compared with: its largest element, or what its rounding may be.

    ``noise`` is what coarser rounding may be of the largest gradient of all.
    """
    own = {name: float(gradient.abs().max()) if gradient.numel() else 0.0 for name, gradient in gradients.items()}
    of_layer: dict[str, float] = defaultdict(float)
    for name, size in own.items():
        of_layer[_layer(name)] = max(of_layer[_layer(name)], size)
    largest = max(own.values(), default=0.0)
    least = max(noise, ROUNDING_OF_ALL) * largest
    return {name: max(size, ROUNDING_OF_LAYER * of_layer[_layer(name)], least) for name, size in own.items()}


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _relative_difference(found: Tensor | None, expected: Tensor | None, size: float) -> float:
    if found is None or expected is None:
        return 0.0 if found is expected else math.inf
    if not found.numel():
        return 0.0
    return _finite(float((found - expected).abs().max()) / max(size, 1e-30))


def _finite(difference: float) -> float:
    """What is not a number compares as equal to nothing."""
    return difference if math.isfinite(difference) else math.inf
