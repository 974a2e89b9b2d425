from __future__ import annotations

import pytest

from penstock.errors import FormatError
from penstock.schedule import Action
from penstock.trace import Event, Trace, merge


def event(worker: int, action: str, start_s: float, end_s: float) -> Event:
    return Event(worker=worker, action=Action.parse(action), start_s=start_s, end_s=end_s)


def steady(rounds: int, *, warm_up_s: float = 0.0, drain_s: float = 0.0) -> Trace:
    """One worker, four samples every two seconds, but a slow start and a fast end."""
    events, now_s = [], warm_up_s
    for i in range(rounds):
        events.append(event(0, f"0F{i}", now_s, now_s + 0.5))
        events.append(event(0, f"0B{i}", now_s + 0.5, now_s + 1.5))
        events.append(event(0, f"0STEP{i}", now_s + 1.5, now_s + 2.0))
        now_s += 2.0
    first = event(0, "0F0", 0.0, 0.5)
    events[0] = first
    last = events[-1]
    events[-1] = event(0, str(last.action), last.start_s, last.end_s - drain_s)
    return Trace(origin="simulated", workers=("only",), samples=(4,) * rounds, events=tuple(events))


@pytest.mark.parametrize("rounds", [5, 8, 41])
def test_the_rate_of_a_steady_trace_leaves_out_filling_and_draining(rounds: int) -> None:
    assert steady(rounds).samples_per_s == pytest.approx(2.0)
    assert steady(rounds, warm_up_s=30.0, drain_s=0.4).samples_per_s == pytest.approx(2.0)


def test_the_rate_of_a_single_update_is_all_samples_over_the_whole_span() -> None:
    assert steady(1).samples_per_s == pytest.approx(4 / 2.0)


def test_the_rate_counts_samples_and_not_microbatches() -> None:
    trace = steady(9)
    halved = Trace(origin="measured", workers=trace.workers, samples=(2,) * 9, events=trace.events)
    assert halved.samples_per_s == pytest.approx(trace.samples_per_s / 2)


def test_the_rate_counts_whole_rounds_though_one_replica_is_ahead_of_the_other() -> None:
    """The fast replica's next backward ends before the slow one's update: it is of the next round all the same."""
    events = []
    for i in range(8):
        start_s = 10.0 * i
        events += [event(0, f"0B{2 * i}", start_s, start_s + 1), event(1, f"0B{2 * i + 1}", start_s + 3, start_s + 4)]
        events += [event(0, f"0STEP{i}", start_s + 8, start_s + 9), event(1, f"0STEP{i}", start_s + 9, start_s + 12)]
    trace = merge("measured", ("fast", "slow"), (1,) * 16, [events])
    assert trace.samples_per_s == pytest.approx(2 / 10.0)


def forwards(microbatches: int, *, fill_s: float = 0.0) -> Trace:
    """Three samples every two seconds from two replicas behind one that is twice as fast and far ahead."""
    events = [event(0, f"0F{i}", 1.0 * i, 1.0 * i + 1.0) for i in range(microbatches)]
    for i in range(microbatches):
        start_s = 1.0 + fill_s + 4.0 * (i // 2)
        events.append(event(1 + i % 2, f"1F{i}", start_s, start_s + 4.0 + 1e-9 * (i % 3)))
    return merge("simulated", ("fast", "slow", "slow"), (3,) * microbatches, [events])


@pytest.mark.parametrize("microbatches", [8, 9, 80])
def test_the_rate_of_inference_is_that_of_the_last_stage_in_steady_state(microbatches: int) -> None:
    assert forwards(microbatches).samples_per_s == pytest.approx(2 * 3 / 4.0)
    assert forwards(microbatches, fill_s=100.0).samples_per_s == pytest.approx(2 * 3 / 4.0)


def test_the_rate_of_an_inference_too_short_to_be_steady_is_all_samples_over_the_whole_span() -> None:
    assert forwards(1).samples_per_s == pytest.approx(3 / 5.0)
    assert forwards(3).samples_per_s == pytest.approx(9 / 9.0)


def test_an_empty_trace_has_no_span_no_rate_and_no_utilisation() -> None:
    trace = Trace(origin="measured", workers=("a",), samples=(), events=())
    assert (trace.span_s, trace.samples_per_s, trace.utilisation(0)) == (0.0, 0.0, 0.0)


def test_utilisation_is_computing_over_the_span_and_synchronising_is_not_computing() -> None:
    events = [
        event(0, "0F0", 1.0, 2.0),
        event(0, "0B0", 4.0, 6.0),
        event(0, "0SYNC0", 6.0, 10.0),
        event(0, "0STEP0", 10.0, 11.0),
        event(1, "1F0", 2.0, 3.0),
    ]
    trace = merge("measured", ("a", "b"), (1,), [events])
    assert trace.span_s == 10.0
    assert trace.busy_s(0) == pytest.approx(4.0)
    assert trace.utilisation(0) == pytest.approx(0.4)
    assert trace.utilisation(1) == pytest.approx(0.1)


def test_merged_events_are_in_order_of_start() -> None:
    trace = merge("measured", ("a", "b"), (1,), [[event(0, "0F0", 2.0, 3.0)], [event(1, "1F0", 1.0, 2.0)]])
    assert [e.start_s for e in trace.events] == [1.0, 2.0]


def test_an_event_of_a_worker_that_does_not_exist_is_refused() -> None:
    with pytest.raises(FormatError, match="event 0F0 is of worker 1; there are 1"):
        Trace(origin="measured", workers=("a",), samples=(1,), events=(event(1, "0F0", 0.0, 1.0),))


@pytest.mark.parametrize(("start_s", "end_s"), [(1.0, 0.5), (float("nan"), 1.0), (0.0, float("inf"))])
def test_an_event_that_does_not_end_after_it_starts_is_refused(start_s: float, end_s: float) -> None:
    with pytest.raises(FormatError, match="it must end after it starts"):
        event(0, "0F0", start_s, end_s)
