"""DynPipe's partition of a chain of layers, and its layer profiles."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock import codec
from penstock.cluster import ANY_KIND
from penstock.errors import FormatError, PlanError
from penstock.formats.reading import MILLI, decode_json, layer_seconds, numbered_lines, parse_amount
from penstock.graph import Layer, LayerGraph, Value
from penstock.limits import is_size
from penstock.plan import Plan
from penstock.profile import Profile

FRONT_END = "dynpipe"


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The keys of the file, each with one entry per stage."""

    partition: tuple[int, ...]
    """The number of layers of each stage, in the order of the chain."""
    recompute_ratio: tuple[float, ...]
    """The share of the stage's layers that are recomputed in the backward."""
    batch_size: tuple[int, ...]
    """Samples that the stage computes at a time."""

    def __post_init__(self) -> None:
        if not self.partition:
            raise FormatError("partition: empty; there is at least one stage")
        for field in ("recompute_ratio", "batch_size"):
            if len(getattr(self, field)) != len(self.partition):
                raise FormatError(
                    f"{field}: {len(getattr(self, field))} entries for {len(self.partition)} stages; each stage has one"
                )
        for i, ratio in enumerate(self.recompute_ratio):
            if not 0 <= ratio <= 1:
                raise FormatError(f"recompute_ratio[{i}]: {ratio} is no share; expected 0 to 1")
        for field in ("partition", "batch_size"):
            for i, count in enumerate(getattr(self, field)):
                if count < 1:
                    raise FormatError(f"{field}[{i}]: {count}; expected at least 1")


def parse_partition(text: str, source: str) -> Partition:
    return decode_json(Partition, text, source)


def partition_text(partition: Partition) -> str:
    return json.dumps(codec.encode(partition)) + "\n"


def partition_of(plan: Plan) -> Partition:
    """The layers per stage. A stage recomputes all of its layers or none, and computes whole microbatches."""
    stages = [plan.stage_of_layer[layer] for layer in plan.profile.graph.order]
    for position, (before, after) in enumerate(itertools.pairwise(stages)):
        if after < before:
            layer = plan.profile.graph.by_id[plan.profile.graph.order[position + 1]].name
            raise PlanError(
                f"{layer} of stage {after} comes after layers of stage {before} in the model's order; a DynPipe "
                "partition only counts layers of a chain: export the format graph or hybrid instead"
            )
    return Partition(
        partition=tuple(len(stage.layers) for stage in plan.stages),
        recompute_ratio=tuple(float(stage.recompute) for stage in plan.stages),
        batch_size=(math.ceil(plan.microbatch_size),) * len(plan.stages),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The text of a file with one number per line, and its name for errors."""

    text: str
    source: str


def parse_layer_costs(
    *, forward_ms: Column, backward_ms: Column, communication_s: Column, bytes_per_s: float, model: str
) -> Profile:
    """A chain of layers from DynPipe's three files.

    ``bytes_per_s`` is the rate of the link that the communication times were measured on. Sizes follow from it, and a
    cluster with this rate gives the same times. The last layer's communication may be left out.
    """
    if not (math.isfinite(bytes_per_s) and bytes_per_s > 0):
        raise FormatError(f"bytes_per_s is {bytes_per_s}; give the bandwidth of the link that was measured")
    forward_s, backward_s = _amounts(forward_ms, MILLI), _amounts(backward_ms, MILLI)
    sent_s = _amounts(communication_s)
    count = len(forward_s)
    _check_length(backward_ms, backward_s, (count,))
    _check_length(communication_s, sent_s, (count, count - 1))
    return Profile(
        model=model,
        front_end=FRONT_END,
        batch_size=1,
        microbatch_size=1,
        graph=LayerGraph(
            layers=tuple(Layer(id=i, name=f"layer{i}", kind="Layer") for i in range(count)),
            values=tuple(
                Value(
                    name=f"layer{i}",
                    producer=i,
                    consumers=(i + 1,) if i + 1 < count else (),
                    num_bytes=_sent_bytes(seconds * bytes_per_s, f"{communication_s.source}: number {i + 1}"),
                )
                for i, seconds in enumerate(sent_s)
            ),
        ),
        seconds={ANY_KIND: tuple(layer_seconds(f, b, False) for f, b in zip(forward_s, backward_s, strict=True))},
    )


def _amounts(column: Column, places: int = 0) -> list[float]:
    lines = numbered_lines(column.text, column.source)
    return [parse_amount(line, f"{column.source}:{number}", places) for number, line in lines]


def _check_length(column: Column, amounts: Sequence[float], allowed: tuple[int, ...]) -> None:
    if len(amounts) not in allowed:
        raise FormatError(f"{column.source}: {len(amounts)} numbers for {allowed[0]} layers; each layer has one")


def _sent_bytes(num_bytes: float, where: str) -> int:
    if not is_size(num_bytes):
        raise FormatError(f"{where}: too long for any transfer; give seconds")
    return round(num_bytes)
