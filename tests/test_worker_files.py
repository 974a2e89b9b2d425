"""What workers record and hand in at the end of a run, however long it was."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from penstock.clocks import Alignment
from penstock.errors import FormatError
from penstock.run import EdgeError, RunDirectory
from penstock.runtime.process import loss_file
from penstock.runtime.process.loss_file import RECENT, ROW, LossFile, LossLog, per_minibatch, read_rows
from penstock.runtime.process.worker_files import (
    Account,
    accounts_of,
    clear,
    edge_errors,
    events_of,
    leave_files,
    losses_file,
    staleness_of,
)
from penstock.runtime.stage.losses import Term
from penstock.runtime.worker.events import FIRST, NEWEST, EventLog, beginning_and_newest
from penstock.schedule import Action, Kind
from penstock.trace import trace_of

MILLION = 1_000_000


def account(worker: int, **changed: object) -> Account:
    fields: dict[str, object] = {
        "origin_s": 100.0,
        "clocks": (Alignment(workers=(0, 1)),) if worker == 0 else (),
        "links": {},
        "device_kind": "cpu",
        "compression": (),
        "staleness": {},
    }
    return Account(**(fields | changed))  # type: ignore[arg-type]


def test_a_run_of_a_million_losses_and_actions_ends_well_in_bounded_memory(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    logs = [EventLog.one_of(2) for _ in range(2)]
    losses = LossLog(file=LossFile(losses_file(run, 1)))
    forward, backward = Action(0, Kind.FORWARD, 0), Action(1, Kind.BACKWARD, 0)
    for i in range(MILLION):
        logs[0].add(forward, i, float(i), i + 0.5)
        logs[1].add(backward, i, float(i), i + 0.5)
        losses.add(i, Term(2.0 * (i // 4), 2.0), i // 4)
    assert losses.file is not None
    assert len(losses._newest) == RECENT
    assert len(losses.file._rows) < 3 * loss_file.BUFFERED
    assert sum(map(len, logs)) <= (FIRST + NEWEST) * 1024
    losses.file.flush()
    for worker, log in enumerate(logs):
        leave_files(run, worker, account(worker), log)
    found = per_minibatch(read_rows(losses_file(run, 1)), [4] * (MILLION // 4))
    assert found == tuple(map(float, range(MILLION // 4)))
    beginning, newest = beginning_and_newest(events_of(run, accounts_of(run, 2)))
    assert beginning is not None
    trace = trace_of("measured", ("0", "1"), (2,) * MILLION, newest)
    assert trace.columns.index.max() == MILLION - 1
    assert len(beginning) >= FIRST * 1000
    assert len(newest) >= NEWEST * 1000
    clear(run)
    assert not run.workers.exists()


def test_losses_are_added_up_in_the_order_of_microbatches_whoever_saw_them(tmp_path: Path) -> None:
    files = [LossFile(tmp_path / f"{worker}") for worker in range(3)]
    terms = [(0.1 * i, 1.0 + i % 3) for i in range(11)]
    for microbatch, term in reversed(list(enumerate(terms))):
        files[microbatch % 2].add(microbatch, *term)
    for file in files:
        file.flush()
    minibatches = (4, 4, 3)
    alone = np.array([(i, *term) for i, term in enumerate(terms)], ROW)
    parts = [rows for file in files for rows in read_rows(file.path)]
    assert per_minibatch(parts, minibatches) == per_minibatch([alone], minibatches)
    total, weight = (sum(part) for part in zip(*terms[4:8], strict=True))
    assert per_minibatch([alone], minibatches)[1] == pytest.approx(total / weight, rel=1e-12)


def test_a_minibatch_without_a_finite_loss_has_none() -> None:
    rows = np.array([(0, 1.0, 1.0), (2, math.nan, 1.0), (4, math.inf, 1.0), (6, 0.0, 0.0), (7, 3.0, 1.5)], ROW)
    assert per_minibatch([rows], (1, 1, 2, 1, 1, 2)) == (1.0, None, None, None, None, 2.0)
    assert per_minibatch([], ()) == ()


def test_a_new_run_does_not_read_the_losses_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "workers" / "losses"
    for value in (1.0, 2.0):
        file = LossFile(path)
        assert not path.exists()
        file.add(0, value, 1.0)
        file.flush()
    assert per_minibatch(read_rows(path), (1,)) == (2.0,)


def test_a_disk_that_fails_ends_the_recording_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_file, "BUFFERED", 10)
    (tmp_path / "workers").write_text("a file where a directory should be")
    file = LossFile(tmp_path / "workers" / "losses")
    for i in range(100):
        file.add(i, 1.0, 1.0)
    (record,) = caplog.records
    assert "training goes on, and its result will lack the losses" in record.getMessage()
    assert list(read_rows(tmp_path / "elsewhere")) == []


def test_a_row_that_was_only_begun_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "losses"
    path.write_bytes(np.array([(0, 1.0, 1.0), (1, 2.0, 1.0)], ROW).tobytes()[:-5])
    assert per_minibatch(read_rows(path), (1, 1)) == (1.0, None)


def test_events_of_other_machines_come_by_worker_0s_clock(tmp_path: Path) -> None:
    run, logs = RunDirectory(tmp_path), [EventLog(), EventLog()]
    for log in logs:
        log.add(Action(0, Kind.FORWARD, 0), 5, 1.0, 2.0)
    ahead = Alignment(workers=(1,), ahead_s=10.0, since_s=50.0)
    leave_files(run, 0, account(0, clocks=(Alignment(workers=(0,)),)), logs[0])
    leave_files(run, 1, account(1, origin_s=90.5, clocks=(ahead,)), logs[1])
    (first,), (second,) = events_of(run, accounts_of(run, 2))
    assert (first.start_s[0], first.end_s[0], first.worker[0], first.index[0]) == (1.0, 2.0, 0, 5)
    assert (second.start_s[0], second.end_s[0], second.worker[0]) == (1.5, 2.5, 1)


def test_a_run_directory_that_another_host_does_not_see_is_named(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    leave_files(run, 0, account(0), EventLog())
    with pytest.raises(FormatError, match=r"worker 1 has written it.*visible to all hosts"):
        accounts_of(run, 2)


def test_what_compression_lost_and_how_old_gradients_were_is_over_all_replicas() -> None:
    def lost(error: float | None, looked_at: int, direction: str = "forward") -> EdgeError:
        return EdgeError(source=0, target=1, sends="int8", direction=direction, error=error, looked_at=looked_at)

    accounts = [
        account(0, compression=(lost(0.1, 1), lost(None, 2, "backward")), staleness={"1": {"0": 1, "2": 3}}),
        account(1, compression=(lost(0.3, 3), lost(0.1, 2, "backward")), staleness={"1": {"2": 4}, "0": {"1": 9}}),
    ]
    assert list(edge_errors(accounts)) == [lost(pytest.approx(0.25), 4), lost(None, 4, "backward")]
    assert staleness_of(accounts, 1).microbatches == (1, 0, 7)
