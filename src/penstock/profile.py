"""What a model costs: its layer graph and, per device kind, the seconds of every layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import ClassVar

from penstock.cluster import ANY_KIND
from penstock.errors import ProfileError
from penstock.graph import LayerGraph
from penstock.limits import is_seconds, is_size


def _check_seconds(costs: LayerSeconds | WorkerSeconds) -> None:
    for each in fields(costs):
        seconds = getattr(costs, each.name)
        if not is_seconds(seconds):
            raise ProfileError(
                f"{each.name} is {seconds}; a cost is a time of 0 or more that can pass: measure it again"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """One layer on one microbatch; the optimizer's update, and a copy of the weights, once per minibatch."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    halving_s: float = 0.0
    """What the forward takes more where the two halves of the backward will be taken apart."""
    apart_s: float = 0.0
    """What the two halves of the backward take more when they are taken apart."""
    cold_s: float = 0.0
    """What the first forward after an update takes more, since the update has filled the caches with other things."""
    forward_switch_s: float = 0.0
    """What a forward takes more after an action of another kind or stage than after a forward of the same stage."""
    backward_switch_s: float = 0.0
    """What a backward takes more after an action of another kind or stage than after a backward of the same stage."""
    crowded_s: float = 0.0
    """What a microbatch takes more on a worker that has all layers: its caches hold less of each."""
    update_s: float = 0.0
    copy_s: float = 0.0
    """of its weights, where an update must leave a version in flight as it is"""
    average_s: float = 0.0
    """gathering its gradients for an all-reduce and putting them back, beside what the all-reduce takes"""

    def __post_init__(self) -> None:
        _check_seconds(self)

    @property
    def halved_forward_s(self) -> float:
        """The forward of a microbatch whose backward will be taken in halves."""
        return self.forward_s + self.halving_s

    @property
    def halved_input_s(self) -> float:
        """The first half of a backward, taken apart from the second."""
        return self.backward_input_s * self._apart

    @property
    def halved_weight_s(self) -> float:
        """The second half of a backward, taken apart from the first."""
        return self.backward_weight_s * self._apart

    @property
    def _apart(self) -> float:
        whole_s = self.backward_input_s + self.backward_weight_s
        return 1.0 + self.apart_s / whole_s if whole_s else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeconds:
    """A worker's own time for an action, whatever its layers: bookkeeping, starting autograd, calling the optimizer."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    update_s: float = 0.0
    copy_s: float = 0.0
    """added to an update that must leave a version in flight as it is"""
    average_s: float = 0.0
    """per all-reduce of a round's gradients, whatever they are"""
    between_s: float = 0.0
    """from the end of an action to the start of the next one"""

    def __post_init__(self) -> None:
        _check_seconds(self)


NO_TIME = WorkerSeconds()
BY_SIZE = (
    "forward_s",
    "backward_input_s",
    "backward_weight_s",
    "halving_s",
    "apart_s",
    "cold_s",
    "forward_switch_s",
    "backward_switch_s",
    "crowded_s",
)
"""The fields of ``LayerSeconds`` that depend on the microbatch size."""


@dataclass(frozen=True, kw_only=True)
class SizeCosts:
    """What the layers cost at one microbatch size."""

    microbatch_size: float
    seconds: Mapping[str, tuple[LayerSeconds, ...]]
    """per device kind, one entry for each layer of the graph"""
    saved_bytes: tuple[float, ...]
    """of each layer"""
    value_bytes: tuple[float, ...]
    """of each value of the graph"""
    load_s: float = 0.0
    """reading a microbatch from the job's data"""

    def __post_init__(self) -> None:
        if not is_seconds(self.load_s):
            raise ProfileError(f"load_s is {self.load_s}; it is a time of 0 or more that can pass: measure it again")
        for name, numbers in (("saved_bytes", self.saved_bytes), ("value_bytes", self.value_bytes)):
            wrong = [number for number in numbers if not is_size(number)]
            if wrong:
                raise ProfileError(f"{name} is {wrong[0]}; it is a number of 0 or more bytes: measure it again")


