"""Sums the gradients of a round over the workers that own a parameter, as the sync policy says; clips them by the
norm of all stages together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.cost import BUCKET_BYTES, in_buckets
from penstock.plan import Plan
from penstock.runtime.stage.weights import Weights
from penstock.runtime.transport.base import Pending, Transport
from penstock.sync import SyncPolicy


def sync_groups(plan: Plan, *, together: bool = False) -> list[tuple[int, ...]]:
    """Every set of workers that will ever sum together, in an order all workers agree on.

    ``together`` says that all of them meet, at an update or to evaluate.
    """
    groups = set(plan.owners_of_parameters.values()) | set(plan.pipeline.workers)
    if together:
        groups.add(tuple(range(len(plan.devices))))
    return sorted(workers for workers in groups if len(workers) > 1)


class GradientSync:
    def __init__(
        self,
        owners: Mapping[str, tuple[int, ...]],
        policy: SyncPolicy,
        *,
        transport: Transport,
        timeout_s: float,
        bucket_bytes: float = BUCKET_BYTES,
    ) -> None:
        self.owners, self.policy = owners, policy
        self.transport, self.timeout_s, self.bucket_bytes = transport, timeout_s, bucket_bytes
        self._under_way: _Summing | None = None

    def begin(self, weights: Weights, round_index: int) -> None:
        """Start all-reducing gradients while the last backward of the round, which is about to run, is still running
        (overlap), if the transport can."""
        groups = {self.policy.group(self.owners[name], self.transport.rank, round_index) for name in weights.parameters}
        if all(len(group) > 1 and self.transport.carries(group) for group in groups):
            self._under_way = self._summing([weights], round_index)
            weights.on_final = self._under_way.final

    def run(self, stages: Sequence[Weights], round_index: int) -> None:
        """Replace the round's gradients by their sum over the group of each parameter, and over those of this worker's
        stages that share it."""
        summing, self._under_way = self._under_way or self._summing(stages, round_index), None
        for weights in stages:
            weights.on_final = None
        summing.finish(self.timeout_s)

    def sum_weight(self, weights: Weights, replicas: tuple[int, ...], round_index: int, device: torch.device) -> None:
        """Replace the weight of a stage's round by its sum over the replicas, after ``run``."""
        group = self.policy.group(replicas, self.transport.rank, round_index)
        if len(group) > 1:
            total = torch.tensor([weights.round_weight], dtype=torch.float64, device=device)
            self.transport.all_reduce(total, group, self.timeout_s)
            weights.round_weight = float(total)

    def _summing(self, stages: Sequence[Weights], round_index: int) -> _Summing:
        """The same sums in the same order on every worker of a group, whenever it begins."""
        shared: dict[str, list[Weights]] = defaultdict(list)
        for weights in stages:
            for name, parameter in weights.parameters.items():
                if parameter.requires_grad:
                    shared[name].append(weights)
        groups: dict[tuple[tuple[int, ...], str], list[_Owned]] = defaultdict(list)
        for name in [name for name in reversed(list(self.owners)) if name in shared]:  # as a backward comes to them
            owned = _Owned(name, shared[name])
            group = self.policy.group(self.owners[name], self.transport.rank, round_index)
            groups[group, str(owned.parameter.dtype)].append(owned)
        buckets = []
        for (group, _), everything in sorted(groups.items(), key=lambda item: item[0]):
            carried = len(group) > 1 and self.transport.carries(group)
            parts = self._parts(everything) if carried else [everything]
            buckets += [_Bucket(members, group, self.transport, carried=carried) for members in parts]
        return _Summing(buckets)

    def _parts(self, everything: Sequence[_Owned]) -> list[list[_Owned]]:
        """That are worth a message of their own."""
        numbers = in_buckets([owned.parameter.nbytes for owned in everything], self.bucket_bytes)
        parts: dict[int, list[_Owned]] = defaultdict(list)
        for number, owned in zip(numbers, everything, strict=True):
            parts[number].append(owned)
        return list(parts.values())


class _Summing:
    """The sums of a round."""

    def __init__(self, buckets: Sequence[_Bucket]) -> None:
        self._buckets = buckets
        self._bucket_of = {owned.name: bucket for bucket in buckets for owned in bucket.members}
        self._begun = 0

    def final(self, name: str) -> None:
        """Called when the gradient of ``name`` is complete. Starts every bucket whose gradients are all complete, in
        bucket order, which is the same on all workers."""
        self._bucket_of[name].left -= 1
        while self._begun < len(self._buckets) and not self._buckets[self._begun].left:
            self._buckets[self._begun].begin()
            self._begun += 1

    def finish(self, timeout_s: float) -> None:
        for bucket in self._buckets[self._begun :]:
            if bucket.is_carried:
                bucket.begin()
        for bucket in self._buckets:
            bucket.finish(timeout_s)


