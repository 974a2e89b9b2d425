"""Measuring a cluster: whom to time, what the times say, and the file that comes of it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from builders import law
from penstock.cluster import Level, parse_cluster_toml
from penstock.cost import Traffic, message, ring_allreduce
from penstock.errors import ClusterError, WorkerError
from penstock.runtime.links.message_times import LATE, MICROBATCHES, OwnTime, TwoStages, handled_s
from penstock.runtime.links.trials import Prober
from penstock.runtime.transport.base import Channel, Pending
from penstock.runtime.transport.threads import LocalExchange, LocalTransport
from penstock.schedule import Action, Kind, Pipeline, build_schedule
from penstock.survey import (
    Host,
    Pattern,
    Reach,
    Sample,
    Survey,
    Timing,
    Trial,
    WorkerFacts,
    conclude,
    fit_link,
    group_hosts,
    make_trials,
)
from penstock.survey.fit import LEAST_LATENCY_S, MOST_BYTES_PER_S, fit_handling
from penstock.survey.hosts import even_speeds, level_sizes, make_devices
from penstock.survey.trials import few_pairs

SIZES = (2**12, 2**16, 2**20, 2**22, 2**24)
GIB = 2**30

links = st.builds(
    Level, size=st.just(1), bytes_per_s=st.floats(1e6, 1e11), latency_s=st.floats(2 * LEAST_LATENCY_S, 1e-1)
)
host_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) > 1)


def facts_of(sizes: Sequence[int], work_per_s: float = 10.0) -> list[WorkerFacts]:
    return [
        WorkerFacts(host=f"host{i}", host_id=f"id{i}", host_memory_bytes=24 * GIB, work_per_s=work_per_s)
        for i, size in enumerate(sizes)
        for _ in range(size)
    ]


def hosts_of(sizes: Sequence[int]) -> tuple[Host, ...]:
    return group_hosts(facts_of(sizes))


# --- the fit ---


def test_a_link_whose_bytes_do_not_show_has_a_bandwidth_that_a_link_can_have() -> None:
    assert fit_link([Sample(message(size), 1e-6) for size in SIZES]).bytes_per_s == pytest.approx(MOST_BYTES_PER_S)


@law
@given(links, st.integers(1, 16))
def test_times_of_a_link_are_explained_by_the_link_found(link: Level, members: int) -> None:
    traffics = [message(size) if members == 1 else ring_allreduce(size, members) for size in SIZES]
    found = fit_link([Sample(traffic, traffic.seconds(link)) for traffic in traffics])
    for traffic in traffics:
        assert traffic.seconds(found) == pytest.approx(traffic.seconds(link), rel=0.01)


@law
@given(st.floats(1e8, 1e10), st.floats(1e-5, 1e-3), st.integers(1, 3), st.floats(5.0, 100.0))
def test_one_size_that_is_far_off_moves_the_others_little(
    bytes_per_s: float, latency_s: float, outlier: int, factor: float
) -> None:
    link = Level(size=1, bytes_per_s=bytes_per_s, latency_s=latency_s)
    seconds = [message(size).seconds(link) * (factor if i == outlier else 1.0) for i, size in enumerate(SIZES)]
    found = fit_link([Sample(message(size), s) for size, s in zip(SIZES, seconds, strict=True)])
    for i, size in enumerate(SIZES):
        if i != outlier:
            assert 0.6 < message(size).seconds(found) / message(size).seconds(link) < 1.6


@law
@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=5))
def test_any_times_give_a_link(seconds: list[float]) -> None:
    found = fit_link([Sample(message(size), s) for size, s in zip(SIZES, seconds, strict=False)])
    assert found.latency_s >= LEAST_LATENCY_S * 0.999
    assert found.bytes_per_s > 0


# --- hosts and devices ---


@law
@given(host_sizes)
def test_hosts_hold_every_worker_once_in_order(sizes: list[int]) -> None:
    hosts = hosts_of(sizes)
    assert [len(host.workers) for host in hosts] == sizes
    assert list(itertools.chain.from_iterable(host.workers for host in hosts)) == list(range(sum(sizes)))


def test_workers_that_are_not_numbered_host_by_host_are_refused() -> None:
    facts = [*facts_of([1, 1]), *facts_of([1])]
    with pytest.raises(ClusterError, match=r"worker 1 is on host1, between workers 0 and 2 of host0; number the work"):
        group_hosts(facts)


@law
@given(host_sizes)
def test_no_group_of_the_inner_level_has_workers_of_two_hosts(sizes: list[int]) -> None:
    hosts, levels = hosts_of(sizes), level_sizes(hosts_of(sizes))
    if len(hosts) == 1:
        assert levels == (sum(sizes),)
    elif len(levels) > 1:
        host_of = {worker: i for i, host in enumerate(hosts) for worker in host.workers}
        assert levels[0] * levels[1] == sum(sizes)
        for first in range(0, sum(sizes), levels[0]):
            assert len({host_of[worker] for worker in range(first, first + levels[0])}) == 1


@pytest.mark.parametrize(("sizes", "levels"), [([4, 4], (4, 2)), ([2, 4], (2, 3)), ([1, 1, 1], (3,)), ([2, 3], (5,))])
def test_hosts_with_different_numbers_of_workers_make_the_largest_equal_groups(
    sizes: list[int], levels: tuple[int, ...]
) -> None:
    assert level_sizes(hosts_of(sizes)) == levels


@law
@given(st.lists(st.floats(0.01, 1000.0), min_size=1, max_size=8))
def test_speeds_are_beside_the_fastest_and_those_close_together_are_equal(rates: list[float]) -> None:
    speeds = even_speeds(rates)
    assert max(speeds) == 1.0
    assert min(speeds) > 0
    for rate, speed in zip(rates, speeds, strict=True):
        assert speed >= rate / max(rates) * 0.94
        assert speed <= rate / max(rates) / 0.9 * 1.06


def test_noise_does_not_make_a_cluster_unequal_and_a_slow_host_does() -> None:
    assert even_speeds([10.0, 9.4, 9.1, 5.0, 4.6]) == [1.0, 1.0, 1.0, 0.5, 0.5]


def test_memory_of_a_host_is_shared_by_its_workers_and_a_gpus_is_its_own() -> None:
    cpu = facts_of([3])
    gpu = WorkerFacts(
        host="g", host_id="g", host_memory_bytes=GIB, device_memory_bytes=16 * GIB, kind="T4", work_per_s=500.0
    )
    devices = make_devices([*cpu, gpu])
    assert [device.memory_bytes for device in devices] == [8 * GIB] * 3 + [16 * GIB]
    assert [device.kind for device in devices] == ["any"] * 3 + ["T4"]
    assert [device.speed for device in devices] == [1.0] * 4  # beside those of its kind


# --- trials ---


@law
@given(host_sizes)
def test_trials_stay_inside_or_cross_hosts_as_they_say_and_nobody_is_in_two_places(sizes: list[int]) -> None:
    hosts = hosts_of(sizes)
    host_of = {worker: i for i, host in enumerate(hosts) for worker in host.workers}
    trials = make_trials(hosts)
    for trial in trials:
        members = list(itertools.chain(*trial.groups))
        assert len(members) == len(set(members)) > 0
        for group in trial.groups:
            assert len(group) == 2 or trial.pattern is Pattern.ALL_REDUCE
            crosses = len({host_of[worker] for worker in group}) > 1
            assert crosses == (trial.reach is Reach.BETWEEN)
    assert len({trial.reach for trial in trials}) == len(level_sizes(hosts))
    for reach in {trial.reach for trial in trials}:
        patterns = [trial.pattern for trial in trials if trial.reach is reach]
        assert 1 <= patterns.count(Pattern.HAND_OVER) <= 3
        assert patterns.count(Pattern.ALL_REDUCE) == 1
        assert patterns.count(Pattern.STREAM) in (0, 2)  # alone and at once


def test_few_pairs_are_few_and_reach_both_ends() -> None:
    assert few_pairs("ab") == [("a", "b")]
    assert few_pairs("abcd") == [("a", "b"), ("b", "c"), ("a", "d")]
    assert len(few_pairs(range(1000))) == 3


def test_pairs_that_share_a_link_are_timed_at_once() -> None:
    streams = [trial for trial in make_trials(hosts_of([2, 2])) if trial.pattern is Pattern.STREAM]
    assert [(trial.reach, trial.groups) for trial in streams] == [
        (Reach.BETWEEN, ((0, 2),)),
        (Reach.BETWEEN, ((0, 2), (1, 3))),
    ]


# --- what is concluded ---


def traffic_of(trial: Trial, group: tuple[int, ...], num_bytes: int) -> Traffic:
    ring = trial.pattern is Pattern.ALL_REDUCE
    return ring_allreduce(num_bytes, len(group)) if ring else message(num_bytes)


def survey_of(
    sizes: Sequence[int],
    *,
    messages: Sequence[Level],
    rings: Sequence[Level] | None = None,
    at_once: float = 1.0,
    slow_pair: tuple[int, int] | None = None,
) -> Survey:
    """The survey of hosts whose links, inside and between, take just the time that they should."""
    facts = facts_of(sizes)
    trials = make_trials(group_hosts(facts))
    reaches = list(dict.fromkeys(trial.reach for trial in trials))
    timings = []
    for (number, trial), (index, group) in (
        (numbered, indexed) for numbered in enumerate(trials) for indexed in enumerate(numbered[1].groups)
    ):
        of_pattern = (rings or messages) if trial.pattern is Pattern.ALL_REDUCE else messages
        share = at_once if trial.pattern is Pattern.STREAM and len(trial.groups) > 1 else 1.0
        slow = 10.0 if group == slow_pair else 1.0
        for num_bytes in trial.sizes:
            seconds = traffic_of(trial, group, num_bytes).seconds(of_pattern[reaches.index(trial.reach)])
            timings.append(Timing(trial=number, group=index, num_bytes=num_bytes, seconds=seconds / share * slow))
    return conclude(facts, trials, timings, "gloo")


FAST, SLOW = Level(size=1, bytes_per_s=4e9, latency_s=5e-5), Level(size=1, bytes_per_s=1e8, latency_s=3e-4)


def test_links_that_behave_are_found_as_they_are() -> None:
    survey = survey_of([4, 4], messages=[FAST, SLOW])
    assert [(level.size, level.bytes_per_s) for level in survey.cluster.levels] == [(4, 4e9), (2, 1e8)]
    assert [level.latency_s for level in survey.cluster.levels] == pytest.approx([5e-5, 3e-4])
    assert survey.cluster.devices[0].memory_bytes == 6 * GIB
    assert survey.remarks == ()
    for found in survey.levels:
        assert all(check.measured_s == pytest.approx(check.predicted_s, rel=0.05) for check in found.checks)


def test_an_all_reduce_that_is_slower_than_messages_has_figures_of_its_own() -> None:
    ring = Level(size=1, bytes_per_s=1e9, latency_s=2e-4)
    survey = survey_of([2], messages=[FAST], rings=[ring])
    (level,) = survey.cluster.levels
    assert (level.bytes_per_s, level.ring_bytes_per_s) == pytest.approx((4e9, 1e9))
    assert (level.latency_s, level.ring_latency_s) == pytest.approx((5e-5, 2e-4))
    assert [check.measured_s / check.predicted_s for check in survey.levels[0].checks] == pytest.approx(
        [1.0] * 10, 0.05
    )


def test_what_messages_take_of_a_workers_own_time_is_in_the_file() -> None:
    """Here as much as if a message kept its worker busy until it is there; the outermost links count."""
    survey = survey_of([2, 2], messages=[FAST, SLOW])
    assert survey.cluster.handling_s == pytest.approx(3e-4, rel=0.05)
    assert survey.cluster.copying_bytes_per_s == pytest.approx(1e8, rel=0.05)


def test_handling_that_does_not_grow_with_the_bytes_has_no_rate() -> None:
    assert fit_handling([(1000, 2e-4), (10**6, 1e-4)]) == (2e-4, None)
    assert fit_handling([(0, 1e-4), (10**6, 2e-4)]) == pytest.approx((1e-4, 1e10))


def test_a_link_that_pairs_share_is_told() -> None:
    survey = survey_of([2, 2], messages=[FAST, SLOW], at_once=0.5)
    (remark,) = survey.remarks
    assert remark.startswith("between hosts: 2 pairs at once get 50% each of what one gets alone")
    assert survey.levels[1].share_at_once == pytest.approx(0.5)


def test_a_pair_that_is_far_slower_than_the_others_is_named() -> None:
    survey = survey_of([1, 1, 1, 1], messages=[SLOW], slow_pair=(1, 2))
    assert survey.cluster.levels[0].bytes_per_s == pytest.approx(1e8)
    (remark,) = survey.remarks
    assert "workers 1 and 2 get 10MB/s where all pairs together get 100MB/s" in remark


def test_a_machine_that_is_busy_with_something_else_is_told() -> None:
    quiet, noisy = (replace(each, spread=spread) for each, spread in zip(facts_of([2]), (0.02, 0.4), strict=True))
    trials = make_trials(group_hosts([quiet, noisy]))
    timings = [
        Timing(trial=number, group=0, num_bytes=size, seconds=traffic_of(trial, (0, 1), size).seconds(FAST))
        for number, trial in enumerate(trials)
        for size in trial.sizes
    ]
    (remark,) = conclude([quiet, noisy], trials, timings, "gloo").remarks
    assert "the speed of worker 1 on host0 varied by 40%" in remark
    assert "measure again when it is quiet" in remark


def test_hosts_with_different_numbers_of_workers_are_told() -> None:
    survey = survey_of([2, 4], messages=[FAST, SLOW])
    assert [level.size for level in survey.cluster.levels] == [2, 3]
    assert "the hosts have 2, 4 workers; levels join equal groups, so the file has groups of 2" in survey.remarks[0]


@law
@given(host_sizes, links, links, st.floats(0.1, 1.0))
def test_the_file_reads_back_as_the_cluster_of_the_answer(
    sizes: list[int], inside: Level, beyond: Level, at_once: float
) -> None:
    survey = survey_of(sizes, messages=[inside, beyond], at_once=at_once)
    assert parse_cluster_toml(survey.toml, "cluster.toml") == survey.cluster
    assert len(survey.cluster.devices) == sum(sizes)
    keys = ("name", "count", "memory", "size", "bandwidth", "latency", "all_reduce", "handling", "copying")
    assert all(line.startswith(("#", "[[", *keys)) or not line for line in survey.toml.splitlines())


# --- timing, on threads ---


@pytest.mark.parametrize("sizes", [[2], [3], [4], [1, 1], [2, 2], [2, 4]])
def test_workers_time_every_group_of_every_trial(sizes: list[int]) -> None:
    trials, exchange, found, errors = make_trials(hosts_of(sizes)), LocalExchange(), list[Timing](), list[Exception]()
    everyone = tuple(range(sum(sizes)))

    def work(rank: int) -> None:
        transport = LocalTransport(rank, exchange)
        clock = itertools.count().__next__  # ticks of a second: every size is repeated as seldom as can be
        prober = Prober(transport=transport, clock=clock, device=torch.device("cpu"), timeout_s=30.0)
        try:
            for number, trial in enumerate(trials):
                prober.meet(everyone)
                found.extend(prober.run(number, trial))
        except Exception as error:
            errors.append(error)
            exchange.fail(str(error))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in everyone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert {(t.trial, t.group) for t in found} == {(i, j) for i, t in enumerate(trials) for j in range(len(t.groups))}
    for timing in found:
        assert timing.num_bytes in trials[timing.trial].sizes
        assert timing.seconds > 0
    assert exchange.messages == {}  # whatever was sent was received
    survey = conclude(facts_of(sizes), trials, found, "threads")
    assert len(survey.cluster.devices) == sum(sizes)


@pytest.mark.parametrize(("busy_s", "counts"), [(24.0, True), (0.01, False)])
def test_what_cores_do_for_messages_counts_where_it_shows(busy_s: float, counts: bool) -> None:
    """24 messages of each worker: what the kernel does for them is in no thread's time."""
    exchange, found = LocalExchange(), dict[int, float]()

    def work(rank: int) -> None:
        own = OwnTime(core_s=itertools.count(0.0, busy_s).__next__)
        found[rank] = handled_s(64, (0, 1), LocalTransport(rank, exchange), own, torch.device("cpu"), 30.0)

    run_both(work)
    assert all((seconds == 1.0) == counts for seconds in found.values())
    assert len(found) == 2


