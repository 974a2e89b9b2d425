"""Pixel positions of everything in the drawing of a plan: bands of stages, blocks of layers, wires between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.plan import Plan
from penstock.report.drawing.blocks import Block, BlockGraph, Delivery, readable_blocks
from penstock.report.drawing.labels import DeliveryLabel, FoldLabel, Labels, RowLabel, StageLabel, text_width_px
from penstock.report.drawing.layered import Edge, Node, Ranked, place, rank_nodes

ROW, BLOCK_EDGE, PILL, LINE = 18.0, 4.0, 19.0, 15.0
RANK_GAP, BAND_GAP, BAND_EDGE = 26.0, 6.0, 14.0
GUTTER, MARGIN, LEAST_WIDTH = 140.0, 8.0, 330.0
LEAST_BLOCK, BLOCK_PADDING, PILL_PADDING = 84.0, 16.0, 16.0

# A larger picture is not readable, so more layers are drawn as one.
MOST_HEIGHT, MOST_WIDTH, MOST_POINTS = 3000.0, 2600.0, 3000
USUAL_BLOCK, USUAL_PILL = 180.0, 64.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A block with the labels of its rows, or a delivery with its own."""

    stage: int
    left: float
    top: float
    width: float
    height: float
    label: tuple[RowLabel, ...] | DeliveryLabel
    fold: FoldLabel | None = None
    """Shown above the rows of a block that stands for several equal ones."""

    @property
    def bottom(self) -> float:
        return self.top + self.height


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of a wire from rank to rank: straight down, sideways, straight down."""

    x: float
    top: float
    turn: float
    end_x: float
    end_turn: float
    bottom: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    pieces: tuple[Piece, ...]
    label: DeliveryLabel | None
    """What it carries to another stage, or from the delivery to its readers."""
    crosses: bool
    """Whether it leads from stage to stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    stage: int
    top: float
    bottom: float
    label: StageLabel


@dataclass(frozen=True, kw_only=True)
class Picture:
    width: float
    height: float
    bands: tuple[Band, ...]
    boxes: tuple[Box, ...]
    wires: tuple[Wire, ...]


def make_picture(plan: Plan) -> Picture:
    graph = readable_blocks(plan, _fits)
    labels = Labels(plan)
    node_labels = [_label(labels, node) for node in graph.nodes]
    folds = [labels.fold(node.fold) if isinstance(node, Block) and node.fold else None for node in graph.nodes]
    ranked = _ranked(graph, list(map(_width, node_labels, folds)))
    bands, tops, heights = _rows(graph, ranked, [labels.stage(stage) for stage in range(len(plan.stages))])
    middles = place(ranked)
    left, right = _extent(ranked, middles)
    width = max(LEAST_WIDTH, GUTTER + right - left + 2 * MARGIN)
    shift = GUTTER + (width - GUTTER - (left + right)) / 2
    middles = tuple(x + shift for x in middles)
    boxes = tuple(
        Box(
            stage=node.stage,
            left=middles[index] - ranked.nodes[index].width / 2,
            top=tops[ranked.ranks[index]] + (heights[ranked.ranks[index]] - _height(node)) / 2,
            width=ranked.nodes[index].width,
            height=_height(node),
            label=node_labels[index],
            fold=folds[index],
        )
        for index, node in enumerate(graph.nodes)
    )
    strips = [(top, top + height) for top, height in zip(tops, heights, strict=True)]
    return Picture(
        width=width, height=bands[-1].bottom, bands=bands, boxes=boxes, wires=_wires(ranked, boxes, strips, middles)
    )


def _fits(graph: BlockGraph) -> bool:
    """Judged by usual widths, since making labels takes time."""
    ranked = _ranked(graph, [USUAL_BLOCK if isinstance(node, Block) else USUAL_PILL for node in graph.nodes])
    height = sum(_rank_heights(graph, ranked)) + RANK_GAP * ranked.num_ranks
    return height <= MOST_HEIGHT and ranked.width <= MOST_WIDTH and len(ranked.ranks) <= MOST_POINTS


