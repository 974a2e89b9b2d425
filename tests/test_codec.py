"""Every stored value survives its file, and every broken file is one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import (
    SCHEDULES,
    affine_profile,
    chain_profile,
    clusters,
    graphs,
    law,
    one_device_plan,
    plans,
    profiles,
    slow_law,
)
from penstock import codec
from penstock.cluster import Cluster
from penstock.errors import FormatError, GraphError, PenstockError, ProfileError, ScheduleError
from penstock.graph import LayerGraph
from penstock.plan import Plan
from penstock.profile import Profile
from penstock.run import Result, RunDirectory
from penstock.schedule import Schedule
from penstock.simulate import simulate
from penstock.trace import Trace

finite = st.floats(-1e100, 1e100)
results = st.builds(
    Result,
    samples=st.integers(0, 10**9),
    seconds=finite,
    losses=st.lists(finite, max_size=5).map(tuple),
    checkpoint=st.none() | st.text(max_size=8),
    device_kinds=st.dictionaries(st.text(max_size=3), st.text(max_size=8), max_size=3),
)


def again(value: Any) -> Any:
    return codec.loads(type(value), codec.dumps(value), "file")


@law
@given(graphs())
def test_a_graph_round_trips(graph: LayerGraph) -> None:
    assert again(graph) == graph


@law
@given(profiles(kinds=("cpu", "Tesla V100")))
def test_a_profile_round_trips(profile: Profile) -> None:
    assert again(profile) == profile


@law
@given(clusters())
def test_a_cluster_round_trips(cluster: Cluster) -> None:
    assert again(cluster) == cluster


@slow_law
@given(plans())
def test_a_plan_its_schedule_and_its_trace_round_trip(plan: Plan) -> None:
    assert again(plan) == plan
    schedule = plan.schedule_for([plan.microbatches] * 2)
    assert again(schedule) == schedule
    trace = simulate(plan, 2)
    assert again(trace) == trace


@law
@given(results)
def test_a_result_round_trips(result: Result) -> None:
    assert again(result) == result


def test_a_schedule_file_holds_actions_as_text(tmp_path: Path) -> None:
    schedule = one_device_plan(chain_profile([1.0])).schedule_for([2])
    codec.save(schedule, tmp_path / "schedule.json")
    assert json.loads((tmp_path / "schedule.json").read_text())["programs"] == [["0F0", "0B0", "0F1", "0B1", "0STEP0"]]


def test_a_saved_file_replaces_the_old_one_and_leaves_no_partial_one(tmp_path: Path) -> None:
    path = tmp_path / "made" / "on" / "the way" / "profile.json"
    for seconds in (1.0, 2.0):
        profile = chain_profile([seconds])
        codec.save(profile, path)
        assert codec.load(Profile, path) == profile
        assert [each.name for each in path.parent.iterdir()] == ["profile.json"]


def test_a_value_that_cannot_be_written_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    good = Result(samples=1, seconds=1.0, losses=(), checkpoint=None, device_kinds={})
    codec.save(good, path)
    with pytest.raises(ValueError, match="JSON"):
        codec.save(Result(samples=1, seconds=float("nan"), losses=(), checkpoint=None, device_kinds={}), path)
    assert codec.load(Result, path) == good
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]


def test_optional_fields_may_be_left_out_of_a_file() -> None:
    data = codec.encode(chain_profile([1.0]))
    del data["threads"], data["graph"]["layers"][0]["saved_bytes"], data["graph"]["values"]
    assert codec.loads(Profile, json.dumps(data), "p.json") == chain_profile([1.0])


def test_a_whole_number_is_read_where_a_fraction_is_meant() -> None:
    data = codec.encode(chain_profile([1.0]))
    data["seconds"]["cpu"][0]["forward_s"] = 1
    read = codec.loads(Profile, json.dumps(data), "p.json").seconds["cpu"][0].forward_s
    assert (read, type(read)) == (1.0, float)


def put(path: str, value: Any) -> Any:
    """An edit of a profile's JSON: sets ``graph.layers.0.id`` and the like."""

    def edit(data: Any) -> None:
        *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        for key in way:
            data = data[key]
        data[last] = value

    return edit


def drop(path: str) -> Any:
    def edit(data: Any) -> None:
        *way, last = path.split(".")
        for key in way:
            data = data[key]
        del data[last]

    return edit


