"""What a run writes down as it goes, and how workers tell of themselves."""

from __future__ import annotations

import errno
import io
import os
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from penstock.errors import FormatError, JobError
from penstock.record import Mark, Moment, Reader, Record, Start, Writer, interval_s
from penstock.run import RunDirectory
from penstock.runtime.machine.memory import MemoryMeter
from penstock.runtime.peers.threads import Board, ThreadPeers
from penstock.runtime.process.progress import Listener, Progress, ProgressLine

START = Start(
    model="toy",
    schedule="1f1b",
    workers=("stage 0 on device 0", "stage 1 on device 1"),
    samples=100,
    minibatches=10,
    first_minibatch=5,
    began_unix_s=1.8e9,
    samples_per_s=50.0,
    memory_bytes=(1000, 2000),
)
MOMENT = Moment(
    at_s=1.0,
    samples=20,
    loss=None,
    busy=(0.5, 1.0),
    memory_bytes=(900, None),
    done=("0B1", ""),
    heard_s=(1.0, 0.0),
)
MARK = Mark(
    at_s=1.5, kind="evaluation", text="evaluation after 2 minibatches", minibatch=2, values={"loss": 0.5, "f1": None}
)


def test_a_reader_sees_what_was_added_since_and_never_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run" / "progress.jsonl"
    reader = Reader(path)
    assert reader.read() == Record()
    writer = Writer(path, START)
    writer.moment(MOMENT)
    assert reader.read() == Record(start=START, moments=(MOMENT,))
    later = replace(MOMENT, at_s=2.0, loss=0.25)
    writer.mark(MARK)
    writer.moment(later)
    with path.open("a") as file:
        file.write('{"end":"fini')
    assert reader.read() == Record(start=START, moments=(MOMENT, later), marks=(MARK,))
    with path.open("a") as file:
        file.write('shed"}\n')
    assert reader.read().end == "finished"
    assert Reader(path).read() == reader.read()


def test_a_run_that_begins_anew_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for _ in range(2):
        writer = Writer(run.progress, START)
        writer.mark(MARK)
        run.note_end("failed: worker 1 ended")
    assert run.record() == Record(start=START, marks=(MARK,), end="failed: worker 1 ended")


def test_an_end_is_noted_only_of_a_run_that_began(tmp_path: Path) -> None:
    RunDirectory(tmp_path).note_end("stopped")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["[]", "{}", '{"moment":{}}', '{"later":1}', '{"end":"a","mark":1}'])
def test_a_file_that_is_no_record_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "progress.jsonl"
    Writer(path, START)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(FormatError, match=r"progress\.jsonl: line 2: not a line of a run's record"):
        Reader(path).read()


