"""Microbatch sizes: what a profile says of those that were measured, those between and those beyond, and of which a
plan makes use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from builders import affine_profile, chain_profile, flat_cluster, law, layer_seconds, plan_of, profiles
from penstock import codec
from penstock.cli.app import app
from penstock.cost import CostModel
from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.plan_costs import PlanCosts
from penstock.planner import make_plan
from penstock.profile import BY_SIZE, NO_TIME, Profile, SizeCosts
from penstock.schedule import family

sizes = st.floats(0.1, 64.0)


def numbers(costs: SizeCosts) -> Iterator[float]:
    """All that depends on the size."""
    for rows in costs.seconds.values():
        yield from (getattr(row, name) for row in rows for name in BY_SIZE)
    yield from (*costs.saved_bytes, *costs.value_bytes, costs.load_s)


@law
@given(profiles(kinds=("cpu", "gpu")))
def test_costs_at_a_measured_size_are_those_measured(profile: Profile) -> None:
    assert profile.measured_sizes == tuple(sorted(profile.measured_sizes))
    for measured in profile.other_sizes:
        assert profile.at(measured.microbatch_size) == measured
    largest = profile.at(profile.microbatch_size)
    assert largest.seconds == profile.seconds
    assert largest.saved_bytes == tuple(layer.saved_bytes for layer in profile.graph.layers)
    assert largest.value_bytes == tuple(value.num_bytes for value in profile.graph.values)
    assert largest.load_s == profile.load_s


@law
@given(profiles(), st.floats(0.01, 0.99))
def test_costs_between_two_measured_sizes_are_on_a_line(profile: Profile, share: float) -> None:
    for low, high in zip(profile.measured_sizes, profile.measured_sizes[1:], strict=False):
        between = profile.at(low + share * (high - low))
        for first, found, last in zip(*map(numbers, (profile.at(low), between, profile.at(high))), strict=True):
            assert found == pytest.approx(first + share * (last - first), rel=1e-9, abs=1e-9)


@law
@given(profiles(one_size=True), sizes)
def test_costs_from_one_measured_size_are_in_proportion(profile: Profile, size: float) -> None:
    known = numbers(profile.at(profile.microbatch_size))
    assert list(numbers(profile.at(size))) == pytest.approx([x * size / profile.microbatch_size for x in known])


@law
@given(profiles(), sizes, st.floats(1.0, 10.0))
def test_beyond_the_measured_sizes_costs_neither_fall_nor_grow_faster_than_in_proportion(
    profile: Profile, size: float, times: float
) -> None:
    smallest, *_, largest = (*profile.measured_sizes, profile.measured_sizes[-1])
    less, more = size, size * times
    if less < largest and more > smallest:  # some of it lies between
        less, more = largest, largest * times
    for small, large in zip(numbers(profile.at(less)), numbers(profile.at(more)), strict=True):
        assert small <= large * (1 + 1e-9)
        assert large <= small * more / less * (1 + 1e-9)


@law
@given(profiles(), sizes)
def test_updates_and_averaging_take_as_long_at_any_size(profile: Profile, size: float) -> None:
    for found, known in zip(profile.at(size).seconds["cpu"], profile.seconds["cpu"], strict=True):
        assert replace(known, **{name: getattr(found, name) for name in BY_SIZE}) == found


# Old files


def test_a_file_without_sizes_and_own_time_loads_and_costs_in_proportion() -> None:
    profile = chain_profile([1.0, 2.0], batch_size=8, microbatch_size=4, value_bytes=40, saved_bytes=80)
    data = codec.encode(profile)
    for name in ("load_s", "worker", "other_sizes", "smallest_microbatch", "uncertainty"):
        del data[name]
    for layer in data["graph"]["layers"]:
        del layer["reads_data"]
    for row in data["seconds"]["cpu"]:
        del row["average_s"]
    old = codec.loads(Profile, json.dumps(data), "old.json")
    assert old == profile
    assert (old.measured_sizes, old.worker_on("cpu"), old.uncertainty) == ((4,), NO_TIME, 0.0)
    plan = plan_of(old, flat_cluster(2), [[0], [1]], microbatches=4)
    costs = PlanCosts(plan)
    assert [costs.stage_s(stage) for stage in range(2)] == pytest.approx([1.5, 3.0])
    assert (costs.message_bytes(0, 1), costs.model.saved_bytes(0)) == (20, 40)
    assert plan.extrapolated == ""


def test_a_plan_file_without_what_was_passed_over_loads() -> None:
    plan = make_plan(chain_profile([1.0, 2.0]), flat_cluster(2))
    data = codec.encode(plan)
    del data["prediction"]["passed_over"]
    assert codec.loads(Plan, json.dumps(data), "old.json") == plan


# What a plan makes of them


@pytest.mark.parametrize(("microbatches", "size"), [(8, "1"), (3, "2.66667"), (1, "8")])
def test_a_plan_says_when_its_microbatches_are_extrapolated(microbatches: int, size: str) -> None:
    profile = affine_profile(1.0, 1.0, measured=(3, 4))
    plan = make_plan(profile, flat_cluster(2), schedule="1f1b", microbatches=microbatches)
    assert plan.extrapolated.startswith(
        f"microbatches of {size} samples are extrapolated from profiled ones of 3 to 4;"
    )


def test_a_plan_of_measured_sizes_and_of_those_between_does_not_say_that_it_extrapolates() -> None:
    for microbatches in (1, 2, 3, 8):
        profile = affine_profile(1.0, 1.0, measured=(1, 8))
        assert make_plan(profile, flat_cluster(2), schedule="1f1b", microbatches=microbatches).extrapolated == ""


HEAVY = {"parameter_bytes": 10**9}
"""Too much to average over a link of 1 MB/s: data parallelism is out of the question."""
SLOW = flat_cluster(2, bytes_per_s=1e6)


def test_few_microbatches_are_taken_where_small_ones_cost_as_much_as_large_ones() -> None:
    def microbatches(fixed_s: float, sample_s: float) -> int:
        profile = affine_profile(fixed_s, sample_s, layers=4, batch_size=16, measured=(1, 8, 16), **HEAVY)
        plan = make_plan(profile, SLOW, schedule="1f1b")
        measured = {
            count: make_plan(profile, SLOW, schedule="1f1b", microbatches=count).prediction.seconds_per_minibatch
            for count in (1, 2, 4, 8)
        }
        assert plan.prediction.seconds_per_minibatch <= min(measured.values()) * 1.01
        return plan.microbatches

    assert microbatches(0.0, 1e-3) == 8
    assert microbatches(2e-3, 1e-3) == 2
    assert microbatches(1e-2, 1e-5) == 1


def test_as_many_microbatches_are_taken_as_the_model_has_samples_for() -> None:
    profile = affine_profile(0.0, 1e-3, layers=2, batch_size=16, measured=(4, 16), **HEAVY)
    assert make_plan(profile, SLOW, schedule="1f1b").microbatches == 8
    for smallest, most in ((2, 8), (3, 5), (5, 3), (16, 1), (99, 1)):
        choosy = replace(profile, smallest_microbatch=smallest)
        assert make_plan(choosy, SLOW, schedule="1f1b").microbatches <= most


def test_microbatches_that_are_smaller_than_the_model_takes_are_refused() -> None:
    profile = affine_profile(0.0, 1e-3, layers=2, batch_size=16, measured=(4, 16), **HEAVY)
    choosy = replace(profile, smallest_microbatch=3)
    assert make_plan(choosy, SLOW, schedule="1f1b", microbatches=5).microbatches == 5
    with pytest.raises(
        PlanError, match=r"8 microbatches from a batch of 16 are of 2 samples, .* needs 3; choose 1 to 5"
    ):
        make_plan(choosy, SLOW, schedule="1f1b", microbatches=8)


# A gain that predictions cannot be trusted with


def gaining(*, uncertainty: float) -> Profile:
    """Two stages in two microbatches take 66 ms, one device in one of them 68 ms, and in two of them 88 ms."""
    return replace(affine_profile(3.34e-3, 1e-3, **HEAVY), uncertainty=uncertainty)


def test_one_device_is_taken_where_a_pipeline_gains_less_than_predictions_are_off_by() -> None:
    plan = make_plan(gaining(uncertainty=0.05), SLOW, schedule="1f1b")
    assert (len(plan.stages), plan.devices, plan.microbatches) == (1, (0,), 1)
    assert plan.prediction.passed_over == (
        "2 stages on 2 devices promised 3.0% more, less than the 5% that predictions are off by"
    )
    assert plan.prediction.seconds_per_minibatch == plan.prediction.one_device_s == pytest.approx(0.06804)


@pytest.mark.parametrize("uncertainty", [0.0, 0.02])
def test_a_pipeline_is_taken_where_it_gains_more_than_predictions_are_off_by(uncertainty: float) -> None:
    plan = make_plan(gaining(uncertainty=uncertainty), SLOW, schedule="1f1b")
    assert (len(plan.stages), plan.microbatches, plan.prediction.passed_over) == (2, 2, "")
    assert plan.prediction.seconds_per_minibatch == pytest.approx(0.06606)


def test_data_parallelism_is_taken_where_a_pipeline_gains_less_than_predictions_are_off_by() -> None:
    """A minibatch of each of two replicas takes 3 s and averaging 0.1 s; two stages take 3 s without it."""
    profile = chain_profile([0.5, 0.5], batch_size=1, parameter_bytes=10**5 // 2)
    cluster = flat_cluster(2, bytes_per_s=1e6)
    trusted = make_plan(profile, cluster)
    assert [len(stage.devices) for stage in trusted.stages] == [1, 1]
    careful = make_plan(replace(profile, uncertainty=0.1), cluster)
    assert [len(stage.devices) for stage in careful.stages] == [2]
    assert careful.prediction.passed_over.startswith("2 stages on 2 devices promised ")
    assert careful.prediction.seconds_per_minibatch == careful.prediction.data_parallel_s


def test_one_device_is_taken_where_several_replicas_gain_less_than_predictions_are_off_by() -> None:
    profile = chain_profile([1.0], batch_size=1, parameter_bytes=10**6)
    cluster = flat_cluster(2, bytes_per_s=3.5e5)  # a round of two takes 3 s and 2.86 s to average
    assert len(make_plan(profile, cluster).devices) == 2
    careful = make_plan(replace(profile, uncertainty=0.05), cluster)
    assert len(careful.devices) == 1
    assert careful.prediction.passed_over.startswith("data parallelism on 2 devices promised 2.")


@law
@given(profiles(), st.sampled_from(["pipedream", "1f1b", "gpipe"]), st.floats(0.0, 0.5))
def test_a_careful_plan_is_slower_than_the_fastest_by_no_more_than_the_uncertainty(
    profile: Profile, schedule: str, uncertainty: float
) -> None:
    cluster = flat_cluster(3, bytes_per_s=1e7)
    bold = make_plan(profile, cluster, schedule=schedule)
    careful = make_plan(replace(profile, uncertainty=uncertainty), cluster, schedule=schedule)
    limit_s = bold.prediction.seconds_per_minibatch * (1 + uncertainty)
    assert careful.prediction.seconds_per_minibatch <= limit_s * (1 + 1e-9)
    assert bool(careful.prediction.passed_over) == (
        careful.prediction.seconds_per_minibatch > bold.prediction.seconds_per_minibatch
    )


def test_plan_and_show_say_what_was_passed_over_and_extrapolated(tmp_path: Path) -> None:
    profile, output = tmp_path / "profile.json", tmp_path / "plan.json"
    made = replace(gaining(uncertainty=0.05), batch_size=16)
    codec.save(made, profile)
    asked = ["plan", str(profile), "--cluster", "2@1MB/s", "--schedule", "1f1b", "--output", str(output)]
    answer = CliRunner().invoke(app, [*asked, "--microbatches", "1", "--json"])
    assert answer.exit_code == 0, answer.output
    (note,) = json.loads(answer.stdout)["notes"]
    assert note.startswith("microbatches of 16 samples are extrapolated from profiled ones of 1 to 8; profile with")
    codec.save(gaining(uncertainty=0.05), profile)
    shown = CliRunner().invoke(app, asked).stdout
    again = CliRunner().invoke(app, ["show", str(output)]).stdout
    for text in (shown, again):
        assert "2 stages on 2 devices promised 3.0% more" in " ".join(text.split())


# The costs of a worker


def test_a_worker_has_its_own_time_per_action_update_and_average() -> None:
    own = replace(
        NO_TIME,
        forward_s=1.0,
        backward_s=2.0,
        backward_input_s=4.0,
        backward_weight_s=8.0,
        update_s=16.0,
        copy_s=32.0,
        average_s=64.0,
        between_s=0.5,
    )
    row = replace(layer_seconds(0.0), average_s=3.0)
    profile = replace(chain_profile([0.0]), worker={"cpu": own}, load_s=0.25, seconds={"cpu": (row,)})
    costs = CostModel(profile=profile, cluster=flat_cluster(1), microbatch_size=2)
    assert costs.own_microbatch_s(0, family("1f1b")) == 1.0 + 2.0 + 2 * 0.5
    assert costs.own_microbatch_s(0, family("zb-h1")) == 1.0 + 4.0 + 8.0 + 3 * 0.5
    assert costs.own_microbatch_s(0, family("inference")) == 1.0 + 0.5
    assert [costs.own_update_s(0, stashed=stashed) for stashed in (False, True)] == [16.5, 48.5]
    assert costs.own_average_s([0], 0) == 64.0 + 3.0
    assert costs.load_s(0) == 0.5