BROKEN = [
    ("unknown version", put("format", "penstock.profile/99"), FormatError, ["format", "'99'", "upgrade Penstock"]),
    ("another kind", put("format", "penstock.plan/1"), FormatError, ["format", "penstock.plan/1", "another kind"]),
    ("no format", drop("format"), FormatError, ["format", "penstock.profile/1", "another kind of file"]),
    ("nested version", put("graph.format", "penstock.graph/0"), FormatError, ["graph.format", "'0'", "upgrade"]),
    ("NaN", put("seconds.cpu.1.forward_s", float("nan")), FormatError, ["seconds.cpu[1].forward_s", "measure it"]),
    ("infinity", put("seconds.cpu.0.update_s", float("inf")), FormatError, ["seconds.cpu[0].update_s", "measure it"]),
    ("huge", put("seconds.cpu.0.update_s", 10**400), FormatError, ["seconds.cpu[0].update_s", "measure it"]),
    ("negative", put("seconds.cpu.0.forward_s", -1.0), ProfileError, ["cpu[0]", "forward_s is -1.0", "measure it"]),
    ("negative size", put("graph.values.0.num_bytes", -8), GraphError, ["values[0]", "num_bytes is -8", "0 or more"]),
    ("cycle", put("graph.values.1.consumers", [0]), GraphError, ["graph", "layer0", "cycle"]),
    ("self loop", put("graph.values.0.consumers", [0]), GraphError, ["graph", "layer0", "cycle"]),
    ("edge to nowhere", put("graph.values.0.consumers", [7]), GraphError, ["graph", "'v0'", "7", "nowhere"]),
    ("edge from nowhere", put("graph.values.0.producer", 7), GraphError, ["graph", "'v0'", "7", "nowhere"]),
    ("duplicate id", put("graph.layers.1.id", 0), GraphError, ["graph", "duplicate layer id 0"]),
    ("duplicate name", put("graph.layers.1.name", "layer0"), GraphError, ["graph", "duplicate layer name 'layer0'"]),
    ("unknown parameter", put("graph.layers.1.parameters", ["ghost"]), GraphError, ["layer 1", "'ghost'"]),
    ("no layers", put("graph.layers", []), GraphError, ["graph", "at least one layer"]),
    ("unknown field", put("graph.layers.1.colour", "red"), FormatError, ["graph.layers[1].colour", "saved_bytes"]),
    ("missing field", drop("batch_size"), FormatError, ["batch_size", "missing", "write it again"]),
    ("text for number", put("batch_size", "8"), FormatError, ["batch_size", "a whole number", "'8'"]),
    ("fraction for whole", put("batch_size", 8.5), FormatError, ["batch_size", "a whole number", "8.5"]),
    ("truth for number", put("batch_size", True), FormatError, ["batch_size", "a whole number", "True"]),
    ("truth for cost", put("seconds.cpu.0.update_s", True), FormatError, ["seconds.cpu[0].update_s", "a number"]),
    ("number for text", put("model", 3), FormatError, ["model", "text", "3"]),
    ("text for truth", put("graph.values.0.differentiable", "no"), FormatError, ["differentiable", "true or false"]),
    ("object for list", put("graph.layers", {}), FormatError, ["graph.layers", "a list"]),
    ("list for object", put("seconds", []), FormatError, ["seconds", "an object"]),
    ("null for object", put("graph", None), FormatError, ["graph", "an object (LayerGraph)"]),
    ("too few costs", put("seconds.cpu", []), ProfileError, ["seconds.cpu", "0 entries for 3 layers"]),
    ("no costs", put("seconds", {}), ProfileError, ["seconds", "at least one device kind"]),
    ("no samples", put("batch_size", 0), ProfileError, ["batch_size", "at least 1"]),
    ("no sample at all", put("smallest_microbatch", 0), ProfileError, ["smallest_microbatch is 0", "at least 1"]),
    ("empty microbatch", put("microbatch_size", 0), ProfileError, ["microbatch_size is 0", "above 0"]),
    ("negative loading", put("load_s", -1.0), ProfileError, ["load_s is -1.0", "0 or more"]),
    ("negative own time", put("worker", {"cpu": {"between_s": -1.0}}), ProfileError, ["cpu", "between_s is -1.0"]),
    ("negative uncertainty", put("uncertainty", -0.1), ProfileError, ["uncertainty is -0.1", "0 or more"]),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "error", "words"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_a_broken_profile_is_refused_with_its_file_the_field_and_a_remedy(
    tmp_path: Path, edit: Any, error: type[PenstockError], words: list[str]
) -> None:
    data = codec.encode(chain_profile([1.0, 1.0, 1.0]))
    edit(data)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data))
    with pytest.raises(error) as caught:
        codec.load(Profile, path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert [word for word in words if word not in message] == []
    assert "\n" not in message


BROKEN_SIZES = [
    ("empty", put("microbatch_size", 0), ["microbatch_size is 0.0", "above 0"]),
    ("negative", put("microbatch_size", -2), ["microbatch_size is -2.0", "above 0"]),
    ("twice", put("microbatch_size", 8), ["microbatches of 8 samples have two entries", "each size has one"]),
    ("another kind", put("seconds", {"gpu": []}), ["seconds at 1 samples: ['gpu']", "['cpu']"]),
    ("no kind", put("seconds", {}), ["seconds", "at least one device kind"]),
    ("too few layers", put("seconds.cpu", []), ["seconds.cpu: 0 entries for 2 layers"]),
    ("too few saved", put("saved_bytes", [1]), ["saved_bytes: 1 entries for 2 layers"]),
    ("too many values", put("value_bytes", [1, 2]), ["value_bytes: 2 entries for 1 values"]),
    ("negative saved", put("saved_bytes.1", -5), ["other_sizes[0]", "saved_bytes is -5.0", "measure it again"]),
    ("negative value", put("value_bytes.0", -5), ["other_sizes[0]", "value_bytes is -5.0", "measure it again"]),
    ("negative loading", put("load_s", -0.5), ["other_sizes[0]", "load_s is -0.5", "measure it again"]),
]


@pytest.mark.parametrize(("edit", "words"), [row[1:] for row in BROKEN_SIZES], ids=[row[0] for row in BROKEN_SIZES])
def test_a_broken_microbatch_size_is_refused_by_name(edit: Any, words: list[str]) -> None:
    data = codec.encode(affine_profile(1.0, 1.0))
    edit(data["other_sizes"][0])
    with pytest.raises(ProfileError) as caught:
        codec.loads(Profile, json.dumps(data), "p.json")
    assert str(caught.value).startswith("p.json: ")
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("kept", [0, 1, 20, -3])
def test_a_truncated_file_is_refused_and_says_where_it_ends(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "profile.json"
    path.write_text(codec.dumps(chain_profile([1.0]))[:kept])
    with pytest.raises(FormatError, match=r"profile\.json: not complete JSON \(line 1, column .* write it again"):
        codec.load(Profile, path)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"penstock.profile/1"'])
def test_json_that_is_not_an_object_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match=r"^p\.json: top level: expected an object \(Profile\), found"):
        codec.loads(Profile, text, "p.json")


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 10_000], ids=["nesting", "digits"])
def test_json_that_python_cannot_hold_is_refused_and_not_a_crash(text: str) -> None:
    with pytest.raises(FormatError, match=r"^p\.json: "):
        codec.loads(Profile, text, "p.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"gone\.json: no such file"):
        codec.load(Profile, tmp_path / "gone.json")


def test_a_directory_is_not_read_as_a_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="a directory where a file is expected"):
        codec.load(Profile, tmp_path)