def test_torn_lines_are_skipped_and_what_follows_begins_on_a_line_of_its_own(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    writer = Writer(run.progress, START)
    for torn in (b'{"moment":{"at_s":1.0,"sam', b'{"ma', b"\x00\x00\x00", b"\xff"):
        with run.progress.open("ab") as file:
            file.write(torn)
        writer.moment(MOMENT)
    with run.progress.open("ab") as file:
        file.write(b'{"mom')
    run.note_end("failed")
    assert run.record() == Record(start=START, moments=(MOMENT,) * 4, end="failed")


class FullDisk:
    """Makes opening files fail, as a disk without room may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def __enter__(self) -> None:
        def failing(path: Path, *arguments: Any, **options: Any) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        self._context = self._patch.context()
        self._context.__enter__().setattr(Path, "open", failing)

    def __exit__(self, *exception: Any) -> None:
        self._context.__exit__(*exception)


def test_a_full_disk_loses_lines_of_the_record_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, full = RunDirectory(tmp_path), FullDisk(monkeypatch)
    with full:
        writer = Writer(run.progress, START)
        heard = Heard()
        first, second = two_workers(writer, heard)
        for at_s in (1.0, 2.0):
            first.tell(at_s, busy_s=at_s, samples=32, loss=None, done="0F7")
            first.pass_on(at_s)
        first.mark(MARK)
    assert caplog.text.count("progress is not recorded for now, training goes on") == 1
    assert "progress.jsonl: cannot be written: No space left on device" in caplog.text
    first.pass_on(3.0)
    found = run.record()
    assert (found.start, [moment.at_s for moment in found.moments]) == (START, [3.0])
    with full:
        first.end("finished")
    assert caplog.text.count("training goes on") == 2
    assert (len(heard.moments), heard.marks, heard.words) == (3, [MARK], "finished")  # others hear all of it
    assert second.listeners == ()


def test_that_an_end_cannot_be_noted_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    Writer(run.progress, START)
    with FullDisk(monkeypatch):
        run.note_end("failed: worker 1 ended")
    assert run.record().end is None


def test_moments_of_a_long_run_are_few() -> None:
    now_s, moments = 0.0, 0
    while now_s < 24 * 3600:
        now_s += interval_s(now_s)
        moments += 1
    assert 10_000 < moments < 13_000
    assert interval_s(0) == 0.5


class Heard:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.marks: list[Mark] = []
        self.words = ""

    def moment(self, moment: Moment) -> None:
        self.moments.append(moment)

    def mark(self, mark: Mark) -> None:
        self.marks.append(mark)

    def end(self, words: str) -> None:
        self.words = words


def two_workers(*listeners: Listener) -> tuple[Progress, Progress]:
    board, cpu = Board(), torch.device("cpu")
    first, second = (
        Progress(ThreadPeers(board, rank, 2, timeout_s=1.0), MemoryMeter(cpu, 1000), listeners if rank == 0 else ())
        for rank in (0, 1)
    )
    return first, second


def test_worker_0_passes_on_what_all_have_told() -> None:
    heard = Heard()
    first, second = two_workers(heard)
    second.tell(1.0, busy_s=0.75, samples=0, loss=2.5, done="1B3")
    first.tell(1.25, busy_s=1.0, samples=32, loss=None, done="0F7")
    first.pass_on(1.25)
    second.pass_on(1.25)
    (moment,) = heard.moments
    assert (moment.samples, moment.loss, moment.done, moment.heard_s) == (32, 2.5, ("0F7", "1B3"), (1.25, 1.0))
    assert moment.busy == (0.8, 0.75)
    assert all(size is not None and size >= 1000 for size in moment.memory_bytes)
    first.tell(2.25, busy_s=1.5, samples=64, loss=None, done="0F9")
    first.pass_on(2.25)
    assert heard.moments[1].busy == (0.5, 0.75)  # of the second nothing new was heard
    first.mark(MARK)
    first.end("finished")
    assert (heard.marks, heard.words) == ([MARK], "finished")


def test_workers_tell_more_often_than_worker_0_asks() -> None:
    first, second = two_workers()
    assert [first.is_due(at_s) for at_s in (0.1, 0.3, 0.5)] == [False, False, True]
    assert [second.is_due(at_s) for at_s in (0.1, 0.3, 0.5)] == [False, True, True]


def test_the_progress_line_says_how_far_it_is_and_lets_marks_stand() -> None:
    out = io.StringIO()
    line = ProgressLine(80, out)
    for at_s in (1.0, 2.5, 3.0):
        line.moment(replace(MOMENT, at_s=at_s, samples=20, loss=0.5))
    line.mark(MARK)
    line.end("finished")
    assert out.getvalue().splitlines() == [
        " 25%  loss 0.5000  8.0 samples/s  0:02, 0:08 left  workers busy 50% 100%",
        "evaluation after 2 minibatches",
    ]


def test_the_meter_sees_tensors_come_and_go() -> None:
    meter = MemoryMeter(torch.device("cpu"), 500)
    before = meter.take()
    assert before is not None
    held = torch.empty(2_000_000, dtype=torch.uint8)
    meter.look(now_s=0.0)
    del held
    at_peak, after = meter.take(), meter.take()
    assert at_peak is not None
    assert after is not None
    assert at_peak - before == pytest.approx(2_000_000, rel=0.1)
    assert after - before == pytest.approx(0, abs=200_000)


def test_the_meter_looks_no_more_often_than_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = MemoryMeter(torch.device("cpu"), 0)
    looks: list[int] = []
    monkeypatch.setattr(meter, "_now", lambda: looks.append(1) or 0)
    for i in range(100):
        meter.look(i * 0.01)
    assert 15 <= len(looks) <= 21


def test_samples_of_a_run_that_goes_on_count_from_where_it_began() -> None:
    assert [START.minibatch(samples) for samples in (0, 50, 100)] == [5, 10, 15]


def test_tensorboard_reads_back_what_a_run_told(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from penstock.runtime.process.scalars import Scalars

    scalars = Scalars(tmp_path, START)
    scalars.moment(replace(MOMENT, loss=2.5))
    scalars.moment(replace(MOMENT, at_s=3.0, samples=50))
    scalars.mark(MARK)
    scalars.end("finished")
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    values = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    assert values == {
        "loss": [(7, 2.5)],
        "samples per second": [(7, 20.0), (10, 15.0)],
        "busy/worker 0": [(7, 0.5), (10, 0.5)],
        "busy/worker 1": [(7, 1.0), (10, 1.0)],
        "memory/worker 0": [(7, 900.0), (10, 900.0)],
        "evaluation/loss": [(2, 0.5)],
    }


def test_tensorboard_that_is_missing_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from penstock.runtime.process import scalars

    monkeypatch.setattr(scalars, "version", Mock(side_effect=PackageNotFoundError))
    with pytest.raises(JobError, match=r"pip install 'penstock\[tensorboard\]'"):
        scalars.Scalars(tmp_path, START)
