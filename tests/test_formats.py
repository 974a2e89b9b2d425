"""Files of other systems, whichever they are: known by their content; damage is named and never a traceback."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import chain_profile, law
from format_files import (
    CONF,
    GRAPH,
    REFERENCE,
    SERVERS,
    layer_costs,
    needs_reference,
    parse,
    placement,
    plan_of_three_stages,
)
from penstock import codec
from penstock.cluster import Level, parse_cluster
from penstock.errors import ClusterError, FormatError, GraphError, PenstockError, ProfileError
from penstock.formats import (
    PLAN_FORMATS,
    cluster_of_servers,
    parse_partition,
    parse_placement,
    parse_servers,
    parse_stage_map,
    plan_text,
    read_cluster,
    read_profile,
)
from penstock.profile import Profile


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
        ('{"format": "penstock.prof', "not complete JSON"),
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
            assert READERS[name][1](text) is not None


@law
@given(damaged())
def test_whatever_a_file_holds_read_profile_reads_or_refuses_it(
    tmp_path_factory: pytest.TempPathFactory, file: tuple[str, str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_text(file[1], encoding="utf-8", errors="replace")
    with contextlib.suppress(FormatError, GraphError, ProfileError, ClusterError):
        assert isinstance(read_profile(path), Profile)
