"""The live line of a training run: loss, samples per second, how busy each worker is."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple, TextIO


class Report(NamedTuple):
    """What a worker says of itself."""

    samples: int
    """finished at this worker, if it runs the first stage"""
    busy: float
    """share of the time spent computing"""
    loss: float | None
    """recent mean, if it runs the last stage"""


class ProgressLine:
    """Overwrites itself on a terminal; elsewhere prints a line now and then."""

    def __init__(self, total_samples: int, out: TextIO | None = None, every_s: float = 2.0) -> None:
        self.total, self.out, self.every_s = total_samples, out or sys.stderr, every_s
        self._live = self.out.isatty()
        self._last_s = 0.0
        self._width = 0

    def show(self, reports: Sequence[Report], elapsed_s: float) -> None:
        text = self.text(reports, elapsed_s)
        if self._live:
            self.out.write("\r" + text.ljust(self._width))
            self._width = len(text)
        elif elapsed_s - self._last_s >= self.every_s:
            self.out.write(text + "\n")
            self._last_s = elapsed_s
        self.out.flush()

    def text(self, reports: Sequence[Report], elapsed_s: float) -> str:
        samples = sum(report.samples for report in reports)
        losses = [report.loss for report in reports if report.loss is not None]
        loss = f"loss {sum(losses) / len(losses):.4f}" if losses else "loss -"
        busy = " ".join(f"{report.busy:.0%}" for report in reports)
        done, rate = samples / max(1, self.total), samples / elapsed_s if elapsed_s > 0 else 0.0
        return f"{done:4.0%}  {loss}  {rate:.1f} samples/s  workers busy {busy}  {elapsed_s:.0f} s"

    def note(self, text: str) -> None:
        """Leave a line standing above the one that moves."""
        self.out.write("\r" + text.ljust(self._width) + "\n" if self._live else text + "\n")
        self.out.flush()

    def close(self) -> None:
        if self._live and self._width:
            self.out.write("\n")
            self.out.flush()
