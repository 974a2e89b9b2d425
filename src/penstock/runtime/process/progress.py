"""How a run goes: every worker tells, and worker 0 hands what all have told to whoever shows or keeps it."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TextIO

from penstock.errors import FormatError
from penstock.record import Mark, Moment, interval_s
from penstock.runtime.machine.memory import MemoryMeter
from penstock.runtime.peers.peers import Peers
from penstock.units import show_clock

log = logging.getLogger(__name__)
TOPIC = "how far it is"


class Report(NamedTuple):
    """What a worker says of itself."""

    at_s: float
    busy_s: float
    """of computing so far"""
    samples: int
    """finished at this worker, if it runs the first stage"""
    loss: float | None
    """recent mean, if it runs the last stage"""
    memory_bytes: int | None
    done: str
    """its last action"""


class Listener(Protocol):
    """Hears at worker 0 how the run goes. penstock.record.Writer is one."""

    def moment(self, moment: Moment) -> None: ...

    def mark(self, mark: Mark) -> None: ...

    def end(self, words: str) -> None: ...


class Progress:
    """One worker's end of it."""

    def __init__(self, peers: Peers, memory: MemoryMeter, listeners: Sequence[Listener]) -> None:
        """Worker 0 has the listeners; all must have come this far before any tells."""
        self.peers, self.rank, self.memory, self.listeners = peers, peers.rank, memory, listeners
        self._told_s = 0.0
        self._before: Sequence[Report] = [_NOTHING] * peers.size
        self._busy = (0.0,) * peers.size
        self._failing: set[Listener] = set()
        self._publish(_NOTHING)

    def is_due(self, now_s: float) -> bool:
        return now_s - self._told_s >= interval_s(now_s) / (1 if self.rank == 0 else 2)  # so that worker 0 has news

    def tell(self, now_s: float, *, busy_s: float, samples: int, loss: float | None, done: str) -> None:
        """A worker's word, which stands until its next."""
        self._told_s = now_s
        self._publish(Report(now_s, busy_s, samples, loss, self.memory.take(), done))

    def pass_on(self, now_s: float) -> None:
        """At worker 0: let the listeners hear what all have told."""
        if self.rank != 0:
            return
        reports = [Report(*words) for words in self.peers.told(TOPIC)]
        self._busy = tuple(map(share_busy, reports, self._before, self._busy))
        self._before = reports
        moment = moment_of(reports, self._busy, now_s)
        self._let_hear(lambda listener: listener.moment(moment))

    def mark(self, mark: Mark) -> None:
        self._let_hear(lambda listener: listener.mark(mark))

    def end(self, words: str) -> None:
        self._let_hear(lambda listener: listener.end(words))

    def _let_hear(self, tell: Callable[[Listener], None]) -> None:
        """Best effort: a listener that cannot write, as on a full disk, does not end the run."""
        for listener in self.listeners:
            try:
                tell(listener)
                self._failing.discard(listener)
            except (OSError, FormatError) as error:
                if listener not in self._failing:
                    log.warning("progress is not recorded for now, training goes on: %s", error)
                self._failing.add(listener)

    def _publish(self, report: Report) -> None:
        self.peers.tell(TOPIC, report)


_NOTHING = Report(0.0, 0.0, 0, None, None, "")


def share_busy(new: Report, old: Report, before: float) -> float:
    """Of the time between a worker's two last words. One that has said nothing since is taken to be as it was."""
    return min(1.0, (new.busy_s - old.busy_s) / (new.at_s - old.at_s)) if new.at_s > old.at_s else before


def moment_of(reports: Sequence[Report], busy: tuple[float, ...], now_s: float) -> Moment:
    losses = [report.loss for report in reports if report.loss is not None]
    return Moment(
        at_s=now_s,
        samples=sum(report.samples for report in reports),
        loss=sum(losses) / len(losses) if losses else None,
        busy=busy,
        memory_bytes=tuple(report.memory_bytes for report in reports),
        done=tuple(report.done for report in reports),
        heard_s=tuple(report.at_s for report in reports),
    )


class ProgressLine:
    """Overwrites itself on a terminal; elsewhere prints a line now and then."""

    def __init__(self, total_samples: int, out: TextIO | None = None, every_s: float = 2.0) -> None:
        self.total, self.out, self.every_s = total_samples, out or sys.stderr, every_s
        self._live = self.out.isatty()
        self._last_s = 0.0
        self._width = 0

    def moment(self, moment: Moment) -> None:
        text = self.text(moment)
        if self._live:
            text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps could not be overwritten
            self.out.write("\r" + text.ljust(self._width))
            self._width = len(text)
        elif moment.at_s - self._last_s >= self.every_s:
            self.out.write(text + "\n")
            self._last_s = moment.at_s
        self.out.flush()

    def text(self, moment: Moment) -> str:
        loss = "loss -" if moment.loss is None else f"loss {moment.loss:.4f}"
        busy = " ".join(f"{share:.0%}" for share in moment.busy)
        done = moment.samples / max(1, self.total)
        rate = moment.samples / moment.at_s if moment.at_s > 0 else 0.0
        left = f", {show_clock((self.total - moment.samples) / rate)} left" if 0 < moment.samples < self.total else ""
        return f"{done:4.0%}  {loss}  {rate:.1f} samples/s  {show_clock(moment.at_s)}{left}  workers busy {busy}"

    def mark(self, mark: Mark) -> None:
        """Leave a line standing above the one that moves."""
        self.out.write("\r" + mark.text.ljust(self._width) + "\n" if self._live else mark.text + "\n")
        self.out.flush()

    def end(self, words: str) -> None:
        if self._live and self._width:
            self.out.write("\n")
            self.out.flush()
