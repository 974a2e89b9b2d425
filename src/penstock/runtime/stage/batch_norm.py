"""Batch norm over the microbatches that the replicas of a stage run at the same time.

Replicas meet inside their forwards and backwards, so all of them must do their k-th together. Where every stage has as
many replicas, each with the same share of every minibatch, replica i of each stage makes a pipeline of its own, and
the pipelines run in lock step; so the meetings add no way to deadlock. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.errors import JobError, PlanError
from penstock.plan import Plan
from penstock.runtime.capture.capture import Captured
from penstock.runtime.capture.split import Section
from penstock.runtime.transport.base import Transport

_BATCH_NORM = torch.ops.aten.batch_norm.default


def check_lock_step(plan: Plan, minibatches: Iterable[int]) -> None:
    """Whether replicas can meet under this plan, with minibatches of these numbers of microbatches."""
    pipeline = plan.pipeline
    replicas = sorted({len(workers) for workers in pipeline.workers})
    if plan.is_asynchronous or len(replicas) > 1 or any(len(set(shares)) > 1 for shares in pipeline.shares):
        raise PlanError(
            "Job.sync_batch_norm needs a synchronous schedule and as many replicas in every stage, with equal shares, "
            f"so that they run in lock step; this plan has {plan.schedule} and {replicas} replicas. Plan with "
            "--schedule 1f1b and --replicas, or leave sync_batch_norm out"
        )
    uneven = next((count for count in minibatches if count % pipeline.round_sizes[0]), None)
    if uneven is not None:
        raise PlanError(
            f"Job.sync_batch_norm needs as many microbatches for each of {replicas[0]} replicas, but a minibatch has "
            f"{uneven}; plan with a multiple (--microbatches), and give data whose last minibatch has as many"
        )


def synchronise(
    section: Section, captured: Captured, replicas: tuple[int, ...], transport: Transport, timeout_s: float
) -> None:
    """Let the section's batch norms take their statistics over all replicas."""
    if captured.front_end != "export" and any(isinstance(m, _BatchNorm) for m in captured.root.modules()):
        raise JobError(
            f"Job.sync_batch_norm needs the model's operations, which torch.export gives; this model was captured by "
            f"{captured.front_end}, with whole modules. See `penstock profile`, or leave sync_batch_norm out"
        )
    module = section.module
    for index, node in enumerate(list(module.graph.nodes)):
        if normalises_by_batch(node):
            name = f"synchronised_batch_norm_{index}"
            module.add_submodule(name, _Synchronised(replicas, transport, timeout_s))
            node.op, node.target = "call_module", name
            node.args = (*node.args[:5], *node.args[6:8])  # without the mode, and which kernel to take
    module.recompile()


def normalises_by_batch(node: fx.Node) -> bool:
    """Whether an operation is a batch norm that takes its statistics from the batch."""
    return node.target is _BATCH_NORM and bool(node.args[5])


class _Synchronised(nn.Module):
    def __init__(self, replicas: tuple[int, ...], transport: Transport, timeout_s: float) -> None:
        super().__init__()
        self.replicas, self.transport, self.timeout_s = replicas, transport, timeout_s

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        normal, mean, var, count = _Normalise.apply(wide, eps, self)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if running_mean is not None and running_var is not None:
                running_mean.lerp_(mean.to(running_mean), momentum)
                running_var.lerp_((var * (count / (count - 1))).to(running_var), momentum)
        per_channel = (1, -1) + (1,) * (x.dim() - 2)
        if weight is not None:
            normal = normal * weight.view(per_channel)
        if bias is not None:
            normal = normal + bias.view(per_channel)
        made: Tensor = normal.to(x.dtype)
        return made

    def gather(self, row: Tensor) -> Tensor:
        """Every replica's row, in their order, so that all join them to the same bits."""
        rows = torch.zeros(len(self.replicas), *row.shape, dtype=row.dtype, device=row.device)
        rows[self.replicas.index(self.transport.rank)] = row
        self.transport.all_reduce(rows, self.replicas, self.timeout_s)
        return rows


class _Normalise(torch.autograd.Function):
    """(x - mean) / deviation per channel over all replicas, as one batch would have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, meeting: _Synchronised) -> tuple[Tensor, Tensor, Tensor, float]:
        dimensions = [d for d in range(x.dim()) if d != 1]
        own_var, own_mean = torch.var_mean(x, dimensions, correction=0)
        own_count = own_mean.new_tensor([x.numel() // x.shape[1]])
        rows = meeting.gather(torch.cat([own_mean, own_var, own_count]).double())
        means, variances, counts = rows[:, : x.shape[1]], rows[:, x.shape[1] : -1], rows[:, -1:]
        count = float(counts.sum())
        mean = (means * counts).sum(0) / count
        var = ((variances + (means - mean).square()) * counts).sum(0) / count
        view = (1, -1) + (1,) * (x.dim() - 2)
        inverse = (var + eps).rsqrt().to(x.dtype).view(view)
        normal = (x - mean.to(x.dtype).view(view)) * inverse
        ctx.save_for_backward(normal, inverse)
        ctx.meeting, ctx.count, ctx.dimensions = meeting, count, dimensions
        ctx.mark_non_differentiable(mean, var)
        return normal, mean, var, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        normal, inverse = ctx.saved_tensors
        own = torch.stack([gradient.sum(ctx.dimensions), (gradient * normal).sum(ctx.dimensions)])
        total = ctx.meeting.gather(own.double()).sum(0) / ctx.count
        plain, along = (t.to(gradient.dtype).view(inverse.shape) for t in total)
        return inverse * (gradient - plain - normal * along), None, None
