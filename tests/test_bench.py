"""Benchmarks answer in rows that show themselves; what is said of published results follows from the plans."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from builders import chain_profile
from penstock.bench import growth, hosts, run_benchmark, scale
from penstock.bench.network import NetworkRow, network_row, network_svg
from penstock.bench.published import CLUSTERS, PROFILES, TABLE_1, Measured, Published
from penstock.bench.rows import Row, at_least, at_most
from penstock.bench.simulator import SimulatorRow, verdict
from penstock.bench.table1 import as_run, compare, compare_with
from penstock.bench.why import Compared, _all_reduce_slower, _seconds_with, config_of, why
from penstock.cli.app import app
from penstock.cli.show import bench_table, print_table
from penstock.errors import ClusterError, JobError
from penstock.formats import read_profile
from penstock.formats.pipedream_graph import graph_text
from penstock.profile import Profile

REFERENCE = Path(os.environ.get("PENSTOCK_REFERENCE", Path(__file__).parents[2] / "shared" / "reference"))
PIPEDREAM = REFERENCE / "pipedream"
needs_reference = pytest.mark.skipif(not PIPEDREAM.is_dir(), reason="PipeDream's profiles are not beside the project")
IMAGE_BYTES = 3 * 224 * 224 * 4


def test_rows_know_whether_their_target_is_met() -> None:
    assert at_least("a", "b", 3.0, 2.0, 1.5).met
    assert not at_least("a", "b", 3.0, 2.0, 1.6).met
    assert at_most("a", "b", 3.0, 3.0).met
    assert at_most("a", "b", 3.0).met is None
    assert at_most("a", "b", 3.14159, 3.0).cells == ("a", "b", "3.142", "-", "-", "3", "NO")


def with_inputs(profile: Profile, seconds: float) -> Profile:
    """The first layer as the input of an imported graph, which takes so long to load."""
    first, *rest = profile.graph.layers
    graph = replace(profile.graph, layers=(replace(first, kind="Input0"), *rest))
    rows = profile.seconds_on("any")
    return replace(profile, graph=graph, seconds={"any": (replace(rows[0], forward_s=seconds), *rows[1:])})


def heavy_end() -> Profile:
    """A net like VGG: most of the computing in front, most of the weights behind."""
    profile = chain_profile([0.0] + [1e-2] * 8 + [1e-3], batch_size=1, value_bytes=10**6, parameter_bytes=10**5)
    last = profile.graph.layers[-1].parameters
    parameters = tuple(
        replace(parameter, num_bytes=4 * 10**8) if parameter.name in last else parameter
        for parameter in profile.graph.parameters
    )
    return with_inputs(replace(profile, graph=replace(profile.graph, parameters=parameters)), 5.0)


@pytest.fixture
def reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reference directory with one profile of our own making."""
    directory = tmp_path / "pipedream" / "profiles" / "vgg16"
    directory.mkdir(parents=True)
    (directory / "graph.txt").write_text(graph_text(heavy_end()))
    monkeypatch.setenv("PENSTOCK_REFERENCE", str(tmp_path))
    return tmp_path / "pipedream" / "profiles"


def test_planning_is_measured_in_a_process_of_its_own() -> None:
    held = b"x" * 3 * 10**8  # what this process holds is not counted there
    point = growth.in_a_process(20, 16)
    assert (point.layers, point.devices) == (20, 16)
    assert point.cpu_s > 0
    assert 0 <= point.gap < 0.1
    assert 10**6 < point.peak_bytes < len(held)


def test_a_thousand_layers_on_a_thousand_devices_take_seconds() -> None:
    rows = growth.growth_rows([growth.in_a_process(*growth.LARGE)])
    assert [(row.metric, row.target, row.met) for row in rows] == [
        ("CPU seconds", 10.0, True),
        ("peak bytes", 2e9, True),
        ("gap to the lower bound", None, None),
    ]


