from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import (
    SYNCHRONOUS,
    TRAINING,
    chain_profile,
    flat_cluster,
    law,
    layer_seconds,
    one_layer_per_stage,
    plan_of,
    plans,
    profile_of,
    slow_law,
)
from penstock import codec
from penstock.cluster import Cluster, Device, Level
from penstock.cost import Caches, Cold
from penstock.errors import ClusterError, ScheduleError
from penstock.graph import Layer, LayerGraph, Parameter, Value
from penstock.plan import Plan
from penstock.plan_costs import PlanCosts
from penstock.profile import Profile, WorkerSeconds
from penstock.schedule import Action, Kind, check, dependencies, depths_with_slack, family, planned_depth
from penstock.schedule.builders import position_on
from penstock.simulate import CALM, Conditions, Episode, Stragglers, parse_conditions, play, simulate
from penstock.simulate.play import Player

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
def test_no_plan_is_slower_where_messages_and_averaging_take_no_time(plan: Plan, minibatches: int) -> None:
    """More bandwidth alone promises nothing: what comes earlier may be in somebody's way."""
    levels = tuple(replace(level, bytes_per_s=1e18, latency_s=0.0) for level in plan.cluster.levels)
    free = replace(plan, cluster=replace(plan.cluster, levels=levels))
    assert simulate(free, minibatches).span_s <= simulate(plan, minibatches).span_s * (1 + 1e-6)


@slow_law
@given(plans(), st.integers(1, 3), st.sampled_from([0.5, 3.0]))
def test_where_everything_takes_so_many_times_as_long_so_does_the_whole(
    plan: Plan, minibatches: int, times: float
) -> None:
    cluster = plan.cluster
    levels = tuple(
        replace(
            level,
            bytes_per_s=level.bytes_per_s / times,
            latency_s=level.latency_s * times,
            ring_bytes_per_s=level.ring.bytes_per_s / times,
        )
        for level in cluster.levels
    )
    slower = replace(
        cluster,
        levels=levels,
        devices=tuple(replace(device, speed=device.speed / times) for device in cluster.devices),
        handling_s=cluster.handling_s * times,
        copying_bytes_per_s=cluster.copying_bytes_per_s and cluster.copying_bytes_per_s / times,
    )
    span_s = simulate(plan, minibatches).span_s
    assert simulate(replace(plan, cluster=slower), minibatches).span_s == pytest.approx(times * span_s, rel=1e-6)


@slow_law
@given(plans(), st.integers(1, 4))
def test_no_port_carries_more_than_it_can_nor_less_than_was_sent(plan: Plan, minibatches: int) -> None:
    played = play(plan, minibatches)
    assert all(played.occupied(link) <= 1 + 1e-9 for link in played.links)
    out = sum(link.carried_bytes for link in played.links if link.place.out)
    assert out == pytest.approx(sum(link.carried_bytes for link in played.links if not link.place.out))


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


def test_a_schedule_that_cannot_end_is_refused_with_who_waits_for_whom() -> None:
    plan = one_layer_per_stage([1.0, 1.0], schedule="gpipe", microbatches=2)
    schedule = plan.schedule_for([2])
    turned = replace(schedule, programs=(schedule.programs[0], schedule.programs[1][::-1]))
    with pytest.raises(ScheduleError, match=r"schedule gpipe deadlocks:\n.*waits for 1B0"):
        Player(plan, turned, CALM).run((2, 2))


def test_a_message_delays_the_stage_that_reads_it_by_latency_and_bytes() -> None:
    profile = chain_profile([1.0, 1.0], batch_size=1, value_bytes=100)
    plan = plan_of(profile, flat_cluster(2, bytes_per_s=50.0, latency_s=0.5), [[0], [1]])
    start_s = {str(event.action): event.start_s for event in simulate(plan, 1).events}
    assert start_s["1F0"] == pytest.approx(1.0 + 2.5)
    assert start_s["0B0"] == pytest.approx(1.0 + 2.5 + 1.0 + 2.0 + 2.5)