def test_a_path_through_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match=r"profile\.json: cannot be read: Not a directory"):
        codec.load(Profile, tmp_path / "file" / "profile.json")


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"PK\x03\x04\xff\xfe\x00\x80")
    with pytest.raises(FormatError, match=r"model\.pt: not a text file; expected UTF-8 JSON or TOML"):
        codec.load(Profile, path)


def test_a_bad_action_in_a_schedule_file_is_named_by_its_place() -> None:
    data = codec.encode(one_device_plan(chain_profile([1.0])).schedule_for([1]))
    data["programs"][0][1] = "0Q0"
    with pytest.raises(ScheduleError, match=r"^s\.json: programs\[0\]\[1\]: '0Q0' is not an action; write stage"):
        codec.loads(Schedule, json.dumps(data), "s.json")


def test_an_event_that_ends_before_it_starts_is_refused() -> None:
    data = codec.encode(simulate(one_device_plan(chain_profile([1.0])), 1))
    data["events"][0]["end_s"] = -1.0
    with pytest.raises(FormatError, match=r"^t\.json: events\[0\]: event 0F0 lasts from 0\.0 to -1\.0 s"):
        codec.loads(Trace, json.dumps(data), "t.json")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_plan_file_with_a_layer_in_no_stage_is_refused(schedule: str) -> None:
    data = codec.encode(one_device_plan(chain_profile([1.0, 1.0]), schedule=schedule))
    data["stages"][0]["layers"] = [0]
    with pytest.raises(PenstockError, match=r"^plan\.json: each layer belongs to one stage; missing: \[1\]"):
        codec.loads(Plan, json.dumps(data), "plan.json")


def test_an_unfinished_run_directory_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such run directory"):
        RunDirectory(tmp_path / "gone").load()
    with pytest.raises(FormatError, match=r"result\.json is missing\); train to the end first"):
        RunDirectory(tmp_path).load()
