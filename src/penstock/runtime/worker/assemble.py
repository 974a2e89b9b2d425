"""Puts a worker together from a job and a plan. Training, verification, benchmarks and tests all start here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.errors import PlanError
from penstock.job import Job
from penstock.plan import Plan
from penstock.profile import Profile
from penstock.runtime.capture.blueprint import Blueprint, blueprint_of
from penstock.runtime.capture.capture import Captured, capture
from penstock.runtime.capture.split import Splitter, check_same_model
from penstock.runtime.messages.mailbox import Edge, Mailbox
from penstock.runtime.stage.batch_norm import check_lock_step, synchronise
from penstock.runtime.stage.buffers import ReplicaBuffers
from penstock.runtime.stage.compiling import compiled
from penstock.runtime.stage.losses import keyed_loss, loss_function
from penstock.runtime.stage.optimizers import scaled_rates
from penstock.runtime.stage.precision import LossScaler, autocast_for
from penstock.runtime.stage.stage import StageModule
from penstock.runtime.stage.weights import Weights
from penstock.runtime.sync.sync import GlobalClip, GradientSync
from penstock.runtime.transport.base import Transport
from penstock.runtime.worker.data import inputs_of_other_shapes, load_batch, load_microbatch, microbatch_key, to_device
from penstock.runtime.worker.worker import OwnStage, Segment, Worker, received_by, sent_by
from penstock.sampling import Epoch
from penstock.schedule import FAMILIES, family
from penstock.sync import sync_policy


@dataclass(frozen=True)
class JobFeed:
    """Reads microbatches of one epoch."""

    job: Job
    epoch: Epoch
    captured: Captured
    device: torch.device

    def key(self, microbatch: int) -> int:
        return microbatch_key(self.epoch, microbatch)

    def load(self, microbatch: int, *, inputs: bool = True, target: bool = True) -> tuple[Sequence[Any], Any]:
        given, wanted = load_microbatch(self.job, self.epoch, microbatch)
        bound = self.captured.bind(to_device(given, self.device)) if inputs else ()
        return bound, to_device(wanted, self.device) if target else None


def capture_for_plan(job: Job, plan: Plan, device: torch.device) -> tuple[Splitter, Blueprint]:
    """The job's model, captured as it was for the plan's profile, for the device where it will run."""
    check_job(job, plan)
    return capture_as_profiled(job, plan.profile, device)


def capture_as_profiled(job: Job, profile: Profile, device: torch.device) -> tuple[Splitter, Blueprint]:
    """On the device already, because a graph remembers where the constants it makes were."""
    inputs, _ = load_batch(job, range(min(profile.microbatch_size, len(job.data))), seed=0)
    inputs, others = to_device((inputs, inputs_of_other_shapes(job, inputs)), device)
    blueprint = blueprint_of(job, device)
    blueprint.model.train()  # for modules that the graph calls whole
    splitter = Splitter(capture(blueprint.model, inputs, others))
    check_same_model(splitter, (layer.name for layer in profile.graph.layers), "the plan")
    return splitter, blueprint


def check_job(job: Job, plan: Plan) -> None:
    """The plan must be for this job, and for training."""
    if not family(plan.schedule).trains:
        names = " or ".join(name for name, kind in FAMILIES.items() if kind.trains)
        raise PlanError(
            f"schedule {plan.schedule} has no backwards: nothing would be trained, no gradients made; "
            f"plan with --schedule {names}"
        )
    synchronous = " or ".join(name for name, kind in FAMILIES.items() if kind.trains and not kind.asynchronous)
    if job.clip_norm is not None and plan.is_asynchronous:
        raise PlanError(
            f"Job.clip_norm limits the norm over all stages at one update, but under schedule {plan.schedule} stages "
            f"update at different moments; plan with --schedule {synchronous}, or let the optimizer clip each "
            "stage by its own norm (docs/jobs.md)"
        )
    if job.precision == "fp16" and plan.is_asynchronous:
        raise PlanError(
            f"Job.precision fp16 scales the loss by what all stages agree on at one update, but under schedule "
            f"{plan.schedule} stages update at different moments; take precision bf16, which needs no scale, "
            f"or plan with --schedule {synchronous}"
        )
    if job.sync_batch_norm:
        if not plan.profile.sync_batch_norm:  # averaging might overlap with backwards that batch norm sums in
            raise PlanError("the job has sync_batch_norm, the plan is for one without; profile and plan again")
        check_lock_step(plan, make_epoch(job, plan, 0).minibatches)
    if plan.profile.precision != job.precision:
        raise PlanError(
            f"the plan is for precision {plan.profile.precision}, the job has {job.precision}; profile and plan again"
        )
    if job.compile and plan.takes_halves:
        raise PlanError(
            f"Job.compile makes one function of a backward, which schedule {plan.schedule} takes in two halves; "
            "plan with another schedule, or leave compile out"
        )
    if plan.profile.batch_size != job.batch_size:
        raise PlanError(
            f"the plan is for minibatches of {plan.profile.batch_size} samples, the job has {job.batch_size}; "
            "profile and plan again"
        )


def is_weighted(job: Job, plan: Plan) -> bool:
    """Whether a microbatch's loss has a weight."""
    return job.weigh is not None or plan.profile.weighted_loss


def make_epoch(job: Job, plan: Plan, number: int) -> Epoch:
    return Epoch(
        num_samples=len(job.data),
        batch_size=job.batch_size,
        microbatches=plan.microbatches,
        seed=job.seed,
        number=number,
    )