def _ranked(graph: BlockGraph, widths: Sequence[float]) -> Ranked:
    nodes = [
        Node(width=width, band=node.stage, leads=isinstance(node, Delivery))
        for node, width in zip(graph.nodes, widths, strict=True)
    ]
    return rank_nodes(nodes, graph.edges)


def _label(labels: Labels, node: Block | Delivery) -> tuple[RowLabel, ...] | DeliveryLabel:
    if isinstance(node, Block):
        return tuple(labels.row(row, node.fold) for row in node.rows)
    return labels.delivery(node.sender.layers, node.stage)


def _width(label: tuple[RowLabel, ...] | DeliveryLabel, fold: FoldLabel | None) -> float:
    if isinstance(label, DeliveryLabel):
        return text_width_px(label.text) + PILL_PADDING
    widths = [row.width_px for row in label] + ([fold.width_px] if fold else [])
    return max(LEAST_BLOCK, BLOCK_PADDING + max(widths))


def _height(node: Block | Delivery) -> float:
    if isinstance(node, Delivery):
        return PILL
    return ROW * (len(node.rows) + (node.fold is not None)) + 2 * BLOCK_EDGE


def _rank_heights(graph: BlockGraph, ranked: Ranked) -> list[float]:
    return [max((_height(graph.nodes[p]) for p in row if not ranked.is_bend(p)), default=0.0) for row in ranked.rows]


def _rows(
    graph: BlockGraph, ranked: Ranked, labels: Sequence[StageLabel]
) -> tuple[tuple[Band, ...], list[float], list[float]]:
    """The bands, and the top and height of every rank. A band has room for its label."""
    heights = _rank_heights(graph, ranked)
    last = [0] * len(labels)
    for node, rank in zip(graph.nodes, ranked.ranks, strict=False):
        last[node.stage] = max(last[node.stage], rank)
    bands, tops, y, first = [], [], 0.0, 0
    for stage, label in enumerate(labels):
        ranks = range(first, last[stage] + 1)
        content = sum(heights[rank] for rank in ranks) + RANK_GAP * (len(ranks) - 1)
        height = max(content, LINE * label.lines) + 2 * BAND_EDGE
        bands.append(Band(stage=stage, top=y, bottom=y + height, label=label))
        inside = y + (height - content) / 2
        for rank in ranks:
            tops.append(inside)
            inside += heights[rank] + RANK_GAP
        y, first = y + height + BAND_GAP, last[stage] + 1
    return tuple(bands), tops, heights


def _extent(ranked: Ranked, middles: Sequence[float]) -> tuple[float, float]:
    half = [ranked.width_of(point) / 2 for point in range(len(middles))]
    pairs = list(zip(middles, half, strict=True))
    return min(x - h for x, h in pairs), max(x + h for x, h in pairs)


def _wires(
    ranked: Ranked, boxes: Sequence[Box], strips: Sequence[tuple[float, float]], middles: Sequence[float]
) -> tuple[Wire, ...]:
    """One wire for all edges that leave a node within its stage, and one for each delivery to another stage."""

    def piece(step: Edge) -> Piece:
        source, target = step
        turn = strips[ranked.ranks[source]][1]
        end_turn, bottom = strips[ranked.ranks[target]]
        return Piece(
            x=middles[source],
            top=turn if ranked.is_bend(source) else boxes[source].bottom,
            turn=turn,
            end_x=middles[target],
            end_turn=end_turn,
            bottom=bottom if ranked.is_bend(target) else boxes[target].top,
        )

    steps: dict[Edge, list[Edge]] = {}
    for (source, target), route in zip(ranked.edges, ranked.routes, strict=True):
        within = boxes[source].stage == boxes[target].stage
        steps.setdefault((source, source) if within else (source, target), []).extend(pairwise(route))
    wires = []
    for (source, target), along in steps.items():
        label = boxes[target].label
        sent = label if isinstance(label, DeliveryLabel) else None
        pieces = tuple(map(piece, dict.fromkeys(along)))
        wires.append(Wire(pieces=pieces, label=sent, crosses=source != target))
    return tuple(wires)