def test_bench_planner_draws_its_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_REFERENCE", raising=False)
    monkeypatch.setattr(growth, "LAYERS", (5, 10))
    monkeypatch.setattr(growth, "DEVICES", (8, 16))
    drawing = tmp_path / "growth.svg"
    result = CliRunner().invoke(app, ["bench", "planner", "--svg", str(drawing), "--json"])
    rows = json.loads(result.stdout)
    assert len(rows) == 4
    assert set(rows[0]) == {"case", "metric", "value", "baseline", "ratio", "target", "met"}
    assert "PENSTOCK_REFERENCE names no directory" in result.stderr
    names = [text.text for text in ElementTree.fromstring(drawing.read_bytes()).iter() if text.get("class") == "name"]
    assert names == ["5 layers", "10 layers", "8 devices", "16 devices"]


@pytest.mark.parametrize("directory", [None, "nowhere"])
def test_without_the_profiles_table_1_says_what_to_set(directory: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_REFERENCE", raising=False)
    if directory:
        monkeypatch.setenv("PENSTOCK_REFERENCE", directory)
    with pytest.raises(JobError, match="PENSTOCK_REFERENCE names no directory with pipedream/profiles"):
        run_benchmark("table1")


def test_table_1_answers_in_json_with_stable_keys(reference: Path) -> None:
    rows = json.loads(CliRunner().invoke(app, ["bench", "table1", "--json"]).stdout)
    assert len(rows) == len(TABLE_1)
    assert set(rows[0]) == {
        "case", "published", "published_by_penstock", "pipedream_formulas", "penstock", "data_parallel_s",
        "all_reduce_share", "why",
    }  # fmt: skip
    assert rows[0]["published"] == {"config": "15-1", "speedup": 5.28}
    planned = [row for row in rows if row["penstock"]]
    assert [row["case"] for row in planned] == ["VGG-16 4x4 A", "VGG-16 2x8 B"]
    assert all(row["penstock"]["speedup"] >= row["published_by_penstock"]["speedup"] * 0.99 for row in planned)


def test_rows_without_a_profile_say_so(reference: Path) -> None:
    reasons = {row.case: row.why for row in run_benchmark("table1").rows}
    assert reasons["ResNet-50 4x4 A"] == "not planned: no profile resnet50 at hand."
    assert reasons["S2VT 4x1 C"] == "not planned: PipeDream's repository has no profile of it."


def test_the_table_fits_a_terminal_and_ends_with_the_reasons(
    reference: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_table(bench_table("table1", run_benchmark("table1").rows))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[:2] == ["VGG-16", "15-1"] for line in lines)
    assert lines[-1].startswith("- S2VT 4x1 C: not planned")


def test_rows_of_numbers_are_shown_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row(case="a case", metric="seconds", value=2.0, baseline=4.0, ratio=0.5, target=None, met=None)]
    print_table(bench_table("x", rows))
    assert "a case   seconds       2          4     0.5        -   -" in capsys.readouterr().out


def test_inputs_take_no_time_and_costs_follow_the_minibatch() -> None:
    profile = heavy_end()
    half = as_run(profile, 0.5)
    assert profile.seconds_on("any")[0].forward_s > 0
    assert half.compute_s("any")[0] == profile.compute_s("any")[0] == 0.0
    assert half.compute_s("any") == tuple(seconds / 2 for seconds in profile.compute_s("any"))
    assert {value.num_bytes for value in half.graph.values} == {value.num_bytes / 2 for value in profile.graph.values}
    assert half.graph.parameters == profile.graph.parameters


def compared(published: Published, **known: Any) -> Compared:
    return compare_with(published, Measured("made", samples=1, minibatch=1, **known), heavy_end())


def test_a_slower_all_reduce_gives_the_published_speedup() -> None:
    here = compared(Published("VGG-16", 4, "A", "15-1", 1.0))
    goal = here.speedup(here.as_published) * 1.5
    here = replace(here, published=replace(here.published, speedup=goal))
    times = _all_reduce_slower(here)
    assert times is not None
    assert times > 1
    both = (_seconds_with(plan, times) for plan in (here.data_parallel, here.as_published))
    assert next(both) / next(both) == pytest.approx(goal, rel=2e-3)
    assert f"would take an all-reduce at {1.25 / times:.2f} GB/s instead of 1.25." in why(here)