@dataclass(frozen=True)
class Assembly:
    """A worker with what it takes to give it an epoch."""

    job: Job
    plan: Plan
    splitter: Splitter
    worker: Worker
    buffers: Sequence[ReplicaBuffers]
    """of each of the worker's stages"""
    blueprint: Blueprint

    @property
    def layers(self) -> list[int]:
        """Those that this worker runs."""
        return [layer for index in self.worker.stages for layer in self.plan.stages[index].layers]

    def segment(self, epoch: Epoch, first_microbatch: int = 0, first_round: int = 0) -> Segment:
        return Segment(
            schedule=self.plan.schedule_for(epoch.minibatches),
            samples=epoch.samples,
            feed=JobFeed(
                job=self.job,
                epoch=epoch,
                captured=self.splitter.captured,
                device=self.worker.device,
            ),
            first_microbatch=first_microbatch,
            first_round=first_round,
            scheduler_steps=self._scheduler_steps(epoch),
            minibatches_before=epoch.minibatches_before,
            remedy=self.job.remedy,
        )

    def _scheduler_steps(self, epoch: Epoch) -> tuple[int, ...]:
        if self.job.scheduler_steps == "epoch":
            return (epoch.number,) * len(epoch.samples)
        return epoch.minibatches_before


def _update_width(plan: Plan, stage: int) -> float:
    """How many times as many microbatches an update of this stage averages as one of the first stage."""
    sizes = plan.pipeline.round_sizes
    return 1.0 if family(plan.schedule).accumulates else sizes[stage] / sizes[0]


def assemble(
    job: Job,
    plan: Plan,
    *,
    transport: Transport,
    clock: Callable[[], float],
    device: torch.device,
    timeout_s: float,
    captured: tuple[Splitter, Blueprint] | None = None,
) -> Assembly:
    """The worker of ``transport.rank``: its section of the model, its ends of the channels, its share of the sync.

    A model that is captured already may be given, by ``capture_for_plan`` of a plan from the same profile.
    """
    splitter, blueprint = captured or capture_for_plan(job, plan, device)
    pipeline = plan.pipeline
    edges = splitter.edge_values([stage.layers for stage in plan.stages])
    clip, scaler = None, None
    if job.clip_norm is not None:
        clip = GlobalClip(plan, job.clip_norm, transport=transport, device=device, timeout_s=timeout_s)
    if job.precision == "fp16":
        everybody = tuple(range(len(plan.devices)))
        scaler = LossScaler(everybody=everybody, transport=transport, device=device, timeout_s=timeout_s)
    worker = Worker(
        rank=transport.rank,
        stages={
            stage.index: stage
            for stage in _own_stages(
                job, plan, splitter, blueprint, edges, transport=transport, device=device, timeout_s=timeout_s
            )
        },
        mailbox=Mailbox(
            pipeline,
            {edge: len(names) for edge, names in edges.items()},
            transport=transport,
            device=device,
            timeout_s=timeout_s,
            sends={index: stage.sends for index, stage in enumerate(plan.stages)},
            weighted=is_weighted(job, plan),
        ),
        sync=GradientSync(plan.owners_of_parameters, sync_policy(plan.sync), transport=transport, timeout_s=timeout_s),
        clip=clip,
        scaler=scaler,
        weighted=is_weighted(job, plan),
        clock=clock,
        device=device,
    )
    buffers = [
        ReplicaBuffers(stage.module.section.buffers, pipeline.workers[index], transport=transport, timeout_s=timeout_s)
        for index, stage in worker.stages.items()
    ]
    return Assembly(job, plan, splitter, worker, buffers, blueprint)


def _own_stages(
    job: Job,
    plan: Plan,
    splitter: Splitter,
    blueprint: Blueprint,
    edges: Mapping[Edge, tuple[str, ...]],
    *,
    transport: Transport,
    device: torch.device,
    timeout_s: float,
) -> Iterator[OwnStage]:
    rebuild, pipeline = splitter.captured.rebuild_output, plan.pipeline
    taken: set[str] = set()
    for index in pipeline.stages_of[transport.rank]:
        section = blueprint.filled(splitter.section(plan.stages[index].layers), device)
        if job.sync_batch_norm and len(pipeline.workers[index]) > 1:
            synchronise(section, splitter.captured, pipeline.workers[index], transport, timeout_s)
        if job.compile:
            section = compiled(section)
        # Each stage updates its own: a weight that two of them share stays equal by its gradients, as between workers.
        parameters = {
            name: nn.Parameter(parameter.detach().clone(), parameter.requires_grad) if name in taken else parameter
            for name, parameter in section.parameters.items()
        }
        taken |= parameters.keys()
        optimizer = scaled_rates(job.optimizer, _update_width(plan, index)) if job.lr_by_replicas else job.optimizer
        yield OwnStage(
            index=index,
            module=StageModule(
                section,
                Weights(parameters, optimizer, job.scheduler, job.remedy if plan.is_asynchronous else None),
                loss_function(keyed_loss(job), rebuild, weighted=is_weighted(job, plan)),
                recompute=plan.stages[index].recompute,
                in_halves=plan.takes_halves,
                autocast=autocast_for(job.precision, device),
            ),
            sends_to=sent_by(index, edges),
            receives_from=received_by(index, edges),
        )
