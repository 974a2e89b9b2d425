from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import (
    chain_profile,
    flat_cluster,
    law,
    one_layer_per_stage,
    plan_of,
    plans,
    slow_law,
)
from penstock.cost import PlanCosts
from penstock.plan import Plan
from penstock.schedule import Kind, check, dependencies, depths_with_slack, family
from penstock.schedule.builders import position_on
from penstock.simulate import simulate

stage_seconds = st.lists(st.floats(0.1, 1.0), min_size=1, max_size=4)


@law
@given(st.integers(1, 5), st.integers(1, 9), st.floats(0.01, 10.0), st.sampled_from(["gpipe", "1f1b"]))
def test_equal_stages_with_free_links_take_the_microbatches_and_one_bubble_per_further_stage(
    stages: int, microbatches: int, forward_s: float, schedule: str
) -> None:
    """(m + p - 1) (F + B): GPipe, section 2.3; 1F1B only keeps less in flight."""
    plan = one_layer_per_stage([forward_s] * stages, schedule=schedule, microbatches=microbatches)
    assert simulate(plan, 1).span_s == pytest.approx((microbatches + stages - 1) * 3 * forward_s)


@law
@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 3))
def test_interleaving_divides_the_bubble_by_the_stages_of_a_worker(positions: int, groups: int, laps: int) -> None:
    """Narayanan and others (2021), section 2.2, where microbatches fill whole groups; each stage takes 3 here."""
    plan = looped("interleaved", positions, laps, microbatches=positions * groups)
    assert simulate(plan, 1).span_s == pytest.approx(3 * (positions * groups * laps + positions - 1))


@law
@given(st.integers(2, 8), st.integers(2, 4))
def test_zero_bubble_leaves_a_third_of_the_bubble_and_laid_out_there_and_back_only_the_way_there(
    positions: int, groups: int
) -> None:
    """Qi and others (2023), table 1, with halves as long as a forward; to within three of those."""
    microbatches = positions * groups
    h1 = simulate(looped("zb-h1", positions, 1, microbatches), 1)
    assert 3 * microbatches + positions - 1 <= h1.span_s <= 3 * microbatches + positions - 1 + 3
    v = simulate(looped("zb-v", positions, 2, microbatches), 1)
    assert 6 * microbatches + positions - 1 <= v.span_s <= 6 * microbatches + positions - 1 + 3


def looped(schedule: str, positions: int, laps: int, microbatches: int) -> Plan:
    """Equal stages, with free links, several on each worker."""
    plan = one_layer_per_stage([1.0] * positions * laps, schedule="gpipe", microbatches=microbatches)
    layout = family(schedule).layout
    stages = [
        replace(stage, devices=(position_on(layout, index, positions),), in_flight=positions)
        for index, stage in enumerate(plan.stages)
    ]
    return replace(plan, stages=tuple(stages), schedule=schedule)


@slow_law
@given(stage_seconds, st.integers(1, 3))
def test_pipedream_runs_at_the_rate_of_its_slowest_stage_however_short_the_trace(
    forward_s: list[float], replicas: int
) -> None:
    plan = one_layer_per_stage(forward_s, schedule="pipedream", replicas=replicas)
    for minibatches in (24 * replicas, 60 * replicas):
        rate = simulate(plan, minibatches).samples_per_s
        assert rate == pytest.approx(2 * replicas / (3 * max(forward_s)))


@slow_law
@given(stage_seconds, st.integers(1, 3))
def test_inference_runs_at_the_rate_of_its_slowest_stage_and_takes_the_sum_of_all_for_one_microbatch(
    forward_s: list[float], replicas: int
) -> None:
    plan = one_layer_per_stage(forward_s, schedule="inference", replicas=replicas)
    for minibatches in (8 * replicas, 31 * replicas):
        assert simulate(plan, minibatches).samples_per_s == pytest.approx(2 * replicas / max(forward_s))
    assert simulate(plan, 1).span_s == pytest.approx(sum(forward_s))


@slow_law
@given(plans(), st.integers(1, 4))
def test_doubling_every_bandwidth_never_slows_a_plan(plan: Plan, minibatches: int) -> None:
    levels = tuple(replace(level, bytes_per_s=2 * level.bytes_per_s) for level in plan.cluster.levels)
    faster = replace(plan, cluster=replace(plan.cluster, levels=levels))
    assert simulate(faster, minibatches).span_s <= simulate(plan, minibatches).span_s * (1 + 1e-9)


