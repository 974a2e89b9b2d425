"""What a worker keeps of what it did."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.runtime.worker import events
from penstock.runtime.worker.events import EventLog, beginning_and_newest, columns_of
from penstock.schedule import Action, Kind
from penstock.trace import Columns, Event, Events, joined


def fill(log: EventLog, count: int) -> list[tuple[Action, float, float]]:
    kinds = list(Kind)
    made = [(Action(i % 5, kinds[i % len(kinds)], i), float(i), i + 0.5) for i in range(count)]
    for action, start_s, end_s in made:
        log.add(action._replace(index=action.index - 3), 3, start_s, end_s)
    return made


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "CHUNK", 10)


@pytest.mark.parametrize("count", [0, 7, 10, 49, 50])
def test_a_log_with_room_keeps_everything_in_order(count: int) -> None:
    log = EventLog(first=2, newest=4)
    made = fill(log, count)
    assert [tuple(event) for event in log] == made
    assert len(log) == count
    assert len(log.parts()) == 1
    log.clear()
    assert (len(log), log.parts()) == (0, [[]])


def test_a_long_run_keeps_the_first_and_the_newest() -> None:
    log = EventLog(first=2, newest=3)
    made = fill(log, 1234)
    first, newest = log.parts()
    assert [tuple(event) for event in first] == made[:20]
    assert [tuple(event) for event in newest] == made[1210:]
    assert len(log) == 44


def test_what_is_sent_comes_out_as_it_was() -> None:
    log = EventLog(first=1, newest=2)
    fill(log, 77)
    for rows, part in zip(log.rows(), log.parts(), strict=True):
        found = Events(columns_of(rows, worker=7))
        assert [event.worker for event in found] == [7] * len(part)
        assert [(event.action, event.start_s, event.end_s) for event in found] == part


@pytest.mark.parametrize("workers", [1, 2, 16, 1000])
def test_all_workers_together_keep_a_bounded_number(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    log = EventLog.one_of(workers)
    action = Action(0, Kind.FORWARD, 0)
    for i in range(600_000 // workers + 4 * events.CHUNK):
        log.add(action, i, 0.0, 0.0)
    most = (events.FIRST + events.NEWEST) * events.CHUNK
    assert workers * len(log) <= max(most, 3 * workers * events.CHUNK)


def events_at(worker: int, starts_s: Sequence[float]) -> Columns:
    action = Action(worker, Kind.FORWARD, 0)
    return Columns.of([Event(worker=worker, action=action, start_s=at, end_s=at + 1) for at in starts_s])


def starts_by_worker(columns: Columns) -> list[list[float]]:
    return [columns.start_s[columns.worker == worker].tolist() for worker in range(3)]


def test_both_ends_of_a_run_are_stretches_for_which_all_have_their_events() -> None:
    whole = events_at(0, range(20))
    parts = [events_at(1, at) for at in ((0, 1, 2, 3), (12, 13, 19))]
    others = [events_at(2, at) for at in ((0, 5), (15, 18))]
    beginning, newest = beginning_and_newest([[whole], parts, others])
    assert beginning is not None
    assert starts_by_worker(beginning) == [[0, 1, 2, 3], [0, 1, 2, 3], [0]]
    assert starts_by_worker(newest) == [[15, 16, 17, 18, 19], [19], [15, 18]]
    nothing, everything = beginning_and_newest([[whole]])
    assert nothing is None
    assert Events(everything) == Events(joined([whole]))
