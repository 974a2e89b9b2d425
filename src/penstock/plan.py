"""A plan: which layers run where, under which schedule. A plan file is complete: it carries its profile and cluster."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from penstock.cluster import Cluster
from penstock.compression import check_compression, coarsest
from penstock.errors import PlanError
from penstock.graph import Value, by_edge
from penstock.limits import MOST_MICROBATCHES, MOST_SHARE, per_second
from penstock.profile import Profile
from penstock.schedule import (
    Action,
    Kind,
    Pipeline,
    Schedule,
    Staleness,
    build_schedule,
    check,
    check_layout,
    family,
    steady_staleness,
)
from penstock.schedule.custom import check_custom, parse_custom

SYNC_POLICIES = ("all-reduce",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    layers: tuple[int, ...]
    devices: tuple[int, ...]
    """Each device runs one replica."""
    in_flight: int = 1
    """Microbatches that a replica keeps between forward and backward. A replica with share s keeps s (in_flight - 1) +
    1."""
    shares: tuple[int, ...] = ()
    """How many microbatches of a round each replica takes, in proportion to its speed. One each by default."""
    recompute: bool = False
    """Whether to keep only the stage's inputs from a forward, and to compute it again for the backward."""
    sends: str = "exact"
    """How its float32 values travel to other workers, and their gradients back: exact, or compressed to bf16 or
    int8."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("a stage without layers; leave it out")
        if not self.devices:
            raise PlanError(f"stage of layers {list(self.layers)[:3]}...: no device; give it at least one")
        if not 1 <= self.in_flight <= MOST_MICROBATCHES:
            raise PlanError(
                f"stage of layers {list(self.layers)[:3]}...: in_flight is {self.in_flight}; "
                f"it is from 1 to {MOST_MICROBATCHES}"
            )
        if not self.shares:
            object.__setattr__(self, "shares", (1,) * len(self.devices))
        if len(self.shares) != len(self.devices) or not all(1 <= share <= MOST_SHARE for share in self.shares):
            raise PlanError(
                f"stage of layers {list(self.layers)[:3]}...: shares {list(self.shares)} for {len(self.devices)} "
                f"devices; give each device a share from 1 to {MOST_SHARE}"
            )
        check_compression(self.sends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the planner expects of a plan, and the alternatives it was compared with."""

    seconds_per_minibatch: float
    lower_bound_s: float
    """No plan for this profile and cluster is faster than this."""
    data_parallel_s: float | None
    """Seconds of a minibatch with plain data parallelism over all devices. None where that does not fit."""
    one_device_s: float | None
    latency_s: float | None = None
    """Seconds of one microbatch from the first stage to the last. Inference plans minimise it, and the lower bound is
    then for this."""
    passed_over: str = ""
    """A faster plan that was not chosen because it gains less than predictions are uncertain."""

    def __post_init__(self) -> None:
        for field in ("seconds_per_minibatch", "lower_bound_s", "data_parallel_s", "one_device_s", "latency_s"):
            seconds = getattr(self, field)
            if seconds is not None and not seconds >= 0:
                raise PlanError(f"{field} is {seconds}; it must be a time of 0 or more")

    @property
    def gap(self) -> float:
        """How far above the proven bound the plan is, as a share of the bound."""
        seconds = self.seconds_per_minibatch if self.latency_s is None else self.latency_s
        ratio = per_second(seconds, self.lower_bound_s)
        return 0.0 if ratio is None else ratio - 1