@slow_law
@given(plans(), st.integers(1, 4))
def test_a_worker_does_one_thing_at_a_time(plan: Plan, minibatches: int) -> None:
    trace = simulate(plan, minibatches)
    for worker in range(len(trace.workers)):
        mine = sorted((e for e in trace.events if e.worker == worker), key=lambda e: (e.start_s, e.end_s))
        assert all(before.end_s <= after.start_s for before, after in pairwise(mine))


@slow_law
@given(plans(), st.integers(1, 4))
def test_every_action_of_every_program_is_in_the_trace_once(plan: Plan, minibatches: int) -> None:
    schedule = plan.schedule_for([plan.microbatches] * minibatches)
    expected = Counter((worker, action) for worker, program in enumerate(schedule.programs) for action in program)
    assert Counter((event.worker, event.action) for event in simulate(plan, minibatches).events) == expected


@slow_law
@given(plans(), st.integers(1, 3))
def test_nothing_starts_before_what_it_needs_has_ended(plan: Plan, minibatches: int) -> None:
    trace = simulate(plan, minibatches)
    ended_s = {e.action.result: e.end_s for e in trace.events if e.action.of_microbatch}
    for event in trace.events:
        for need in dependencies(event.action, plan.pipeline):
            assert ended_s[need] <= event.start_s


@slow_law
@given(plans(), st.integers(1, 3))
def test_a_trace_accounts_for_all_samples_and_names_every_worker(plan: Plan, minibatches: int) -> None:
    trace = simulate(plan, minibatches)
    assert sum(trace.samples) == plan.profile.batch_size * minibatches
    assert trace.workers == plan.worker_names
    assert trace.origin == "simulated"


def test_a_message_delays_the_stage_that_reads_it_by_latency_and_bytes() -> None:
    profile = chain_profile([1.0, 1.0], batch_size=1, value_bytes=100)
    plan = plan_of(profile, flat_cluster(2, bytes_per_s=50.0, latency_s=0.5), [[0], [1]])
    start_s = {str(event.action): event.start_s for event in simulate(plan, 1).events}
    assert start_s["1F0"] == pytest.approx(1.0 + 2.5)
    assert start_s["0B0"] == pytest.approx(1.0 + 2.5 + 1.0 + 2.0 + 2.5)


def test_messages_of_one_direction_between_two_workers_queue_up() -> None:
    profile = chain_profile([1.0, 0.0], batch_size=3, value_bytes=500)
    plan = plan_of(profile, flat_cluster(2, bytes_per_s=100.0), [[0], [1]], schedule="gpipe", microbatches=3)
    start_s = {str(event.action): event.start_s for event in simulate(plan, 1).events}
    assert [start_s[f"1F{i}"] for i in range(3)] == pytest.approx([6.0, 11.0, 16.0])


def test_replicas_wait_for_the_slowest_before_they_synchronise() -> None:
    profile = chain_profile([1.0], batch_size=3, parameter_bytes=100)
    plan = plan_of(profile, flat_cluster(2, bytes_per_s=100.0), [[0]], [2], microbatches=3)
    meetings = [event for event in simulate(plan, 1).events if event.action.kind is Kind.SYNC]
    assert [(e.worker, e.start_s, e.end_s) for e in meetings] == [(1, 3.0, 7.0), (0, 6.0, 7.0)]


@pytest.mark.parametrize("replicas", [(1, 4, 1, 3, 1), (3, 4, 3, 2), (1, 4), (4, 1), (9, 2, 1)], ids=str)
def test_slack_brings_an_uneven_pipeline_to_its_bottleneck(replicas: tuple[int, ...]) -> None:
    """PipeDream's depths miss it: stages in balance, with replicas 1-4-1-3-1, run at 0.40 of their rate."""
    plan = plan_of(
        chain_profile([float(r) for r in replicas], batch_size=1),
        flat_cluster(sum(replicas)),
        [[stage] for stage in range(len(replicas))],
        replicas,
        schedule="pipedream",
    )
    by_pipedream_s = 1 / simulate(plan, 600).samples_per_s
    depths = depths_with_slack(plan.pipeline, rounds=3)
    deep = replace(plan, stages=tuple(replace(s, in_flight=d) for s, d in zip(plan.stages, depths, strict=True)))
    check(deep.schedule_for([1] * 200))
    minibatches = 40 * len(plan.devices) + 10 * replicas[0] * depths[0]
    period_s = 1 / simulate(deep, minibatches).samples_per_s
    assert period_s == pytest.approx(PlanCosts(deep).bottleneck_s(), rel=0.03)
    if replicas == (1, 4, 1, 3, 1):
        assert period_s / by_pipedream_s == pytest.approx(0.40, abs=0.01)