def test_who_sends_or_takes_a_message_is_busy_with_it_at_its_two_ends() -> None:
    """A message is under way for 4 s: its sender is busy for the first of them, who takes it for the last."""
    profile = chain_profile([1.0, 1.0], batch_size=2, value_bytes=100)
    cluster = replace(flat_cluster(2, bytes_per_s=25.0), handling_s=0.5, copying_bytes_per_s=200.0)
    plan = plan_of(profile, cluster, [[0], [1]], schedule="gpipe", microbatches=2)
    start_s = {str(event.action): event.start_s for event in simulate(plan, 1).events}
    assert [start_s[each] for each in ("0F0", "0F1")] == pytest.approx([0.0, 2.0])  # computed, sent
    assert [start_s[each] for each in ("1F0", "1F1")] == pytest.approx([5.0, 9.0])  # they pass the link one by one
    assert [start_s[each] for each in ("1B0", "1B1")] == pytest.approx([10.0, 13.0])
    assert PlanCosts(plan).stage_s(0) == pytest.approx(1.0 + 2.0 + 2 * 1.0)


def with_own_time(profile: Profile, *, load_s: float = 0.0, reads: Collection[int] = (), **own: float) -> Profile:
    layers = tuple(replace(layer, reads_data=layer.id in reads) for layer in profile.graph.layers)
    graph = replace(profile.graph, layers=layers)
    return replace(profile, graph=graph, load_s=load_s, worker={"cpu": WorkerSeconds(**own)})


def test_a_stage_that_reads_data_loads_before_each_forward_and_others_do_not() -> None:
    profile = with_own_time(chain_profile([1.0] * 3, batch_size=2), load_s=0.25, reads=(0, 2))
    plan = plan_of(profile, flat_cluster(3), [[0], [1], [2]], schedule="gpipe", microbatches=2)
    start_s = {str(event.action): event.start_s for event in simulate(plan, 1).events}
    assert [start_s[each] for each in ("0F0", "0F1")] == pytest.approx([0.25, 1.5])
    assert [start_s[each] for each in ("1F0", "1F1")] == pytest.approx([1.25, 2.5])
    assert [start_s[each] for each in ("2F0", "2F1")] == pytest.approx([2.5, 3.75])  # once what it takes is there
    assert start_s["2B0"] == pytest.approx(4.75)
    assert [PlanCosts(plan).stage_s(stage) for stage in range(3)] == pytest.approx([3.25, 3.0, 3.25])


def test_a_workers_own_time_is_in_its_actions_and_between_them() -> None:
    own = {"forward_s": 0.1, "backward_s": 0.2, "update_s": 0.3, "between_s": 0.05}
    plan = plan_of(with_own_time(chain_profile([1.0], batch_size=1), **own), flat_cluster(1), [[0]])
    times = [(str(e.action), e.start_s, e.end_s) for e in simulate(plan, 1).events]
    assert [each[0] for each in times] == ["0F0", "0B0", "0STEP0"]
    assert [each[1] for each in times] == pytest.approx([0.05, 1.2, 3.45])
    assert [each[2] for each in times] == pytest.approx([1.15, 3.4, 3.75])
    assert PlanCosts(plan).stage_s(0) == pytest.approx(3.75)


def test_averaging_takes_a_workers_own_time_beside_the_all_reduce() -> None:
    profile = with_own_time(chain_profile([1.0], batch_size=2, parameter_bytes=100), average_s=0.5)
    rows = tuple(replace(row, average_s=0.25) for row in profile.seconds["cpu"])
    level = Level(size=2, bytes_per_s=100.0, ring_by_workers=True)
    cluster = replace(flat_cluster(2), levels=(level,))
    plan = plan_of(replace(profile, seconds={"cpu": rows}), cluster, [[0]], [2], schedule="gpipe", microbatches=2)
    seconds = {event.end_s - event.start_s for event in simulate(plan, 1).events if event.action.kind is Kind.SYNC}
    assert list(seconds) == pytest.approx([1.0 + 0.75])
    assert PlanCosts(plan).sync_s(0) == pytest.approx(1.75)


