"""The cost model: the only formulas of seconds and bytes. Planner and simulator both ask here."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.cluster import Cluster, Level
from penstock.plan import Plan, Stage
from penstock.profile import LayerSeconds, Profile
from penstock.schedule import Action, Kind


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages of one size that cross a link one after another."""

    messages: int
    bytes_each: float

    def seconds(self, link: Level) -> float:
        return self.messages * (link.latency_s + self.bytes_each / link.bytes_per_s)


def message(num_bytes: float) -> Traffic:
    return Traffic(1, num_bytes)


def ring_allreduce(num_bytes: float, members: int) -> Traffic:
    """Each of n members sends and receives 2 (n-1) times an n-th of the bytes."""
    return Traffic(2 * (members - 1), num_bytes / members)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Costs of running layers of a profile on devices of a cluster, ``microbatch_size`` samples at a time.

    Seconds and activation bytes scale with the samples from what the profile measured; parameters do not.
    """

    profile: Profile
    cluster: Cluster
    microbatch_size: float

    @property
    def scale(self) -> float:
        return self.microbatch_size / self.profile.microbatch_size

    def layer_seconds(self, device: int) -> tuple[LayerSeconds, ...]:
        """Per layer, in graph order, as profiled for this device's kind."""
        return self.profile.seconds_on(self.cluster.devices[device].kind)

    def forward_s(self, layers: Collection[int], device: int) -> float:
        return self._sum_s(layers, device, ("forward_s",)) * self.scale

    def backward_s(self, layers: Collection[int], device: int) -> float:
        return self._sum_s(layers, device, ("backward_input_s", "backward_weight_s")) * self.scale

    def update_s(self, layers: Collection[int], device: int, *, stashed: bool) -> float:
        """The optimizer's update; with weights ``stashed`` for microbatches in flight, of a copy of them."""
        return self._sum_s(layers, device, ("update_s", "copy_s") if stashed else ("update_s",))

    def transfer_s(self, num_bytes: float, source: int, target: int) -> float:
        """One message between two devices."""
        if num_bytes == 0:
            return 0.0
        return message(num_bytes).seconds(self.cluster.link(source, target))

    def allreduce_s(self, num_bytes: float, devices: Sequence[int]) -> float:
        """A ring all-reduce at the pace of the slowest link."""
        if len(devices) < 2 or num_bytes == 0:
            return 0.0
        return ring_allreduce(num_bytes, len(devices)).seconds(self.cluster.slowest_link(devices))

    def parameter_bytes(self, layers: Collection[int]) -> int:
        return sum(parameter.num_bytes for parameter in self.profile.graph.parameters_of(layers))

    def forward_bytes(self, source: Collection[int], target: Collection[int]) -> float:
        return self.scale * sum(value.num_bytes for value in self.profile.graph.crossing(source, target))

    def backward_bytes(self, source: Collection[int], target: Collection[int]) -> float:
        """What returns from ``target`` to ``source``: the gradients of what went forward."""
        crossing = self.profile.graph.crossing(source, target)
        return self.scale * sum(value.num_bytes for value in crossing if value.differentiable)

    def stage_memory_bytes(self, stage: Stage, versions: int) -> float:
        """Peak bytes of one replica: weight versions, gradients, optimizer state, activations in flight."""
        graph = self.profile.graph
        parameters = graph.parameters_of(stage.layers)
        weights = sum(parameter.num_bytes for parameter in parameters)
        state = sum(parameter.state_bytes for parameter in parameters)
        saved = sum(graph.by_id[layer].saved_bytes for layer in stage.layers) * self.scale
        return weights * (versions + 1) + state + saved * stage.in_flight

    def _sum_s(self, layers: Collection[int], device: int, fields: Sequence[str]) -> float:
        seconds, row = self.layer_seconds(device), self._row
        total: float = sum(getattr(seconds[row[layer]], field) for layer in layers for field in fields)
        return total / self.cluster.devices[device].speed

    @cached_property
    def _row(self) -> dict[int, int]:
        return {layer.id: row for row, layer in enumerate(self.profile.graph.layers)}


