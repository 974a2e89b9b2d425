"""Emulated devices: the real worker under any plan, waits of the profile's seconds, links that are shared."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from builders import chain_profile, flat_cluster, plan_of
from penstock import codec
from penstock.bench.emulated import EmulatedRow, Rates
from penstock.cli.app import app
from penstock.cli.show import bench_table, print_table
from penstock.cluster import Cluster, Level, parse_cluster
from penstock.errors import PlanError
from penstock.plan import Plan, Stage
from penstock.plan_costs import PlanCosts
from penstock.planner import make_plan
from penstock.profile import WorkerSeconds
from penstock.run import RunDirectory
from penstock.runtime.emulate.emulate import emulate, usual_dilation
from penstock.runtime.emulate.network import Arrival, EmulatedNetwork
from penstock.schedule import Kind
from penstock.simulate import simulate

HOSTS = parse_cluster("2@100MB/s,2@10MB/s")
MB = 1e6


class HandClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Sent:
    """Messages on a network whose clock is moved by hand."""

    def __init__(self, cluster: Cluster = HOSTS) -> None:
        self.clock = HandClock()
        self.network = EmulatedNetwork(cluster, self.clock)
        self.count = 0

    def send(self, source: int, target: int, num_bytes: float, kind: Kind = Kind.FORWARD) -> Arrival:
        self.count += 1
        stream = (source, target, kind)
        self.network.send(stream, self.count, (source, target), num_bytes)
        return self.network.claim(stream, self.count)

    def arrival_s(self, *arrivals: Arrival) -> list[float]:
        return [pytest.approx(self.network.arrival_s(each)) for each in arrivals]


def test_a_message_takes_its_bytes_over_the_slowest_link_on_its_way() -> None:
    sent = Sent()
    assert sent.arrival_s(sent.send(0, 1, 10 * MB), sent.send(2, 0, 10 * MB)) == [0.1, 1.0]


def test_the_devices_of_a_host_share_its_uplink() -> None:
    sent = Sent()
    assert sent.arrival_s(sent.send(0, 2, 10 * MB), sent.send(1, 3, 10 * MB)) == [2.0, 2.0]


def test_the_two_streams_of_a_link_are_two() -> None:
    sent = Sent()
    assert sent.arrival_s(sent.send(0, 2, 10 * MB), sent.send(3, 1, 10 * MB)) == [1.0, 1.0]


def test_one_that_comes_later_slows_what_is_under_way_and_one_that_ends_speeds_it_up() -> None:
    sent = Sent()
    first = sent.send(0, 2, 10 * MB)
    sent.clock.now_s = 0.5
    second = sent.send(1, 3, 2 * MB)
    assert sent.arrival_s(first, second) == [1.2, 0.9]
    sent.clock.now_s = 5.0
    assert sent.arrival_s(first, second) == [1.2, 0.9]


def test_messages_of_a_stream_follow_each_other() -> None:
    sent = Sent()
    assert sent.arrival_s(sent.send(0, 2, 10 * MB), sent.send(0, 2, 5 * MB)) == [1.0, 1.5]


def test_latency_comes_after_the_last_byte_and_occupies_nothing() -> None:
    sent = Sent(flat_cluster(2, bytes_per_s=10 * MB, latency_s=0.25))
    assert sent.arrival_s(sent.send(0, 1, 10 * MB), sent.send(0, 1, 10 * MB)) == [1.25, 2.25]


def test_an_all_reduce_is_a_ring_that_all_its_workers_wait_for() -> None:
    sent = Sent(parse_cluster("2@100MB/s,2@10MB/s"))
    first = sent.network.ring((0, 1, 2, 3), 0, [3, 0, 2, 1], 8 * MB)
    others = [sent.network.ring((0, 1, 2, 3), 0, [3, 0, 2, 1], 8 * MB) for _ in range(3)]
    assert all(each is first for each in others)
    assert sent.arrival_s(first) == [1.2]  # 2 (n-1) / n of the bytes over the uplink
    again = sent.network.ring((0, 1, 2, 3), 1, [3, 0, 2, 1], 8 * MB)
    assert again is not first


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.floats(0, 1e7), st.floats(0, 1)), max_size=8))
def test_what_is_foreseen_is_never_too_late_and_comes_true(events: Sequence[tuple[int, int, float, float]]) -> None:
    sent, under_way = Sent(), []
    for source, target, num_bytes, later_s in events:
        if source != target:
            foreseen = [sent.network.arrival_s(each) for each in under_way]
            under_way.append(sent.send(source, target, num_bytes))
            now = [sent.network.arrival_s(each) for each in under_way]
            assert all(before <= after + 1e-9 for before, after in zip(foreseen, now, strict=False))
            sent.clock.now_s += later_s
    last = [sent.network.arrival_s(each) for each in under_way]
    sent.clock.now_s += 1000
    assert [sent.network.arrival_s(each) for each in under_way] == [pytest.approx(each) for each in last]


PROFILE = chain_profile([2e-3] * 4, batch_size=4, value_bytes=4000, parameter_bytes=4000, tied=(0, 3))
UNTIED = chain_profile([2e-3] * 4, batch_size=4, value_bytes=4000, parameter_bytes=4000)
FAST = parse_cluster("4@1GB/s")


def stages_of(plan: Plan, **changes: object) -> Plan:
    return replace(plan, stages=tuple(replace(stage, **changes) for stage in plan.stages))


def looped(schedule: str, devices: Sequence[int]) -> Plan:
    straight = plan_of(UNTIED, FAST, [[0, 1], [2, 3]], schedule="1f1b", microbatches=4)
    stages = tuple(Stage(layers=(i,), devices=(device,), in_flight=4) for i, device in enumerate(devices))
    return replace(straight, stages=stages, schedule=schedule)


PLANS = {
    "asynchronous": plan_of(UNTIED, FAST, [[0], [1, 2], [3]], schedule="pipedream"),
    "replicas": plan_of(UNTIED, FAST, [[0, 1], [2, 3]], [3, 1], schedule="pipedream"),
    "shares": plan_of(UNTIED, FAST, [[0, 1], [2, 3]], [2, 1], schedule="pipedream", shares=[[2, 1], [1]]),
    "2bw": plan_of(UNTIED, FAST, [[0, 1], [2, 3]], schedule="2bw", microbatches=2),
    "data parallel": plan_of(UNTIED, FAST, [[0, 1, 2, 3]], [4], schedule="1f1b", microbatches=4),
    "tied": plan_of(PROFILE, FAST, [[0, 1], [2, 3]], [2, 1], schedule="1f1b", microbatches=4),
    "halves": plan_of(UNTIED, FAST, [[0, 1], [2, 3]], schedule="zb-h1", microbatches=4),
    "there and back": looped("zb-v", (0, 1, 1, 0)),
    "laps": looped("interleaved", (0, 1, 0, 1)),
    "recompute": stages_of(plan_of(UNTIED, FAST, [[0, 1], [2, 3]], schedule="1f1b", microbatches=4), recompute=True),
    "compressed": stages_of(plan_of(UNTIED, FAST, [[0, 1], [2, 3]], schedule="pipedream"), sends="int8"),
}


@pytest.mark.parametrize("name", PLANS)
def test_any_plan_runs_every_action_for_at_least_its_seconds(name: str) -> None:
    plan = PLANS[name]
    found = emulate(plan, 6, dilation=1.0, timeout_s=60)
    schedule, costs = plan.schedule_for([plan.microbatches] * 6), PlanCosts(plan)
    for worker, program in enumerate(schedule.programs):
        mine = sorted((e for e in found.trace.events if e.worker == worker), key=lambda event: event.start_s)
        assert [event.action for event in mine] == list(program)
        for event in mine:
            if event.action.kind is not Kind.SYNC:
                assert event.end_s - event.start_s >= costs.compute_s(event.action, worker) - 1e-9
    assert found.trace.origin == "emulated"
    assert found.result.samples == 24
    assert [stage.most for stage in found.result.staleness] == [stage.most for stage in plan.staleness]


@pytest.mark.parametrize("by_workers", [False, True])
def test_averaging_begins_in_the_midst_of_a_backward_where_it_is_played_so(by_workers: bool) -> None:
    profile = chain_profile([0.05, 0.05], batch_size=2, parameter_bytes=8 * 10**6)
    level = Level(size=2, bytes_per_s=80 * MB, ring_by_workers=by_workers)
    plan = plan_of(profile, replace(flat_cluster(2), levels=(level,)), [[0, 1]], [2], schedule="1f1b", microbatches=2)
    found, played = emulate(plan, 3).trace, simulate(plan, 3)
    waits = [
        statistics.median(event.end_s - event.start_s for event in trace.events if event.action.kind is Kind.SYNC)
        for trace in (found, played)
    ]
    assert waits[1] == pytest.approx(0.2 if by_workers else 0.1)
    assert waits[0] == pytest.approx(waits[1], rel=0.3)


OWN = WorkerSeconds(
    forward_s=0.01,
    backward_s=0.02,
    backward_input_s=0.005,
    backward_weight_s=0.005,
    update_s=0.01,
    average_s=0.02,
    between_s=0.005,
)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("replicas", [(1, 1), (2, 1)])
def test_a_workers_own_time_and_loading_take_as_long_emulated_as_simulated(
    schedule: str, replicas: tuple[int, int]
) -> None:
    plain = chain_profile([0.01, 0.01], batch_size=4, parameter_bytes=1)
    layers = tuple(replace(layer, reads_data=True) for layer in plain.graph.layers)
    profile = replace(plain, graph=replace(plain.graph, layers=layers), worker={"cpu": OWN}, load_s=0.01)
    plan = plan_of(profile, flat_cluster(3), [[0], [1]], replicas, schedule=schedule, microbatches=4)
    bare = replace(plan, profile=replace(profile, worker={}, load_s=0.0))
    simulated_s = simulate(plan, 2).span_s
    assert simulated_s > 1.5 * simulate(bare, 2).span_s
    trace = emulate(plan, 2, timeout_s=60).trace
    starts_with_s = PlanCosts(plan).before_s(0, 0, Kind.FORWARD)  # a trace begins with its first action
    assert trace.span_s == pytest.approx(simulated_s + starts_with_s, rel=0.06)


def test_a_slow_link_takes_its_time() -> None:
    slow = plan_of(UNTIED, flat_cluster(2, bytes_per_s=4e5), [[0, 1], [2, 3]], schedule="1f1b")
    found = emulate(slow, 3, dilation=0.5, timeout_s=60)
    # a message of 4 KB for each of 4 samples takes 40 ms each way, three minibatches long
    assert found.result.seconds >= 3 * 2 * 0.04
    assert found.dilation == 0.5


def test_tensors_are_of_true_size_where_that_is_little_and_shrunk_where_it_is_not() -> None:
    assert emulate(PLANS["asynchronous"], 1, dilation=1.0).shrink == 1.0
    large = chain_profile([2e-3] * 2, batch_size=1, value_bytes=10**8, parameter_bytes=10**9)
    assert emulate(plan_of(large, flat_cluster(2, bytes_per_s=1e12), [[0], [1]]), 1, dilation=1.0).shrink > 100


def test_time_is_as_slow_as_the_work_of_running_actions_asks_for() -> None:
    fast, slow = (plan_of(chain_profile([each] * 2), FAST, [[0], [1]]) for each in (1e-3, 1.0))
    dilations = [usual_dilation(plan, plan.schedule_for([1] * 4), 4) for plan in (fast, slow)]
    assert dilations[0] == pytest.approx(1000 * dilations[1])


def test_what_cannot_be_emulated_is_said() -> None:
    with pytest.raises(PlanError, match="dilation is 0; it must be above 0"):
        emulate(PLANS["asynchronous"], 1, dilation=0.0)
    serving = make_plan(UNTIED, FAST, schedule="inference", samples_per_s=1.0)
    with pytest.raises(PlanError, match="schedule inference trains nothing"):
        emulate(serving, 1)


def test_the_command_leaves_a_run_like_any_other(tmp_path: Path) -> None:
    codec.save(PLANS["replicas"], tmp_path / "plan.json")
    run = tmp_path / "run"
    options = ["--minibatches", "9", "--dilation", "1", "--run-dir", str(run), "--json"]
    answer = CliRunner().invoke(app, ["emulate", str(tmp_path / "plan.json"), *options])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.output)["device_kinds"]["3"] == "emulated any"
    plan, trace, result = RunDirectory(run).load()
    assert plan == PLANS["replicas"]
    assert len(trace.events) == sum(map(len, plan.schedule_for([1] * 9).programs))
    assert set(result.links.values()) == {"emulated"}
    assert CliRunner().invoke(app, ["report", str(run)]).exit_code == 0


def test_an_emulated_row_shows_speedups_and_how_near_the_simulator_is(capsys: pytest.CaptureFixture[str]) -> None:
    row = EmulatedRow(
        case="VGG-16 4x4 A",
        config="15-1",
        published=5.28,
        simulated=2.0,
        emulated=1.9,
        data_parallel=Rates(10.0, 10.5),
        pipelined=Rates(20.0, 19.9),
        met=True,
    )
    assert row.cells == ("VGG-16 4x4 A", "15-1", "5.28", "2.00", "1.90", "1.050", "0.995", "yes")
    print_table(bench_table("table1", [row]))
    assert "15-1" in capsys.readouterr().out