@slow_law
@given(plans(schedules=("pipedream", "1f1b", "gpipe", "zb-h1")))
def test_one_device_takes_what_the_cost_model_says_of_it(plan: Plan) -> None:
    whole = plan_of(
        plan.profile,
        flat_cluster(1),
        [plan.profile.graph.order],
        schedule=plan.schedule,
        microbatches=plan.microbatches,
    )
    costs = PlanCosts(whole)
    assert simulate(whole, 3).span_s <= 3 * costs.minibatch_s() * (1 + 1e-9)
    starts_with_s = costs.before_s(0, 0, Kind.FORWARD)  # before the first action of the trace
    assert simulate(whole, 3).span_s + starts_with_s == pytest.approx(3 * costs.minibatch_s())


@slow_law
@given(plans())
def test_a_worker_waits_its_own_time_between_two_actions(plan: Plan) -> None:
    costs, trace = PlanCosts(plan), simulate(plan, 2)
    for worker in range(len(plan.devices)):
        mine = sorted((e for e in trace.events if e.worker == worker), key=lambda e: (e.start_s, e.end_s))
        for before, after in pairwise(mine):
            if after.action.kind is not Kind.SYNC:
                gap_s = costs.before_s(after.action.stage, worker, after.action.kind)
                assert after.start_s - before.end_s >= gap_s * (1 - 1e-6) - 1e-12


def test_an_all_reduce_goes_at_its_own_rate() -> None:
    profile = chain_profile([1.0], batch_size=2, parameter_bytes=100)
    level = Level(size=2, bytes_per_s=100.0, latency_s=9.0, ring_bytes_per_s=10.0, ring_latency_s=1.0)
    cluster = replace(flat_cluster(2), levels=(level,))
    plan = plan_of(profile, cluster, [[0]], [2], schedule="gpipe", microbatches=2)
    seconds = {event.end_s - event.start_s for event in simulate(plan, 1).events if event.action.kind is Kind.SYNC}
    assert list(seconds) == pytest.approx([2 * (1.0 + 50 / 10)])
    assert PlanCosts(plan).sync_s(0) == pytest.approx(12.0)


def test_averaging_begins_in_the_midst_of_the_last_backward_of_a_round() -> None:
    """Two layers of 8 MB: the second's gradients are there when half of the backward is, and travel during the rest."""
    profile = chain_profile([1.0, 1.0], batch_size=2, parameter_bytes=8 * 2**20)
    cluster = flat_cluster(2, bytes_per_s=8 * 2**20)
    plan = plan_of(profile, cluster, [[0, 1]], [2], schedule="gpipe", microbatches=2)
    assert PlanCosts(plan).buckets(0) == [(0.5, 8 * 2**20), (1.0, 8 * 2**20)]
    (sync, *_) = [event for event in simulate(plan, 1).events if event.action.kind is Kind.SYNC]
    assert sync.start_s == pytest.approx(2.0 + 4.0)
    assert sync.end_s - sync.start_s == pytest.approx(1.0)
    by_workers = replace(cluster, levels=(replace(cluster.levels[0], ring_by_workers=True),))
    plan = replace(plan, cluster=by_workers)
    (sync, *_) = [event for event in simulate(plan, 1).events if event.action.kind is Kind.SYNC]
    assert sync.end_s - sync.start_s == pytest.approx(PlanCosts(plan).sync_s(0)) == pytest.approx(2.0)


