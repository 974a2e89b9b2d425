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
from penstock.runtime.capture import Captured, capture
from penstock.runtime.data import inputs_of_other_shapes, load_batch, load_microbatch
from penstock.runtime.mailbox import Edge, Mailbox
from penstock.runtime.measure import to_device
from penstock.runtime.split import Splitter, check_same_model
from penstock.runtime.stage import StageModule
from penstock.runtime.sync import GlobalClip, GradientSync, owners_of_parameters
from penstock.runtime.transport import Transport
from penstock.runtime.weights import Weights
from penstock.runtime.worker import OwnStage, Segment, Worker
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

    def load(self, microbatch: int) -> tuple[Sequence[Any], Any]:
        inputs, target = to_device(load_microbatch(self.job, self.epoch, microbatch), self.device)
        return self.captured.bind(inputs), target


def capture_for_plan(job: Job, plan: Plan, device: torch.device) -> Splitter:
    """The job's model, captured as it was for the plan's profile, on the device where it will run.

    On the device already, because a graph remembers where the constants it makes were.
    """
    check_job(job, plan)
    inputs, _ = load_batch(job, range(min(plan.profile.microbatch_size, len(job.data))), seed=0)
    inputs, others = to_device((inputs, inputs_of_other_shapes(job, inputs)), device)
    splitter = Splitter(capture(job.model.to(device), inputs, others))
    check_same_model(splitter, (layer.name for layer in plan.profile.graph.layers), "the plan")
    return splitter


def check_job(job: Job, plan: Plan) -> None:
    """The plan must be for this job, and for training."""
    if not family(plan.schedule).trains:
        names = " or ".join(name for name, kind in FAMILIES.items() if kind.trains)
        raise PlanError(
            f"schedule {plan.schedule} has no backwards: nothing would be trained, no gradients made; "
            f"plan with --schedule {names}"
        )
    if job.clip_norm is not None and plan.is_asynchronous:
        names = " or ".join(name for name, kind in FAMILIES.items() if kind.trains and not kind.asynchronous)
        raise PlanError(
            f"Job.clip_norm limits the norm over all stages at one update, but under schedule {plan.schedule} stages "
            f"update at different moments; plan with --schedule {names}, or let the optimizer clip each "
            "stage by its own norm (docs/jobs.md)"
        )
    if plan.profile.batch_size != job.batch_size:
        raise PlanError(
            f"the plan is for minibatches of {plan.profile.batch_size} samples, the job has {job.batch_size}; "
            "profile and plan again"
        )


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


def assemble(
    job: Job,
    plan: Plan,
    *,
    transport: Transport,
    clock: Callable[[], float],
    device: torch.device,
    timeout_s: float,
) -> Assembly:
    """The worker of ``transport.rank``: its section of the model, its ends of the channels, its share of the sync."""
    splitter = capture_for_plan(job, plan, device)
    pipeline = plan.pipeline
    edges = splitter.edge_values([stage.layers for stage in plan.stages])
    clip = None
    if job.clip_norm is not None:
        clip = GlobalClip(plan, job.clip_norm, transport=transport, device=device, timeout_s=timeout_s)
    worker = Worker(
        rank=transport.rank,
        stages={stage.index: stage for stage in _own_stages(job, plan, splitter, edges, transport.rank)},
        mailbox=Mailbox(
            pipeline,
            {edge: len(names) for edge, names in edges.items()},
            transport=transport,
            device=device,
            timeout_s=timeout_s,
        ),
        sync=GradientSync(owners_of_parameters(plan), sync_policy(plan.sync), transport=transport, timeout_s=timeout_s),
        clip=clip,
        clock=clock,
        device=device,
    )
    return Assembly(job, plan, splitter, worker)


def _own_stages(
    job: Job, plan: Plan, splitter: Splitter, edges: Mapping[Edge, tuple[str, ...]], rank: int
) -> Iterator[OwnStage]:
    rebuild = splitter.captured.rebuild_output
    taken: set[str] = set()
    for index in plan.pipeline.stages_of[rank]:
        section = splitter.section(plan.stages[index].layers)
        # Each stage updates its own: a weight that two of them share stays equal by its gradients, as between workers.
        parameters = {
            name: nn.Parameter(parameter.detach().clone(), parameter.requires_grad) if name in taken else parameter
            for name, parameter in section.parameters.items()
        }
        taken |= parameters.keys()
        yield OwnStage(
            index=index,
            module=StageModule(
                section,
                Weights(parameters, job.optimizer, job.scheduler, job.remedy if plan.is_asynchronous else None),
                lambda output, target: job.loss(rebuild(output), target),
                recompute=plan.stages[index].recompute,
                in_halves=plan.takes_halves,
            ),
            sends_to={target: names for (source, target), names in sorted(edges.items()) if source == index},
            receives_from={source: names for (source, target), names in sorted(edges.items()) if target == index},
        )
