"""Equal consecutive blocks of a model, such as those of a transformer: drawn once, with their number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from penstock.graph import LayerGraph
from penstock.plan import Plan

MOST_DIGITS = 9
"""A number with more digits in a name does not count blocks."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Blocks with the same layers and the same edges inside."""

    name: str
    """The name of all of them together, such as ``blocks.0-5``."""
    blocks: tuple[tuple[int, ...], ...]
    """The layers of each block, in the same order."""
    layer_names: tuple[str, ...]
    """The name of each layer within its block."""

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for block in self.blocks for layer in block)


class _Mark(NamedTuple):
    """A qualified name, split at one of its numbers: ``blocks.3.norm`` into ``blocks.``, 3 and ``norm``."""

    scope: str
    number: int
    rest: str


class _Part(NamedTuple):
    """Consecutive layers that belong to one block, or to none."""

    block: tuple[str, int] | None
    layers: tuple[int, ...]
    shape: Hashable = None
    """Equal for equal blocks."""


def find_folds(plan: Plan) -> list[Fold]:
    """All runs of equal blocks. A block that is divided between stages belongs to no run, unless its neighbour is
    divided equally.

    The layers of a run are consecutive in a topological order, so that drawing them as one box makes no cycle.
    """
    graph, found = plan.profile.graph, list[Fold]()
    marks = {layer.id: _marks(layer.name) for layer in graph.layers}
    for stage in plan.stages:
        own = set(stage.layers)
        layers = [layer for layer in graph.order if layer in own]
        folded: set[int] = set()
        for depth in range(max(len(marks[layer]) for layer in layers)):
            here = {layer: marks[layer][depth] for layer in own - folded if depth < len(marks[layer])}
            for run in _runs(_parts(graph, layers, here)):
                first = here[run[0].layers[0]]
                name = f"{first.scope}{first.number}-{first.number + len(run) - 1}"
                within = tuple(here[layer].rest for layer in run[0].layers)
                found.append(Fold(name, tuple(part.layers for part in run), within))
                folded.update(found[-1].layers)
    return found


def _marks(name: str) -> list[_Mark]:
    """One for each list of blocks that the layer is in, outermost first."""
    parts = name.split(".")
    return [
        _Mark(".".join([*parts[:at], ""]), int(part), ".".join(parts[at + 1 :]))
        for at, part in enumerate(parts[:-1])
        if part.isdecimal() and len(part) <= MOST_DIGITS
    ]


def _parts(graph: LayerGraph, layers: Sequence[int], marks: dict[int, _Mark]) -> Iterator[_Part]:
    output_bytes: dict[int, int] = defaultdict(int)
    for value in graph.values:
        output_bytes[value.producer] += value.num_bytes
    for block, members in groupby(layers, lambda layer: marks[layer][:2] if layer in marks else None):
        own = tuple(members)
        if block is None:
            yield _Part(None, own)
            continue
        place = {layer: index for index, layer in enumerate(own)}
        insides = tuple(
            (
                marks[layer].rest,
                graph.by_id[layer].kind,
                tuple(parameter.num_bytes for parameter in graph.parameters_of([layer])),
                output_bytes[layer],
                tuple(place[reader] for reader in graph.successors[layer] if reader in place),
            )
            for layer in own
        )
        yield _Part(block, own, insides)


def _runs(parts: Iterator[_Part]) -> list[list[_Part]]:
    """Two or more blocks of one list, numbered without a gap, all of the same shape."""
    runs: list[list[_Part]] = [[]]
    for part in parts:
        before = runs[-1][-1] if runs[-1] else None
        goes_on = (
            before is not None
            and before.block is not None
            and part.block == (before.block[0], before.block[1] + 1)
            and part.shape == before.shape
        )
        runs[-1].append(part) if goes_on else runs.append([part])
    return [run for run in runs if len(run) > 1]