def test_averaging_that_is_over_before_the_backward_takes_no_time_after_it() -> None:
    """Only the second layer has parameters: they are there when half of the backward is, and soon averaged."""
    graph = chain_profile([1.0, 1.0], batch_size=2, parameter_bytes=8 * 2**20).graph
    layers = (replace(graph.layers[0], parameters=()), graph.layers[1])
    own = tuple(parameter for parameter in graph.parameters if parameter.name in layers[1].parameters)
    profile = chain_profile([1.0, 1.0], batch_size=2, parameter_bytes=8 * 2**20)
    profile = replace(profile, graph=replace(graph, layers=layers, parameters=own))
    plan = plan_of(profile, flat_cluster(2, bytes_per_s=2**24), [[0, 1]], [2], schedule="gpipe", microbatches=2)
    syncs = [event for event in simulate(plan, 1).events if event.action.kind is Kind.SYNC]
    assert [event.start_s for event in syncs] == [event.end_s for event in syncs] == pytest.approx([6.0, 6.0])


def test_averaging_that_takes_longer_than_the_backward_is_waited_for_at_its_end() -> None:
    profile = chain_profile([1.0, 1.0], batch_size=2, parameter_bytes=8 * 2**20)
    plan = plan_of(profile, flat_cluster(2, bytes_per_s=2**20), [[0, 1]], [2], schedule="gpipe", microbatches=2)
    (sync, *_) = [event for event in simulate(plan, 1).events if event.action.kind is Kind.SYNC]
    assert sync.end_s - sync.start_s == pytest.approx(16.0 - 2.0)


def test_messages_of_one_direction_between_two_workers_queue_up() -> None:
    profile = chain_profile([1.0, 0.0], batch_size=3, value_bytes=500)
    plan = plan_of(profile, flat_cluster(2, bytes_per_s=100.0), [[0], [1]], schedule="gpipe", microbatches=3)
    start_s = {str(event.action): event.start_s for event in simulate(plan, 1).events}
    assert [start_s[f"1F{i}"] for i in range(3)] == pytest.approx([6.0, 11.0, 16.0])


def test_messages_from_two_workers_into_one_share_its_port() -> None:
    """Two replicas send 100 bytes each at 1 s to a stage that takes 100 bytes a second: both are there at 3 s."""
    profile = chain_profile([1.0, 0.0], batch_size=2, value_bytes=100)
    plan = plan_of(profile, flat_cluster(3, bytes_per_s=100.0), [[0], [1]], [2, 1], schedule="gpipe", microbatches=2)
    start_s = {str(event.action): event.start_s for event in simulate(plan, 1).events}
    assert (start_s["1F0"], start_s["1F1"]) == (pytest.approx(3.0), pytest.approx(3.0))


def test_devices_share_the_cores_of_their_host() -> None:
    """Three replicas on two cores: 3 s of computing take 4.5 s of each. Two have a core each."""
    profile = chain_profile([1.0], batch_size=6)
    crowded, alone = (
        plan_of(profile, replace(flat_cluster(count), cores=2), [[0]], [count], microbatches=count) for count in (3, 2)
    )
    ends_s = [[e.end_s for e in simulate(plan, 1).events if str(e.action)[1] == "B"] for plan in (crowded, alone)]
    each_s = 3.0 * 6  # the profile is of one sample, and a microbatch has 6 / count of them
    assert ends_s[0] == pytest.approx([each_s / 3 * 1.5] * 3)
    assert ends_s[1] == pytest.approx([each_s / 2] * 2)
    assert PlanCosts(crowded).bottleneck_s() == pytest.approx(each_s / 3 / 2)


def test_a_worker_that_waits_leaves_its_core_to_others() -> None:
    """Stage 1 works alone while the others wait for it, as fast as if there were cores for all."""
    profile = chain_profile([1.0, 1.0, 1.0], batch_size=1)
    plan = plan_of(profile, flat_cluster(3), [[0], [1], [2]])
    crowded = replace(plan, cluster=replace(plan.cluster, cores=1))
    assert [e.end_s for e in simulate(crowded, 1).events] == pytest.approx([e.end_s for e in simulate(plan, 1).events])


