"""SparsePipe's formulas: what its optimizer answers, or better, on its own profiles."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import chain_graph, chains_of, graphs, layer_seconds, slow_law
from penstock.cluster import Cluster, Device, Level
from penstock.errors import PlanError
from penstock.formats import read_cluster, read_profile
from penstock.graph import LayerGraph
from penstock.planner.sparsepipe import solve, sparsepipe_plan
from penstock.profile import Profile
from penstock.simulate import simulate

REFERENCE = Path(__file__).parents[2] / "shared" / "reference" / "sparsepipe"
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="SparsePipe's profiles are not beside the project")


def results(key: str) -> list[dict[str, Any]]:
    path = REFERENCE / "optimizer_results.json"
    return json.loads(path.read_text())[key] if path.is_file() else []


def read_case(text: str, rates: list[float], tmp_path: Path) -> tuple[Profile, Cluster]:
    """A case's server file, with its profiles where they are here."""
    for theirs, ours in (("../profiler/Minkowski/profiles/minkvgg/minkvgg_v0.02_", "minkvgg_"), ("hete_files", "")):
        text = text.replace(f" {theirs}", f" {REFERENCE / (ours or theirs)}")
    servers = tmp_path / "servers.txt"
    servers.write_text(text)
    return read_profile(servers), read_cluster(f"{servers}@{','.join(f'{rate:.0f}B/s' for rate in rates)}")


@needs_reference
@pytest.mark.parametrize(
    "case",
    results("cases"),
    ids=lambda c: f"{c['case']}-{c['bandwidth_bytes_per_s'][0]:.0e}{''.join(c['extra_flags'])}",
)
def test_objective_is_equal_or_lower_on_every_case(case: dict[str, Any], tmp_path: Path) -> None:
    profile, cluster = read_case(case["server_file"], case["bandwidth_bytes_per_s"], tmp_path)
    answer = solve(profile, cluster, straight="--straight_pipeline" in case["extra_flags"])
    assert answer.seconds_per_minibatch <= case["predicted_stage_time_s"] * (1 + 1e-9)
    assert answer.downsets.complete


@needs_reference
@pytest.mark.parametrize("row", results("exact"), ids=lambda row: f"{row['case']}-{row['bandwidth']:.0e}")
def test_objective_equals_the_full_search_on_every_row(row: dict[str, Any], tmp_path: Path) -> None:
    text = next(case["server_file"] for case in results("cases") if case["case"] == row["case"])
    answer = solve(*read_case(text, [row["bandwidth"]], tmp_path))
    assert answer.seconds_per_minibatch == pytest.approx(row["exact_time_s"], rel=1e-6)


def profile_on(graph: LayerGraph, **seconds: list[float]) -> Profile:
    """Forward and backward together of each layer, on each kind."""
    rows = {kind: tuple(layer_seconds(s / 3) for s in each) for kind, each in seconds.items()}
    return Profile(model="toy", front_end="module", batch_size=1, microbatch_size=1, graph=graph, seconds=rows)


def cluster_on(kinds: list[str], *levels: tuple[int, float]) -> Cluster:
    return Cluster(
        name="unequal",
        devices=tuple(Device(kind=kind) for kind in kinds),
        levels=tuple(Level(size=size, bytes_per_s=rate) for size, rate in levels),
    )


def exhaustive(profile: Profile, cluster: Cluster) -> float:
    """Every chain of downsets, every assignment of units to stages, at every level, by SparsePipe's formulas."""
    graph = profile.graph
    everything = frozenset(graph.by_id)

    def make(unit: Any) -> str:
        return unit.kind if isinstance(unit, Device) else "".join(sorted(make(part) for part in unit))

    def seconds(device: Device, layers: frozenset[int]) -> float:
        rows = zip(graph.layers, profile.compute_s(device.kind), strict=True)
        return sum(row for layer, row in rows if layer.id in layers)

    def shared(slowest: float, units: int, layers: frozenset[int], rate: float) -> float:
        weights = sum(p.num_bytes for layer in layers for p in graph.parameters_of([layer]))
        return (slowest + 2 * (units - 1) * weights / (rate * units)) / units

    def transfer(downset: frozenset[int], rate: float) -> float:
        return 2 * sum(v.num_bytes for v in graph.crossing(downset, everything - downset)) / rate

    def whole(unit: Any, level: int, layers: frozenset[int]) -> float:
        if level < 0:
            return seconds(unit, layers)
        slowest = max(whole(part, level - 1, layers) for part in unit)
        return shared(slowest, len(unit), layers, cluster.levels[level].bytes_per_s)

    def stage(units: Sequence[Any], level: int, before: frozenset[int], after: frozenset[int]) -> float:
        alike = len({make(unit) for unit in units}) == 1
        times = [fastest(u, level - 1, before, after) if alike else whole(u, level - 1, after - before) for u in units]
        return shared(max(times), len(units), after - before, cluster.levels[level].bytes_per_s)

    @cache
    def fastest(unit: Any, level: int, before: frozenset[int], after: frozenset[int]) -> float:
        if level < 0:
            return seconds(unit, after - before)
        rate = cluster.levels[level].bytes_per_s
        best = stage(unit, level, before, after)
        for stages in range(2, len(unit) + 1):
            ways = [way for way in itertools.product(range(stages), repeat=len(unit)) if len(set(way)) == stages]
            for chain in chains_of(graph, stages - 1, before, after):
                across = max(transfer(end, rate) for end in chain[1:])
                for way in ways:
                    members = [[u for u, each in zip(unit, way, strict=True) if each == s] for s in range(stages)]
                    times = [stage(members[s], level, chain[s], chain[s + 1]) for s in range(stages)]
                    best = min(best, max(*times, across))
        return best

    units: list[Any] = list(cluster.devices)
    for level in cluster.levels:
        units = [tuple(units[i : i + level.size]) for i in range(0, len(units), level.size)]
    return fastest(units[0], len(cluster.levels) - 1, frozenset(), everything)


