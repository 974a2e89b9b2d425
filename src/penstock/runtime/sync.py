"""Sums the gradients of a round over the workers that own a parameter, as the sync policy says; clips them by the
norm of all stages together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.plan import Plan
from penstock.runtime.transport import Transport
from penstock.runtime.weights import Weights
from penstock.sync import SyncPolicy


def owners_of_parameters(plan: Plan) -> dict[str, tuple[int, ...]]:
    """For each parameter, the workers that hold it: replicas of its stage, and of every other stage it is tied to."""
    owners: dict[str, set[int]] = defaultdict(set)
    for layer in plan.profile.graph.layers:
        for name in layer.parameters:
            owners[name].update(plan.pipeline.workers[plan.stage_of_layer[layer.id]])
    return {name: tuple(sorted(workers)) for name, workers in owners.items()}


def sync_groups(plan: Plan, *, together: bool = False) -> list[tuple[int, ...]]:
    """Every set of workers that will ever sum together, in an order all workers agree on.

    ``together`` says that all of them meet, at an update or to evaluate.
    """
    groups = set(owners_of_parameters(plan).values()) | set(plan.pipeline.workers)
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
    ) -> None:
        self.owners, self.policy = owners, policy
        self.transport, self.timeout_s = transport, timeout_s

    def run(self, stages: Sequence[Weights], round_index: int) -> None:
        """Replace the round's gradients by their sum over the group of each parameter, and over those of this worker's
        stages that share it."""
        shared: dict[str, list[Weights]] = defaultdict(list)
        for weights in stages:
            for name, parameter in weights.parameters.items():
                if parameter.requires_grad:
                    shared[name].append(weights)
        groups: dict[tuple[int, ...], list[_Owned]] = defaultdict(list)
        for name in sorted(shared):
            owned = _Owned(name, shared[name])
            owned.sum_here()
            group = self.policy.group(self.owners[name], self.transport.rank, round_index)
            if len(group) > 1:
                groups[group].append(owned)
        for group, members in sorted(groups.items()):
            self._sum(group, members)

    def _sum(self, group: tuple[int, ...], everything: Sequence[_Owned]) -> None:
        """One message per group and dtype. Presence travels along: a gradient that nobody has stays absent,
        as in one process, so that optimizers which decay weights leave the parameter alone."""
        by_dtype: dict[torch.dtype, list[_Owned]] = defaultdict(list)
        for owned in everything:
            by_dtype[owned.parameter.dtype].append(owned)
        for dtype, members in by_dtype.items():
            parts = [owned.gradient for owned in members]
            device = members[0].parameter.device
            present = torch.tensor([part is not None for part in parts], dtype=dtype, device=device)
            tensors = [
                torch.zeros_like(owned.parameter) if part is None else part
                for owned, part in zip(members, parts, strict=True)
            ]
            flat = torch.cat([present, *(tensor.reshape(-1) for tensor in tensors)])
            self.transport.all_reduce(flat, group, self.timeout_s)
            counts, sizes = flat[: len(members)].tolist(), [tensor.numel() for tensor in tensors]
            for owned, count, piece in zip(members, counts, torch.split(flat[len(members) :], sizes), strict=True):
                if count > 0:
                    owned.set_gradient(piece.view(owned.parameter.shape))


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
        owners = owners_of_parameters(plan)
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