def test_a_worker_whose_peer_is_silent_says_whom_it_waited_for() -> None:
    trial = Trial(reach=Reach.INSIDE, pattern=Pattern.HAND_OVER, groups=((0, 1),))
    prober = Prober(
        transport=LocalTransport(1, LocalExchange()), clock=time.perf_counter, device=torch.device("cpu"), timeout_s=0.1
    )
    with pytest.raises(WorkerError, match=r"worker 1 waited for worker 0 \(at most 0.1 s\): nothing came"):
        prober.run(0, trial)


class _SharedClock:
    """Moves when somebody works or a message comes."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def work(self) -> None:
        self.now_s += 5.0


class _SecondEachWay(LocalTransport):
    def __init__(self, rank: int, exchange: LocalExchange, clock: _SharedClock) -> None:
        super().__init__(rank, exchange)
        self.clock = clock

    def receive(self, tensor: Tensor, channel: Channel, number: int) -> Pending:
        return _Arriving(super().receive(tensor, channel, number), self.clock)


@dataclass(frozen=True)
class _Arriving:
    inner: Pending
    clock: _SharedClock

    def wait(self, timeout_s: float) -> None:
        self.inner.wait(timeout_s)
        self.clock.now_s += 1.0


def test_a_message_is_timed_to_a_receiver_who_waits_without_the_work_that_it_does_then() -> None:
    exchange, clock, found = LocalExchange(), _SharedClock(), dict[int, list[float]]()

    def take_part(rank: int) -> None:
        stages = TwoStages((0, 1), _SecondEachWay(rank, exchange, clock), torch.device("cpu"), 30.0)
        found[rank] = stages.hand_over_s(64, 3, clock.work, clock)

    run_both(take_part)
    assert found == {0: pytest.approx([1.0] * 3), 1: []}
    assert exchange.messages == {}


def test_nobody_waits_for_a_message_whose_handling_is_timed() -> None:
    """A worker that waits looks for the message again and again, which is no part of handling it: counted in, it made
    every message cost 0.1 ms too much."""
    schedule = build_schedule("gpipe", Pipeline(workers=((0,), (1,)), reads=((), (0,))), [MICROBATCHES])
    ends_s: dict[Action, int] = {}
    for worker, taken in ((0, Kind.BACKWARD), (1, Kind.FORWARD)):
        now, late = 0, LATE[worker]
        for action in schedule.programs[worker]:
            if action.of_microbatch:
                now, late = (now + late, 0) if action.kind is taken else (now, late)
                ends_s[action] = now = now + 1
    for action, end in ends_s.items():
        if (action.stage, action.kind) in ((0, Kind.BACKWARD), (1, Kind.FORWARD)):
            assert ends_s[action._replace(stage=1 - action.stage)] < end - 1


def run_both(take_part: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
