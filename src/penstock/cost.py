"""The cost model: the only formulas of seconds and bytes. Planner and simulator both ask here."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.cluster import Cluster, Level
from penstock.compression import COMPRESSIONS
from penstock.graph import Value, ValueTensor
from penstock.plan import Stage
from penstock.profile import LayerSeconds, Profile, SizeCosts, WorkerSeconds
from penstock.schedule import Family, Kind

MOST_SHARES = 4
"""The largest share of a round for one replica. Longer rounds update less often."""
WORTH_A_LONGER_ROUND = 1.01
BUCKET_BYTES = 2**22
"""Size of a bucket: gradients that are all-reduced together while the backward goes on. Large enough that latency
matters little."""

Array = np.ndarray[Any, Any]
Compressions = Mapping[int, str]
"""How the values of a layer are compressed on their way, by layer. Values of other layers travel exactly."""
UNCOMPRESSED: Compressions = {}


@dataclass(frozen=True, slots=True)
class Cold:
    """Extra seconds of actions that follow another action on the same worker, which has filled the caches with other
    code and data."""

    after_update_s: float
    """For the first forward after an update of the stage."""
    forward_s: float
    """For a forward after anything but a forward of the same stage."""
    backward_s: float
    """For a backward, or the first half of one, after anything but another of the same stage."""

    def __bool__(self) -> bool:
        return max(self.after_update_s, self.forward_s, self.backward_s) > 0


class Caches:
    """Follows the actions of a worker, and tells the extra seconds of each because of the one before it."""

    def __init__(self, cold: Mapping[int, Cold]) -> None:
        """``cold`` has an entry for each stage of the worker."""
        self._cold = cold
        self._last: tuple[int, Kind] | None = None
        self._updated: set[int] = set()
        """Stages that have had no forward since their last update."""

    def extra_s(self, stage: int, kind: Kind) -> float:
        """Extra seconds of the worker's next action. Call it once per action, in program order."""
        action = stage, kind
        before, self._last = self._last, action
        if kind is Kind.STEP:
            self._updated.add(stage)
        elif kind is Kind.FORWARD:
            if stage in self._updated:
                self._updated.remove(stage)
                return self._cold[stage].after_update_s
            return 0.0 if before == action else self._cold[stage].forward_s
        elif kind is not Kind.WEIGHT and before != action:
            return self._cold[stage].backward_s
        return 0.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages of one size that cross a link one after another. Both fields are numbers or arrays."""

    messages: Any
    bytes_each: Any

    def seconds(self, link: Level) -> Any:
        """Seconds until the last message has arrived. Nothing to send takes no time."""
        return self.messages * link.latency_s * (self.bytes_each > 0) + self.occupied_s(link)

    def occupied_s(self, link: Level) -> Any:
        """Seconds during which the link can carry nothing else. Latency occupies nothing."""
        return self.total_bytes / link.bytes_per_s

    @property
    def total_bytes(self) -> Any:
        return self.messages * self.bytes_each


def message(num_bytes: Any) -> Traffic:
    return Traffic(1, num_bytes)


def ring_allreduce(num_bytes: Any, members: Any) -> Traffic:
    """Each of n members sends and receives 2 (n-1) times an n-th of the bytes."""
    return Traffic(2 * (members - 1), num_bytes / members)


def ring_terms(num_bytes: Any, link: Level) -> tuple[Any, Any]:
    """Two times (a, b) such that a ring all-reduce among n members takes (n-1) (a + b / n)."""
    return 2 * link.latency_s * (num_bytes > 0), 2 * num_bytes / link.bytes_per_s


def _share_sent(value: Value, tensors: Iterable[ValueTensor], compression: str) -> float:
    """How much of a value's bytes travels under a compression. Of a container, only these of its tensors do."""
    share = COMPRESSIONS[compression].share
    if not value.tensors:
        return share if value.is_float32 else 1.0
    sent_bytes = sum(tensor.num_bytes * (share if tensor.is_float32 else 1.0) for tensor in tensors)
    return sent_bytes / max(1, value.num_bytes)


