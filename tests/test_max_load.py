"""The smallest maximum load: the optimum of the dnn-partitioning benchmark, and of exhaustive search."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import chain_profile, chains_of, flat_cluster, graphs, layer_seconds, profile_of, slow_law
from penstock.cluster import HOST_KIND, Cluster, Device, Level
from penstock.errors import PlanError
from penstock.formats import read_cluster, read_profile
from penstock.graph import Layer, LayerGraph, Value
from penstock.planner.max_load import max_load_plan, solve
from penstock.profile import Profile
from penstock.simulate import simulate

REFERENCE = Path(__file__).parents[2] / "shared" / "reference" / "dnn-partitioning"
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the benchmark's graphs are not beside the project")


@needs_reference
@pytest.mark.parametrize("name", ["bert24_training", "resnet50_training"])
def test_the_load_is_the_benchmarks_optimum(name: str) -> None:
    optimum = json.loads((REFERENCE / "results.json").read_text())["max_load"][name]["optimal"]
    path = REFERENCE / f"{name}.json"
    answer = solve(read_profile(path), read_cluster(str(path)))
    assert answer.downsets.complete
    assert round(answer.load_s, 2) == optimum


@needs_reference
def test_without_the_hosts_core_the_load_of_resnet50_is_higher() -> None:
    """The benchmark's optimum needs it, though its six accelerators alone are what it is known for."""
    path = REFERENCE / "resnet50_training.json"
    assert solve(read_profile(path), read_cluster("6@2GiB/s")).load_s == pytest.approx(80.455, abs=1e-3)


def exhaustive(profile: Profile, cluster: Cluster) -> float:
    """Every chain of downsets on every choice of devices."""
    loads = (
        max(load(profile, cluster, each, chain[i + 1] - chain[i]) for i, each in enumerate(devices))
        for count in range(1, len(cluster.devices) + 1)
        for chain in chains_of(profile.graph, count - 1)
        for devices in itertools.permutations(cluster.devices, count)
    )
    return min(loads)


def load(profile: Profile, cluster: Cluster, device: Device, stage: frozenset[int]) -> float:
    graph = profile.graph
    sizes = [p for layer in stage for p in graph.parameters_of([layer])]
    kept = sum(2 * p.num_bytes + p.state_bytes for p in sizes) + sum(graph.by_id[n].saved_bytes for n in stage)
    if device.memory_bytes is not None and kept > device.memory_bytes:
        return math.inf
    rows = zip(graph.layers, profile.compute_s(device.kind), strict=True)
    compute = sum(seconds for layer, seconds in rows if layer.id in stage) / device.speed
    others = frozenset(graph.by_id) - stage
    moved = [*graph.crossing(stage, others), *graph.crossing(others, stage)]
    num_bytes = sum(value.num_bytes * (2 if value.differentiable else 1) for value in moved)
    return compute + (0.0 if device.kind == HOST_KIND else num_bytes / cluster.levels[0].bytes_per_s)


devices = st.builds(
    Device,
    kind=st.sampled_from(["cpu", HOST_KIND]),
    memory_bytes=st.sampled_from([None, 2 * 10**6, 10**7]),
    speed=st.sampled_from([0.5, 1.0]),
)


@slow_law
@given(
    graphs(max_layers=5),
    st.lists(st.integers(1, 9), min_size=5, max_size=5),
    st.lists(devices, min_size=1, max_size=3),
    st.sampled_from([1e5, 1e6, 1e9]),
)
def test_the_load_equals_exhaustive_search(
    graph: LayerGraph, times: list[int], chosen: list[Device], rate: float
) -> None:
    profile = profile_of(graph, [layer_seconds(float(each)) for each in times[: len(graph.layers)]])
    profile = replace(profile, seconds={**profile.seconds, HOST_KIND: profile.seconds["cpu"]})
    cluster = Cluster(name="any", devices=tuple(chosen), levels=(Level(size=len(chosen), bytes_per_s=rate),))
    expected = exhaustive(profile, cluster)
    if math.isinf(expected):
        with pytest.raises(PlanError, match="no split of it fits"):
            solve(profile, cluster)
        return
    assert solve(profile, cluster).load_s == pytest.approx(expected)
    plan = max_load_plan(profile, cluster)
    assert plan.prediction.lower_bound_s <= plan.prediction.seconds_per_minibatch * (1 + 1e-9)
    worst = max(
        load(profile, cluster, cluster.devices[stage.devices[0]], frozenset(stage.layers)) for stage in plan.stages
    )
    assert worst == pytest.approx(expected)
    if not any(layer.parameters for layer in graph.layers):
        assert simulate(plan, 4).samples_per_s > 0


def test_a_value_read_in_two_later_stages_costs_its_sender_once_and_each_reader_once() -> None:
    graph = LayerGraph(
        layers=tuple(Layer(id=i, name=f"l{i}", kind="Any") for i in range(3)),
        values=(
            Value(name="v", producer=0, consumers=(1, 2), num_bytes=10),
            Value(name="order", producer=1, consumers=(2,), num_bytes=0),
        ),
    )
    profile = profile_of(graph, [layer_seconds(100 / 3), layer_seconds(99 / 3), layer_seconds(98 / 3)])
    assert solve(profile, flat_cluster(3, bytes_per_s=10.0)).load_s == pytest.approx(100 + 2)


def test_devices_stay_idle_where_another_stage_would_cost_more_than_it_saves() -> None:
    profile = chain_profile([1.0, 1.0], value_bytes=1000)
    plan = max_load_plan(profile, flat_cluster(4, bytes_per_s=1.0))
    assert [stage.devices for stage in plan.stages] == [(0,)]
    assert plan.prediction.seconds_per_minibatch == pytest.approx(6.0)


def test_memory_forces_a_split_and_says_so_when_nothing_fits() -> None:
    profile = chain_profile([1.0, 1.0], value_bytes=1000, parameter_bytes=100)
    plan = max_load_plan(profile, flat_cluster(2, bytes_per_s=1.0, memory_bytes=200))
    assert len(plan.stages) == 2
    assert plan.prediction.one_device_s is None
    with pytest.raises(PlanError, match=r"toy needs 400 B and no split of it fits the memory of flat"):
        solve(profile, flat_cluster(2, memory_bytes=199))


def test_too_many_kinds_of_devices_are_refused_rather_than_searched_for_ever() -> None:
    unequal = tuple(Device(speed=1 + index / 100) for index in range(40))
    cluster = Cluster(name="zoo", devices=unequal, levels=(Level(size=40, bytes_per_s=1e9),))
    with pytest.raises(PlanError, match="zoo: 40 kinds of devices can follow each other in too many ways"):
        solve(chain_profile([1.0, 1.0]), cluster)
