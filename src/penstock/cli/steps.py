"""Progress on stderr: a live line on a terminal, otherwise a line for each step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from penstock.units import show_clock

EVERY_S = 2.0
"""The least time between two lines of one step, without a terminal."""
ENOUGH_S = 1.0
"""How long a step must have run before its time left is estimated."""


class _LeftColumn(ProgressColumn):
    """The estimated time left; empty while unknown."""

    def render(self, task: Task) -> Text:
        left_s = task.time_remaining
        return Text("" if not left_s else f"about {show_clock(left_s)} left")


class Steps:
    """A context that shows one step after another. With ``quiet`` it shows nothing."""

    def __init__(
        self, *, quiet: bool = False, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out, self._quiet, self._clock = out or sys.stderr, quiet, clock
        self._bar: Progress | None = None
        if self._out.isatty() and not quiet:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[parts]}"),
                TimeElapsedColumn(),
                _LeftColumn(),
            )
            self._bar = Progress(*columns, console=Console(file=self._out, stderr=True), transient=True)
            self._task = self._bar.add_task("", total=None, parts="")
        self._words = ""
        self._began_s = self._said_s = 0.0

    def __enter__(self) -> Steps:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Stop the live line, so that others can write to stderr."""
        if self._bar is not None:
            self._bar.stop()

    def begin(self, words: str) -> None:
        """Begin a step, of unknown length until ``part`` is called."""
        self._words, self._began_s = words, self._clock()
        self._said_s = self._began_s
        if self._bar is not None:
            self._bar.reset(self._task, total=None, description=words, parts="")
        elif not self._quiet:
            self._say(words)

    def part(self, done: int, total: int, what: str = "") -> None:
        """Show how much of the step is done."""
        parts = f"{done} of {total} {what}".rstrip()
        now_s = self._clock()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, parts=parts)
        elif not self._quiet and now_s - self._said_s >= EVERY_S:
            self._said_s = now_s
            self._say(f"{self._words}: {parts}{self._left(done, total, now_s - self._began_s)}")

    def _left(self, done: int, total: int, elapsed_s: float) -> str:
        if not done or elapsed_s < ENOUGH_S:
            return ""
        return f", about {show_clock(elapsed_s * (total - done) / done)} left"

    def _say(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()


def loading_torch(quiet: bool) -> Steps:
    """A context around the import of modules that need torch, which takes seconds."""
    steps = Steps(quiet=quiet)
    steps.begin("loading torch")
    return steps