def in_buckets(sizes: Iterable[float], bucket_bytes: float = BUCKET_BYTES) -> list[int]:
    """The bucket number of each gradient. Sizes come in the order in which a backward completes the gradients."""
    numbers, number, filled = [], -1, math.inf
    for size in sizes:
        if filled >= bucket_bytes:
            number, filled = number + 1, 0.0
        numbers.append(number)
        filled += size
    return numbers


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Costs of a profile's layers on the devices of a cluster, for microbatches of ``microbatch_size`` samples."""

    profile: Profile
    cluster: Cluster
    microbatch_size: float

    @cached_property
    def at_size(self) -> SizeCosts:
        """The profile's costs of microbatches of this size."""
        return self.profile.at(self.microbatch_size)

    def layer_seconds(self, device: int) -> tuple[LayerSeconds, ...]:
        """The seconds of each layer, in graph order, as profiled for this device's kind."""
        return self.at_size.seconds[self.profile.known_kind(self.cluster.devices[device].kind)]

    def saved_bytes(self, layer: int) -> float:
        """Bytes that autograd keeps of a layer's forward for the backward of one microbatch."""
        return self._saved_bytes[layer]

    @cached_property
    def _saved_bytes(self) -> dict[int, float]:
        layers = self.profile.graph.layers
        return {layer.id: size for layer, size in zip(layers, self.at_size.saved_bytes, strict=True)}

    def value_bytes(self, value: Value) -> float:
        """Bytes of a value of one microbatch."""
        return self._value_bytes[value.name]

    @cached_property
    def _value_bytes(self) -> dict[str, float]:
        values = self.profile.graph.values
        return {value.name: size for value, size in zip(values, self.at_size.value_bytes, strict=True)}

    def sent_bytes(self, value: Value, compression: str) -> float:
        """Bytes of a value on its way to another worker under this compression."""
        return self.value_bytes(value) * _share_sent(value, value.tensors, compression)

    def gradient_bytes(self, value: Value, compression: str) -> float:
        """Bytes of a value's gradient on its way back. Only tensors that have a gradient count."""
        if not value.differentiable:
            return 0.0
        with_gradient = [tensor for tensor in value.tensors if tensor.differentiable]
        return self.value_bytes(value) * _share_sent(value, with_gradient, compression)

    def forward_s(self, layers: Collection[int], device: int, *, halves: bool = False) -> float:
        """Seconds of the forward. Set ``halves`` if the schedule runs the two halves of the backward apart, which makes
        the forward slower."""
        return self._sum_s(layers, device, ("halved_forward_s" if halves else "forward_s",))

    def cold_s(self, layers: Collection[int], device: int) -> Cold:
        """Extra seconds of a stage's actions because of the action before them."""
        fields = ("cold_s", "forward_switch_s", "backward_switch_s")
        return Cold(*(self._sum_s(layers, device, (each,)) for each in fields))

    def crowded_s(self, layers: Collection[int], device: int, *, beside: Collection[int]) -> float:
        """Extra seconds per microbatch of these layers on a worker that has all layers of ``beside``.

        Halves of the model and the whole model were measured. Between them, the extra time is interpolated; below a
        half there is none.
        """
        share = self._share(beside, device)
        return max(0.0, 2 * share - 1) * self._sum_s(layers, device, ("crowded_s",))

    def _share(self, layers: Collection[int], device: int) -> float:
        """The share of these layers in the forward of the whole model."""
        all_s = self._sum_s(self._row.keys(), device, ("forward_s",))
        return self._sum_s(layers, device, ("forward_s",)) / all_s if all_s else 0.0

    def backward_s(
        self, layers: Collection[int], device: int, *, recompute: bool = False, halves: bool = False
    ) -> float:
        """Seconds of the backward; with ``recompute``, including a second forward."""
        input_s = self.backward_input_s(layers, device, recompute=recompute, halves=halves)
        return input_s + self.backward_weight_s(layers, device, halves=halves)

    def backward_input_s(
        self, layers: Collection[int], device: int, *, recompute: bool = False, halves: bool = False
    ) -> float:
        """Seconds of the half of a backward that computes the gradients of inputs, for which earlier stages wait."""
        again = ("forward_s",) if recompute else ()
        return self._sum_s(layers, device, ("halved_input_s" if halves else "backward_input_s", *again))

    def backward_weight_s(self, layers: Collection[int], device: int, *, halves: bool = False) -> float:
        return self._sum_s(layers, device, ("halved_weight_s" if halves else "backward_weight_s",))

    def microbatch_s(self, layers: Collection[int], device: int, schedule: Family, *, recompute: bool = False) -> float:
        """Seconds of the forward and, if the schedule trains, of the backward."""
        forward_s = self.forward_s(layers, device, halves=schedule.halves)
        if not schedule.trains:
            return forward_s
        return forward_s + self.backward_s(layers, device, recompute=recompute, halves=schedule.halves)

    def update_s(self, layers: Collection[int], device: int, *, stashed: bool) -> float:
        """Seconds of the optimizer's update. If weights are ``stashed`` for microbatches in flight, it includes copying
        them."""
        return self._sum_s(layers, device, ("update_s", "copy_s") if stashed else ("update_s",))

    def worker_seconds(self, device: int) -> WorkerSeconds:
        """A worker's own time for each action, as profiled for this device's kind."""
        return self.profile.worker_on(self.cluster.devices[device].kind)

    def own_microbatch_s(self, device: int, schedule: Family) -> float:
        """A worker's own time per microbatch and stage, without its layers, its messages and loading."""
        own, halves = self.worker_seconds(device), schedule.halves
        backward_s = own.backward_input_s + own.backward_weight_s if halves else own.backward_s
        actions = (3 if halves else 2) if schedule.trains else 1
        total_s = own.forward_s + (backward_s if schedule.trains else 0.0) + actions * own.between_s
        return total_s / self.cluster.devices[device].speed

    def own_update_s(self, device: int, *, stashed: bool) -> float:
        """A worker's own time per update of a stage."""
        own = self.worker_seconds(device)
        total_s = own.update_s + own.between_s + (own.copy_s if stashed else 0.0)
        return total_s / self.cluster.devices[device].speed

    def own_average_s(self, layers: Collection[int], device: int) -> float:
        """A worker's own time to average the gradients of a stage, without the all-reduce."""
        own_s = self.worker_seconds(device).average_s / self.cluster.devices[device].speed
        return own_s + self._sum_s(layers, device, ("average_s",))

    def load_s(self, device: int) -> float:
        """Seconds to read a microbatch from the job's data, at a stage that reads it."""
        return self.at_size.load_s / self.cluster.devices[device].speed

    def allreduce_s(self, num_bytes: float, devices: Sequence[int]) -> float:
        """Seconds of a ring all-reduce, at the pace of the slowest link."""
        if len(devices) < 2:
            return 0.0
        return float(ring_allreduce(num_bytes, len(devices)).seconds(self.cluster.slowest_link(devices).ring))

    def may_overlap(self, schedule: Family) -> bool:
        """Whether any plan with this schedule overlaps averaging with backwards, on some link of the cluster."""
        carried = any(not level.ring_by_workers for level in self.cluster.levels)
        return carried and schedule.may_overlap and not self.profile.sync_batch_norm

    def handled_s(self, num_bytes: Any, schedule: Family) -> Any:
        """A worker's own time per microbatch for the messages across a cut: values in one direction and, if the
        schedule trains, as many gradients in the other."""
        return (2 if schedule.trains else 1) * self.cluster.handled_s(num_bytes)

    def parameter_bytes(self, layers: Collection[int]) -> int:
        return sum(parameter.num_bytes for parameter in self.profile.graph.parameters_of(layers))

    def forward_bytes(
        self, source: Collection[int], target: Collection[int], compressions: Compressions = UNCOMPRESSED
    ) -> float:
        """Bytes that ``target`` reads from ``source``. Model inputs do not count: every stage loads its own."""
        graph = self.profile.graph
        return sum(
            self.sent_bytes(value, compressions.get(value.producer, "exact"))
            for value in filter(graph.is_sent, graph.crossing(source, target))
        )

    def stage_memory_bytes(self, stage: Stage, schedule: Family, share: int = 1) -> float:
        """Peak bytes of a replica with this share of a round."""
        in_flight, versions = schedule.most_in_flight(stage.in_flight, share), schedule.versions(stage.in_flight)
        return float(self.stage_memory(stage, schedule).at(in_flight=in_flight, versions=versions))

    def stage_memory(self, stage: Stage, schedule: Family) -> Memory:
        """Bytes of a stage's replica. Message buffers count at full size even if values are compressed, since
        compressing makes a copy."""
        graph, layers = self.profile.graph, set(stage.layers)
        parameters = graph.parameters_of(stage.layers)
        others = graph.by_id.keys() - layers
        return memory_of(
            weights=sum(parameter.num_bytes for parameter in parameters),
            state=sum(parameter.state_bytes for parameter in parameters),
            saved=sum(map(self.saved_bytes, stage.layers)),
            received=self.forward_bytes(others, layers),
            sent=self.forward_bytes(layers, others),
            largest=self.largest_added(schedule),
            recompute=stage.recompute,
            trains=schedule.trains,
        )

    def largest_added(self, schedule: Family) -> float:
        """Bytes of the largest gradient that is accumulated into another. There is none if an update has one
        microbatch."""
        if not schedule.accumulates or self.microbatch_size >= self.profile.batch_size:
            return 0.0
        return max((parameter.num_bytes for parameter in self.profile.graph.parameters), default=0.0)

    def _sum_s(self, layers: Collection[int], device: int, fields: Sequence[str]) -> float:
        seconds, row = self.layer_seconds(device), self._row
        total: float = sum(getattr(seconds[row[layer]], field) for layer in layers if layer in row for field in fields)
        return total / self.cluster.devices[device].speed

    @cached_property
    def _row(self) -> dict[int, int]:
        """The row of each layer in the profile. Model inputs have no row: every stage that reads one loads it."""
        return {layer.id: row for row, layer in enumerate(self.profile.graph.layers) if not layer.is_input}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a stage's replica: a fixed part, a part per version of the weights, and a part per microbatch between
    its forward and its backward. All are numbers or arrays."""

    fixed: Any
    per_version: Any
    per_microbatch: Any

    def at(self, *, in_flight: Any, versions: Any) -> Any:
        return self.fixed + versions * self.per_version + in_flight * self.per_microbatch


def memory_of(
    *,
    weights: Any,
    state: Any,
    saved: Any,
    received: Any,
    sent: Any,
    recompute: bool,
    largest: float = 0.0,
    trains: bool = True,
) -> Memory:
    """The memory of a stage from the sizes of its parts.

    It has weights, gradients, optimizer state, what is kept of microbatches in flight (including what was sent), and
    buffers for one message in each direction, forward and backward. A stage that recomputes keeps its inputs, and the
    rest for one microbatch at a time. A gradient that is accumulated needs room beside the sum: that of the ``largest``
    gradient of the model, or of all gradients of the stage if they are smaller.
    """
    if not trains:
        return Memory(saved + received + sent, weights, 0.0 * saved)
    fixed = weights + np.minimum(weights, largest) + state + 2 * (received + sent)
    return Memory(fixed + saved, weights, received + sent) if recompute else Memory(fixed, weights, saved + sent)


def pace(turn_s: Any, update_s: Any, sync_s: Any, *, round_size: Any, microbatches: int | None) -> Any:
    """Seconds per microbatch of a stage in steady state, at the pace of its slowest replica.

    ``turn_s`` and ``update_s`` [replica, ...] are the seconds of a replica's share of a round and of its update.
    Updates and averaging come once per round or, if ``microbatches`` is given, once per minibatch of so many.
    """
    updates = microbatches or round_size
    return np.max(turn_s / round_size + update_s / updates, axis=0) + sync_s / updates


def best_shares(seconds: Array, counts: Sequence[int]) -> Array:
    """How many microbatches of a round a replica of each class takes. The round with the fewest seconds per microbatch
    is chosen; among nearly equal ones, the shortest.

    ``seconds`` [class, ...] is the time of a microbatch on a replica of each class, ``counts`` the number of such
    replicas. In a round of t seconds, every replica runs as many microbatches as fit. Candidates for t are small
    multiples of each class's seconds.
    """
    if len(counts) == 1:
        return np.ones_like(seconds, dtype=np.int64)
    with np.errstate(divide="ignore", invalid="ignore"):
        rounds = [times * each for times in range(1, MOST_SHARES + 1) for each in seconds]
        fit = np.nan_to_num(np.floor(np.stack(rounds)[:, None] / seconds[None] + 1e-9), nan=1.0)
    shares = np.clip(fit, 1, MOST_SHARES)
    sizes = np.einsum("rc...,c->r...", shares, np.array(counts, dtype=np.float64))
    paces = (shares * seconds[None]).max(axis=1) / sizes
    good = paces <= paces.min(axis=0) * WORTH_A_LONGER_ROUND
    shortest = np.where(good, sizes, np.inf).argmin(axis=0)
    chosen: Array = np.take_along_axis(shares, shortest[None, None], axis=0)[0].astype(np.int64)
    return chosen


def stashes_weights(asynchronous: bool, in_flight: int) -> bool:
    """Whether a stage updates while microbatches are in flight, and so keeps versions of its weights."""
    return asynchronous and in_flight > 1