@dataclass(frozen=True, kw_only=True)
class Profile:
    model: str
    front_end: str
    """what captured the model: export, fx, module, or the name of an importer"""
    reason: str = ""
    """Why torch.export could not capture the model, where another front end did."""
    batch_size: int
    """samples per minibatch that the job asks for"""
    microbatch_size: int
    """samples in the largest microbatch that was measured; ``graph`` and ``seconds`` are of this size"""
    threads: int = 1
    """CPU threads of the worker that was measured"""
    precision: str = "float32"
    """what layers computed in when they were measured"""
    sync_batch_norm: bool = False
    """Whether the job's batch norm spans the replicas of a stage."""
    weighted_loss: bool = False
    """whether the job's loss returned (sum, weight) when it was measured"""
    graph: LayerGraph
    seconds: Mapping[str, tuple[LayerSeconds, ...]]
    """per device kind, one entry for each of graph.layers, in their order"""
    load_s: float = 0.0
    """reading a microbatch from the job's data, at each stage that does"""
    worker: Mapping[str, WorkerSeconds] = field(default_factory=dict)
    """per device kind; a kind without an entry takes no time of its own"""
    other_sizes: tuple[SizeCosts, ...] = ()
    """further microbatch sizes that were measured"""
    smallest_microbatch: int = 1
    """samples that the model is known to need at least, as batch norm may need two"""
    uncertainty: float = 0.0
    """relative error to expect of a predicted time; a plan that promises less gain than this loses to a simpler one"""

    FORMAT: ClassVar[str] = "penstock.profile/1"

    def __post_init__(self) -> None:
        for name in ("batch_size", "threads", "smallest_microbatch"):
            if getattr(self, name) < 1:
                raise ProfileError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for each in self._sizes:
            self._check_size(each)
        if not 0 <= self.uncertainty <= 1:
            raise ProfileError(f"uncertainty is {self.uncertainty}; it is a share, 0 or more and at most 1")

    def _check_size(self, costs: SizeCosts) -> None:
        size = costs.microbatch_size
        if not (math.isfinite(size) and size > 0):
            raise ProfileError(f"microbatch_size is {size}; it must be above 0")
        if sum(each.microbatch_size == size for each in self._sizes) > 1:
            raise ProfileError(f"microbatches of {size:g} samples have two entries; each size has one")
        if not costs.seconds:
            raise ProfileError("seconds: empty; a profile has the costs of at least one device kind")
        if costs.seconds.keys() != self.seconds.keys():
            raise ProfileError(
                f"seconds at {size:g} samples: {sorted(costs.seconds)}; they are of {sorted(self.seconds)}"
            )
        counts = {f"seconds.{kind}": len(rows) for kind, rows in costs.seconds.items()}
        for what, count in {**counts, "saved_bytes": len(costs.saved_bytes)}.items():
            if count != len(self.graph.layers):
                raise ProfileError(f"{what}: {count} entries for {len(self.graph.layers)} layers; each layer has one")
        if len(costs.value_bytes) != len(self.graph.values):
            raise ProfileError(
                f"value_bytes: {len(costs.value_bytes)} entries for {len(self.graph.values)} values; each value has one"
            )

    @cached_property
    def _sizes(self) -> tuple[SizeCosts, ...]:
        """All that were measured, smallest first."""
        largest = SizeCosts(
            microbatch_size=self.microbatch_size,
            seconds=self.seconds,
            saved_bytes=tuple(layer.saved_bytes for layer in self.graph.layers),
            value_bytes=tuple(value.num_bytes for value in self.graph.values),
            load_s=self.load_s,
        )
        return tuple(sorted((*self.other_sizes, largest), key=lambda costs: costs.microbatch_size))

    @property
    def measured_sizes(self) -> tuple[float, ...]:
        return tuple(costs.microbatch_size for costs in self._sizes)

    def at(self, microbatch_size: float) -> SizeCosts:
        """The costs of microbatches of this size: on a line between the two measured sizes around it."""
        if microbatch_size not in self._interpolated:
            self._interpolated[microbatch_size] = _Line.through(self._sizes, microbatch_size).costs
        return self._interpolated[microbatch_size]

    @cached_property
    def _interpolated(self) -> dict[float, SizeCosts]:
        return {}

    def compute_s(self, kind: str) -> tuple[float, ...]:
        """Forward and backward of each of graph.layers on one microbatch; model inputs take none."""
        return tuple(
            0.0 if layer.is_input else row.forward_s + row.backward_input_s + row.backward_weight_s
            for layer, row in zip(self.graph.layers, self.seconds_on(kind), strict=True)
        )

    def seconds_on(self, kind: str) -> tuple[LayerSeconds, ...]:
        return self.seconds[self.known_kind(kind)]

    def worker_on(self, kind: str) -> WorkerSeconds:
        return self.worker.get(self.known_kind(kind), NO_TIME)

    def known_kind(self, kind: str) -> str:
        """The kind whose costs hold for a device of this one."""
        if kind in self.seconds:
            return kind
        if kind == ANY_KIND:
            return next(iter(self.seconds))
        raise ProfileError(
            f"the profile of {self.model} has no costs for device kind {kind!r}, only for "
            f"{', '.join(self.seconds)}; profile it there, or name that kind in the cluster"
        )


@dataclass(frozen=True, slots=True)
class _Line:
    """Where a microbatch size lies between two that were measured, or beyond them.

    Beyond them the line neither falls with the size nor grows faster than in proportion: noise must not be magnified.
    """

    low: SizeCosts
    high: SizeCosts
    size: float

    @classmethod
    def through(cls, sizes: Sequence[SizeCosts], size: float) -> _Line:
        pairs = list(itertools.pairwise(sizes)) or [(sizes[0], sizes[0])]
        low, high = next((pair for pair in pairs if size <= pair[1].microbatch_size), pairs[-1])
        return cls(low, high, size)

    @property
    def costs(self) -> SizeCosts:
        low, high = self.low, self.high
        return SizeCosts(
            microbatch_size=self.size,
            seconds={
                kind: tuple(self._layer(*both) for both in zip(rows, high.seconds[kind], strict=True))
                for kind, rows in low.seconds.items()
            },
            saved_bytes=tuple(map(self._number, low.saved_bytes, high.saved_bytes)),
            value_bytes=tuple(map(self._number, low.value_bytes, high.value_bytes)),
            load_s=self._number(low.load_s, high.load_s),
        )

    def _number(self, low: float, high: float) -> float:
        first, second = self.low.microbatch_size, self.high.microbatch_size
        if self.size == second:
            return high
        if self.size == first:
            return low
        if first == second:
            return low * self.size / first
        slope = (high - low) / (second - first)
        if first < self.size < second:
            return low + slope * (self.size - first)
        near, known = (first, low) if self.size < first else (second, high)
        return known + min(max(slope, 0.0), known / near) * (self.size - near)

    def _layer(self, low: LayerSeconds, high: LayerSeconds) -> LayerSeconds:
        """An update takes as long whatever the microbatch."""
        return replace(high, **{name: self._number(getattr(low, name), getattr(high, name)) for name in BY_SIZE})
