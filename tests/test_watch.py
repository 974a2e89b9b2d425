"""A run followed in the terminal."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from penstock.cli import watch
from penstock.errors import FormatError
from penstock.record import Record, Writer
from penstock.run import RunDirectory
from test_cli import invoke
from test_record import MARK, MOMENT, START


def shown(record: Record, quiet_s: float = 0.0, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, emoji=False)
    console.print(watch.view(record, width, quiet_s))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


RUNNING = Record(
    start=START,
    moments=tuple(replace(MOMENT, at_s=1.0 + i, samples=5 * (i + 1), loss=4.0 - 0.1 * i) for i in range(10)),
    marks=(MARK,),
)


def test_a_run_shows_its_pace_its_loss_and_its_workers() -> None:
    text = shown(RUNNING)
    for words in (
        *("toy", "50%", "minibatch 10 of 15", "about 0:10 left", "5.0", "predicted 50.0"),
        *("3.1000", "4 at first, least 3.1", "█▇▆▆▅▄▃▃▂▁"),
        *("stage 1 on device 1", "100%", "0B1", "900 B", "2 KB", "0:02  evaluation after 2 minibatches"),
    ):
        assert words in text, (words, text)
    assert "no news" not in text
    assert "no news for 1:30: a worker waits, or the run has ended" in shown(RUNNING, quiet_s=90)


def test_a_run_that_has_not_finished_anything_says_so() -> None:
    assert "nothing is finished yet" in shown(Record(start=START))
    assert "nothing is finished yet" in shown(Record())


def test_a_worker_that_is_silent_is_named() -> None:
    moment = replace(MOMENT, at_s=100.0, heard_s=(100.0, 10.0), done=("0B1", "1F7"))
    assert "1F7, 1:30 ago" in shown(replace(RUNNING, moments=(moment,)))


def test_everything_fits_a_narrow_terminal() -> None:
    assert max(map(len, shown(RUNNING, width=80).splitlines())) <= 80


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 5, ""),
        ([1.0], 5, "▁"),
        ([1.0, 1.0], 5, "▁▁"),
        ([0.0, 7.0], 5, "▁█"),
        ([float(i) for i in range(16)], 8, "▁▂▃▄▅▆▇█"),
    ],
)
def test_a_sparkline_has_a_column_for_its_share_of_the_values(values: list[float], width: int, line: str) -> None:
    assert watch.sparkline(values, width) == line


def test_watching_goes_on_until_the_run_ends(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    writer = Writer(run.progress, START)
    polls = []

    def meanwhile(seconds: float) -> None:
        polls.append(seconds)
        writer.moment(replace(MOMENT, at_s=float(len(polls)), samples=10 * len(polls)))
        if len(polls) == 3:
            writer.end("finished")

    console = Console(file=io.StringIO(), width=100)
    found = watch.follow(run, console, sleep=meanwhile)
    assert len(polls) == len(found.moments) == 3
    assert found.end == "finished"
    assert isinstance(console.file, io.StringIO)
    assert "30%" in console.file.getvalue()
    assert "finished" in console.file.getvalue()


def test_watching_waits_for_a_run_to_begin(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    polls = []

    def meanwhile(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 2:
            writer = Writer(run.progress, START)
            writer.moment(MOMENT)
            writer.end("finished")

    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    assert watch.follow(run, console, sleep=meanwhile).end == "finished"
    assert isinstance(console.file, io.StringIO)
    assert "waiting for a run to begin" in console.file.getvalue()


def test_a_run_begun_anew_in_the_same_place_is_followed_from_its_start(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    writer = Writer(run.progress, START)
    for _ in range(5):
        writer.moment(MOMENT)
    reader = watch.read_run(run)
    assert len(reader.read().moments) == 5
    Writer(run.progress, replace(START, model="other")).moment(MOMENT)
    again = reader.read()
    assert again.start is not None
    assert (again.start.model, len(again.moments)) == ("other", 1)


def test_a_finished_run_is_shown_and_answered_at_once(tmp_path: Path) -> None:
    writer = Writer(RunDirectory(tmp_path).progress, START)
    writer.moment(replace(MOMENT, samples=100))
    writer.end("finished")
    assert "finished" in invoke("watch", str(tmp_path)).output
    answer = json.loads(invoke("watch", str(tmp_path), "--json").stdout)
    assert answer == {
        "state": "finished", "samples": 100, "total_samples": 100, "minibatch": 15, "seconds": 1.0,
        "samples_per_s": 100.0, "seconds_left": None, "loss": None, "busy": [0.5, 1.0], "memory_bytes": [900, None],
    }  # fmt: skip


def test_where_nothing_runs_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such run directory; start one with penstock train"):
        watch.read_run(RunDirectory(tmp_path / "none"))
    with pytest.raises(FormatError, match=r"nothing has run here \(progress.jsonl is missing\)"):
        watch.read_run(RunDirectory(tmp_path))
