"""No file from outside gives a traceback: it is used, or refused by a PenstockError that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from builders import affine_profile
from mutations import fuzz
from penstock import codec
from penstock.cli.app import app
from penstock.cluster import parse_cluster
from penstock.errors import ClusterError, FormatError, GraphError, PenstockError, ProfileError, ScheduleError
from penstock.planner import make_plan
from penstock.profile import Profile
from penstock.simulate import Conditions, parse_conditions, simulate
from penstock.trace import Trace


def test_mutated_files_are_used_or_refused_but_never_a_traceback(tmp_path: Path) -> None:
    troubles = [f"seed {seed}, {name}: {trouble}" for seed, name, _, trouble, _ in fuzz(tmp_path, 0, 360) if trouble]
    assert not troubles


PROFILE = codec.dumps(affine_profile(1e-3, 1e-4, layers=3))
PLAN = make_plan(affine_profile(1e-3, 1e-4, layers=3), parse_cluster("local:2"))
TRACE = codec.dumps(simulate(PLAN, 4))


def changed(text: str, *path: str | int, to: Any) -> str:
    data = json.loads(text)
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return json.dumps(data)


def refusal(tmp_path: Path, text: str) -> PenstockError:
    file = tmp_path / "file.json"
    file.write_text(text)
    error = CliRunner().invoke(app, ["show", str(file)]).exception
    assert isinstance(error, PenstockError), error
    assert str(error).startswith(str(file))
    assert "\n" not in str(error)
    return error


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"format":' + "[" * 900 + "]" * 900 + "}"])
def test_deep_nesting_is_refused(text: str, tmp_path: Path) -> None:
    assert isinstance(refusal(tmp_path, text), FormatError)


def test_deep_nesting_in_toml_is_refused() -> None:
    with pytest.raises(FormatError, match=r"slow\.toml: not TOML that can be read"):
        parse_conditions("a = " + "[" * 100_000, "slow.toml")


@pytest.mark.parametrize("tag", [[], {}, None, 3, "penstock.plan/99"])
def test_a_format_that_is_no_text_is_refused(tag: Any, tmp_path: Path) -> None:
    assert "format" in str(refusal(tmp_path, changed(PROFILE, "format", to=tag)))


def test_a_size_that_no_computer_has_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, changed(PROFILE, "graph", "layers", 0, "saved_bytes", to=10**59))
    assert "graph.layers[0].saved_bytes: a number of 60 digits" in str(error)
    assert isinstance(refusal(tmp_path, changed(PROFILE, "graph", "values", 0, "num_bytes", to=-1)), GraphError)


def test_seconds_that_add_up_to_infinity_are_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, changed(PROFILE, "seconds", "cpu", 0, "update_s", to=1e308))
    assert "seconds.cpu[0].update_s: 1e+308" in str(error)
    error = refusal(tmp_path, changed(PROFILE, "seconds", "cpu", 0, "update_s", to=1e20))
    assert isinstance(error, ProfileError)


def test_a_trace_with_a_sample_too_few_is_refused(tmp_path: Path) -> None:
    samples = json.loads(TRACE)["samples"]
    error = refusal(tmp_path, changed(TRACE, "samples", to=samples[:-1]))
    assert f"is of microbatch {len(samples) - 1}; there are {len(samples) - 1}" in str(error)


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    assert "expected text in Unicode" in str(refusal(tmp_path, changed(PROFILE, "model", to="\ud800")))


def test_more_devices_than_a_cluster_has_are_refused_before_they_are_made() -> None:
    for text in ("local:999999999", "99999@1GB/s,99999@1GB/s"):
        with pytest.raises(FormatError, match="a cluster has at most 65536"):
            parse_cluster(text)


def test_a_schedule_file_that_leaves_out_actions_is_refused_before_it_is_simulated() -> None:
    with pytest.raises(ScheduleError, match=r"never runs 0B[13]"):
        make_plan(PLAN.profile, PLAN.cluster, schedule="custom", custom=["0F0 0F1 0B0", "1F0 1B0 1F1 1B1"])


def test_random_slowdowns_too_short_to_be_simulated_are_refused() -> None:
    stragglers = {"times": 2.0, "every_s": 1e-12, "lasting_s": 1.0}
    text = json.dumps({"format": Conditions.FORMAT, "stragglers": [stragglers]})
    with pytest.raises(ClusterError, match="at least 1e-06 s"):
        parse_conditions(text, "slow.json")


def test_the_values_of_good_files_are_left_as_they_are() -> None:
    assert codec.loads(Profile, PROFILE, "profile.json") == PLAN.profile
    assert codec.dumps(codec.loads(Trace, TRACE, "trace.json")) == TRACE
