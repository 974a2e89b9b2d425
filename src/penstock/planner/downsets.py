"""The downsets of a layer graph: every place where it can be cut.

With each layer, a downset contains all layers that the layer depends on. The layers of one downset that are not in a
smaller one are a stage. A chain of n layers has n + 1 downsets; parallel branches multiply them. If there are too many,
small consecutive layers are joined until there are few enough. At worst only the prefixes of one topological order are
left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from penstock.graph import Layer, LayerGraph, Value

Floats = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

MOST_DOWNSETS = 1500
"""A search keeps matrices with the square of this number of entries."""


@dataclass(frozen=True)
class Downsets:
    """Sorted so that each downset comes after all that it contains: the empty one first, the whole graph last."""

    graph: LayerGraph
    members: Bools
    """[downset, layer in the graph's order]"""
    complete: bool
    """Whether every cut of the graph is included."""

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def contained(self) -> Bools:
        """[smaller, larger]: whether the first is strictly inside the second."""
        members = self.members.astype(np.float32)
        inside: Bools = members @ (1.0 - members).T == 0
        np.fill_diagonal(inside, False)
        return inside

    def sums(self, of_layer: Callable[[Layer], float]) -> Floats:
        """[downset]: the sum over its layers."""
        per_layer = np.array([of_layer(self.graph.by_id[layer]) for layer in self.graph.order], dtype=np.float64)
        total: Floats = self.members @ per_layer
        return total

    def sums_between(self, of_layer: Callable[[Layer], float]) -> Floats:
        """[smaller, larger]: the sum over the layers of the stage between, where the first is inside the second."""
        sums = self.sums(of_layer)
        between: Floats = sums[None, :] - sums[:, None]
        return between

    def crossing_bytes(self, bytes_of: Callable[[Value], float] = lambda value: value.num_bytes) -> Floats:
        """[downset]: bytes of the values made inside and read outside, each once. Model inputs do not count."""
        total = np.zeros(len(self))
        for value, made, read in self._sent_values():
            total += bytes_of(value) * (made & (read < len(value.consumers)))
        return total

    def sent_bytes(self, bytes_of: Callable[[Value], float]) -> Floats:
        """[smaller, larger]: bytes of the values made between the two and read outside the larger."""
        made, leaves = [], []
        for value, made_inside, read_inside in self._sent_values():
            made.append(~made_inside)
            leaves.append(bytes_of(value) * (made_inside & (read_inside < len(value.consumers))))
        return _product(made, leaves, len(self))

    def received_bytes(self, bytes_of: Callable[[Value], float]) -> Floats:
        """[smaller, larger]: bytes of the values made inside the smaller and read between the two."""
        waiting, read = [], []
        shared = np.zeros((len(self), len(self)))
        for value, made_inside, read_inside in self._sent_values():
            if len(value.consumers) == 1:
                waiting.append(bytes_of(value) * (made_inside & (read_inside == 0)))
                read.append(read_inside > 0)
            else:
                shared += bytes_of(value) * (made_inside[:, None] & (read_inside[None, :] > read_inside[:, None]))
        return shared + _product(waiting, read, len(self))

    def _sent_values(self) -> Iterator[tuple[Value, Bools, Any]]:
        """Values that a stage may have to send; for each, by [downset], whether it is made inside and how many of its
        readers are inside."""
        for value in self.graph.sent_values:
            read = self.members[:, [self._row[consumer] for consumer in value.consumers]].sum(axis=1)
            yield value, self.members[:, self._row[value.producer]], read

    def parts_any_of(self, groups: Sequence[Sequence[int]]) -> Bools:
        """[downset]: whether it has some but not all of the layers of any of these groups."""
        parts = np.zeros(len(self), dtype=bool)
        for group in groups:
            held = self.members[:, [self._row[layer] for layer in group]]
            parts |= held.any(axis=1) & ~held.all(axis=1)
        return parts

    def between(self, smaller: int, larger: int) -> tuple[int, ...]:
        """The layers of the stage between two downsets."""
        rows = np.flatnonzero(self.members[larger] & ~self.members[smaller])
        return tuple(self.graph.order[row] for row in rows)

    @cached_property
    def _row(self) -> dict[int, int]:
        return {layer: index for index, layer in enumerate(self.graph.order)}


def find_downsets(graph: LayerGraph, weights: Mapping[int, float], most: int = MOST_DOWNSETS) -> Downsets:
    """At most ``most`` downsets; all of them if there are no more. Cuts that an opaque value would cross are left out.

    ``weights`` has the cost of each layer. Model inputs are in the same stage as their first reader. A layer without
    cost and without readers is in the same stage as the layer that it reads from. Neither excludes a useful plan.
    """
    blocks = _Blocks(graph, weights)
    found = blocks.downsets(most)
    complete = found is not None
    limit = sum(weights.values()) / 256
    while found is None and blocks.contract(limit):
        found = blocks.downsets(most)
        limit *= 2
    masks = found if found is not None else blocks.prefixes(most)
    width = (len(graph.layers) + 7) // 8
    packed = np.array([list(mask.to_bytes(width, "little")) for mask in masks], dtype=np.uint8)
    members = np.unpackbits(packed, axis=1, bitorder="little")[:, : len(graph.layers)].astype(bool)
    members[0] = False  # the empty downset; model inputs belong to the first stage
    found_downsets = Downsets(graph, members, complete)
    unsent = found_downsets.parts_any_of([(v.producer, *v.consumers) for v in graph.values if v.opaque])
    return replace(found_downsets, members=members[~unsent])


def _product(rows: Sequence[Any], columns: Sequence[Any], size: int) -> Floats:
    """[row, column]: the sum over the items of row x column."""
    if not rows:
        return np.zeros((size, size))
    total: Floats = np.stack(rows, axis=1).astype(np.float64) @ np.stack(columns).astype(np.float64)
    return total


class _Blocks:
    """Joined layers, as a graph of bit masks over the layer graph's order."""

    def __init__(self, graph: LayerGraph, weights: Mapping[int, float]) -> None:
        row = {layer: index for index, layer in enumerate(graph.order)}
        self.start = sum(1 << row[layer.id] for layer in graph.layers if layer.is_input)
        self.masks: dict[int, int] = {}
        """The layers of each block."""
        self.weights: dict[int, float] = {}
        self.after: dict[int, set[int]] = {}
        self.before: dict[int, set[int]] = {}
        kept = [layer for layer in graph.order if not graph.by_id[layer].is_input]
        for layer in kept:
            block = row[layer]
            self.masks[block], self.weights[block] = 1 << block, weights[layer]
            self.after[block] = {row[after] for after in graph.successors[layer]}
            self.before[block] = set()
        for block, after in self.after.items():
            for follower in after:
                self.before[follower].add(block)
        for block in list(self.masks):
            if not self.after[block] and len(self.before[block]) == 1 and self.weights[block] == 0:
                self._merge(next(iter(self.before[block])), block)

    def downsets(self, most: int) -> list[int] | None:
        """All downsets of blocks, smaller ones first; None if there are more than ``most``."""
        ready = [block for block in sorted(self.masks) if not self.before[block]]
        seen: dict[int, list[int]] = {self.start: ready}
        level = [self.start]
        while level:
            larger: list[int] = []
            for downset in level:
                for block in seen[downset]:
                    grown = downset | self.masks[block]
                    if grown not in seen:
                        others = [other for other in seen[downset] if other != block]
                        seen[grown] = others + [b for b in sorted(self.after[block]) if self._is_ready(b, grown)]
                        larger.append(grown)
                if len(seen) > most:
                    return None
            level = larger
        return sorted(seen, key=lambda downset: (downset.bit_count(), downset))

    def contract(self, limit: float) -> bool:
        """Join consecutive blocks that have no other neighbours, up to a weight. Returns False if nothing was left to
        join."""
        if limit > 4 * sum(self.weights.values()):
            return False
        for block in sorted(self.masks):
            while block in self.masks and len(self.after[block]) == 1:
                follower = next(iter(self.after[block]))
                light = self.weights[block] + self.weights[follower] <= limit
                if len(self.before[follower]) > 1 or not light:
                    break
                self._merge(block, follower)
        self._join_parallel(limit)
        return True

    def prefixes(self, most: int) -> list[int]:
        """The prefixes of one order of the blocks, at most ``most`` of them, evenly spaced."""
        masks, downset = [self.start], self.start
        waiting = {block: len(before) for block, before in self.before.items()}
        ready = sorted(block for block, count in waiting.items() if count == 0)
        while ready:
            block = ready.pop(0)
            downset |= self.masks[block]
            masks.append(downset)
            for follower in sorted(self.after[block]):
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    ready.append(follower)
        chosen = sorted({round(i * (len(masks) - 1) / (most - 1)) for i in range(most)})
        return [masks[index] for index in chosen] if len(masks) > most else masks

    def _join_parallel(self, limit: float) -> None:
        """Join blocks between the same two neighbours, which would multiply the downsets."""
        beside: dict[tuple[frozenset[int], frozenset[int]], int] = {}
        for block in sorted(self.masks):
            key = (frozenset(self.before[block]), frozenset(self.after[block]))
            other = beside.setdefault(key, block)
            if other != block and self.weights[other] + self.weights[block] <= limit:
                self._merge(other, block)

    def _merge(self, into: int, block: int) -> None:
        """Merge ``block`` into another that is its only neighbour on one side, or that is parallel to it."""
        self.masks[into] |= self.masks.pop(block)
        self.weights[into] += self.weights.pop(block)
        for follower in self.after.pop(block):
            self.before[follower].discard(block)
            if follower != into:
                self.before[follower].add(into)
                self.after[into].add(follower)
        for source in self.before.pop(block):
            self.after[source].discard(block)
            if source != into:
                self.after[source].add(into)
                self.before[into].add(source)

    def _is_ready(self, block: int, downset: int) -> bool:
        return all(self.masks[source] & ~downset == 0 for source in self.before[block])


def layer_weights(graph: LayerGraph, seconds: Collection[float]) -> dict[int, float]:
    """The cost of each layer, for deciding which to join. A layer with parameters never counts as free."""
    return {
        layer.id: cost + (1e-12 if layer.parameters else 0.0) for layer, cost in zip(graph.layers, seconds, strict=True)
    }