def test_an_all_reduce_as_assumed_changes_nothing() -> None:
    here = compared(Published("VGG-16", 4, "A", "15-1", 1.0))
    for plan in (here.data_parallel, here.as_published, here.chosen):
        assert _seconds_with(plan, 1.0) == pytest.approx(plan.prediction.seconds_per_minibatch)


def test_a_speedup_that_no_all_reduce_explains_gets_no_rate() -> None:
    here = compared(Published("VGG-16", 4, "A", "15-1", 1e6))
    assert _all_reduce_slower(here) is None
    assert "all-reduce at" not in why(here)


def test_what_agrees_needs_no_reason() -> None:
    here = compared(Published("VGG-16", 4, "A", "16", 1.0))
    here = replace(here, as_published=here.chosen, published=replace(here.published, speedup=here.speedup(here.chosen)))
    assert why(here) == ""


def test_a_reason_against_data_parallelism_counts_what_the_backward_could_hide() -> None:
    here = compared(Published("VGG-16", 4, "A", "16", 1.0))
    assert config_of(here.chosen) != "16"
    total_s = sum(here.data_parallel.profile.compute_s("any"))
    sync_s = here.data_parallel_s * 16 - total_s
    assert here.all_reduce_share == pytest.approx(sync_s / (total_s + sync_s))
    backward_s = total_s * 2 / 3
    left_ms = (total_s + sync_s - min(sync_s, backward_s)) / 16 * 1e3
    assert f"even hidden behind the backward, {left_ms:.3g} ms would be left" in why(here)


def test_sentences_of_another_length_are_planned_too() -> None:
    here = compared(Published("GNMT-8", 1, "A", "straight", 100.0), tokens=20, other_tokens=10)
    assert here.other_length is not None
    plain, plan = here.other_length
    there = plain.prediction.seconds_per_minibatch / plan.prediction.seconds_per_minibatch
    assert sum(plan.profile.compute_s("any")) == pytest.approx(sum(here.chosen.profile.compute_s("any")) / 2)
    change = f"{here.speedup(here.as_published):.2f} becomes {there:.2f}"
    assert f"with sentences of 10 tokens, not the profile's 20, {change}" in why(here)
    assert "lies between" not in why(here)


def test_clusters_are_those_of_the_paper() -> None:
    rates = {name: hosts.cluster(2).levels[-1].bytes_per_s * 8 / 1e9 for name, hosts in CLUSTERS.items()}
    assert rates == {"A": 10, "B": 25, "C": 40}
    assert [len(hosts.cluster(2).devices) for hosts in CLUSTERS.values()] == [8, 16, 2]


@needs_reference
@pytest.mark.parametrize("model", ["VGG-16", "ResNet-50", "AlexNet"])
def test_the_samples_of_a_profile_are_those_of_its_images(model: str) -> None:
    measured = PROFILES[model]
    graph = read_profile(PIPEDREAM / "profiles" / measured.profile / "graph.txt").graph
    images = next(value for value in graph.values if graph.by_id[value.producer].is_input)
    assert images.num_bytes == measured.samples * IMAGE_BYTES


@needs_reference
def test_the_profile_of_gnmt_is_the_one_with_eight_layers() -> None:
    measured, width = PROFILES["GNMT-8"], 1024
    graph = read_profile(PIPEDREAM / "profiles" / measured.profile / "graph.txt").graph
    assert sum("LSTM(" in layer.kind for layer in graph.layers) == 8
    embedding = next(layer for layer in graph.layers if layer.kind.startswith("Embedding"))
    words = next(value for value in graph.values if value.producer == embedding.id)
    assert words.num_bytes == measured.samples * measured.tokens * width * 4


@needs_reference
@pytest.mark.parametrize("published", [row for row in TABLE_1 if row.hosts == 4 or row.model == "GNMT-8"])
def test_every_difference_from_table_1_has_a_reason(published: Published) -> None:
    found = compare(published, PIPEDREAM / "profiles")
    if isinstance(found, str):
        assert published.model in ("GNMT-16", "S2VT")
        return
    assert found.speedup(found.chosen) >= max(1.0, found.speedup(found.as_published)) * 0.999
    if published.config != "straight":
        assert config_of(found.as_published) == published.config
    differs = config_of(found.chosen) != config_of(found.as_published)
    differs |= abs(found.speedup(found.as_published) / published.speedup - 1) > 0.05
    assert bool(why(found)) == differs


