"""Files of other systems for tests, made by hand, and where the originals lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders import chain_profile, flat_cluster, plan_of
from penstock.formats import (
    parse_graph,
    parse_layer_costs,
)
from penstock.formats.dynpipe import Column
from penstock.plan import Plan
from penstock.profile import Profile

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


SERVERS = "Server0\n    Fast 1 fast.txt\n    Slow 3 slow.txt\nServer1\n    Slow 4 slow.txt\n"


def layer_costs(forward: str = "1\n2\n3\n", backward: str = "2\n4\n6.5\n", sent: str = "0.5\n0.25\n") -> Profile:
    return parse_layer_costs(
        forward_ms=Column(text=forward, source="forward.txt"),
        backward_ms=Column(text=backward, source="backward.txt"),
        communication_s=Column(text=sent, source="communication.txt"),
        bytes_per_s=1e6,
        model="toy",
    )


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


CONF: dict[str, Any] = {
    "module_to_stage_map": [0, 1, 1],
    "stage_to_rank_map": {"0": [0, 1], "1": [2]},
    "stage_to_depth_map": {"0": 1, "1": 0},
}


def plan_of_three_stages() -> Plan:
    return plan_of(chain_profile([1e-3] * 6), flat_cluster(4), [[0, 1], [2, 3, 4], [5]], [2, 1, 1], schedule="1f1b")
