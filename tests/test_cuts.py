"""Where a schedule can be cut: every stage has made the updates of just what is before."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from builders import TRAINING, replica_shares
from penstock.schedule import (
    Action,
    Kind,
    Pipeline,
    Schedule,
    build_schedule,
    cuts_of,
    dependencies,
    depths_with_slack,
    due,
    participants,
)
from penstock.schedule.builders import FAMILIES

law = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, list[int]]:
    """Any training schedule over stages with any replicas and shares, and its minibatches."""
    shares = draw(replica_shares(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))))
    numbers = itertools.count()
    pipeline = Pipeline(
        workers=tuple(tuple(next(numbers) for _ in each) for each in shares),
        reads=tuple((stage - 1,) if stage else () for stage in range(len(shares))),
        shares=tuple(map(tuple, shares)),
    )
    name = draw(st.sampled_from(TRAINING))
    fewest = max(pipeline.round_sizes) if name == "2bw" else 1
    microbatches = fewest + draw(st.integers(0, 4)) if FAMILIES[name].accumulates else 1
    sizes = [microbatches] * draw(st.integers(1, 30))
    depths = depths_with_slack(pipeline, draw(st.integers(1, 6))) if draw(st.booleans()) else None
    return build_schedule(name, pipeline, sizes, depths), sizes


@law
@given(schedules())
def test_at_a_cut_every_stage_has_made_the_updates_of_just_the_minibatches_before_it(
    made: tuple[Schedule, list[int]],
) -> None:
    schedule, sizes = made
    pipeline, cuts = schedule.pipeline, cuts_of(schedule, sizes)
    assert list(cuts) == sorted(cuts)
    assert list(cuts)[-1] == len(sizes)
    for cut, steps in cuts.items():
        before = sum(sizes[:cut])
        for worker, program in enumerate(schedule.programs):
            (stage,) = pipeline.stages_of[worker]
            done = [action.index for action in program if action.kind is Kind.STEP][: steps[stage] + 1]
            consumed = [m for index in done for m in schedule.round_members(stage, index)]
            assert consumed == list(range(before))
            if cut < len(sizes):  # whoever goes on from here gives the same microbatches to the same replicas
                assert all(pipeline.worker_of(stage, m) == pipeline.worker_of(stage, before + m) for m in range(60))


@law
@given(schedules())
def test_a_run_ends_though_at_each_cut_a_worker_waits_until_all_have_come_to_the_one_before(
    made: tuple[Schedule, list[int]],
) -> None:
    """Which is what it is to write one checkpoint at a time; here at every cut there is."""
    schedule, sizes = made
    pipeline, programs = schedule.pipeline, schedule.programs
    passed = [
        [program.index(Action(pipeline.stages_of[worker][0], Kind.STEP, steps[pipeline.stages_of[worker][0]])) + 1
         for steps in cuts_of(schedule, sizes).values()]
        for worker, program in enumerate(programs)
    ]  # fmt: skip
    position, done = [0] * len(programs), set()

    def may_run(worker: int) -> bool:
        if position[worker] == len(programs[worker]):
            return False
        reached = passed[worker].index(position[worker]) if position[worker] in passed[worker] else 0
        waits = reached and any(position[each] < passed[each][reached - 1] for each in range(len(programs)))
        return not waits and all(need in done for need in dependencies(programs[worker][position[worker]], pipeline))

    moved = True
    while moved:
        moved = False
        for worker in range(len(programs)):
            if not may_run(worker):
                continue
            action = programs[worker][position[worker]]
            together = participants(action, worker, pipeline)
            here = [programs[each][position[each]] if may_run(each) else None for each in together]
            if all(other is not None and other[1:] == action[1:] for other in here):
                for each in together:
                    done.add(programs[each][position[each]].result)
                    position[each] += 1
                moved = True
    assert position == [len(program) for program in programs]


@law
@given(cuts=st.sets(st.integers(1, 50), min_size=1), before=st.integers(0, 60), every=st.integers(1, 20))
def test_the_first_cut_at_or_after_each_multiple_is_due(cuts: set[int], before: int, every: int) -> None:
    chosen = due(sorted(cuts), before=before, every=every)
    reached = range(before + 1, before + max(cuts) + 1)
    expected = {min(c for c in cuts if before + c >= wanted) for wanted in reached if wanted % every == 0}
    assert chosen == sorted(expected)