@pytest.mark.parametrize("shape", scale.SHAPES)
def test_the_simulator_plays_each_shape_and_its_growth_is_drawn(shape: str) -> None:
    points = [scale.measure(shape, microbatches, workers=16) for microbatches in (8, 16)]
    assert points[1].actions >= 16 * 16 * 3
    assert [(point.cells[1], point.met) for point in points] == [("8", None), ("16", None)]
    assert replace(points[1], actions=5_000_000, cpu_s=61.0).met is False
    assert "million actions" in scale.scale_svg(points)


def network_at(rate: str, penstock: float, *, slow: bool) -> NetworkRow:
    median = {"torch data parallel": 10.0, "torch 1f1b 2": 40.0, "torch 1f1b 4": 30.0, "1f1b 2": 41.0, "1f1b 4": 45.0}
    return network_row(
        rate=rate, slow=slow, measured_bytes_per_s=25e6, plan="1-1 pipedream", median={**median, "penstock": penstock}
    )


def test_a_network_row_takes_the_better_microbatching_and_asks_more_of_a_slow_network() -> None:
    row = network_at("200 Mbit/s", 52.0, slow=True)
    assert (row.torch_pipeline, row.synchronous) == (40.0, 45.0)
    assert (row.to_best_peer, row.to_data_parallel) == (1.3, 5.2)
    assert not row.met
    assert network_at("200 Mbit/s", 53.0, slow=True).met
    assert network_at("1 Gbit/s", 41.0, slow=False).met
    assert not network_at("1 Gbit/s", 39.0, slow=False).met
    assert row.cells == (
        *("200 Mbit/s\n(200 Mbit/s)", "10.0", "40.0", "45.0", "52.0", "1-1 pipedream", "1.30", "5.20", "NO"),
    )


def test_the_drawing_of_networks_has_a_line_for_each_contender() -> None:
    drawing = ElementTree.fromstring(network_svg([network_at("200 Mbit/s", 53.0, slow=True)]))
    names = {text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Penstock", "torch 1F1B", "DDP"} <= names


def test_a_benchmark_of_networks_says_why_it_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="test hosts need root"):
        run_benchmark("network")
    monkeypatch.undo()
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(ClusterError, match="test hosts need tc; install iproute2"):
        run_benchmark("network")


def played(measured: float, simulated: float, case: str = "vgg") -> SimulatorRow:
    return SimulatorRow(
        case=case,
        network="loopback",
        plan="1-1",
        schedule="1f1b",
        measured=measured,
        simulated=simulated,
        error=simulated / measured - 1,
    )


def test_the_simulators_verdict_counts_errors_and_pairs_in_another_order() -> None:
    near = [played(100.0, 103.0), played(102.0, 101.0), played(200.0, 190.0), played(150.0, 150.0, "transformer")]
    assert verdict(near) == (
        "4 runs: median error 2.0%, worst 5.0%; of 2 pairs of a model that differ by more than 5%, 0 are in another "
        "order when simulated. Wanted: 5%, 12% and none: met."
    )
    crossed = verdict([*near, played(90.0, 110.0)])
    assert "worst 22.2%" in crossed
    assert "4 are in another order" not in crossed
    assert "2 are in another order" in crossed
    assert crossed.endswith("NOT met.")


def test_the_simulators_verdict_says_how_good_the_chosen_numbers_of_microbatches_were() -> None:
    rows = [
        replace(played(90.0, 100.0), microbatches=2, chosen="microbatches"),
        replace(played(100.0, 99.0), microbatches=4),
        replace(played(300.0, 300.0), chosen="all"),
        replace(played(100.0, 100.0, "unet"), chosen="microbatches"),
    ]
    assert verdict(rows).endswith(
        "The chosen number of microbatches is within 5% of the best in 1 of 2 cases, 10.0% below it at worst. "
        "Wanted: all: NOT met."
    )