def test_a_transfer_goes_on_faster_when_the_other_has_ended() -> None:
    """Stage 0 sends 100 bytes to stage 1 and 300 to stage 2, at 100 bytes a second: shared for 2 s, then alone."""
    graph = LayerGraph(
        layers=tuple(Layer(id=i, name=f"l{i}", kind="Any") for i in range(3)),
        values=(
            Value(name="near", producer=0, consumers=(1,), num_bytes=100, differentiable=False),
            Value(name="far", producer=0, consumers=(2,), num_bytes=300, differentiable=False),
            Value(name="nothing", producer=1, consumers=(2,), num_bytes=0, differentiable=False),
        ),
    )
    profile = profile_of(graph, [layer_seconds(1.0)] * 3, batch_size=1)
    plan = plan_of(profile, flat_cluster(3, bytes_per_s=100.0), [[0], [1], [2]])
    start_s = {str(event.action): event.start_s for event in simulate(plan, 1).events}
    assert (start_s["1F0"], start_s["2F0"]) == (pytest.approx(3.0), pytest.approx(5.0))


def test_devices_of_a_host_share_its_link_to_other_hosts() -> None:
    """Two devices of one host send to two of another: 100 bytes each over 100 bytes a second take 2 s."""
    cluster = Cluster(
        name="hosts",
        devices=(Device(),) * 4,
        levels=(Level(size=2, bytes_per_s=1e9), Level(size=2, bytes_per_s=100.0)),
    )
    profile = chain_profile([1.0, 1.0], batch_size=2, value_bytes=100)
    plan = plan_of(profile, cluster, [[0], [1]], [2, 2], schedule="gpipe", microbatches=2)
    start_s = {str(event.action): event.start_s for event in simulate(plan, 1).events}
    assert (start_s["1F0"], start_s["1F1"]) == (pytest.approx(3.0), pytest.approx(3.0))
    assert PlanCosts(plan).cut_s(0) == pytest.approx(1.0)  # a microbatch's 100 bytes: all pass the host's one link
    assert PlanCosts(plan).busiest_port_s() == pytest.approx(1.0)


def test_latency_delays_and_does_not_occupy() -> None:
    profile = chain_profile([1.0, 0.0], batch_size=3, value_bytes=100)
    cluster = flat_cluster(2, bytes_per_s=100.0, latency_s=7.0)
    plan = plan_of(profile, cluster, [[0], [1]], schedule="gpipe", microbatches=3)
    start_s = {str(event.action): event.start_s for event in simulate(plan, 1).events}
    assert [start_s[f"1F{i}"] for i in range(3)] == pytest.approx([9.0, 10.0, 11.0])
    assert PlanCosts(plan).cut_s(0) == pytest.approx(1.0)


def test_messages_and_averaging_share_a_port() -> None:
    """The averaging of stage 1's two replicas meets a message into one of them on its way in."""
    profile = chain_profile([1.0, 1.0], batch_size=2, value_bytes=100, parameter_bytes=0)
    alone = plan_of(profile, flat_cluster(3, bytes_per_s=100.0), [[0], [1]], [1, 2], schedule="pipedream")
    heavy = replace(
        alone,
        profile=replace(
            profile,
            graph=replace(
                profile.graph, parameters=(Parameter(name="w0", num_bytes=0), Parameter(name="w1", num_bytes=1000))
            ),
        ),
    )
    meetings = [e for e in simulate(heavy, 8).events if e.action.kind is Kind.SYNC]
    ring_s = min(e.end_s - e.start_s for e in meetings)
    assert ring_s >= PlanCosts(heavy).sync_s(1) * (1 - 1e-9)
    assert max(e.end_s - e.start_s for e in meetings if e.worker == 2) > ring_s


