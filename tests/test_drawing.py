"""The drawing of a plan: all of it is there, nothing overlaps, every line leads down, whatever layers are called."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import chain_graph, chain_profile, flat_cluster, law, layer_seconds, plan_of, plans, profile_of
from penstock import codec
from penstock.graph import Layer, LayerGraph, Value
from penstock.plan import Plan
from penstock.plan_costs import PlanCosts
from penstock.report.drawing import inline_svg, layered, svg_file
from penstock.report.drawing.blocks import Block, BlockGraph, Delivery, readable_blocks
from penstock.report.drawing.labels import DeliveryLabel
from penstock.report.drawing.picture import GUTTER, MOST_HEIGHT, MOST_WIDTH, Picture, make_picture

SVG = "{http://www.w3.org/2000/svg}"
ROUNDING = 1e-6


def graph_of(edges: Sequence[tuple[int, int]], kinds: Sequence[str] = ("Conv2d", "BatchNorm2d", "ReLU")) -> LayerGraph:
    count = 1 + max(end for edge in edges for end in edge)
    readers: dict[int, list[int]] = {}
    for source, target in edges:
        readers.setdefault(source, []).append(target)
    return LayerGraph(
        layers=tuple(Layer(id=i, name=f"net.{i}", kind=kinds[i % len(kinds)]) for i in range(count)),
        values=tuple(
            Value(name=f"v{source}", producer=source, consumers=tuple(targets), num_bytes=1_000_000)
            for source, targets in readers.items()
        ),
    )


def cut(graph: LayerGraph, stages: int) -> Plan:
    """Stages of equal numbers of layers, each on a device of its own."""
    order, size = graph.order, -(-len(graph.layers) // stages)
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    seconds = [layer_seconds(1e-3 * (1 + i % 3)) for i in range(len(order))]
    return plan_of(profile_of(graph, seconds), flat_cluster(len(parts)), parts)


def residual(blocks: int) -> list[tuple[int, int]]:
    """Each block is a chain of eleven layers with a line around it."""
    edges = []
    for first in range(0, 11 * blocks, 11):
        edges += [*pairwise(range(first, first + 12)), (first, first + 11)]
    return edges


def everyone_reads_everyone(layers: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(layers) for j in range(i + 1, layers)]


BIG = {
    "a chain of 1,000": cut(chain_graph(1_000), 4),
    "a chain of 1,000 in one stage": cut(chain_graph(1_000), 1),
    "residual blocks of 1,321 layers": cut(graph_of(residual(120)), 5),
    "dense connections": cut(graph_of(everyone_reads_everyone(60)), 3),
    "500 experts side by side": cut(graph_of([(0, i) for i in range(1, 501)] + [(i, 501) for i in range(1, 501)]), 3),
    "1,500 layers with lines of all lengths": cut(
        graph_of([(i, min(1_499, i + 1 + (i * i) % 211)) for i in range(1_499)]), 5
    ),
}


def rows_of(picture: Picture) -> list[tuple[int, ...]]:
    return [row.layers for box in picture.boxes if isinstance(box.label, tuple) for row in box.label]


def assert_drawn_well(picture: Picture) -> None:
    bands = {band.stage: band for band in picture.bands}
    for above, below in pairwise(picture.bands):
        assert above.bottom < below.top
    for box in picture.boxes:
        assert box.left >= GUTTER - ROUNDING
        assert box.left + box.width <= picture.width + ROUNDING
        assert bands[box.stage].top < box.top < box.bottom < bands[box.stage].bottom
    for one, two in combinations(sorted(picture.boxes, key=lambda box: (box.top + box.bottom, box.left)), 2):
        assert one.left + one.width <= two.left + ROUNDING or one.bottom < two.top
    columns = [(box.left, box.left + box.width, box.top, box.bottom) for box in picture.boxes]
    for piece in (piece for wire in picture.wires for piece in wire.pieces):
        assert piece.top <= piece.turn <= piece.end_turn <= piece.bottom
        for x, top, bottom in ((piece.x, piece.top, piece.turn), (piece.end_x, piece.end_turn, piece.bottom)):
            assert not any(
                left + ROUNDING < x < right - ROUNDING and top < box_bottom and box_top < bottom
                for left, right, box_top, box_bottom in columns
            )


@law
@given(plans())
def test_each_layer_is_drawn_once_and_nothing_overlaps_or_leads_up(plan: Plan) -> None:
    picture = make_picture(plan)
    assert sorted(layer for row in rows_of(picture) for layer in row) == sorted(plan.stage_of_layer)
    assert_drawn_well(picture)


@pytest.mark.parametrize("name", BIG)
def test_a_big_graph_gives_a_picture_of_sane_size_with_every_layer_in_it(name: str) -> None:
    plan = BIG[name]
    picture = make_picture(plan)
    assert sorted(layer for row in rows_of(picture) for layer in row) == sorted(plan.stage_of_layer)
    assert_drawn_well(picture)
    assert picture.height <= 1.2 * MOST_HEIGHT
    assert picture.width <= 1.5 * MOST_WIDTH
    assert len(svg_file(plan)) < 500_000


def is_folded(node: Block | Delivery) -> bool:
    """Its rows lead from one of several equal blocks to the next, and so up too."""
    return isinstance(node, Block) and node.fold is not None


def every_detail(plan: Plan) -> list[BlockGraph]:
    seen: list[BlockGraph] = []
    readable_blocks(plan, lambda graph: seen.append(graph) is not None)
    return seen


@law
@given(plans())
def test_at_every_detail_whatever_reads_a_value_is_joined_to_its_producer(plan: Plan) -> None:
    for graph in every_detail(plan):
        place = {
            layer: (index, row)
            for index, node in enumerate(graph.nodes)
            if isinstance(node, Block)
            for row, layers in enumerate(node.rows)
            for layer in layers
        }
        edges = set(graph.edges)
        assert all(source < target for source, target in edges)
        hops = edges | {(a, d) for a, b in edges for c, d in edges if b == c and not isinstance(graph.nodes[b], Block)}
        for value in plan.profile.graph.values:
            for consumer in value.consumers:
                (source, source_row), (target, target_row) = place[value.producer], place[consumer]
                assert (source, target) in hops or (
                    source == target and (source_row <= target_row or is_folded(graph.nodes[source]))
                )


def test_detail_ends_with_one_row_for_each_stage() -> None:
    for plan in BIG.values():
        assert len([node for node in every_detail(plan)[-1].nodes if isinstance(node, Block)]) == len(plan.stages)


def test_a_series_is_one_block_and_a_convolution_starts_a_row() -> None:
    graph = graph_of([*pairwise(range(31))])
    seconds = [layer_seconds(5e-3 if i % 3 == 0 else 1e-4) for i in range(31)]
    plan = plan_of(profile_of(graph, seconds), flat_cluster(1), [graph.order])
    fine, threes, *_ = every_detail(plan)
    assert fine.nodes == (Block(stage=0, rows=tuple((i,) for i in range(31))),)
    assert threes.nodes == (Block(stage=0, rows=(*((i, i + 1, i + 2) for i in range(0, 30, 3)), (30,))),)


@law
@given(plans(), st.data())
def test_any_name_gives_well_formed_xml_that_says_it(plan: Plan, data: st.DataObject) -> None:
    layers = plan.profile.graph.layers
    anything = st.text(st.characters(exclude_categories=[]))
    names = data.draw(st.lists(anything, min_size=len(layers), max_size=len(layers), unique=True))
    kinds = data.draw(st.lists(anything, min_size=len(layers), max_size=len(layers)))
    renamed = tuple(replace(each, name=n, kind=k) for each, n, k in zip(layers, names, kinds, strict=True))
    graph = replace(plan.profile.graph, layers=renamed)
    svg = svg_file(replace(plan, profile=replace(plan.profile, graph=graph)))
    root = ET.fromstring(svg.encode("utf-8"))
    drawn = {group.get("data-layers"): group for group in root.iter(f"{SVG}g") if group.get("data-layers")}
    for layer in renamed:
        group = drawn[str(layer.id)]
        expected = re.sub(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", layer.name)
        (title,) = group.findall(f"{SVG}title")
        # XML reads every line ending as a line feed.
        assert (title.text or "").startswith(expected[:200].replace("\r\n", "\n").replace("\r", "\n"))


def test_a_hostile_name_stays_text() -> None:
    plan = cut(chain_graph(2), 1)
    layers = tuple(replace(each, name=f'"><script>{each.id}</script>&') for each in plan.profile.graph.layers)
    hostile = replace(plan, profile=replace(plan.profile, graph=replace(plan.profile.graph, layers=layers)))
    for svg in (svg_file(hostile), inline_svg(hostile)):
        assert "<script" not in svg
        assert "&lt;script&gt;" in svg


@law
@given(plans())
def test_the_same_plan_gives_the_same_drawing(plan: Plan) -> None:
    assert svg_file(plan) == svg_file(codec.loads(Plan, codec.dumps(plan), "plan"))


@law
@given(plans())
def test_the_amounts_on_the_lines_into_a_stage_are_what_it_reads(plan: Plan) -> None:
    costs, picture = PlanCosts(plan), make_picture(plan)
    for stage in range(len(plan.stages)):
        labels = [box.label for box in picture.boxes if box.stage == stage]
        sent = sum(label.num_bytes for label in labels if isinstance(label, DeliveryLabel))
        assert sent == pytest.approx(costs.input_bytes(stage))
    assert sum(map(costs.input_bytes, range(len(plan.stages)))) == pytest.approx(
        sum(map(costs.output_bytes, range(len(plan.stages))))
    )


def test_a_value_read_twice_in_a_stage_is_sent_and_drawn_once() -> None:
    plan = cut(graph_of([(0, 1), (1, 2), (1, 3), (2, 3)]), 2)
    picture = make_picture(plan)
    sent = [box.label.text for box in picture.boxes if isinstance(box.label, DeliveryLabel)]
    assert sent == ["8 MB"]  # of 8 samples, a megabyte each
    assert sum(wire.crosses for wire in picture.wires) == 1


def test_a_row_tells_its_figures() -> None:
    profile = chain_profile([1e-3, 2e-3], value_bytes=1000, parameter_bytes=5000)
    svg = svg_file(plan_of(profile, flat_cluster(2), [[0], [1]]))
    tooltip = "layer0: Linear\nstage 0: forward 8 ms, backward 16 ms\nparameters 5 KB\noutput 8 KB per microbatch"
    assert f"<title>{tooltip}</title>" in svg
    assert ">Linear<tspan" in svg
    assert ">layer0</tspan>" in svg


def test_merged_rows_say_how_many_layers_and_which() -> None:
    svg = svg_file(BIG["a chain of 1,000"])
    assert re.search(r">\d+ layers: Linear \.\. Linear</text>", svg)
    assert re.search(r"<title>\d+ layers: layer0 \.\. layer\d+\nlayer0, layer1, ", svg)


def test_the_slowest_stage_is_marked_in_its_band_and_a_slow_link_on_its_line() -> None:
    plan = plan_of(chain_profile([1e-3, 5e-3], value_bytes=1), flat_cluster(2), [[0], [1]])
    alarms = [band.label.alarm for band in make_picture(plan).bands]
    assert alarms == ["", "bottleneck"]
    assert 'class="pill"' in svg_file(plan)
    heavy = plan_of(chain_profile([1e-3, 5e-3], value_bytes=10**9), flat_cluster(2), [[0], [1]])
    assert [band.label.alarm for band in make_picture(heavy).bands] == ["bottleneck: link to 1", ""]
    assert 'class="pill slow"' in svg_file(heavy)


def test_one_stage_is_no_bottleneck() -> None:
    assert make_picture(cut(chain_graph(3), 1)).bands[0].label.alarm == ""


def test_a_file_needs_no_css_variables_and_a_page_no_namespace() -> None:
    plan = cut(chain_graph(3), 2)
    svg = svg_file(plan)
    assert "var(" not in svg
    assert "prefers-color-scheme: dark" in svg
    assert not re.search(r"https?://", inline_svg(plan))


# ---- equal blocks


def transformer(blocks: int, *, wide_block: int | None = None) -> LayerGraph:
    """An embedding, blocks of five layers with a line around four of them, and a head; one block may be wider."""
    inside = (("norm", "LayerNorm"), ("attend", "Linear"), ("widen", "Linear"), ("gelu", "gelu"), ("add", "add"))
    layers, values = (
        [Layer(id=0, name="embed", kind="Embedding")],
        [Value(name="v0", producer=0, consumers=(1, 5), num_bytes=100)],
    )
    for block in range(blocks):
        first = 1 + 5 * block
        for place, (name, kind) in enumerate(inside):
            layers.append(Layer(id=first + place, name=f"blocks.{block}.{name}", kind=kind))
            last = place == 4
            readers = (first + 5, first + 9) if last and block < blocks - 1 else (first + place + 1,)
            num_bytes = 999 if block == wide_block and place == 2 else 100
            values.append(
                Value(name=f"v{first + place}", producer=first + place, consumers=readers, num_bytes=num_bytes)
            )
    layers.append(Layer(id=1 + 5 * blocks, name="head", kind="Linear"))
    return LayerGraph(layers=tuple(layers), values=tuple(values))


def folded_rows(plan: Plan) -> list[tuple[str, str, int]]:
    """What stands above each box of equal blocks, and how many rows it has."""
    boxes = [box for box in make_picture(plan).boxes if box.fold is not None and isinstance(box.label, tuple)]
    return [
        (box.fold.text, box.fold.times, len(box.label)) for box in boxes if box.fold and isinstance(box.label, tuple)
    ]


def test_equal_blocks_that_follow_each_other_are_one_box_with_their_number() -> None:
    plan = cut(transformer(6), 1)
    picture = make_picture(plan)
    assert folded_rows(plan) == [("blocks.0-5", "\N{MULTIPLICATION SIGN} 6", 5)]
    assert sorted(layer for row in rows_of(picture) for layer in row) == sorted(plan.stage_of_layer)
    assert_drawn_well(picture)
    assert picture.height == make_picture(cut(transformer(2), 1)).height < 300
    svg = svg_file(plan)
    assert ">\N{MULTIPLICATION SIGN} 6</text>" in svg
    assert ">norm</tspan>" in svg
    assert "and the same in 5 more; of one, in the mean:\nstage 0: forward" in svg


def test_only_whole_blocks_of_one_stage_and_of_equal_size_are_folded() -> None:
    # 32 layers in 2 stages: the first ends with the embedding and three blocks
    assert folded_rows(cut(transformer(6), 2)) == [
        ("blocks.0-2", "\N{MULTIPLICATION SIGN} 3", 5),
        ("blocks.3-5", "\N{MULTIPLICATION SIGN} 3", 5),
    ]
    assert [name for name, _, _ in folded_rows(cut(transformer(6, wide_block=2), 1))] == ["blocks.0-1", "blocks.3-5"]
    assert folded_rows(cut(transformer(1), 1)) == []


def test_blocks_in_blocks_are_folded_where_the_outer_ones_differ() -> None:
    names = [f"stages.{stage}.{block}.{layer}" for stage in (0, 1) for block in range(2 + stage) for layer in "ab"]
    names.append("head")
    layers = tuple(Layer(id=i, name=name, kind="Linear") for i, name in enumerate(names))
    values = tuple(Value(name=f"v{i}", producer=i, consumers=(i + 1,), num_bytes=1) for i in range(len(names) - 1))
    plan = cut(LayerGraph(layers=layers, values=values), 1)
    assert [name for name, _, _ in folded_rows(plan)] == ["stages.0.0-1", "stages.1.0-2"]


def test_no_bar_runs_through_a_name() -> None:
    root = ET.fromstring(svg_file(cut(transformer(3), 1)).encode("utf-8"))
    rows = [group for group in root.iter(f"{SVG}g") if group.get("data-layers")]
    for row in rows:
        (bar,) = [rect for rect in row.findall(f"{SVG}rect") if rect.get("class") == "bar"]
        for text in row.findall(f"{SVG}text"):
            assert float(text.get("y") or 0) + 3 <= float(bar.get("y") or 0)  # below the letters that reach lowest


# ---- the layout by itself


def test_lines_that_need_not_cross_do_not() -> None:
    nodes = [layered.Node(width=10, band=0)] * 6
    ranked = layered.rank_nodes(nodes, [(0, 5), (1, 4), (2, 3)])
    x = layered.place(ranked)
    assert (x[0] - x[1]) * (x[5] - x[4]) > 0
    assert (x[1] - x[2]) * (x[4] - x[3]) > 0


def test_a_long_line_beside_a_chain_is_straight() -> None:
    nodes = [layered.Node(width=100, band=0)] * 8
    ranked = layered.rank_nodes(nodes, [*pairwise(range(8)), (0, 7)])
    x = layered.place(ranked)
    (route,) = [route for route in ranked.routes if len(route) > 2]
    assert len({x[bend] for bend in route[1:-1]}) == 1
    assert len({x[node] for node in range(1, 7)}) == 1


def test_an_input_stands_just_above_its_first_reader() -> None:
    nodes = [layered.Node(width=10, band=0)] * 5
    ranked = layered.rank_nodes(nodes, [(0, 1), (1, 2), (2, 4), (3, 4)])
    assert ranked.ranks[3] == 2


@law
@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0.1, 10)), min_size=1))
def test_rising_numbers_rise_and_keep_their_mean(points: list[tuple[float, float]]) -> None:
    values, weights = zip(*points, strict=True)
    rising = layered._rising(values, weights)
    assert all(one <= two + 1e-9 for one, two in pairwise(rising))
    total = sum(v * w for v, w in points)
    assert sum(r * w for r, w in zip(rising, weights, strict=True)) == pytest.approx(total, abs=1e-6)