rates = st.sampled_from([1e3, 1e5, 1e6, 1e9])
seconds_of_layers = st.lists(st.integers(1, 9).map(float), min_size=4, max_size=4)


@slow_law
@given(
    graphs(max_layers=4),
    seconds_of_layers,
    seconds_of_layers,
    st.lists(st.sampled_from("ab"), min_size=1, max_size=4),
    rates,
)
def test_one_server_equals_exhaustive_search(
    graph: LayerGraph, fast: list[float], slow: list[float], kinds: list[str], rate: float
) -> None:
    profile = profile_on(graph, a=fast[: len(graph.layers)], b=slow[: len(graph.layers)])
    cluster = cluster_on(kinds, (len(kinds), rate))
    assert solve(profile, cluster).seconds_per_minibatch == pytest.approx(exhaustive(profile, cluster))


@slow_law
@given(graphs(max_layers=4), seconds_of_layers, st.lists(st.sampled_from("ab"), min_size=4, max_size=4), rates, rates)
def test_servers_equal_exhaustive_search(
    graph: LayerGraph, seconds: list[float], kinds: list[str], inner: float, outer: float
) -> None:
    profile = profile_on(graph, a=seconds[: len(graph.layers)], b=seconds[::-1][: len(graph.layers)])
    cluster = cluster_on(kinds, (2, inner), (2, outer))
    assert solve(profile, cluster).seconds_per_minibatch == pytest.approx(exhaustive(profile, cluster))


def test_layers_go_where_they_are_fast_whatever_the_order_of_the_devices() -> None:
    profile = profile_on(chain_graph(2, value_bytes=1), a=[9.0, 1.0], b=[1.0, 9.0])
    plan = sparsepipe_plan(profile, cluster_on(["a", "b"], (2, 1e9)))
    assert [(stage.layers, stage.devices) for stage in plan.stages] == [((0,), (1,)), ((1,), (0,))]
    assert plan.prediction.seconds_per_minibatch == pytest.approx(1.0)
    assert plan.prediction.one_device_s == pytest.approx(10.0)
    assert plan.prediction.lower_bound_s == pytest.approx(1.0)


def test_a_mixed_stage_goes_at_the_pace_of_its_slowest_device() -> None:
    profile = profile_on(chain_graph(1), a=[2.0], b=[6.0])
    assert solve(profile, cluster_on(["a", "b"], (2, 1e9))).seconds_per_minibatch == pytest.approx(3.0)


def test_a_transfer_takes_as_long_however_many_replicas_share_it() -> None:
    """PipeDream would divide it by two."""
    profile = profile_on(chain_graph(2, value_bytes=100), a=[4.0, 100.0], b=[100.0, 4.0])
    answer = solve(profile, cluster_on(list("aabb"), (4, 20.0)))
    assert [stage.devices for stage in answer.stages] == [(0, 1), (2, 3)]
    assert answer.seconds_per_minibatch == pytest.approx(10.0)


def test_unequal_servers_that_share_a_stage_run_it_whole() -> None:
    profile = profile_on(chain_graph(1), a=[2.0], b=[6.0])
    plan = sparsepipe_plan(profile, cluster_on(["a", "a", "a", "b"], (2, 1e9), (2, 1e9)))
    assert [stage.devices for stage in plan.stages] == [(0, 1, 2, 3)]
    assert plan.prediction.seconds_per_minibatch == pytest.approx(1.5)
    assert plan.prediction.data_parallel_s == pytest.approx(1.5)


@slow_law
@given(
    graphs(max_layers=5),
    st.lists(st.sampled_from("ab"), min_size=6, max_size=6),
    st.sampled_from([(6,), (3, 2), (1, 2, 3)]),
)
def test_a_plan_uses_every_device_once_and_can_be_simulated(
    graph: LayerGraph, kinds: list[str], sizes: tuple[int, ...]
) -> None:
    count = len(graph.layers)
    profile = profile_on(graph, a=[1.0] * count, b=[2.0] * count)
    plan = sparsepipe_plan(profile, cluster_on(kinds, *((size, 1e6) for size in sizes)))
    assert sorted(plan.devices) == list(range(6))
    assert plan.prediction.lower_bound_s <= plan.prediction.seconds_per_minibatch * (1 + 1e-9)
    if not any(layer.parameters for layer in graph.layers):
        assert simulate(plan, 4).samples_per_s > 0


def test_a_straight_pipeline_needs_a_cut_for_every_device() -> None:
    profile = profile_on(chain_graph(2), a=[1.0, 1.0])
    assert len(solve(profile, cluster_on(["a"] * 2, (2, 1e9)), straight=True).stages) == 2
    with pytest.raises(PlanError, match="each of the 3 devices needs a stage of its own"):
        solve(profile, cluster_on(["a"] * 3, (3, 1e9)), straight=True)


def test_too_many_kinds_of_devices_are_refused_rather_than_searched_for_ever() -> None:
    kinds = [f"kind{i}" for i in range(20)]
    profile = profile_on(chain_graph(2), **{kind: [1.0, 1.0] for kind in kinds})
    with pytest.raises(PlanError, match="20 kinds of devices can be shared out in too many ways"):
        solve(profile, cluster_on(kinds, (20, 1e9)))
