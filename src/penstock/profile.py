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
    """Seconds of one layer for one microbatch. Updates and copies of the weights come once per minibatch."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    halving_s: float = 0.0
    """Extra seconds of the forward if the two halves of the backward run apart."""
    apart_s: float = 0.0
    """Extra seconds of the two halves of the backward if they run apart."""
    cold_s: float = 0.0
    """Extra seconds of the first forward after an update, which has filled the caches with other data."""
    forward_switch_s: float = 0.0
    """Extra seconds of a forward that does not follow a forward of the same stage."""
    backward_switch_s: float = 0.0
    """Extra seconds of a backward that does not follow a backward of the same stage."""
    crowded_s: float = 0.0
    """Extra seconds per microbatch on a worker that has all layers of the model, since its caches hold less of each."""
    update_s: float = 0.0
    copy_s: float = 0.0
    """Seconds to copy its weights, if an update must not change a version that is in flight."""
    average_s: float = 0.0
    """Seconds to gather its gradients for an all-reduce and put them back, without the all-reduce itself."""

    def __post_init__(self) -> None:
        _check_seconds(self)

    @property
    def halved_forward_s(self) -> float:
        """Seconds of the forward of a microbatch whose backward runs in halves."""
        return self.forward_s + self.halving_s

    @property
    def halved_input_s(self) -> float:
        """Seconds of the first half of a backward, if it runs apart from the second."""
        return self.backward_input_s * self._apart

    @property
    def halved_weight_s(self) -> float:
        """Seconds of the second half of a backward, if it runs apart from the first."""
        return self.backward_weight_s * self._apart

    @property
    def _apart(self) -> float:
        whole_s = self.backward_input_s + self.backward_weight_s
        return 1.0 + self.apart_s / whole_s if whole_s else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeconds:
    """A worker's own time per action, whatever its layers: bookkeeping, starting autograd, calling the optimizer."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    update_s: float = 0.0
    copy_s: float = 0.0
    """Extra seconds of an update that must not change a version in flight."""
    average_s: float = 0.0
    """Seconds per all-reduce of a round's gradients, whatever their sizes."""
    between_s: float = 0.0
    """Seconds from the end of an action to the start of the next one."""

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
    """For each device kind, one entry per layer of the graph."""
    saved_bytes: tuple[float, ...]
    """One entry per layer."""
    value_bytes: tuple[float, ...]
    """One entry per value of the graph."""
    load_s: float = 0.0
    """Seconds to read a microbatch from the job's data."""

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
    """What captured the model: export, fx, module, or the name of an importer."""
    reason: str = ""
    """Why torch.export could not capture the model, where another front end did."""
    batch_size: int
    """Samples per minibatch, as the job says."""
    microbatch_size: int
    """Samples in the largest microbatch that was measured. ``graph`` and ``seconds`` are for this size."""
    threads: int = 1
    """CPU threads of the measured worker."""
    precision: str = "float32"
    """The precision in which layers computed when they were measured."""
    sync_batch_norm: bool = False
    """Whether the job's batch norm spans the replicas of a stage."""
    weighted_loss: bool = False
    """Whether the job's loss returned (sum, weight) when it was measured."""
    graph: LayerGraph
    seconds: Mapping[str, tuple[LayerSeconds, ...]]
    """For each device kind, one entry per layer, in the order of ``graph.layers``."""
    load_s: float = 0.0
    """Seconds to read a microbatch from the job's data, at each stage that reads it."""
    worker: Mapping[str, WorkerSeconds] = field(default_factory=dict)
    """A worker's own time, by device kind. A kind without an entry takes none."""
    other_sizes: tuple[SizeCosts, ...] = ()
    """Costs of further microbatch sizes that were measured."""
    smallest_microbatch: int = 1
    """The fewest samples that the model is known to accept: batch norm may need two."""
    uncertainty: float = 0.0
    """Relative error to expect of a predicted time. A plan that gains less than this loses to a simpler one."""

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
        """All measured sizes, smallest first."""
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
        """The costs of microbatches of this size, interpolated between the two measured sizes next to it."""
        if microbatch_size not in self._interpolated:
            self._interpolated[microbatch_size] = _Line.through(self._sizes, microbatch_size).costs
        return self._interpolated[microbatch_size]

    @cached_property
    def _interpolated(self) -> dict[float, SizeCosts]:
        return {}

    def compute_s(self, kind: str) -> tuple[float, ...]:
        """Seconds of forward and backward of each layer, in the order of ``graph.layers``, for one microbatch. Model
        inputs take none."""
        return tuple(
            0.0 if layer.is_input else row.forward_s + row.backward_input_s + row.backward_weight_s
            for layer, row in zip(self.graph.layers, self.seconds_on(kind), strict=True)
        )

    def seconds_on(self, kind: str) -> tuple[LayerSeconds, ...]:
        return self.seconds[self.known_kind(kind)]

    def worker_on(self, kind: str) -> WorkerSeconds:
        return self.worker.get(self.known_kind(kind), NO_TIME)

    def known_kind(self, kind: str) -> str:
        """The kind whose profile is used for a device of this kind."""
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
    """The position of a microbatch size between two measured sizes, or beyond them.

    Beyond them, costs neither fall as the size grows nor grow faster than in proportion, so that noise is not
    magnified.
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
        """Updates take equally long for every microbatch size."""
        return replace(high, **{name: self._number(getattr(low, name), getattr(high, name)) for name in BY_SIZE})
