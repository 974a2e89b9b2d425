"""Where a schedule can be cut: every stage has made the updates of just what is before."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from builders import replica_shares
from penstock.schedule import Kind, Pipeline, build_schedule, cuts_of, due
from penstock.schedule.builders import FAMILIES

law = settings(max_examples=60, deadline=None, derandomize=True)


@law
@given(
    replicas=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    name=st.sampled_from([name for name, kind in FAMILIES.items() if kind.trains and name != "2bw"]),
    minibatches=st.integers(1, 30),
    microbatches=st.integers(1, 5),
    data=st.data(),
)
def test_at_a_cut_every_stage_has_made_the_updates_of_just_the_minibatches_before_it(
    replicas: list[int], name: str, minibatches: int, microbatches: int, data: st.DataObject
) -> None:
    shares = data.draw(replica_shares(replicas))
    numbers = itertools.count()
    pipeline = Pipeline(
        workers=tuple(tuple(next(numbers) for _ in each) for each in shares),
        reads=tuple((stage - 1,) if stage else () for stage in range(len(shares))),
        shares=tuple(map(tuple, shares)),
    )
    sizes = [microbatches if FAMILIES[name].accumulates else 1] * minibatches
    schedule = build_schedule(name, pipeline, sizes)
    cuts = cuts_of(schedule, sizes)
    assert list(cuts) == sorted(cuts)
    assert list(cuts)[-1] == minibatches
    for cut, steps in cuts.items():
        before = sum(sizes[:cut])
        for worker, program in enumerate(schedule.programs):
            stage = pipeline.stage_of[worker]
            done = [action.index for action in program if action.kind is Kind.STEP][: steps[stage] + 1]
            consumed = [m for index in done for m in schedule.round_members(stage, index)]
            assert consumed == list(range(before))
            if cut < minibatches:  # whoever goes on from here gives the same microbatches to the same replicas
                assert all(pipeline.worker_of(stage, m) == pipeline.worker_of(stage, before + m) for m in range(60))


@law
@given(cuts=st.sets(st.integers(1, 50), min_size=1), before=st.integers(0, 60), every=st.integers(1, 20))
def test_the_first_cut_at_or_after_each_multiple_is_due(cuts: set[int], before: int, every: int) -> None:
    chosen = due(sorted(cuts), before=before, every=every)
    reached = range(before + 1, before + max(cuts) + 1)
    expected = {min(c for c in cuts if before + c >= wanted) for wanted in reached if wanted % every == 0}
    assert chosen == sorted(expected)
