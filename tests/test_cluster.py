from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import clusters, law
from penstock.cluster import Cluster, Device, Level, cluster_toml, parse_cluster, parse_cluster_toml
from penstock.errors import ClusterError, FormatError, PenstockError

TOML = """
name = "two hosts"

[[devices]]
kind = "Tesla V100"
memory = "16GiB"
count = 2

[[devices]]
kind = "Tesla P100"
memory = "12GB"
speed = 0.5
count = 2

[[levels]]
size = 2
bandwidth = "12GB/s"
latency = "1ms"

[[levels]]
size = 2
bandwidth = "10Gbit/s"
"""


@law
@given(clusters(max_devices=12), st.data())
def test_two_devices_talk_over_the_lowest_level_that_holds_both_whoever_asks(
    cluster: Cluster, data: st.DataObject
) -> None:
    devices = st.integers(0, len(cluster.devices) - 1)
    first, second = data.draw(devices), data.draw(devices)
    assert cluster.link(first, second) is cluster.link(second, first)
    reaches = [math.prod(level.size for level in cluster.levels[: i + 1]) for i in range(len(cluster.levels))]
    lowest = next(i for i, reach in enumerate(reaches) if first // reach == second // reach)
    assert cluster.link(first, second) is cluster.links[lowest]


@law
@given(clusters(max_devices=12), st.data())
def test_a_link_between_groups_is_no_better_than_those_inside_them(cluster: Cluster, data: st.DataObject) -> None:
    devices = st.integers(0, len(cluster.devices) - 1)
    near, far = cluster.link(data.draw(devices), data.draw(devices)), cluster.link(0, len(cluster.devices) - 1)
    if near.size > 1:
        assert far.bytes_per_s <= near.bytes_per_s
        assert far.latency_s >= near.latency_s


def test_a_level_of_one_group_joins_nothing_and_changes_no_link() -> None:
    levels = (Level(size=1, bytes_per_s=1.0), Level(size=4, bytes_per_s=10.0), Level(size=1, bytes_per_s=100.0))
    cluster = Cluster(name="c", devices=(Device(),) * 4, levels=levels)
    assert [link.bytes_per_s for link in cluster.links] == [1.0, 10.0, 10.0]


@law
@given(clusters(max_devices=12), st.data())
def test_the_slowest_link_of_a_group_is_the_highest_level_any_pair_needs(cluster: Cluster, data: st.DataObject) -> None:
    devices = sorted(data.draw(st.sets(st.integers(0, len(cluster.devices) - 1), min_size=1)))
    links = [cluster.link(a, b) for a in devices for b in devices if a != b]
    rate = min((link.bytes_per_s for link in links), default=None)
    assert rate is None or cluster.slowest_link(devices).bytes_per_s == rate


def test_local_is_so_many_workers_on_one_link() -> None:
    cluster = parse_cluster("local:4")
    assert (cluster.name, len(cluster.devices), len(cluster.levels)) == ("local:4", 4, 1)
    assert cluster.link(0, 3).size == 4


def test_levels_in_text_are_innermost_first() -> None:
    cluster = parse_cluster("4@12GB/s,4@1.25GB/s")
    assert len(cluster.devices) == 16
    assert cluster.link(0, 3).bytes_per_s == 12e9
    assert cluster.link(3, 4).bytes_per_s == 1.25e9


def test_a_toml_file_states_count_memory_bandwidth_and_latency_with_units(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(TOML)
    v100 = Device(kind="Tesla V100", memory_bytes=16 * 2**30)
    p100 = Device(kind="Tesla P100", memory_bytes=12 * 10**9, speed=0.5)
    assert parse_cluster(str(path)) == Cluster(
        name="two hosts",
        devices=(v100, v100, p100, p100),
        levels=(Level(size=2, bytes_per_s=12e9, latency_s=1e-3), Level(size=2, bytes_per_s=1.25e9)),
    )


def test_a_toml_file_needs_no_name(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[[devices]]\n[[levels]]\nsize = 1\nbandwidth = 1e9\n")
    assert parse_cluster(str(path)).devices == (Device(),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("local:0", "such as local:4"),
        ("local:", "such as local:4"),
        ("local:four", "such as local:4"),
        ("local:-1", "such as local:4"),
        ("local:²", "such as local:4"),
        ("nowhere", "neither a file nor a known form; write local:4"),
        ("", "neither a file nor a known form|directory"),
        ("4@", "a rate such as 1.25GB/s"),
        ("4@fast", "a rate such as 1.25GB/s"),
        ("@1GB/s", "devices@bandwidth such as 4@12GB/s"),
        ("²@1GB/s", "devices@bandwidth such as 4@12GB/s"),
        ("4@1GB/s,", "devices@bandwidth such as 4@12GB/s"),
        ("4@1GB/s;2@1GB/s", "a rate such as 1.25GB/s"),
        ("0@1GB/s", "a level joins at least one"),
        ("4@0GB/s", "it must be above 0"),
        ("gone.toml", "no such file"),
    ],
)
def test_text_that_is_no_cluster_is_refused_with_what_to_write(text: str, words: str) -> None:
    with pytest.raises(PenstockError, match=words) as caught:
        parse_cluster(text)
    assert text in str(caught.value)


DEVICE, LEVEL = "[[devices]]\ncount = 2\n", "[[levels]]\nsize = 2\nbandwidth = '1GB/s'\n"


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[[devices", "not TOML"),
        (LEVEL, r"devices: missing; write one or more \[\[devices\]\] tables"),
        (DEVICE, r"levels: missing; write one or more \[\[levels\]\] tables"),
        ("devices = 3\n" + LEVEL, "devices: missing"),
        (DEVICE.replace("2", "0") + LEVEL, r"devices\[0\]\.count: expected a whole number of at least 1, found 0"),
        (DEVICE.replace("2", "'2'") + LEVEL, r"devices\[0\]\.count: expected a whole number"),
        (DEVICE + "memory = 'big'\n" + LEVEL, r"devices\[0\]\.memory: 'big': expected a size such as 16GB"),
        (DEVICE + "memory = nan\n" + LEVEL, r"devices\[0\]\.memory: nan: expected a size such as 16GB"),
        (DEVICE + "memory = inf\n" + LEVEL, r"devices\[0\]\.memory: inf: expected a size such as 16GB"),
        (DEVICE + "memory = [1]\n" + LEVEL, r"devices\[0\]\.memory: \[1\]: expected a size such as 16GB"),
        (DEVICE + "memory = 0\n" + LEVEL, "leave it out where it is no constraint"),
        (DEVICE + "speed = 0.0\n" + LEVEL, r"devices\[0\]: device speed is 0\.0; it must be above 0"),
        (DEVICE + "speed = nan\n" + LEVEL, r"devices\[0\]\.speed"),
        (
            DEVICE + "colour = 'red'\n" + LEVEL,
            r"devices\[0\]\.colour: unknown key; there are count, kind, speed",
        ),
        (DEVICE + LEVEL.replace("2", "3"), "join 3 = 3 devices but there are 2; make the two agree"),
        (
            DEVICE + LEVEL.replace("bandwidth", "speed"),
            r"\.speed: unknown key; there are size, bandwidth",
        ),
        (DEVICE + "[[levels]]\nsize = 2\n", r"levels\[0\]\.bytes_per_s: missing"),
        (DEVICE + LEVEL + "latency = 'soon'\n", r"levels\[0\]\.latency: 'soon': expected a duration such as 10us"),
        (DEVICE + LEVEL + "all_reduce_by_workers = 1\n", r"levels\[0\]\.all_reduce_by_workers: expected true or false"),
    ],
)
def test_a_broken_cluster_file_is_refused_with_its_name_and_the_field(tmp_path: Path, toml: str, words: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(toml)
    with pytest.raises(PenstockError, match=words) as caught:
        parse_cluster(str(path))
    assert str(caught.value).startswith(f"{path}: ")


def test_a_binary_file_is_no_cluster(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match="not a text file"):
        parse_cluster(str(path))


def test_levels_that_do_not_multiply_to_the_devices_are_refused() -> None:
    with pytest.raises(ClusterError, match="join 2 x 2 = 4 devices but there are 3"):
        Cluster(name="c", devices=(Device(),) * 3, levels=(Level(size=2, bytes_per_s=1),) * 2)


def test_a_link_to_a_device_outside_the_cluster_is_refused() -> None:
    with pytest.raises(ClusterError, match="devices 0 and 4 are not both in local:4"):
        parse_cluster("local:4").link(0, 4)


def test_a_cluster_is_written_with_units_counts_and_comments() -> None:
    cluster = parse_cluster_toml(TOML, "two.toml")
    lines = cluster_toml(cluster, ["Made by hand,", "with\nline breaks"], ["inside", "between"]).splitlines()
    assert lines[:4] == ["# Made by hand,", "# with line breaks", "", 'name = "two hosts"']
    assert lines[5:10] == ["[[devices]]", "count = 2", 'kind = "Tesla V100"', 'memory = "16GiB"', ""]
    assert lines[-5:] == ["", "[[levels]]  # between", "size = 2", 'bandwidth = "1.25GB/s"', 'latency = "0ns"']


@law
@given(clusters(max_devices=12), st.text(), st.text(), st.lists(st.text()), st.booleans())
def test_a_cluster_written_reads_back_as_itself_to_three_digits(
    cluster: Cluster, name: str, kind: str, about: list[str], memory: bool
) -> None:
    first = Device(kind=kind, memory_bytes=7 * 10**9 if memory else None, speed=0.3)
    cluster = Cluster(name=name, devices=(first, *cluster.devices[1:]), levels=cluster.levels)
    text = cluster_toml(cluster, about, about[:1] * len(cluster.levels))
    found = parse_cluster_toml(text, "cluster.toml")
    assert (found.name, len(found.devices)) == (name, len(cluster.devices))
    for one, two in zip(cluster.devices, found.devices, strict=True):
        assert (one.kind, one.speed) == (two.kind, two.speed)
        assert (one.memory_bytes is None) == (two.memory_bytes is None)
        assert (two.memory_bytes or 0) == pytest.approx(one.memory_bytes or 0, rel=1e-2)
    for level, read in zip(cluster.levels, found.levels, strict=True):
        assert read.size == level.size
        assert read.bytes_per_s == pytest.approx(level.bytes_per_s, rel=5.1e-3)
        assert read.latency_s == pytest.approx(level.latency_s, rel=5.1e-3, abs=1e-12)
    assert cluster_toml(found, about, about[:1] * len(cluster.levels)) == text
