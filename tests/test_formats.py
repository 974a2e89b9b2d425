"""Files of other systems: what they say is what the values hold, what is written reads the same, damage is named."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import chain_profile, flat_cluster, law, plan_of, plans
from penstock import codec
from penstock.cluster import Device, Level, parse_cluster
from penstock.cost import CostModel, message
from penstock.errors import ClusterError, FormatError, GraphError, PenstockError, PlanError, ProfileError
from penstock.formats import (
    PLAN_FORMATS,
    Partition,
    StageMap,
    cluster_of_servers,
    data_parallel_map,
    graph_text,
    hybrid_map,
    merge_kinds,
    model_parallel_map,
    parse_graph,
    parse_layer_costs,
    parse_partition,
    parse_placement,
    parse_servers,
    parse_stage_map,
    partition_of,
    partition_text,
    plan_text,
    read_cluster,
    read_profile,
    stage_map_text,
)
from penstock.formats.dynpipe import Column
from penstock.formats.sparsepipe import profile_paths
from penstock.plan import Plan, Stage
from penstock.profile import Profile
from penstock.schedule import family

REFERENCE = Path(__file__).parents[2] / "shared" / "reference"
needs_reference = pytest.mark.skipif(
    not REFERENCE.is_dir(), reason=f"the original systems' files are not at {REFERENCE}"
)


def references(pattern: str) -> Any:
    paths = (path for path in REFERENCE.glob(pattern) if path.name != "test_server.txt")
    found = sorted(path.relative_to(REFERENCE).as_posix() for path in paths)
    return pytest.mark.parametrize("name", found or [pytest.param("", marks=needs_reference)])


def node(name: str, description: str, *amounts: object, stage: int | None = None) -> str:
    keys = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
    attributes = ", ".join(f"{key}={amount}" for key, amount in zip(keys, amounts, strict=True))
    return f"{name} -- {description} -- {attributes}" + ("" if stage is None else f" -- stage_id={stage}")


GRAPH = "\n".join(
    [
        node("node4", "Linear(8, 4)", "3.500", "7.250", "64.000", "128.000", stage=1),
        node("node1", "Input0", "0.000", "0.000", "32.000", "0.000", stage=0),
        node("node2", "LSTM(8, 8)", "1.125", "2.333", "[16.0; 8.0; 8.0]", "512.000", stage=0),
        node("node3", "Dropout(p=0.1)", "0.250", "0.125", "32.000", "0.000", stage=0),
        "\tnode2 -- node3",
        "\tnode2 -- node4",
        "\tnode1 -- node2",
        "\tnode3 -- node4",
        "",
    ]
)
FLAT_GRAPH = GRAPH.replace("[16.0; 8.0; 8.0]", "32.000")


def parse(text: str, kind: str = "any") -> tuple[Profile, dict[int, int]]:
    return parse_graph(text, source="graph.txt", model="toy", kind=kind)


# PipeDream's graph.txt


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


# PipeDream's configurations


def plan_of_three_stages() -> Plan:
    return plan_of(chain_profile([1e-3] * 6), flat_cluster(4), [[0, 1], [2, 3, 4], [5]], [2, 1, 1], schedule="1f1b")


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
        with pytest.raises(FormatError, match="not JSON"):  # it has a key without quotes
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


CONF: dict[str, Any] = {
    "module_to_stage_map": [0, 1, 1],
    "stage_to_rank_map": {"0": [0, 1], "1": [2]},
    "stage_to_depth_map": {"0": 1, "1": 0},
}
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


# SparsePipe


SERVERS = "Server0\n    Fast 1 fast.txt\n    Slow 3 slow.txt\nServer1\n    Slow 4 slow.txt\n"


def test_servers_of_equal_size_are_two_levels() -> None:
    servers = parse_servers(SERVERS, "servers.txt")
    cluster = cluster_of_servers(servers, [12e9, 1e9])
    assert cluster.devices == (Device(kind="Fast"),) + (Device(kind="Slow"),) * 7
    assert cluster.levels == (Level(size=4, bytes_per_s=12e9), Level(size=2, bytes_per_s=1e9))
    assert profile_paths(servers) == {"Fast": "fast.txt", "Slow": "slow.txt"}


def test_one_bandwidth_joins_all_devices_even_of_unequal_servers() -> None:
    servers = parse_servers(SERVERS.replace("Slow 4", "Slow 2"), "servers.txt")
    assert cluster_of_servers(servers, [1e9]).levels == (Level(size=6, bytes_per_s=1e9),)
    with pytest.raises(ClusterError, match="servers of 2 and 4 devices"):
        cluster_of_servers(servers, [12e9, 1e9])
    with pytest.raises(ClusterError, match="2 bandwidths for 1 servers"):
        cluster_of_servers(servers[:1], [12e9, 1e9])


BAD_SERVERS = {
    "empty": ("", "empty"),
    "no server": ("  Fast 1 a\n", "servers.txt:1: a device before the first server"),
    "no device": ("Server0\nServer1\n  Fast 1 a\n", "Server0 has no device"),
    "a server twice": ("Server0\n  Fast 1 a\nServer0\n", "servers.txt:3: Server0 is there twice"),
    "a bad count": ("Server0\n  Fast one a\n", "servers.txt:2: count: expected a whole number"),
    "a count of none": ("Server0\n  Fast 0 a\n", "servers.txt:2: count: expected a whole number from 1"),
    "too many": ("Server0\n  Fast 65536 a\n  Slow 1 b\n", "servers.txt:3: 65537 devices"),
    "no path": ("Server0\n  Fast 1\n", "servers.txt:2: expected `name count profile_path`"),
    "two profiles": ("Server0\n  Fast 1 a\n  Fast 1 b\n", "servers.txt:3: Fast has the profile b here and a before"),
    "something else": ("Server0\n  Fast 1 a\nhello\n", "servers.txt:3: expected a line such as Server0"),
}


@pytest.mark.parametrize("name", BAD_SERVERS)
def test_a_damaged_server_file_is_refused_with_its_line(name: str) -> None:
    text, words = BAD_SERVERS[name]
    with pytest.raises(FormatError, match=re.escape(words)):
        parse_servers(text, "servers.txt")


def test_profiles_of_several_kinds_merge_whatever_the_order_of_their_nodes() -> None:
    other = "\n".join(reversed(GRAPH.replace("3.500", "9.000").strip().splitlines()))
    merged = merge_kinds({"Fast": parse(GRAPH, "Fast")[0], "Slow": parse(other, "Slow")[0]})
    assert merged.graph == parse(GRAPH)[0].graph
    assert [rows[0].forward_s for rows in merged.seconds.values()] == [0.0035, 0.009]
    assert merged.seconds["Fast"][1:] == merged.seconds["Slow"][1:]


def test_activations_of_merged_profiles_are_the_largest() -> None:
    larger = parse(GRAPH.replace("activation_size=64.000", "activation_size=70.000"), "Slow")[0]
    merged = merge_kinds({"Fast": parse(GRAPH, "Fast")[0], "Slow": larger})
    assert {value.name: value.num_bytes for value in merged.graph.values}["node4"] == 70


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("\tnode2 -- node4\n", "", "node node2 differs"),
        ("Dropout", "ReLU", "node node3 differs: Dropout with 0 bytes"),
        ("parameter_size=512", "parameter_size=500", "node node2 differs: LSTM with 512 bytes"),
        ("node4", "node5", "node node4 differs"),
    ],
)
def test_profiles_of_other_graphs_do_not_merge_and_the_first_node_is_named(old: str, new: str, words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        merge_kinds({"Fast": parse(GRAPH, "Fast")[0], "Slow": parse(GRAPH.replace(old, new), "Slow")[0]})


def test_an_extra_node_is_named_too() -> None:
    extra = GRAPH + node("node9", "ReLU", 1, 1, 1, 0)
    with pytest.raises(ProfileError, match="node node9 differs: absent on Fast"):
        merge_kinds({"Fast": parse(GRAPH, "Fast")[0], "Slow": parse(extra, "Slow")[0]})


@needs_reference
def test_the_reference_profiles_of_three_kinds_merge() -> None:
    paths = {kind: REFERENCE / f"sparsepipe/minkvgg_b64_{kind}/graph.txt" for kind in ("RTX", "tv", "txp")}
    merged = merge_kinds({kind: parse(path.read_text(), kind)[0] for kind, path in paths.items()})
    assert list(merged.seconds) == ["RTX", "tv", "txp"]


# DynPipe


def test_a_plans_partition_counts_its_layers() -> None:
    partition = partition_of(plan_of_three_stages())
    assert partition == Partition(partition=(2, 3, 1), recompute_ratio=(0.0,) * 3, batch_size=(8, 8, 8))
    assert parse_partition(partition_text(partition), "p.json") == partition


def test_a_stage_that_recomputes_does_so_wholly_in_its_partition() -> None:
    plan = plan_of_three_stages()
    recomputing = replace(plan, stages=(replace(plan.stages[0], recompute=True), *plan.stages[1:]))
    assert partition_of(recomputing).recompute_ratio == (1.0, 0.0, 0.0)


def test_a_plan_that_is_no_chain_of_layers_has_no_partition() -> None:
    profile, _ = parse("\n".join(node(f"node{i}", "X", 1, 1, 1, 0) for i in range(4)))
    with pytest.raises(PlanError, match="node1 of stage 0 comes after layers of stage 1"):
        partition_of(plan_of(profile, flat_cluster(2), [[1, 3], [0, 2]]))


BAD_PARTITIONS = {
    "empty": ({"partition": []}, "partition: empty"),
    "a stage of none": ({"partition": [0, 1]}, "partition[0]: 0"),
    "too few": ({"batch_size": [1]}, "batch_size: 1 entries for 2 stages"),
    "no share": ({"recompute_ratio": [0, 2]}, "recompute_ratio[1]: 2.0 is no share"),
    "an unknown key": ({"partitions": [1]}, "partitions: unknown field"),
    "text": ({"partition": ["a", 1]}, "partition[0]: expected a whole number"),
}


@pytest.mark.parametrize("name", BAD_PARTITIONS)
def test_a_damaged_partition_is_refused_with_its_field(name: str) -> None:
    change, words = BAD_PARTITIONS[name]
    good = {"partition": [2, 3], "recompute_ratio": [0, 0.5], "batch_size": [4, 4]}
    with pytest.raises(FormatError, match=re.escape(f"p.json: {words}")):
        parse_partition(json.dumps(good | change), "p.json")


def layer_costs(forward: str = "1\n2\n3\n", backward: str = "2\n4\n6.5\n", sent: str = "0.5\n0.25\n") -> Profile:
    return parse_layer_costs(
        forward_ms=Column(text=forward, source="forward.txt"),
        backward_ms=Column(text=backward, source="backward.txt"),
        communication_s=Column(text=sent, source="communication.txt"),
        bytes_per_s=1e6,
        model="toy",
    )


def test_layer_profiles_become_a_chain_whose_link_gives_the_seconds_back() -> None:
    profile = layer_costs()
    assert [row.forward_s for row in profile.seconds_on("any")] == [0.001, 0.002, 0.003]
    assert [row.backward_input_s for row in profile.seconds_on("any")] == [0.002, 0.004, 0.0065]
    costs = CostModel(profile=profile, cluster=flat_cluster(2, bytes_per_s=1e6), microbatch_size=1)
    assert message(costs.forward_bytes([0], [1])).seconds(costs.cluster.link(0, 1)) == 0.5


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"forward": ""}, "forward.txt: empty"),
        ({"backward": "1\n2\n"}, "backward.txt: 2 numbers for 3 layers"),
        ({"sent": "1\n"}, "communication.txt: 1 numbers for 3 layers"),
        ({"sent": "1\n\nx\n"}, "communication.txt:3: expected a number"),
        ({"sent": "1\n1e305\n"}, "communication.txt: number 2"),
        ({"forward": "1\n-2\n3\n"}, "forward.txt:2: -0.002 is no time"),
    ],
)
def test_damaged_layer_profiles_are_refused(files: dict[str, str], words: str) -> None:
    with pytest.raises(FormatError, match=re.escape(words)):
        layer_costs(**files)


# dnn-partitioning


def placement(**change: Any) -> dict[str, Any]:
    names = ["a", "b", "c"]
    nodes = [
        {"id": i, "name": name, "fpgaLatency": 1.5 + i, "size": 64.0, "isBackwardNode": 0, "colorClass": i}
        for i, name in enumerate(names)
    ]
    gradients = [
        {"id": 10 + i, "name": f"{name}grad", "fpgaLatency": 4.0, "size": 64.0, "isBackwardNode": 1, "colorClass": i}
        for i, name in enumerate(names)
    ]
    pairs = [(0, 1), (0, 2), (1, 2)]
    edges = [{"sourceId": i, "destId": j, "cost": 0.25} for i, j in pairs]
    edges += [{"sourceId": 10 + j, "destId": 10 + i, "cost": 0.25} for i, j in pairs]
    return {"maxFPGAs": 2, "maxSizePerFPGA": 1000.0, "nodes": nodes + gradients, "edges": edges} | change


def changed(field: str, index: int, **change: Any) -> dict[str, Any]:
    problem = placement()
    problem[field][index] |= change
    return problem


def test_a_node_and_its_gradient_are_one_layer_and_costs_come_back() -> None:
    profile, cluster = parse_placement(json.dumps(placement()), source="p.json", model="toy")
    assert [(layer.id, layer.name) for layer in profile.graph.layers] == [(0, "a"), (1, "b"), (2, "c")]
    rows = profile.seconds_on("any")
    assert [row.forward_s for row in rows] == [1.5, 2.5, 3.5]
    assert [row.backward_input_s + row.backward_weight_s for row in rows] == [4.0] * 3
    assert [(value.name, value.consumers) for value in profile.graph.values] == [("a", (1, 2)), ("b", (2,))]
    assert cluster.devices == (Device(memory_bytes=1000),) * 2
    costs = CostModel(profile=profile, cluster=cluster, microbatch_size=1)
    assert message(costs.forward_bytes([0], [1, 2])).seconds(costs.cluster.link(0, 1)) == 0.25
    # A node's size counts for its gradient too: as weights and their gradients do here.
    buffers = 3 * costs.forward_bytes({0, 1}, {2})
    assert costs.stage_memory_bytes(Stage(layers=(0, 1), devices=(0,)), family("1f1b")) - buffers == 4 * 64


def test_cpus_are_devices_of_their_own_kind_before_the_accelerators() -> None:
    problem = placement(maxCPUs=1)
    problem["nodes"] = [node | {"cpuLatency": 10 * node["fpgaLatency"]} for node in problem["nodes"]]
    profile, cluster = parse_placement(json.dumps(problem), source="p.json", model="toy")
    assert cluster.devices == (Device(kind="host"), *(Device(memory_bytes=1000),) * 2)
    assert profile.compute_s("host") == tuple(10 * seconds for seconds in profile.compute_s("any"))
    without, _ = parse_placement(json.dumps(problem | {"maxCPUs": 0}), source="p.json", model="toy")
    assert list(without.seconds) == ["any"]


def test_a_graph_without_gradients_sends_none_and_keeps_every_size_once() -> None:
    problem = placement()
    problem["nodes"] = [node for node in problem["nodes"] if not node["isBackwardNode"]]
    problem["edges"] = [edge for edge in problem["edges"] if edge["sourceId"] < 10]
    profile, cluster = parse_placement(json.dumps(problem), source="p.json", model="toy")
    assert not any(value.differentiable for value in profile.graph.values)
    costs = CostModel(profile=profile, cluster=cluster, microbatch_size=1)
    buffers = 3 * costs.forward_bytes({0, 1}, {2})
    assert costs.stage_memory_bytes(Stage(layers=(0, 1), devices=(0,)), family("1f1b")) - buffers == 2 * 64
    uneven, _ = parse_placement(json.dumps(changed("nodes", 3, size=100.0)), source="p.json", model="toy")
    costs = CostModel(profile=uneven, cluster=cluster, microbatch_size=1)
    buffers = 3 * costs.forward_bytes({0}, {1, 2})
    assert costs.stage_memory_bytes(Stage(layers=(0,), devices=(0,)), family("1f1b")) - buffers == 64 + 100
    assert all(value.differentiable for value in uneven.graph.values)


BAD_PLACEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "no node": (placement(nodes=[], edges=[]), "nodes: empty"),
    "an unknown key": (placement(extra=1), "extra: unknown field"),
    "an unknown key of a node": (changed("nodes", 1, color=1), "nodes[1].color: unknown field"),
    "a node twice": (changed("nodes", 1, id=0), "nodes[1].id: node 0 is there twice"),
    "a negative time": (changed("nodes", 1, fpgaLatency=-1), "nodes[1].fpgaLatency: -1.0 is no time"),
    "a time that is text": (changed("nodes", 1, fpgaLatency="1"), "nodes[1].fpgaLatency: expected a number"),
    "neither forward nor backward": (changed("nodes", 1, isBackwardNode=2), "nodes[1].isBackwardNode: 2"),
    "a node for CPUs": (changed("nodes", 1, supportedOnFpga=0), "nodes[1].supportedOnFpga: b runs on CPUs alone"),
    "gradients alone": (changed("nodes", 3, colorClass=9), "agrad: colorClass 9 has gradients alone"),
    "a name twice": (changed("nodes", 1, name="a"), "colorClass 0 and 1 both start with 'a'"),
    "an edge to nowhere": (changed("edges", 1, destId=7), "edges[1].destId: node 7 does not exist"),
    "an edge back": (changed("edges", 1, sourceId=12), "edges[1]: leads from a gradient to the forward node c"),
    "a negative cost": (changed("edges", 1, cost=-0.5), "edges[1].cost: -0.5"),
    "a cycle": (changed("edges", 0, sourceId=2), "edges: the layers"),
    "no device": (placement(maxFPGAs=0), "maxFPGAs: 0 devices"),
    "a CPU and no time on it": (placement(maxCPUs=1), "nodes[0].cpuLatency: missing, and maxCPUs is 1"),
    "a negative number of CPUs": (
        placement(maxCPUs=-1, nodes=[n | {"cpuLatency": 1.0} for n in placement()["nodes"]]),
        "maxCPUs: -1 devices",
    ),
    "a million devices": (placement(maxFPGAs=10**6), "maxFPGAs: 1000000 devices"),
    "no memory": (placement(maxSizePerFPGA=0), "maxSizePerFPGA: 0.0 bytes"),
    "endless sizes": (
        placement(nodes=[n | {"size": 1e308, "colorClass": 0} for n in placement()["nodes"]]),
        "size of a colorClass: inf",
    ),
}


@pytest.mark.parametrize("name", BAD_PLACEMENTS)
def test_a_damaged_placement_is_refused_with_its_field(name: str) -> None:
    problem, words = BAD_PLACEMENTS[name]
    with pytest.raises(FormatError, match=re.escape(f"p.json: {words}")):
        parse_placement(json.dumps(problem), source="p.json", model="toy")


@needs_reference
@references("dnn-partitioning/*_training.json")
def test_costs_of_the_reference_placements_are_their_sizes_over_the_links(name: str) -> None:
    text = (REFERENCE / name).read_text()
    profile, cluster = parse_placement(text, source=name, model="m")
    problem = json.loads(text)
    assert len(profile.graph.layers) == len(problem["nodes"]) / 2
    forward = {node["id"]: node["name"] for node in problem["nodes"] if not node["isBackwardNode"]}
    sizes = {forward[e["sourceId"]]: (e["size"], e["cost"]) for e in problem["edges"] if e["sourceId"] in forward}
    for value in profile.graph.values:
        assert (value.num_bytes, value.num_bytes / cluster.levels[0].bytes_per_s) == sizes[value.name]


# Any profile


def write_all(directory: Path) -> dict[str, Path]:
    """A file of each format that can be imported."""
    texts = {
        "own.json": codec.dumps(chain_profile([1e-3] * 3)),
        "graph.txt": GRAPH,
        "placement.json": json.dumps(placement()),
        "servers.txt": "Server0\n  Fast 1 graph.txt\n  Slow 3 slow.txt\n",
        "slow.txt": GRAPH.replace("3.500", "9.000"),
    }
    for name, text in texts.items():
        (directory / name).write_text(text)
    return {name: directory / name for name in texts}


def test_any_profile_is_known_by_its_content(tmp_path: Path) -> None:
    files = write_all(tmp_path)
    found = {name: read_profile(path) for name, path in files.items()}
    assert {name: profile.front_end for name, profile in found.items()} == {
        "own.json": "module",
        "graph.txt": "pipedream",
        "placement.json": "dnn-partitioning",
        "servers.txt": "sparsepipe",
        "slow.txt": "pipedream",
    }
    assert found["own.json"] == chain_profile([1e-3] * 3)
    assert found["graph.txt"].model == tmp_path.name
    assert list(found["servers.txt"].seconds) == ["Fast", "Slow"]


def test_a_server_files_profiles_may_be_named_from_the_directory_above(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    files = write_all(tmp_path / "files")
    text = files["servers.txt"].read_text()
    files["servers.txt"].write_text(text.replace("graph.txt", "files/graph.txt"))
    assert list(read_profile(files["servers.txt"]).seconds) == ["Fast", "Slow"]
    files["servers.txt"].write_text(text.replace("graph.txt", "nowhere.txt"))
    with pytest.raises(FormatError, match="no such file; paths start at"):
        read_profile(files["servers.txt"])


@needs_reference
def test_the_reference_server_file_is_a_profile_of_two_kinds() -> None:
    path = REFERENCE / "sparsepipe/hete_files/test_server.txt"
    assert list(read_profile(path).seconds) == ["TitanV", "TitanXP"]
    cluster = cluster_of_servers(parse_servers(path.read_text(), path.name), [1e8])
    assert [device.kind for device in cluster.devices] == ["TitanV"] + ["TitanXP"] * 3


def test_a_cluster_may_be_the_devices_of_an_imported_file(tmp_path: Path) -> None:
    files = write_all(tmp_path)
    servers = read_cluster(f"{files['servers.txt']}@12GB/s")
    assert [device.kind for device in servers.devices] == ["Fast"] + ["Slow"] * 3
    assert servers.levels == (Level(size=4, bytes_per_s=12e9),)
    (tmp_path / "two.txt").write_text(SERVERS)
    assert [level.bytes_per_s for level in read_cluster(f"{tmp_path}/two.txt@12GB/s,1GB/s").levels] == [12e9, 1e9]
    assert len(read_cluster(str(files["placement.json"])).devices) == 2
    (tmp_path / "cluster.toml").write_text('[[devices]]\n[[levels]]\nsize = 1\nbandwidth = "1GB/s"\n')
    assert len(read_cluster(str(tmp_path / "cluster.toml")).devices) == 1
    assert read_cluster("4@12GB/s,2@1GB/s") == parse_cluster("4@12GB/s,2@1GB/s")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("servers.txt", "a server file has no bandwidths; give them too, as in servers.txt@12GB/s"),
        ("servers.txt@12", "cluster 'servers.txt@12': '12': expected a rate"),
        ("servers.txt@12GB/s,1GB/s", "2 bandwidths for 1 servers"),
        ("graph.txt@12GB/s", "graph.txt:1: expected a line such as Server0"),
        ("graph.txt", "graph.txt: not TOML"),
        ("own.json", "own.json: JSON without devices"),
    ],
)
def test_a_file_without_a_cluster_says_what_is_missing(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PenstockError, match=re.escape(words)):
        read_cluster(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("import torch\n", "tried a Penstock profile"),
        ('{"a": 1}', "JSON, but no profile that Penstock knows; tried"),
        ("[1]", "tried a Penstock profile"),
        ('{"format": "penstock.plan/1"}', "another kind of file"),
        ('{"format": "penstock.prof', "not JSON"),
    ],
)
def test_a_file_that_is_no_profile_is_told_what_was_tried(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(FormatError, match=words):
        read_profile(tmp_path / "file")


def test_an_unknown_plan_format_lists_those_there_are() -> None:
    with pytest.raises(FormatError, match=", ".join(PLAN_FORMATS)):
        plan_text(plan_of_three_stages(), "onnx")


READERS: dict[str, tuple[str, Callable[[str], object]]] = {
    "graph": (GRAPH, parse),
    "conf": (json.dumps(CONF), lambda text: parse_stage_map(text, "conf.json")),
    "servers": (SERVERS, lambda text: cluster_of_servers(parse_servers(text, "servers.txt"), [1e9, 1e8])),
    "partition": (
        '{"partition": [2, 3], "recompute_ratio": [0, 0.5], "batch_size": [4, 4]}',
        lambda text: parse_partition(text, "p.json"),
    ),
    "costs": ("1.5\n2.5\n3e-1\n", lambda text: layer_costs(text, text, text)),
    "placement": (json.dumps(placement()), lambda text: parse_placement(text, source="p.json", model="toy")),
}
SNIPPETS = ["-", "--", " -- ", "\t", "\n", "]", "[", "{", "}", '"', ",", ";", "=", "nan", "1e999", "-1", "99999999999",
            "null", "true", "Infinity", "node1", "node2", "\x00", "\u2028", "é", "0", ""]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, str]:
    """A valid file after a few cuts, insertions, moved lines, or its end lost."""
    name = draw(st.sampled_from(sorted(READERS)))
    text = READERS[name][0]
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        lines = text.split("\n")
        line = draw(st.integers(0, len(lines) - 1))
        text = draw(
            st.sampled_from(
                [
                    text[:start],
                    text[:start] + text[end:],
                    text[:start] + draw(st.sampled_from(SNIPPETS) | st.text(max_size=3)) + text[end:],
                    "\n".join(lines[:line] + lines[line + 1 :]),
                    "\n".join([*lines, lines[line]]),
                ]
            )
        )
    return name, text


@law
@given(st.lists(damaged(), min_size=10, max_size=10))
def test_a_damaged_file_is_read_or_refused_but_never_a_traceback(files: list[tuple[str, str]]) -> None:
    for name, text in files:
        with contextlib.suppress(FormatError, GraphError, ProfileError, ClusterError):
            READERS[name][1](text)


@law
@given(damaged())
def test_whatever_a_file_holds_read_profile_reads_or_refuses_it(
    tmp_path_factory: pytest.TempPathFactory, file: tuple[str, str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_text(file[1], encoding="utf-8", errors="replace")
    with contextlib.suppress(FormatError, GraphError, ProfileError, ClusterError):
        assert isinstance(read_profile(path), Profile)
