"""What a model costs: its layer graph and, per device kind, the seconds of every layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from penstock.cluster import ANY_KIND
from penstock.errors import ProfileError
from penstock.graph import LayerGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """One layer on one microbatch; the optimizer's update, and a copy of the weights, once per minibatch."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    halving_s: float = 0.0
    """what forward and backward take more where the two halves of the backward are taken apart"""
    update_s: float = 0.0
    copy_s: float = 0.0
    """of its weights, where an update must leave a version in flight as it is"""

    def __post_init__(self) -> None:
        for field in ("forward_s", "backward_input_s", "backward_weight_s", "halving_s", "update_s", "copy_s"):
            seconds = getattr(self, field)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ProfileError(f"{field} is {seconds}; a cost is a finite number of 0 or more: measure it again")


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
    """samples in the microbatch that was measured"""
    threads: int = 1
    """CPU threads of the worker that was measured"""
    precision: str = "float32"
    """what layers computed in when they were measured"""
    graph: LayerGraph
    seconds: Mapping[str, tuple[LayerSeconds, ...]]
    """per device kind, one entry for each of graph.layers, in their order"""

    FORMAT: ClassVar[str] = "penstock.profile/1"

    def __post_init__(self) -> None:
        for field in ("batch_size", "microbatch_size", "threads"):
            if getattr(self, field) < 1:
                raise ProfileError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if not self.seconds:
            raise ProfileError("seconds: empty; a profile has the costs of at least one device kind")
        for kind, costs in self.seconds.items():
            if len(costs) != len(self.graph.layers):
                raise ProfileError(
                    f"seconds.{kind}: {len(costs)} entries for {len(self.graph.layers)} layers; each layer has one"
                )

    def compute_s(self, kind: str) -> tuple[float, ...]:
        """Forward and backward of each of graph.layers on one microbatch; model inputs take none."""
        return tuple(
            0.0 if layer.is_input else row.forward_s + row.backward_input_s + row.backward_weight_s
            for layer, row in zip(self.graph.layers, self.seconds_on(kind), strict=True)
        )

    def seconds_on(self, kind: str) -> tuple[LayerSeconds, ...]:
        if kind in self.seconds:
            return self.seconds[kind]
        if kind == ANY_KIND:
            return next(iter(self.seconds.values()))
        raise ProfileError(
            f"the profile of {self.model} has no costs for device kind {kind!r}, only for "
            f"{', '.join(self.seconds)}; profile it there, or name that kind in the cluster"
        )
