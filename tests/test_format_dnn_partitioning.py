"""Placement problems of dnn-partitioning."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from format_files import (
    REFERENCE,
    needs_reference,
    placement,
    references,
)
from penstock.cluster import Device
from penstock.cost import CostModel, message
from penstock.errors import FormatError
from penstock.formats import (
    parse_placement,
)
from penstock.plan import Stage
from penstock.schedule import family


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
        placement(nodes=[n | {"size": 9e15, "colorClass": 0} for n in placement()["nodes"]]),
        "size of a colorClass: 2.7e+16",
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
