"""PipeDream's graph.txt and its configurations."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import chain_profile, flat_cluster, law, plans
from format_files import (
    CONF,
    FLAT_GRAPH,
    GRAPH,
    REFERENCE,
    needs_reference,
    node,
    parse,
    plan_of_three_stages,
    references,
)
from penstock import codec
from penstock.errors import FormatError
from penstock.formats import (
    StageMap,
    data_parallel_map,
    graph_text,
    hybrid_map,
    model_parallel_map,
    parse_stage_map,
    plan_text,
    read_profile,
    stage_map_text,
)
from penstock.plan import Plan, Stage
from penstock.profile import Profile


def test_a_graph_becomes_a_layer_per_node_in_the_files_units() -> None:
    profile, stages = parse(GRAPH)
    assert [(layer.id, layer.name, layer.kind) for layer in profile.graph.layers][:2] == [
        (4, "node4", "Linear(8, 4)"),
        (1, "node1", "Input0"),
    ]
    linear, _, lstm, dropout = profile.seconds_on("any")
    assert (linear.forward_s, linear.backward_input_s, linear.backward_weight_s) == (0.0035, 0.003625, 0.003625)
    assert lstm.backward_input_s + lstm.backward_weight_s == 0.002333
    assert (dropout.backward_input_s, dropout.backward_weight_s) == (0.000125, 0.0)
    assert {value.name: (value.num_bytes, value.consumers) for value in profile.graph.values} == {
        "node2": (32, (3, 4)),
        "node1": (32, (2,)),
        "node3": (32, (4,)),
        "node4": (64, ()),
    }
    assert {p.name: p.num_bytes for p in profile.graph.parameters} == {"node4": 128, "node2": 512}
    assert stages == {4: 1, 1: 0, 2: 0, 3: 0}
    assert (profile.batch_size, profile.microbatch_size, profile.front_end) == (1, 1, "pipedream")


def test_nodes_with_other_names_are_numbered_as_they_appear() -> None:
    profile, stages = parse(GRAPH.replace("node3", "drop"))
    assert [(layer.id, layer.name) for layer in profile.graph.layers][-1] == (3, "drop")
    assert stages == {0: 1, 1: 0, 2: 0, 3: 0}


def test_a_graph_is_written_as_it_was_read() -> None:
    assert graph_text(*parse(FLAT_GRAPH)) == FLAT_GRAPH
    assert graph_text(*parse(GRAPH)) == FLAT_GRAPH


def test_times_that_three_decimals_cannot_say_are_written_in_full() -> None:
    text = graph_text(*parse(FLAT_GRAPH.replace("3.500", "0.00012345")))
    assert "forward_compute_time=0.00012345," in text
    assert parse(text) == parse(FLAT_GRAPH.replace("3.500", "0.00012345"))


amounts = st.one_of(st.integers(0, 10**7).map(lambda n: f"{n / 1000:.3f}"), st.floats(0, 1e6).map(repr))


@st.composite
def graph_files(draw: st.DrawFn) -> str:
    names = draw(st.lists(st.sampled_from([f"node{i}" for i in range(8)] + ["a", "b.0"]), min_size=1, unique=True))
    lines = [
        node(name, draw(st.sampled_from(["Input0", "Conv2d(3, 3)", "x -> y"])), *draw(st.tuples(*[amounts] * 4)),
             stage=draw(st.none() | st.integers(0, 3)))
        for name in names
    ]  # fmt: skip
    later = [(i, j) for j in range(len(names)) for i in range(j)]
    edges = draw(st.lists(st.sampled_from(later), unique=True, max_size=12)) if later else []
    return "\n".join(lines + [f"\t{names[i]} -- {names[j]}" for i, j in edges])


@law
@given(graph_files())
def test_reading_what_was_written_gives_the_same_profile_and_stages(text: str) -> None:
    read = parse(text)
    assert parse(graph_text(*read)) == read


@law
@given(plans())
def test_any_plan_can_be_written_as_a_graph(plan: Plan) -> None:
    profile, stages = parse(plan_text(plan, "graph"))
    assert len(profile.graph.layers) == len(plan.profile.graph.layers)
    assert list(stages.values()) == [plan.stage_of_layer[layer.id] for layer in plan.profile.graph.layers]
    for written, own in zip(profile.seconds_on("any"), plan.profile.seconds_on("cpu"), strict=True):
        assert written.forward_s == own.forward_s
        assert written.backward_input_s + written.backward_weight_s == own.backward_input_s + own.backward_weight_s


def test_names_that_a_graph_cannot_hold_become_numbers() -> None:
    profile = chain_profile([1e-3, 2e-3])
    layers = tuple(codec.decode(type(x), codec.encode(x) | {"name": f"a -- {x.id}"}) for x in profile.graph.layers)
    renamed = codec.decode(Profile, codec.encode(profile) | {"graph": codec.encode(profile.graph)
                                                             | {"layers": codec.encode(layers)}})  # fmt: skip
    assert [layer.name for layer in parse(graph_text(renamed))[0].graph.layers] == ["node0", "node1"]


@needs_reference
@references("pipedream/test_graphs/*.txt")
def test_the_partitioned_graphs_of_pipedream_are_read(name: str) -> None:
    profile, stages = parse((REFERENCE / name).read_text())
    assert len(stages) in (0, len(profile.graph.layers))
    assert ("partitioned" in name) == bool(stages)


@needs_reference
@references("**/*.txt")
def test_reference_graphs_are_reproduced_line_for_line(name: str) -> None:
    text = (REFERENCE / name).read_text()
    read = parse(text)
    written = graph_text(*read)
    assert parse(written) == read
    if "activation_size=[" not in text:
        keys = "forward_compute_time|backward_compute_time|activation_size|parameter_size"
        usual = re.sub(rf"({keys})=([0-9.]+)", lambda m: f"{m[1]}={float(m[2]):.3f}", text)
        assert written.splitlines() == usual.splitlines()


@needs_reference
def test_the_time_of_a_reference_graph_is_pipedreams_own() -> None:
    """Its optimizer says what one machine takes with vgg16, without the input."""
    run = next(
        run
        for run in json.loads((REFERENCE / "pipedream/optimizer_results.json").read_text())["runs"]
        if run["profile"] == "vgg16"
    )
    profile = read_profile(REFERENCE / "pipedream/profiles/vgg16/graph.txt")
    assert profile.model == "vgg16"
    costs = zip(profile.graph.layers, profile.seconds_on("any"), strict=True)
    total_s = sum(
        row.forward_s + row.backward_input_s + row.backward_weight_s
        for layer, row in costs
        if not layer.kind.startswith("Input")
    )
    assert total_s == pytest.approx(run["single_machine_s"])


FIRST, SECOND = GRAPH.splitlines()[:2]
BAD_GRAPHS = {
    "empty": ("", "graph.txt: empty"),
    "blank": ("\n \n", "graph.txt: empty"),
    "edges alone": ("\ta -- b\n", "no node"),
    "a line of something else": ("hello\n", "graph.txt:1: expected a node"),
    "a bad number": (GRAPH.replace("7.250", "7,25"), "graph.txt:1: unknown attribute '25'"),
    "a number that is a word": (GRAPH.replace("7.250", "fast"), "1: backward_compute_time: expected a number"),
    "not a number": (GRAPH.replace("7.250", "nan"), "1: backward_compute_time: expected a number"),
    "too large": (GRAPH.replace("7.250", "1e999"), "1: backward_compute_time: inf is no time or size"),
    "negative": (GRAPH.replace("7.250", "-7.250"), "1: backward_compute_time: -0.00725 is no time or size"),
    "a missing attribute": (GRAPH.replace(", parameter_size=128.000", ""), "graph.txt:1: parameter_size is missing"),
    "an unknown attribute": (GRAPH.replace("parameter_size=1", "param=1"), "1: unknown attribute 'param=128.000'"),
    "an attribute twice": (GRAPH.replace("parameter_size=1", "activation_size=1"), "activation_size is there twice"),
    "a bad element": (GRAPH.replace("[16.0; 8.0;", "[16.0; x;"), "graph.txt:3: activation_size[1]: expected a number"),
    "an open list": (GRAPH.replace("8.0]", "8.0"), "graph.txt:3: activation_size: the list"),
    "a bad stage": (GRAPH.replace("stage_id=1", "stage_id=one"), "graph.txt:1: expected stage_id=N"),
    "a node twice": (f"{FIRST}\n{SECOND}\n{FIRST}\n", "graph.txt:3: node 'node4' is there twice"),
    "an edge to nowhere": (GRAPH.replace("\tnode3 -- node4", "\tnode3 -- node9"), "graph.txt:8: the edge leads to"),
    "half an edge": (GRAPH.replace("\tnode3 -- node4", "\tnode3"), "graph.txt:8: expected an edge"),
    "a cycle": (GRAPH + "\tnode4 -- node2\n\tnode1 -- node3\n", "graph.txt:9: the edge closes the cycle"),
    "a node that reads itself": (GRAPH + "\tnode4 -- node4\n", "the edge closes the cycle node4 -- node4"),
}


@pytest.mark.parametrize("name", BAD_GRAPHS)
def test_a_damaged_graph_is_refused_with_its_line(name: str) -> None:
    text, words = BAD_GRAPHS[name]
    with pytest.raises(FormatError, match=re.escape(words)):
        parse(text)


def test_an_edge_given_twice_counts_once() -> None:
    assert parse(GRAPH + "\tnode3 -- node4\n") == parse(GRAPH)


def test_the_three_configurations_of_a_plan() -> None:
    plan = plan_of_three_stages()
    assert json.loads(plan_text(plan, "hybrid")) == {
        "module_to_stage_map": [0, 1, 2, 2],
        "stage_to_rank_map": {"0": [0, 1], "1": [2], "2": [3]},
        "stage_to_depth_map": {"0": 1, "1": 1, "2": 0},
    }
    assert json.loads(plan_text(plan, "dp")) == {
        "module_to_stage_map": [0, 0, 0, 0],
        "stage_to_rank_map": {"0": [0, 1, 2, 3]},
    }
    assert json.loads(plan_text(plan, "mp")) == {
        "module_to_stage_map": [0, 1, 2, 2],
        "stage_to_rank_map": {"0": [0], "1": [1], "2": [2]},
    }


def test_ranks_follow_the_devices_that_the_plan_uses() -> None:
    plan = plan_of_three_stages()
    stages = [Stage(layers=s.layers, devices=d) for s, d in zip(plan.stages, [(5, 1), (2,), (7,)], strict=True)]
    data = codec.encode(plan) | {"cluster": codec.encode(flat_cluster(8)), "stages": codec.encode(stages)}
    assert hybrid_map(codec.decode(Plan, data)).ranks == ((0, 2), (1,), (3,))


@law
@given(plans())
def test_a_configuration_reads_as_it_was_written(plan: Plan) -> None:
    for make in (hybrid_map, data_parallel_map, model_parallel_map):
        made = make(plan)
        assert parse_stage_map(stage_map_text(made), "conf.json") == made


@needs_reference
@references("pipedream/profiles/*/conf/**/*.json")
def test_reference_configurations_have_the_shape_that_is_written(name: str) -> None:
    text = (REFERENCE / name).read_text()
    if name.endswith("vgg16/conf/gpus=4/mp_conf.json"):
        with pytest.raises(FormatError, match="not complete JSON"):  # it has a key without quotes
            parse_stage_map(text, name)
        return
    found = parse_stage_map(text, name)
    assert parse_stage_map(stage_map_text(found), name) == found
    modules = found.module_to_stage_map
    assert modules[-1] == modules[-2] == len(found.ranks) - 1
    if name.endswith("mp_conf.json"):
        assert found.ranks == tuple((stage,) for stage in range(len(found.ranks)))
    if name.endswith("dp_conf.json"):
        assert set(modules) == {0}
    if found.stage_to_depth_map:
        assert found.stage_to_depth_map[str(len(found.ranks) - 1)] == 0


BAD_CONFS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown key": ({"extra": 1}, "extra: unknown field"),
    "no module": ({"module_to_stage_map": []}, "module_to_stage_map: empty"),
    "no stage": ({"stage_to_rank_map": {}}, "stage_to_rank_map: empty"),
    "a stage without ranks": ({"module_to_stage_map": [0, 1, 2]}, "module_to_stage_map[2]: stage 2 is not in"),
    "a negative stage": ({"module_to_stage_map": [0, 1, -1]}, "module_to_stage_map[2]: stage -1 is not in"),
    "a stage without modules": ({"module_to_stage_map": [0, 0]}, "stage_to_rank_map.1: no module"),
    "a gap": ({"stage_to_rank_map": {"0": [0], "2": [1]}}, "stage_to_rank_map.1: stages are numbered 0 to 1"),
    "a rank twice": ({"stage_to_rank_map": {"0": [0], "1": [0]}}, "stage_to_rank_map.1: rank 0"),
    "no rank": ({"stage_to_rank_map": {"0": [0], "1": []}}, "stage_to_rank_map.1: no rank"),
    "a rank that is text": ({"stage_to_rank_map": {"0": ["a"]}}, "stage_to_rank_map.0[0]: expected a whole number"),
    "a negative depth": ({"stage_to_depth_map": {"0": -1, "1": 0}}, "stage_to_depth_map.0: -1"),
    "a depth too few": ({"stage_to_depth_map": {"0": 1}}, "stage_to_depth_map.1"),
}


@pytest.mark.parametrize("name", BAD_CONFS)
def test_a_damaged_configuration_is_refused_with_its_field(name: str) -> None:
    change, words = BAD_CONFS[name]
    with pytest.raises(FormatError, match=re.escape(f"conf.json: {words}")):
        parse_stage_map(json.dumps(CONF | change), "conf.json")


def test_a_configuration_without_depths_has_none() -> None:
    without = {key: item for key, item in CONF.items() if key != "stage_to_depth_map"}
    assert parse_stage_map(json.dumps(without), "c") == StageMap(
        module_to_stage_map=(0, 1, 1), stage_to_rank_map={"0": (0, 1), "1": (2,)}
    )