NO_PREDICTION = Prediction(seconds_per_minibatch=0.0, lower_bound_s=0.0, data_parallel_s=None, one_device_s=None)
"""The prediction of a plan that is not finished, or that is used with another cluster than it was made for."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    profile: Profile
    cluster: Cluster
    stages: tuple[Stage, ...]
    schedule: str
    microbatches: int
    """Microbatches per minibatch. 1 under an asynchronous schedule and in inference, where a microbatch is a
    minibatch."""
    sync: str = "all-reduce"
    prediction: Prediction
    custom: tuple[str, ...] = ()
    """The actions of each worker in a minibatch, for the schedule ``custom``."""

    FORMAT: ClassVar[str] = "penstock.plan/1"

    def __post_init__(self) -> None:
        family(self.schedule)
        if self.sync not in SYNC_POLICIES:
            raise PlanError(f"sync {self.sync!r} is unknown; choose one of {', '.join(SYNC_POLICIES)}")
        if not 1 <= self.microbatches <= MOST_MICROBATCHES:
            raise PlanError(f"microbatches is {self.microbatches}; a minibatch has 1 to {MOST_MICROBATCHES}")
        if not family(self.schedule).accumulates and self.microbatches != 1:
            raise PlanError(
                f"schedule {self.schedule} with {self.microbatches} microbatches per minibatch; it has no minibatch "
                "beyond the microbatch: use 1"
            )
        self._check_layers()
        self._check_devices()
        if (self.schedule == "custom") != bool(self.custom):
            raise PlanError(
                "actions of one's own are for schedule custom, and it needs them: plan with --schedule FILE"
            )
        # Checked only where it can fail: the planner makes very many plans with one stage per worker.
        if self.shares_workers or family(self.schedule).layout != "once":
            check_layout(self.schedule, self.pipeline)
        if self.custom:
            check_custom(self._custom_programs, self.pipeline)
            check(self.schedule_for([self.microbatches] * 2))

    @property
    def is_asynchronous(self) -> bool:
        return family(self.schedule).asynchronous

    @property
    def predicted_samples_per_s(self) -> float | None:
        """The one prediction of its throughput; None if there is none."""
        return per_second(self.profile.batch_size, self.prediction.seconds_per_minibatch)

    @property
    def takes_halves(self) -> bool:
        """Whether any backward runs in two halves."""
        halves = (Kind.INPUT, Kind.WEIGHT)
        return family(self.schedule).halves or any(a.kind in halves for p in self._custom_programs for a in p)

    @property
    def compression(self) -> str:
        """The coarsest compression between any two workers."""
        pipeline = self.pipeline
        edges = ((source, stage) for stage, reads in enumerate(pipeline.reads) for source in reads)
        apart = (source for source, stage in edges if pipeline.workers[source] != pipeline.workers[stage])
        return coarsest(self.stages[source].sends for source in apart)

    @property
    def microbatch_size(self) -> float:
        """Samples in a microbatch, on average over a minibatch."""
        return self.profile.batch_size / self.microbatches

    @property
    def extrapolated(self) -> str:
        """A warning if the plan's microbatches are outside the sizes that were profiled; empty otherwise."""
        sizes = self.profile.measured_sizes
        if len(sizes) < 2 or sizes[0] <= self.microbatch_size <= sizes[-1]:
            return ""
        return (
            f"microbatches of {self.microbatch_size:g} samples are extrapolated from profiled ones of "
            f"{sizes[0]:g} to {sizes[-1]:g}; profile with --microbatch-size {math.ceil(self.microbatch_size)}"
        )

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The device of each worker. Workers are numbered host by host, as launchers start them. On a host they are
        numbered stage by stage or, if its devices differ, in the order of the devices."""
        found = dict.fromkeys(device for stage in self.stages for device in stage.devices)
        return tuple(sorted(found, key=self.cluster.start_order))

    @property
    def shares_workers(self) -> bool:
        """Whether some worker has several stages."""
        return len(self.devices) < sum(len(stage.devices) for stage in self.stages)

    @cached_property
    def pipeline(self) -> Pipeline:
        """The workers of each stage, and which stages read from which."""
        worker_on = {device: worker for worker, device in enumerate(self.devices)}
        reads: list[list[int]] = [[] for _ in self.stages]
        for source, target in sorted(self.edges):
            reads[target].append(source)
        ties = {stages for stages in self.stages_of_parameters.values() if len(stages) > 1}
        return Pipeline(
            workers=tuple(tuple(worker_on[device] for device in stage.devices) for stage in self.stages),
            reads=tuple(map(tuple, reads)),
            ties=tuple(sorted(ties)),
            shares=tuple(stage.shares for stage in self.stages),
            meets_in_backwards=self.profile.sync_batch_norm,
        )

    @cached_property
    def stage_of_layer(self) -> dict[int, int]:
        return {layer: index for index, stage in enumerate(self.stages) for layer in stage.layers}

    @cached_property
    def edges(self) -> dict[tuple[int, int], tuple[Value, ...]]:
        """The values that one stage sends to another, for every pair of stages of which the second reads from the
        first, in graph order. A pair has no values if only model inputs pass between its layers: both stages load
        them."""
        graph = self.profile.graph
        read = by_edge(((value, value.producer, value.consumers) for value in graph.values), self.stage_of_layer)
        return {edge: tuple(filter(graph.is_sent, values)) for edge, values in read.items()}

    @cached_property
    def stages_of_parameters(self) -> dict[str, tuple[int, ...]]:
        """The stages that use each parameter. Parameters come in the order of the layers."""
        found: dict[str, set[int]] = defaultdict(set)
        for layer in self.profile.graph.layers:
            for name in layer.parameters:
                found[name].add(self.stage_of_layer[layer.id])
        return {name: tuple(sorted(stages)) for name, stages in found.items()}

    @cached_property
    def owners_of_parameters(self) -> dict[str, tuple[int, ...]]:
        """The workers that hold each parameter: all replicas of all stages that use it."""
        workers = self.pipeline.workers
        return {
            name: tuple(sorted({worker for stage in stages for worker in workers[stage]}))
            for name, stages in self.stages_of_parameters.items()
        }

    @cached_property
    def worker_names(self) -> tuple[str, ...]:
        names: dict[int, list[str]] = {device: [] for device in self.devices}
        for index, stage in enumerate(self.stages):
            for replica, device in enumerate(stage.devices):
                names[device].append(f"{index}.{replica}" if len(stage.devices) > 1 else f"{index}")
        return tuple(
            f"stage{'s' if len(stages) > 1 else ''} {', '.join(stages)} on device {device}"
            for device, stages in names.items()
        )

    def schedule_for(self, minibatches: Sequence[int]) -> Schedule:
        """The action lists for minibatches with these numbers of microbatches."""
        depths = [stage.in_flight for stage in self.stages]
        return build_schedule(self.schedule, self.pipeline, minibatches, depths, self._custom_programs)

    @cached_property
    def staleness(self) -> tuple[Staleness, ...]:
        """Staleness of each stage in steady state."""
        if not self.is_asynchronous:
            return (Staleness((self.microbatches,)),) * len(self.stages)
        return steady_staleness(self.schedule, self.pipeline, [stage.in_flight for stage in self.stages])

    @cached_property
    def _custom_programs(self) -> tuple[tuple[Action, ...], ...]:
        return parse_custom(self.custom) if self.custom else ()

    def _check_layers(self) -> None:
        placed = [layer for stage in self.stages for layer in stage.layers]
        known = self.profile.graph.by_id
        unknown = sorted(set(placed) - set(known))
        if unknown:
            raise PlanError(f"layers {unknown[:4]} are not in the profile of {self.profile.model}; plan it again")
        if len(placed) != len(set(placed)) or len(placed) != len(known):
            missing = sorted(set(known) - set(placed))[:4]
            twice = sorted({layer for layer in placed if placed.count(layer) > 1})[:4]
            raise PlanError(f"each layer belongs to one stage; missing: {missing}, in several: {twice}")
        for value in self.profile.graph.values:
            for consumer in value.consumers:
                source, target = self.stage_of_layer[value.producer], self.stage_of_layer[consumer]
                if source > target:
                    raise PlanError(
                        f"value {value.name!r} would flow back from stage {source} to {target}; reorder the stages"
                    )
                if source != target and value.opaque:
                    names = [self.profile.graph.by_id[layer].name for layer in (value.producer, consumer)]
                    raise PlanError(
                        f"value {value.name!r} is a {value.opaque}, which cannot be sent from stage {source} to "
                        f"{target}; keep layers {names[0]!r} and {names[1]!r} in one stage"
                    )

    def _check_devices(self) -> None:
        if len(self.devices) > len(self.cluster.devices):
            raise PlanError(
                f"{len(self.devices)} workers but {self.cluster.name} has {len(self.cluster.devices)} devices; "
                "plan for it, or give a larger one"
            )
        for device in self.devices:
            if not 0 <= device < len(self.cluster.devices):
                raise PlanError(f"device {device} is not in {self.cluster.name}, which has {len(self.cluster.devices)}")
        for index, stage in enumerate(self.stages):
            if len(set(stage.devices)) != len(stage.devices):
                raise PlanError(f"stage {index} has devices {list(stage.devices)}; each runs one of its replicas")