class _Bucket:
    """Gradients that travel together. Presence travels along: one that nobody has stays absent, as in one process, so
    that optimizers which decay weights leave the parameter alone."""

    def __init__(
        self, members: Sequence[_Owned], group: tuple[int, ...], transport: Transport, *, carried: bool
    ) -> None:
        self.members, self.group, self.transport, self.is_carried = members, group, transport, carried
        self.left = len(members)
        """gradients that are not final yet"""
        self._pending: Pending | None = None

    def begin(self) -> None:
        self._gather()
        self._pending = self.transport.begin_all_reduce(self._flat, self.group)

    def finish(self, timeout_s: float) -> None:
        if self._pending is not None:
            self._pending.wait(timeout_s)
        elif len(self.group) > 1:
            self._gather()
            self.transport.all_reduce(self._flat, self.group, timeout_s)
        else:
            for owned in self.members:
                owned.sum_here()
            return
        counts, sizes = self._flat[: len(self.members)].tolist(), [owned.parameter.numel() for owned in self.members]
        pieces = torch.split(self._flat[len(self.members) :], sizes)
        for owned, count, piece in zip(self.members, counts, pieces, strict=True):
            if count > 0:
                owned.set_gradient(piece.view(owned.parameter.shape))

    def _gather(self) -> None:
        for owned in self.members:
            owned.sum_here()
        parts = [owned.gradient for owned in self.members]
        some = self.members[0].parameter
        present = torch.tensor([part is not None for part in parts], dtype=some.dtype, device=some.device)
        tensors = [
            torch.zeros_like(owned.parameter) if part is None else part
            for owned, part in zip(self.members, parts, strict=True)
        ]
        self._flat = torch.cat([present, *(tensor.reshape(-1) for tensor in tensors)])


@dataclass(frozen=True)
class _Owned:
    """A parameter with those of a worker's stages that use it; each has a copy of its own."""

    name: str
    users: Sequence[Weights]

    @property
    def parameter(self) -> nn.Parameter:
        return self.users[0].parameters[self.name]

    @property
    def gradient(self) -> Tensor | None:
        return self.users[0].gradients.get(self.name)

    def set_gradient(self, gradient: Tensor) -> None:
        for number, weights in enumerate(self.users):  # which may scale theirs in place
            weights.gradients[self.name] = gradient if number == 0 else gradient.clone()

    def sum_here(self) -> None:
        parts = [weights.gradients[self.name] for weights in self.users if self.name in weights.gradients]
        if len(self.users) > 1 and parts:
            self.set_gradient(torch.stack(parts).sum(0))


class GlobalClip:
    """torch.nn.utils.clip_grad_norm_ over the whole model, under a synchronous schedule.

    All workers meet at the end of each minibatch. None of them waits for anything of the next one before, nor needs
    more than the backwards of this one to come, so the meeting adds no way to deadlock.
    """

    def __init__(
        self, plan: Plan, limit: float, *, transport: Transport, device: torch.device, timeout_s: float
    ) -> None:
        owners = plan.owners_of_parameters
        self.limit, self.transport, self.device, self.timeout_s = limit, transport, device, timeout_s
        self._everybody = tuple(range(len(plan.devices)))
        self._place = {name: place for place, name in enumerate(sorted(owners))}
        self._gives = {name for name, workers in owners.items() if workers[0] == transport.rank}

    def run(self, stages: Sequence[Weights]) -> None:
        """Scale the round's gradients of a worker's stages, summed over their owners already.

        The first owner of a parameter gives its norm, and every worker joins the norms in the same order: replicas and
        tied weights count once, and all workers, under any plan, find the same number to the last bit.
        """
        given = {name: part for weights in stages for name, part in weights.gradients.items() if name in self._gives}
        norms = torch.zeros(len(self._place), dtype=torch.float64, device=self.device)
        for name, norm in zip(given, _norms(list(given.values())), strict=True):
            norms[self._place[name]] = norm
        if len(self._everybody) > 1:
            self.transport.all_reduce(norms, self._everybody, self.timeout_s)
        scale = torch.clamp(self.limit / (torch.linalg.vector_norm(norms) + 1e-6), max=1.0)
        for weights in stages:
            for gradient in weights.gradients.values():
                gradient.mul_(scale)


def _norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    return torch._foreach_norm(tensors) if tensors else ()