@pytest.mark.parametrize("schedule", [*TRAINING, "inference"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_memory_curve_peaks_at_what_the_plan_predicts(schedule: str, recompute: bool) -> None:
    profile = chain_profile([1.0] * 3, value_bytes=10, parameter_bytes=1000, saved_bytes=100)
    microbatches = 8 if family(schedule).accumulates else 1
    plan = plan_of(profile, flat_cluster(4), [[0], [1], [2]], [2, 1, 1], schedule=schedule, microbatches=microbatches)
    depths = [planned_depth(schedule, plan.pipeline, stage, microbatches) for stage in range(3)]
    stages = (replace(s, recompute=recompute, in_flight=d) for s, d in zip(plan.stages, depths, strict=True))
    played = play(replace(plan, stages=tuple(stages)), 20)
    predicted = [played.costs.memory_bytes(worker) for worker in range(4)]
    if schedule == "vertical":  # later stages keep the versions that the first one is behind by
        assert played.peak_bytes[0] == predicted[0]
    else:
        assert list(played.peak_bytes) == predicted


@slow_law
@given(plans(schedules=SYNCHRONOUS), st.integers(1, 3))
def test_memory_never_exceeds_the_prediction_and_ends_where_it_began(plan: Plan, minibatches: int) -> None:
    depths = [planned_depth(plan.schedule, plan.pipeline, s, plan.microbatches) for s in range(len(plan.stages))]
    plan = replace(plan, stages=tuple(replace(s, in_flight=d) for s, d in zip(plan.stages, depths, strict=True)))
    played = play(plan, minibatches)
    for worker in range(len(plan.devices)):
        curve = played.memory(worker)
        assert curve.peak_bytes <= played.costs.memory_bytes(worker) * (1 + 1e-9)
        fixed = sum(m.fixed + m.per_version for m in map(played.costs.memory, plan.pipeline.stages_of[worker]))
        assert curve.num_bytes[-1] == pytest.approx(fixed, abs=1e-3)


def test_a_persistent_slowdown_stretches_what_its_device_computes_from_then_on() -> None:
    plan = one_layer_per_stage([1.0], schedule="pipedream")  # a forward takes 1 s, a backward 2 s
    slow = Conditions(episodes=(Episode(device=0, times=3.0, start_s=1.5),))
    ends_s = [
        event.end_s for event in simulate(plan, 2, slow).events if event.action.kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
    assert ends_s == pytest.approx([1.0, 1.5 + 1.5 * 3, 6.0 + 3, 9.0 + 6])


def test_a_recorded_slowdown_ends_and_others_multiply_with_it() -> None:
    plan = one_layer_per_stage([1.0], schedule="inference")
    slow = Conditions(
        episodes=(
            Episode(device=0, times=2.0, start_s=0.5, end_s=2.5),
            Episode(device=0, times=2.0, start_s=1.5, end_s=2.5),
        )
    )
    # half a second at full speed, then a second at a half, half of the rest at a quarter, the rest at full speed
    assert [e.end_s for e in simulate(plan, 3, slow).events] == pytest.approx([1.5, 3.25, 4.25])


def test_stragglers_are_the_same_for_the_same_seed_and_cost_what_they_say_on_average() -> None:
    plan = one_layer_per_stage([0.01], schedule="inference")

    def span_s(seed: int) -> float:
        often = Stragglers(times=3.0, every_s=0.5, lasting_s=0.5)
        return simulate(plan, 10_000, Conditions(stragglers=(often,), seed=seed)).span_s

    assert span_s(1) == span_s(1) != span_s(2)
    assert span_s(1) == pytest.approx(100 * 1.5, rel=0.1)  # half of the time at a third of the speed: two thirds


def test_conditions_are_read_from_toml_and_json_and_checked() -> None:
    text = """
    seed = 7
    [[episodes]]
    device = 1
    times = 2.0
    [[stragglers]]
    times = 1.5
    every_s = 10.0
    lasting_s = 1.0
    """
    found = parse_conditions(text, "slow.toml")
    assert found == Conditions(
        episodes=(Episode(device=1, times=2.0),),
        stragglers=(Stragglers(times=1.5, every_s=10.0, lasting_s=1.0),),
        seed=7,
    )
    assert parse_conditions(codec.dumps(found), "slow.json") == found
    with pytest.raises(ClusterError, match=r"slow\.toml: episodes\[0\]: a slowdown of 0\.0 times; it must be above 0"):
        parse_conditions("[[episodes]]\ndevice = 0\ntimes = 0.0", "slow.toml")
    with pytest.raises(ClusterError, match="a slowdown of device 1, and flat has 1"):
        simulate(one_layer_per_stage([1.0], schedule="inference"), 1, found)


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


def test_the_first_forward_after_an_update_takes_longer_than_others() -> None:
    rows = tuple(replace(row, cold_s=0.5) for row in chain_profile([1.0], batch_size=2).seconds["cpu"])
    profile = replace(chain_profile([1.0], batch_size=2), seconds={"cpu": rows})
    plan = plan_of(profile, flat_cluster(1), [[0]], schedule="gpipe", microbatches=2)
    seconds = {str(event.action): event.end_s - event.start_s for event in simulate(plan, 2).events}
    assert [seconds[each] for each in ("0F0", "0F1", "0F2", "0F3")] == pytest.approx([1.0, 1.0, 1.5, 1.0])


def test_an_action_takes_longer_after_one_of_another_kind() -> None:
    base = chain_profile([1.0], batch_size=2)
    rows = tuple(replace(row, forward_switch_s=0.25, backward_switch_s=0.5) for row in base.seconds["cpu"])
    shapes = {"gpipe": [(0.25, 0.5), (0.0, 0.0)], "1f1b": [(0.25, 0.5), (0.25, 0.5)]}
    for schedule, longer in shapes.items():
        plan = plan_of(base, flat_cluster(1), [[0]], schedule=schedule, microbatches=2)
        switching = replace(plan, profile=replace(base, seconds={"cpu": rows}))
        without, found = (
            {str(event.action): event.end_s - event.start_s for event in simulate(each, 2).events}
            for each in (plan, switching)
        )
        for microbatch, (forward_s, backward_s) in enumerate(longer):
            assert found[f"0F{microbatch}"] - without[f"0F{microbatch}"] == pytest.approx(forward_s)
            assert found[f"0B{microbatch}"] - without[f"0B{microbatch}"] == pytest.approx(backward_s)
        assert found["0STEP0"] == pytest.approx(without["0STEP0"])


def test_a_stage_takes_longer_after_another_stage_of_its_worker() -> None:
    """Two stages on one worker. A second half of a backward takes as long after anything."""
    caches = Caches({0: Cold(3.0, 1.0, 2.0), 1: Cold(6.0, 4.0, 5.0)})
    actions = ["0F0", "1F0", "1F1", "1B0", "1B1", "0B0", "0I1", "0W1", "0STEP0", "1STEP0", "0F2", "1F2", "0F3"]
    found = [caches.extra_s(action.stage, action.kind) for action in map(Action.parse, actions)]
    assert found == [1.0, 4.0, 0.0, 5.0, 0.0, 2.0, 2.0, 0.0, 0.0, 0.0, 3.0, 6.0, 1.0]


@pytest.mark.parametrize(
    ("stages", "extra_s"), [([[0, 1, 2, 3]], 4.0), ([[0, 1, 2], [3]], 1.5), ([[0, 1], [2, 3]], 0.0)]
)
def test_a_worker_with_more_than_half_of_a_model_finds_less_of_it_in_its_caches(
    stages: list[list[int]], extra_s: float
) -> None:
    base = chain_profile([1.0] * 4, batch_size=1)
    rows = tuple(replace(row, crowded_s=1.0) for row in base.seconds["cpu"])
    plan = plan_of(base, flat_cluster(len(stages)), stages)
    crowded = replace(plan, profile=replace(base, seconds={"cpu": rows}))
    without_s, found_s = (PlanCosts(each).seconds_of(0, 0)[Kind.FORWARD] for each in (plan, crowded))
    assert found_s - without_s == pytest.approx(extra_s)
