"""What a run writes down as it goes: a file of lines, each a small JSON object, that only ever grows at its end.

A line has one key: ``start`` (once, first), ``moment`` (how it goes, now and then), ``mark`` (something happened) or
``end``. Whoever follows a run reads what has been added; the report reads all of it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from penstock import codec
from penstock.errors import FormatError

SHORTEST_S, LONGEST_S = 0.5, 10.0
"""between two moments"""


def interval_s(elapsed_s: float) -> float:
    """Between two moments: a thousandth of the run so far, so that a short run has detail and a day of training
    about 12,000 lines."""
    return min(LONGEST_S, max(SHORTEST_S, elapsed_s / 1000))


@dataclass(frozen=True, kw_only=True)
class Start:
    model: str
    schedule: str
    workers: tuple[str, ...]
    samples: int
    """to train on, all epochs together"""
    minibatches: int
    """the same"""
    first_minibatch: int
    """how many were trained before, in a run that goes on"""
    began_unix_s: float
    samples_per_s: float | None
    """predicted"""
    memory_bytes: tuple[int, ...]
    """the most that each worker is predicted to hold"""

    FORMAT: ClassVar[str] = "penstock.progress/1"

    def __post_init__(self) -> None:
        if len(self.memory_bytes) != len(self.workers):
            raise FormatError(f"memory of {len(self.memory_bytes)} workers, and there are {len(self.workers)}")

    def minibatch(self, samples: int) -> int:
        """How many minibatches of the whole run these samples of this one come to."""
        return self.first_minibatch + round(self.minibatches * samples / max(1, self.samples))


@dataclass(frozen=True, kw_only=True)
class Moment:
    at_s: float
    """since the first action could begin, as in the trace"""
    samples: int
    """finished so far"""
    loss: float | None
    """The mean loss of the newest microbatches; None where no worker has reported one."""
    busy: tuple[float, ...]
    """For each worker, the share of the time since the last moment in which it computed."""
    memory_bytes: tuple[int | None, ...]
    """of each worker, the most that it was seen to hold since the moment before; None where that cannot be measured"""
    done: tuple[str, ...]
    """the last action that each worker told of, or nothing"""
    heard_s: tuple[float, ...]
    """when that was"""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happened at a moment. Any kind may be noted; who shows marks need not know it."""

    at_s: float
    kind: str
    """one word or two: evaluation, checkpoint"""
    text: str
    minibatch: int
    """how many had been trained"""
    values: Mapping[str, float | None] = field(default_factory=dict)
    """what was found, where that is numbers"""


@dataclass(frozen=True, kw_only=True)
class Record:
    start: Start | None = None
    moments: tuple[Moment, ...] = ()
    marks: tuple[Mark, ...] = ()
    end: str | None = None
    """how it ended, in words; None while it runs"""


class Writer:
    """Appends lines. Each is handed to the system whole, so that a reader sees it at once and never half of it but
    while it is being written. One that cannot be written, as on a full disk, raises and is lost; later ones are not."""

    def __init__(self, path: Path, start: Start) -> None:
        """Begins the file anew. If that fails, the next line is tried together with the first."""
        self.path = path
        self._unwritten: Start | None = start
        with contextlib.suppress(OSError, FormatError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # whoever still follows the run before keeps its file
            self._begin()

    def moment(self, moment: Moment) -> None:
        self._append("moment", moment)

    def mark(self, mark: Mark) -> None:
        self._append("mark", mark)

    def end(self, words: str) -> None:
        self._append("end", words)

    def _append(self, kind: str, value: Any) -> None:
        self._begin()
        append_line(self.path, kind, value)

    def _begin(self) -> None:
        if self._unwritten is not None:
            append_line(self.path, "start", self._unwritten)
            self._unwritten = None


def append_line(path: Path, kind: str, value: Any) -> None:
    line = json.dumps({kind: codec.encode(value)}, allow_nan=False, separators=(",", ":")).encode()
    try:
        with path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            is_torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"  # the line before was cut short
            file.write(b"\n" * is_torn + line + b"\n")
    except OSError as error:
        raise FormatError(f"{path}: cannot be written: {error.strerror}") from None


class Reader:
    """Reads a record as it grows. Skips lines that were cut short, by a full disk or a machine that failed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changed_unix_s = 0.0
        """when something was added last"""
        self._first = b""
        self._forget()

    def _forget(self) -> None:
        self._offset = 0
        self._lines = 0
        self._start: Start | None = None
        self._moments: list[Moment] = []
        self._marks: list[Mark] = []
        self._end: str | None = None

    def read(self) -> Record:
        """All there is by now; nothing at all where there is no file yet."""
        try:
            with self.path.open("rb") as file:
                first = file.readline()
                if first != self._first:  # a run that has begun anew
                    self._forget()
                self._first, self.changed_unix_s = first, os.fstat(file.fileno()).st_mtime
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            added = b""
        except OSError as error:
            raise FormatError(f"{self.path}: cannot be read: {error.strerror}") from None
        whole = added[: added.rfind(b"\n") + 1]  # the last line may be under way
        self._offset += len(whole)
        for line in whole.splitlines():
            self._lines += 1
            try:
                found = codec.parse_json(line.decode(), "line")
            except (ValueError, FormatError):  # torn: no part of a JSON object is one
                continue
            try:
                self._take(found)
            except (ValueError, AttributeError, FormatError) as error:
                raise FormatError(f"{self.path}: line {self._lines}: not a line of a run's record ({error})") from None
        return Record(start=self._start, moments=tuple(self._moments), marks=tuple(self._marks), end=self._end)

    def _take(self, line: dict[str, Any]) -> None:
        ((kind, value),) = line.items()
        if kind == "start":
            self._start = codec.decode(Start, value)
        elif kind == "moment":
            self._moments.append(self._checked(codec.decode(Moment, value)))
        elif kind == "mark":
            self._marks.append(codec.decode(Mark, value))
        elif kind == "end":
            self._end = codec.decode(str, value)
        else:
            raise FormatError(f"{kind!r} is unknown")

    def _checked(self, moment: Moment) -> Moment:
        workers = len(self._start.workers) if self._start else len(moment.busy)
        if {len(each) for each in (moment.busy, moment.memory_bytes, moment.done, moment.heard_s)} != {workers}:
            raise FormatError(f"a moment that is not of {workers} workers")
        return moment
