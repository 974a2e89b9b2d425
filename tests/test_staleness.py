"""How old gradients are when they are applied: as schedules have it, and as workers found it."""

from __future__ import annotations

import functools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import law, minibatch_sizes, pipelines
from in_threads import even_plan, profile_of, run_in_threads
from models import make_job
from penstock import Remedy
from penstock.errors import FormatError, JobError
from penstock.runtime.worker.assemble import make_epoch
from penstock.schedule import Pipeline, Staleness, build_schedule, staleness_of, steady_staleness, usual_depth

STEADY = {
    ("pipedream", (1, 1, 1)): (2, 1, 0),
    ("pipedream", (1, 1)): (1, 0),
    ("vertical", (1, 1, 1)): (2, 2, 2),
    ("2bw", (1, 1, 1)): (1, 1, 1),
    ("1f1b", (1, 1, 1)): (0, 0, 0),
    ("zb-h1", (1, 1)): (0, 0),
}


@pytest.mark.parametrize(("schedule", "replicas"), STEADY, ids=str)
def test_staleness_in_steady_state(schedule: str, replicas: tuple[int, ...]) -> None:
    plan = even_plan(
        profile_of("conv"), replicas, schedule, microbatches=1 if schedule in ("pipedream", "vertical") else 4
    )
    expected = STEADY[schedule, replicas]
    assert tuple(stage.most for stage in plan.staleness) == expected
    assert tuple(stage.mean for stage in plan.staleness) == expected


@pytest.mark.parametrize("schedule", ["pipedream", "vertical", "2bw", "gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("replicas", [(1, 1, 1), (1, 2), (3, 1)], ids=str)
def test_workers_find_the_staleness_of_their_schedule(schedule: str, replicas: tuple[int, ...]) -> None:
    make = functools.partial(make_job, "conv", samples=61, batch_size=4, epochs=2)
    plan = even_plan(
        profile_of("conv"), replicas, schedule, microbatches=1 if schedule in ("pipedream", "vertical") else 3
    )
    found = [Counter[int]() for _ in replicas]
    for assembly in run_in_threads(plan, make):
        for index, stage in assembly.worker.stages.items():
            found[index].update(stage.weights.staleness)
    expected = [Counter[int]() for _ in replicas]
    for number in range(2):
        for counts, stage in zip(
            expected, staleness_of(plan.schedule_for(make_epoch(make(), plan, number).minibatches)), strict=True
        ):
            counts.update(dict(enumerate(stage.microbatches)))
    assert [Staleness.counted(each) for each in found] == [Staleness.counted(each) for each in expected]


@given(pipelines(), minibatch_sizes)
def test_synchronous_gradients_are_never_stale(pipeline: object, minibatches: list[int]) -> None:
    for stage in staleness_of(build_schedule("1f1b", pipeline, minibatches)):  # type: ignore[arg-type]
        assert stage == Staleness((sum(minibatches),))


@law
@given(pipelines(), st.sampled_from(["pipedream", "vertical", "2bw"]))
def test_the_staleness_of_a_full_pipeline_is_that_of_its_schedule(pipeline: Pipeline, name: str) -> None:
    depths = [usual_depth(name, pipeline, stage) for stage in range(pipeline.num_stages)]
    turn, size = math.lcm(*pipeline.round_sizes), max(pipeline.round_sizes) if name == "2bw" else 1
    filling = max(rounds * depth for rounds, depth in zip(pipeline.round_sizes, depths, strict=True))
    schedule = build_schedule(name, pipeline, [size] * (-(-(filling + turn) // size) + 2), depths)
    over = range(schedule.microbatches - turn, schedule.microbatches)
    steady = steady_staleness(name, pipeline, depths)
    assert [(s.mean, s.most) for s in steady] == [(s.mean, s.most) for s in staleness_of(schedule, over)]


def test_mean_and_most_of_a_count() -> None:
    assert Staleness.counted({0: 1, 2: 3}) == Staleness((1, 0, 3))
    assert Staleness((1, 0, 3)).mean == 1.5
    assert Staleness((1, 3, 0)).most == 1
    with pytest.raises(FormatError, match="count at least one"):
        Staleness((0, 0))


def test_learning_rates_rise_from_one_over_the_delay_to_the_whole() -> None:
    remedy = Remedy(rate_steps=100)
    assert [remedy.rate(3, minibatches) for minibatches in (0, 50, 100, 1000)] == pytest.approx([1 / 4, 1 / 2, 1, 1])
    assert remedy.rate(0, 0) == 1.0


@given(st.integers(0, 20), st.integers(0, 1000))
def test_nothing_is_lowered_or_looked_ahead_by_default(staleness: int, minibatches: int) -> None:
    assert Remedy().rate(staleness, minibatches) == 1.0
    assert Remedy().distance(staleness) == 0.0


def test_the_distance_is_what_momentum_alone_would_go() -> None:
    assert Remedy(look_ahead=1.0).distance(3) == 3.0
    assert Remedy(look_ahead=0.5).distance(3) == 0.875
    assert Remedy(look_ahead=0.5).distance(0) == 0.0


@pytest.mark.parametrize("wrong", [{"rate_steps": -1}, {"rate_steps": 1.5}, {"look_ahead": -0.1}, {"look_ahead": 1.1}])
def test_a_remedy_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    (field,) = wrong
    with pytest.raises(JobError, match=rf"Remedy\.{field} is"):
        Remedy(**wrong)  # type: ignore[arg-type]