def stashes_weights(asynchronous: bool, in_flight: int) -> bool:
    """Whether a stage updates while microbatches are in flight, and so keeps versions of its weights."""
    return asynchronous and in_flight > 1


class PlanCosts:
    """Seconds of every action and message of a plan, looked up rather than summed again for each."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model = CostModel(profile=plan.profile, cluster=plan.cluster, microbatch_size=plan.microbatch_size)
        self._compute = [
            {
                Kind.FORWARD: self.model.forward_s(plan.stages[stage].layers, device),
                Kind.BACKWARD: self.model.backward_s(plan.stages[stage].layers, device),
                Kind.STEP: self.model.update_s(
                    plan.stages[stage].layers,
                    device,
                    stashed=stashes_weights(plan.is_asynchronous, plan.stages[stage].in_flight),
                ),
            }
            for stage, device in zip(plan.pipeline.stage_of, plan.devices, strict=True)
        ]
        self._messages: dict[tuple[Kind, int, int, int, int], float] = {}
        self._syncs: dict[int, float] = {}

    def compute_s(self, action: Action, worker: int) -> float:
        return self._compute[worker][action.kind]

    def sync_s(self, stage: int) -> float:
        if stage not in self._syncs:
            self._syncs[stage] = self._sync_s(stage)
        return self._syncs[stage]

    def _sync_s(self, stage: int) -> float:
        """Averaging a stage's gradients over its replicas, and tied ones over their owners too."""
        pipeline, layers = self.plan.pipeline, self.plan.stages[stage].layers
        devices = [self.plan.devices[worker] for worker in pipeline.sync_workers(stage)]
        return self.model.allreduce_s(self.model.parameter_bytes(layers), devices)

    def message_s(self, action: Action, sender: int, target_stage: int, receiver: int) -> float:
        """The result of a forward to a stage that reads it, or of a backward to a stage that it read from."""
        key = (action.kind, action.stage, sender, target_stage, receiver)
        if key not in self._messages:
            here, there = self.plan.stages[action.stage].layers, self.plan.stages[target_stage].layers
            forward = action.kind is Kind.FORWARD
            num_bytes = self.model.forward_bytes(here, there) if forward else self.model.backward_bytes(there, here)
            devices = self.plan.devices
            self._messages[key] = self.model.transfer_s(num_bytes, devices[sender], devices[receiver])
        return self._messages[key]

    def stage_s(self, stage: int) -> float:
        """Seconds per microbatch of a stage in steady state, its updates and averaging shared out; no waiting."""
        workers = self.plan.pipeline.workers[stage]
        forward_s, backward_s, step_s = (
            max(self._compute[worker][kind] for worker in workers) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.STEP)
        )
        per_round = len(workers) if self.plan.is_asynchronous else self.plan.microbatches
        return (forward_s + backward_s) / len(workers) + (step_s + self.sync_s(stage)) / per_round

    def bottleneck_s(self) -> float:
        """No schedule of the plan's stages is faster per microbatch: the slowest stage, or the slowest link."""
        pipeline = self.plan.pipeline
        slowest_s = max(self.stage_s(stage) for stage in range(pipeline.num_stages))
        for stage, sources in enumerate(pipeline.reads):
            for source in sources:
                senders, receivers = pipeline.workers[source], pipeline.workers[stage]
                there = self.message_s(Action(source, Kind.FORWARD, 0), senders[0], stage, receivers[0])
                back = self.message_s(Action(stage, Kind.BACKWARD, 0), receivers[0], source, senders[0])
                pairs = len(senders) * len(receivers) // math.gcd(len(senders), len(receivers))
                slowest_s = max(slowest_s, max(there, back) / pairs)
        return slowest_s

    def minibatch_s(self) -> float:
        """About how long a minibatch takes: its microbatches at the bottleneck's pace, and filling the pipeline."""
        if self.plan.is_asynchronous:
            return self.bottleneck_s()
        fill_s = sum(
            self._compute[workers[0]][Kind.FORWARD] + self._compute[workers[0]][Kind.BACKWARD]
            for workers in self.plan.pipeline.workers[:-1]
        )
        return self.plan.microbatches * self.bottleneck_s() + fill_s
