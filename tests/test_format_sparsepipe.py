"""SparsePipe's server files and profiles of several kinds."""

from __future__ import annotations

import re

import pytest

from format_files import (
    GRAPH,
    REFERENCE,
    SERVERS,
    needs_reference,
    node,
    parse,
)
from penstock.cluster import Device, Level
from penstock.errors import ClusterError, FormatError, ProfileError
from penstock.formats import (
    cluster_of_servers,
    merge_kinds,
    parse_servers,
)
from penstock.formats.sparsepipe import profile_paths


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
