"""What a drawing of a plan shows: layers in rows, consecutive rows in blocks, and what stages send.

A block is a series: each of its rows feeds only the next one. A row is one layer, or several if there is little room,
so that a model of any size gives a readable picture.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from penstock.plan import Plan
from penstock.report.drawing.folds import Fold, find_folds

Row = tuple[int, ...]
"""Layers that are shown together, in the graph's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    stage: int
    rows: tuple[Row, ...]
    fold: Fold | None = None
    """The equal blocks that are drawn as this one. Each row then has the layers of all of them, block by block."""

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for row in self.rows for layer in row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What a block sends to a later stage. It is one delivery, however many blocks of that stage read it."""

    stage: int
    """The stage that receives it."""
    sender: Block


@dataclass(frozen=True, kw_only=True)
class BlockGraph:
    nodes: tuple[Block | Delivery, ...]
    """Stage by stage: the deliveries to it, then its blocks."""
    edges: tuple[tuple[int, int], ...]
    """Each leads to a later node: from block to block within a stage, from a block to a delivery, from a delivery to
    its readers."""

    def with_rows_of(self, size: int, seconds: Mapping[int, float]) -> BlockGraph:
        """The same blocks with up to ``size`` layers to a row."""
        nodes = (_shortened(n, size, seconds) if isinstance(n, Block) else n for n in self.nodes)
        return replace(self, nodes=tuple(nodes))


def _shortened(block: Block, size: int, seconds: Mapping[int, float]) -> Block:
    if block.fold is None:
        return replace(block, rows=_joined(block.layers, size, seconds))
    rows, start = [], 0
    for row in _joined(block.fold.blocks[0], size, seconds):
        end = start + len(row)
        rows.append(tuple(layer for each in block.fold.blocks for layer in each[start:end]))
        start = end
    return replace(block, rows=tuple(rows))


def _joined(layers: Sequence[int], size: int, seconds: Mapping[int, float]) -> tuple[Row, ...]:
    """A row ends before a slow layer if possible: a convolution begins a row, its norm and activation follow it."""
    rows, start = [], 0
    while len(layers) - start > size:
        ends = range(start + size, start + size // 2, -1)
        end = max(ends, key=lambda end: seconds[layers[end]])
        rows.append(tuple(layers[start:end]))
        start = end
    return (*rows, tuple(layers[start:]))


def readable_blocks(plan: Plan, fits: Callable[[BlockGraph], bool]) -> BlockGraph:
    """As much detail as fits, or the least possible if nothing fits."""
    for graph in _from_fine_to_coarse(plan):
        if fits(graph):
            break
    return graph


def _from_fine_to_coarse(plan: Plan) -> Iterator[BlockGraph]:
    """Graphs with less and less detail. Equal consecutive blocks are one from the start. First, series get
    3, 6, 12 and more layers per row; three are a convolution, its norm and its activation. Then forks and joins are
    drawn as one with what is between them, and finally whatever is side by side."""
    graph = _folded_blocks(plan)
    ids = (layer.id for layer in plan.profile.graph.layers)
    seconds = dict(zip(ids, plan.profile.compute_s(plan.cluster.devices[0].kind), strict=True))
    longest = max(len(node.rows) for node in graph.nodes if isinstance(node, Block))
    yield graph
    for size in (3 * 2**n for n in count()):
        yield graph.with_rows_of(size, seconds)
        if size >= longest:
            break
    depths = _depths(plan)
    heights = [2**n for n in range((max(depths.values()) + 1).bit_length() + 1)]
    for height in heights[1:]:
        yield _blocks(plan, _slices(plan, depths, height, _connected))
    for height in heights:
        yield _blocks(plan, _slices(plan, depths, height, _together))


def _in_stage_order(plan: Plan) -> list[int]:
    return sorted(plan.profile.graph.order, key=plan.stage_of_layer.__getitem__)


def _folded_blocks(plan: Plan) -> BlockGraph:
    """One row per layer, or per layer of several equal blocks."""
    folds = {fold.layers: fold for fold in find_folds(plan)}
    folded = {layer: row for row in folds for layer in row}
    rows = dict.fromkeys(folded.get(layer, (layer,)) for layer in _in_stage_order(plan))
    return _blocks(plan, list(rows), folds)


def _blocks(plan: Plan, rows: Sequence[Row], folds: Mapping[Row, Fold] | None = None) -> BlockGraph:
    """Blocks from rows, which come stage by stage in topological order. Rows in series become one block.

    Rows in ``folds`` are the layers of equal blocks; each becomes a block by itself.
    """
    folds = folds or {}
    owner = {layer: index for index, row in enumerate(rows) for layer in row}
    stage = [plan.stage_of_layer[row[0]] for row in rows]
    links = _links(plan, owner)
    fan_in, fan_out = [0] * len(rows), [0] * len(rows)
    for source, target in links:
        fan_out[source] += 1
        fan_in[target] += 1
    block_of: dict[int, int] = {}
    series: list[list[int]] = []
    follows = {
        target: source
        for source, target in links
        if fan_out[source] == 1 and fan_in[target] == 1 and stage[source] == stage[target]
        if rows[source] not in folds and rows[target] not in folds
    }
    for row in range(len(rows)):
        if row in follows:
            block_of[row] = block_of[follows[row]]
            series[block_of[row]].append(row)
        else:
            block_of[row] = len(series)
            series.append([row])
    blocks = tuple(_block(stage[each[0]], [rows[row] for row in each], folds) for each in series)
    return _linked(blocks, [(block_of[source], block_of[target]) for source, target in links])


def _block(stage: int, rows: Sequence[Row], folds: Mapping[Row, Fold]) -> Block:
    fold = folds.get(rows[0])
    if fold is None:
        return Block(stage=stage, rows=tuple(rows))
    return Block(stage=stage, rows=tuple(zip(*fold.blocks, strict=True)), fold=fold)


def _links(plan: Plan, owner: dict[int, int]) -> list[tuple[int, int]]:
    """Which row reads which other row, each pair once."""
    pairs = (
        (owner[value.producer], owner[consumer]) for value in plan.profile.graph.values for consumer in value.consumers
    )
    return sorted({pair for pair in pairs if pair[0] != pair[1]})


def _linked(blocks: Sequence[Block], links: Sequence[tuple[int, int]]) -> BlockGraph:
    links = sorted({link for link in links if link[0] != link[1]})
    sent = dict.fromkeys((s, blocks[t].stage) for s, t in links if blocks[s].stage != blocks[t].stage)
    nodes: list[Block | Delivery] = []
    node_of: dict[int | tuple[int, int], int] = {}
    for stage in range(blocks[-1].stage + 1):
        for key in sent:
            if key[1] == stage:
                node_of[key] = len(nodes)
                nodes.append(Delivery(stage=stage, sender=blocks[key[0]]))
        for index, block in enumerate(blocks):
            if block.stage == stage:
                node_of[index] = len(nodes)
                nodes.append(block)
    edges = [(node_of[key[0]], node_of[key]) for key in sent]
    for source, target in links:
        key = (source, blocks[target].stage)
        edges.append((node_of[key if key in sent else source], node_of[target]))
    return BlockGraph(nodes=tuple(nodes), edges=tuple(sorted(edges)))


def _depths(plan: Plan) -> dict[int, int]:
    """For each layer, the number of layers of its own stage above it, on the longest path."""
    stage_of, after = plan.stage_of_layer, plan.profile.graph.successors
    depths = dict.fromkeys(plan.profile.graph.order, 0)
    for layer in plan.profile.graph.order:
        for reader in after[layer]:
            if stage_of[reader] == stage_of[layer]:
                depths[reader] = max(depths[reader], depths[layer] + 1)
    return depths


def _slices(
    plan: Plan, depths: dict[int, int], height: int, rows_of: Callable[[Plan, Sequence[int]], list[Row]]
) -> list[Row]:
    """Each stage in slices of about ``height`` depths, each slice as the rows that ``rows_of`` makes of it.

    Edges lead from slice to slice or stay in a row, so the rows form an acyclic graph.
    """
    rows = []
    place = {layer: index for index, layer in enumerate(plan.profile.graph.order)}
    for stage in plan.stages:
        cuts = _thin_places(plan, stage.layers, depths, height)
        slices: list[list[int]] = [[] for _ in range(len(cuts) + 1)]
        for layer in sorted(stage.layers, key=place.__getitem__):
            slices[bisect_left(cuts, depths[layer])].append(layer)
        for layers in slices:
            rows += rows_of(plan, layers)
    return rows


def _thin_places(plan: Plan, layers: Sequence[int], depths: dict[int, int], height: int) -> list[int]:
    """Depths after which to cut a stage: about ``height`` apart, where the fewest layers are read across the cut."""
    own, deepest = set(layers), max(depths[layer] for layer in layers)
    crossing = [0] * (deepest + 1)
    for layer in layers:
        readers = [depths[reader] for reader in plan.profile.graph.successors[layer] if reader in own]
        for depth in range(depths[layer], max(readers, default=depths[layer])):
            crossing[depth] += 1
    cuts, start = [], 0
    while start + height <= deepest:
        near = range(start + height // 2, min(start + height + height // 2, deepest))
        cuts.append(min(near, key=lambda depth: (crossing[depth], abs(depth + 1 - start - height))))
        start = cuts[-1] + 1
    return cuts


def _together(_: Plan, layers: Sequence[int]) -> list[Row]:
    return [tuple(layers)]


def _connected(plan: Plan, layers: Sequence[int]) -> list[Row]:
    """The connected components of the layers."""
    root = {layer: layer for layer in layers}

    def find(layer: int) -> int:
        while root[layer] != layer:
            root[layer] = root[root[layer]]
            layer = root[layer]
        return layer

    for layer in layers:
        for reader in plan.profile.graph.successors[layer]:
            if reader in root:
                root[find(reader)] = find(layer)
    members: dict[int, list[int]] = {}
    for layer in layers:
        members.setdefault(find(layer), []).append(layer)
    return [tuple(row) for row in members.values()]
