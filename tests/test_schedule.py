"""Invariants 3 and 6: one replica per microbatch and stage, and no schedule that is built can deadlock."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import SCHEDULES, SYNCHRONOUS, TRAINING, law, minibatch_sizes, pipeline_of, pipelines, replica_shares
from penstock.errors import ScheduleError
from penstock.schedule import (
    Action,
    Kind,
    Pipeline,
    Schedule,
    build_schedule,
    builders,
    check,
    default_depth,
    dependencies,
    depths_with_slack,
    execution_order,
    family,
    participants,
    replica_depth,
)

actions = st.builds(Action, st.integers(0, 10**6), st.sampled_from(Kind), st.integers(0, 10**6))


@st.composite
def schedules(draw: st.DrawFn, names: Sequence[str] = TRAINING) -> Schedule:
    """Any replication, shares, skips and remainders; tied stages too where the schedule allows them."""
    name = draw(st.sampled_from(names))
    pipeline, sizes = draw(pipelines(ties=not family(name).asynchronous)), draw(minibatch_sizes)
    widest = max(pipeline.round_sizes)
    if widest > family(name).widest_round(min(sizes)):
        sizes = [*(max(size, widest) for size in sizes[:-1]), sizes[-1]]
    return build_schedule(name, pipeline, sizes)


def of_kind(program: tuple[Action, ...], *kinds: Kind) -> list[Action]:
    return [action for action in program if action.kind in kinds]


@law
@given(actions)
def test_an_action_round_trips_through_its_text(action: Action) -> None:
    assert Action.parse(str(action)) == action


def test_an_action_reads_as_stage_kind_and_number() -> None:
    assert str(Action(2, Kind.FORWARD, 0)) == "2F0"
    assert str(Action(1, Kind.STEP, 13)) == "1STEP13"


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0 ", "2F-1", "2F0.5", "SYNC"])
def test_text_that_is_no_action_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action; write stage, kind and microbatch such as 2F0"):
        Action.parse(text)


@law
@given(schedules(SCHEDULES))
def test_no_schedule_deadlocks_whatever_the_replication_the_skips_and_the_remainder(schedule: Schedule) -> None:
    check(schedule)


@law
@given(schedules())
def test_every_stage_does_every_microbatch_once_forward_and_once_backward_on_the_same_worker(
    schedule: Schedule,
) -> None:
    ran: dict[Action, list[int]] = {}
    for worker, program in enumerate(schedule.programs):
        for action in of_kind(program, Kind.FORWARD, Kind.BACKWARD):
            ran.setdefault(action, []).append(worker)
    for stage, replicas in enumerate(schedule.pipeline.workers):
        for microbatch in range(schedule.microbatches):
            forward = ran.pop(Action(stage, Kind.FORWARD, microbatch))
            assert len(forward) == 1
            assert forward[0] in replicas
            assert ran.pop(Action(stage, Kind.BACKWARD, microbatch)) == forward
    assert ran == {}


@law
@given(schedules(["inference"]))
def test_inference_is_every_microbatch_forward_once_at_every_stage_and_nothing_else(schedule: Schedule) -> None:
    pipeline = schedule.pipeline
    for worker, program in enumerate(schedule.programs):
        mine = pipeline.microbatches_of(worker, range(schedule.microbatches))
        assert program == tuple(Action(pipeline.stage_of[worker], Kind.FORWARD, m) for m in mine)
    assert not schedule.trains


@law
@given(schedules(SCHEDULES))
def test_the_order_of_execution_respects_every_dependency_and_every_program(schedule: Schedule) -> None:
    done: set[Action] = set()
    ran: list[list[Action]] = [[] for _ in schedule.programs]
    for moment in execution_order(schedule):
        for worker, action in moment:
            assert set(dependencies(action, schedule.pipeline)) <= done
            assert {each for each, _ in moment} == set(participants(action, worker, schedule.pipeline))
            ran[worker].append(action)
        done.update(action for _, action in moment)
    assert tuple(map(tuple, ran)) == schedule.programs


@law
@given(schedules())
def test_a_worker_never_keeps_more_in_flight_than_its_depth(schedule: Schedule) -> None:
    pipeline = schedule.pipeline
    for worker, program in enumerate(schedule.programs):
        most = in_flight = 0
        for action in program:
            in_flight += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(action.kind, 0)
            most = max(most, in_flight)
        rounds = [schedule.round_members(0, index) for index in range(len(schedule.rounds[0]))]
        whole_minibatch = max(len(pipeline.microbatches_of(worker, members)) for members in rounds)
        depth = replica_depth(default_depth(pipeline, pipeline.stage_of[worker]), pipeline.share_of(worker))
        assert most <= (whole_minibatch if family(schedule.name).all_forwards_first else depth)


@law
@given(pipelines(), minibatch_sizes, st.sampled_from(TRAINING), st.data())
def test_depths_that_fall_along_the_pipeline_are_kept_and_never_deadlock(
    pipeline: Pipeline, minibatches: list[int], name: str, data: st.DataObject
) -> None:
    single = pipeline_of([1] * pipeline.num_stages, pipeline.reads)
    depths = sorted(data.draw(st.lists(st.integers(1, 6), min_size=single.num_stages, max_size=single.num_stages)))
    schedule = build_schedule(name, single, minibatches, depths[::-1])
    check(schedule)
    if not family(name).all_forwards_first:
        for program, depth in zip(schedule.programs, depths[::-1], strict=True):
            first = next(i for i, action in enumerate(program) if action.kind is Kind.BACKWARD)
            assert first <= depth


@law
@given(schedules())
def test_a_step_follows_all_backwards_of_its_round_and_precedes_those_of_the_next(schedule: Schedule) -> None:
    for worker, program in enumerate(schedule.programs):
        stage = schedule.pipeline.stage_of[worker]
        stepped = -1
        pending: set[int] = set()
        for action in of_kind(program, Kind.BACKWARD, Kind.STEP):
            if action.kind is Kind.BACKWARD:
                assert schedule.round_of(stage, action.index) == stepped + 1
                pending.add(action.index)
            else:
                members = schedule.round_members(stage, action.index)
                assert pending == set(schedule.pipeline.microbatches_of(worker, members))
                stepped, pending = action.index, set()
        assert stepped == len(schedule.rounds[stage]) - 1
        assert pending == set()


@law
@given(schedules())
def test_all_replicas_of_a_stage_run_the_same_rounds_in_the_same_order(schedule: Schedule) -> None:
    for stage, replicas in enumerate(schedule.pipeline.workers):
        rounds = range(len(schedule.rounds[stage]))
        shared = len(schedule.pipeline.sync_workers(stage)) > 1
        kinds = (Kind.SYNC, Kind.STEP) if shared else (Kind.STEP,)
        expected = [Action(stage, kind, index) for index in rounds for kind in kinds]
        for worker in replicas:
            assert of_kind(schedule.programs[worker], Kind.SYNC, Kind.STEP) == expected


@law
@given(schedules())
def test_rounds_divide_the_microbatches_without_a_gap(schedule: Schedule) -> None:
    for stage in range(schedule.pipeline.num_stages):
        members = [m for index in range(len(schedule.rounds[stage])) for m in schedule.round_members(stage, index)]
        assert members == list(range(schedule.microbatches))


@law
@given(pipelines(ties=True), minibatch_sizes, st.sampled_from(SYNCHRONOUS))
def test_stages_steps_are_the_minibatches_under_a_synchronous_schedule(
    pipeline: Pipeline, minibatches: list[int], name: str
) -> None:
    schedule = build_schedule(name, pipeline, minibatches)
    for stage in range(pipeline.num_stages):
        members = [len(schedule.round_members(stage, i)) for i in range(len(schedule.rounds[stage]))]
        assert members == minibatches


@law
@given(pipelines(), minibatch_sizes)
def test_under_pipedream_a_stage_steps_after_every_replica_has_had_its_share(
    pipeline: Pipeline, minibatches: list[int]
) -> None:
    schedule = build_schedule("pipedream", pipeline, minibatches)
    for stage, (replicas, shares) in enumerate(zip(pipeline.workers, pipeline.shares, strict=True)):
        rounds = [schedule.round_members(stage, i) for i in range(len(schedule.rounds[stage]))]
        for members in rounds[:-1]:
            assert tuple(len(pipeline.microbatches_of(worker, members)) for worker in replicas) == shares
        assert 1 <= len(rounds[-1]) <= sum(shares)


@law
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_in_any_part_of_a_round_a_replica_has_had_its_share_to_within_one(shares: list[int]) -> None:
    """So that an unequal stage passes microbatches on as evenly as it can, and nobody waits for the end of a round."""
    pipeline = pipeline_of([len(shares)], shares=[shares])
    for seen in range(1, 2 * sum(shares) + 1):
        for worker, share in enumerate(shares):
            had = len(pipeline.microbatches_of(worker, range(seen)))
            assert abs(had - seen * share / sum(shares)) <= 1 + max(shares) / sum(shares)


@pytest.mark.parametrize("name", SCHEDULES)
def test_fewer_microbatches_than_stages_and_replicas_still_run(name: str) -> None:
    schedule = build_schedule(name, pipeline_of([4, 3, 4, 2]), [1])
    check(schedule)
    assert sum(len(of_kind(program, Kind.FORWARD)) for program in schedule.programs) == 4


def test_tied_stages_synchronise_together_over_any_chain_of_ties() -> None:
    pipeline = pipeline_of([1, 2, 1, 1], ties=[(0, 1), (1, 3)])
    assert pipeline.sync_stages == ((0, 1, 3), (0, 1, 3), (2,), (0, 1, 3))
    assert pipeline.sync_workers(3) == (0, 1, 2, 4)


def test_pipedream_refuses_tied_stages_and_says_what_to_use() -> None:
    with pytest.raises(ScheduleError, match=r"stages \(0, 1\) share a weight.*use 1f1b or gpipe, or a plan with"):
        build_schedule("pipedream", pipeline_of([1, 1], ties=[(0, 1)]), [4])


def test_an_unknown_schedule_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        ScheduleError, match="schedule 'zigzag' is unknown; choose one of gpipe, 1f1b, pipedream, vertical, 2bw"
    ):
        build_schedule("zigzag", pipeline_of([1]), [1])


@pytest.mark.parametrize("minibatches", [[], [0], [3, 0, 2]])
def test_a_minibatch_without_microbatches_is_refused(minibatches: list[int]) -> None:
    with pytest.raises(ScheduleError, match="each has at least one"):
        build_schedule("1f1b", pipeline_of([1]), minibatches)


def with_program(schedule: Schedule, worker: int, text: str) -> Schedule:
    programs = list(schedule.programs)
    programs[worker] = tuple(map(Action.parse, text.split()))
    return replace(schedule, programs=tuple(programs))


def test_two_swapped_actions_that_deadlock_are_found_and_the_blocked_action_of_each_worker_is_marked() -> None:
    good = build_schedule("1f1b", pipeline_of([1, 1]), [2], depths=[1, 1])
    assert [str(action) for action in good.programs[0]] == ["0F0", "0B0", "0F1", "0B1", "0STEP0"]
    check(good)
    swapped = with_program(good, 1, "1F0 1F1 1B0 1B1 1STEP0")
    with pytest.raises(ScheduleError) as caught:
        check(swapped)
    assert str(caught.value).splitlines() == [
        "schedule 1f1b deadlocks:",
        "  worker 0: 0F0 [0B0] 0F1 0B1 0STEP0   waits for 1B0",
        "  worker 1: 1F0 [1F1] 1B0 1B1 1STEP0   waits for 0F1",
    ]


def test_a_later_stage_that_fills_deeper_than_an_earlier_one_is_found_to_deadlock() -> None:
    schedule = build_schedule("1f1b", pipeline_of([1, 1]), [4], depths=[1, 3])
    with pytest.raises(ScheduleError, match=r"\[0B0\].*waits for 1B0\n.*\[1F1\].*waits for 0F1"):
        check(schedule)


def test_a_meeting_that_a_replica_never_comes_to_is_found() -> None:
    schedule = build_schedule("1f1b", pipeline_of([2]), [2])
    absent = with_program(schedule, 1, "0F1 0B1 0STEP0")
    with pytest.raises(
        ScheduleError, match=r"worker 0: 0F0 0B0 \[0SYNC0\] 0STEP0   waits for workers \(0, 1\)"
    ) as caught:
        check(absent)
    assert "worker 1: finished" in str(caught.value)


def test_a_forward_left_out_of_inference_is_named_and_a_backward_is_not_missed() -> None:
    schedule = build_schedule("inference", pipeline_of([1, 1]), [2])
    check(schedule)
    with pytest.raises(ScheduleError, match="worker 1 never runs 1F1; add it"):
        check(with_program(schedule, 1, "1F0"))


def test_replicas_that_meet_in_different_order_are_found_to_deadlock() -> None:
    schedule = build_schedule("1f1b", pipeline_of([2]), [2, 2])
    crossed = with_program(schedule, 1, "0F1 0B1 0F3 0B3 0SYNC1 0STEP1 0SYNC0 0STEP0")
    with pytest.raises(ScheduleError, match=r"\[0SYNC0\](.|\n)*\[0SYNC1\]"):
        check(crossed)


def test_a_meeting_repeated_by_one_replica_alone_is_found_to_deadlock() -> None:
    schedule = build_schedule("1f1b", pipeline_of([2]), [2])
    repeated = with_program(schedule, 1, "0F1 0B1 0SYNC0 0SYNC0 0STEP0")
    with pytest.raises(ScheduleError, match=r"worker 1: 0F1 0B1 0SYNC0 \[0SYNC0\]"):
        check(repeated)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("0F0 0B0 0F1 0F0 0B1 0STEP0", "worker 0 runs 0F0 twice"),
        ("0F0 0B0 0F1 0STEP0", "worker 0 never runs 0B1; add it"),
        ("0F0 0B0 0STEP0", "worker 0 never runs 0F1; add it"),
    ],
)
def test_an_action_done_twice_or_left_out_is_named(program: str, words: str) -> None:
    schedule = with_program(build_schedule("1f1b", pipeline_of([1]), [2]), 0, program)
    with pytest.raises(ScheduleError, match=words):
        check(schedule)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"workers": (), "reads": ()}, "at least one stage"),
        ({"reads": ((),)}, "2 stages but 1 lists"),
        ({"workers": ((0,), (0,))}, "use each once"),
        ({"workers": ((0,), (2,))}, "number them 0, 1, 2"),
        ({"reads": ((1,), ())}, "a stage reads from earlier stages only"),
        ({"reads": ((), (1,))}, "a stage reads from earlier stages only"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused(change: dict[str, tuple[tuple[int, ...], ...]], words: str) -> None:
    fields = {"workers": ((0,), (1,)), "reads": ((), (0,))}
    with pytest.raises(ScheduleError, match=words):
        Pipeline(**fields | change)


def test_a_backward_waits_for_its_own_forward_and_for_every_stage_that_read_from_it() -> None:
    pipeline = pipeline_of([1, 1, 1], reads=[(), (0,), (0, 1)])
    assert [str(need) for need in dependencies(Action.parse("0B5"), pipeline)] == ["0F5", "1B5", "2B5"]
    assert [str(need) for need in dependencies(Action.parse("2F5"), pipeline)] == ["0F5", "1F5"]
    assert dependencies(Action.parse("0SYNC1"), pipeline) == ()


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_drawing_of_a_schedule_is_what_its_builder_makes(name: str) -> None:
    """Read from the module's docstring: two stages, four microbatches; dots where the drawing breaks off."""
    drawing = re.search(rf"^ +{name} +worker 0 (.*)\n +worker 1 (.*)$", builders.__doc__ or "", re.MULTILINE)
    assert drawing is not None
    programs = build_schedule(name, pipeline_of([1, 1]), [2, 2] if name == "2bw" else [4]).programs
    for stage, drawn in enumerate(drawing.groups()):
        shown = [f"{stage}{text}" for text in drawn.removesuffix("...").split()]
        made = [str(action) for action in programs[stage]]
        assert shown == (made[: len(shown)] if drawn.endswith("...") else made)


@law
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 3), st.integers(1, 40), st.data())
def test_depths_with_slack_never_deadlock(
    replicas: list[int], rounds: int, microbatches: int, data: st.DataObject
) -> None:
    pipeline = pipeline_of(replicas, shares=data.draw(replica_shares(replicas)))
    depths = depths_with_slack(pipeline, rounds)
    assert depths[-1] == 1
    ahead = [size * (depth - 1) for size, depth in zip(pipeline.round_sizes, depths, strict=True)]
    assert ahead == sorted(ahead, reverse=True)
    check(build_schedule("pipedream", pipeline, [1] * microbatches, depths))


def test_a_stage_that_runs_less_ahead_than_the_next_deadlocks() -> None:
    """Why the depths come from one rule: 8-6-1-1, the second stage deepened on its own."""
    pipeline = pipeline_of([8, 6, 1, 1])
    with pytest.raises(ScheduleError, match="deadlocks"):
        check(build_schedule("pipedream", pipeline, [1] * 200, [3, 4, 10, 1]))
