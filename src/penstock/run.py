"""What a training run leaves behind: a directory with its origin, plan, trace, result and checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from penstock import codec
from penstock.clocks import Alignment
from penstock.errors import FormatError
from penstock.plan import Plan
from penstock.provenance import Provenance
from penstock.record import Reader, Record, append_line
from penstock.schedule import Staleness
from penstock.trace import Trace

INDEX = "checkpoint.json"
"""The file of a checkpoint that is written last."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    epoch: int
    """under way, or just ended, counted from 0"""
    steps: int
    """minibatches trained before it, in all epochs together"""
    values: Mapping[str, float | None]
    """the loss and the metrics, means over the held-out samples or by their weights; None where not a finite number"""

    def __str__(self) -> str:
        shown = "  ".join(f"{name} {'-' if v is None else format(v, '.4f')}" for name, v in self.values.items())
        return f"evaluation after {self.steps} minibatches (epoch {self.epoch + 1}): {shown}"


@dataclass(frozen=True, kw_only=True)
class EdgeError:
    """What compression lost on the way between two stages: ||sent - arrived|| / ||sent||, a mean over the messages
    looked at; None where that was not a number."""

    source: int
    target: int
    sends: str
    direction: str
    """forward (values) or backward (their gradients)"""
    error: float | None
    looked_at: int
    """messages: the first that each worker sent, and of the others one in a hundred"""


@dataclass(frozen=True, kw_only=True)
class Result:
    samples: int
    """trained on, all epochs together"""
    seconds: float
    """of training: the pipeline filling, running and draining, without start-up and writing the last checkpoint"""
    losses: tuple[float | None, ...]
    """of each minibatch, a mean over its samples or by their weights; None where it was no finite number"""
    checkpoint: str | None
    """the newest, relative to the run"""
    device_kinds: Mapping[str, str]
    """worker number -> what it ran on"""
    links: Mapping[str, str] = field(default_factory=dict)
    """pair of workers (``0-1``) -> what carried their messages"""
    evaluations: tuple[Evaluation, ...] = ()
    """of the whole run, also before it was resumed"""
    stopped_early: bool = False
    compression: tuple[EdgeError, ...] = ()
    """of each edge whose values travelled compressed, what that lost"""
    staleness: tuple[Staleness, ...] = ()
    """of each stage, as its weights met the gradients"""
    clocks: tuple[Alignment, ...] = ()
    """of the machines, worker 0's first: how their times were brought together, and how exactly"""

    FORMAT: ClassVar[str] = "penstock.result/1"


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @property
    def provenance(self) -> Path:
        return self.path / "provenance.json"

    @property
    def lock(self) -> Path:
        """Held while a run is under way here."""
        return self.path / "lock"

    @property
    def profile(self) -> Path:
        return self.path / "profile.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def beginning(self) -> Path:
        """The trace of the first actions, where ``trace`` has only the newest."""
        return self.path / "trace-beginning.json"

    @property
    def progress(self) -> Path:
        return self.path / "progress.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def workers(self) -> Path:
        """What the workers record and hand in; it is gone when a run has ended well."""
        return self.path / "workers"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def complete_checkpoints(self) -> list[Path]:
        """The last one written comes last, which need not have the most steps: a run may go on from an earlier one."""
        found: list[tuple[int, str, Path]] = []
        for index in self.checkpoints.glob(f"step-*/{INDEX}"):
            place = index.parent
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                if place.suffix == "":
                    found.append((index.stat().st_mtime_ns, place.name, place))
        return [place for *_, place in sorted(found)]

    def newest_checkpoint(self) -> Path | None:
        complete = self.complete_checkpoints()
        return complete[-1] if complete else None

    def begin(self, plan: Plan, provenance: Provenance) -> None:
        """Write down what is going to run. The directory no longer says how an earlier run in it ended."""
        for left in (self.result, self.progress):
            left.unlink(missing_ok=True)
        codec.save(provenance, self.provenance)
        codec.save(plan.profile, self.profile)
        codec.save(plan, self.plan)

    def load(self) -> tuple[Plan, Trace, Result]:
        if not self.path.is_dir():
            raise FormatError(f"{self.path}: no such run directory")
        if not self.result.exists():
            raise FormatError(f"{self.path}: holds no finished run (result.json is missing); train to the end first")
        return codec.load(Plan, self.plan), codec.load(Trace, self.trace), codec.load(Result, self.result)

    def note_end(self, words: str) -> None:
        """For a run that cannot say so itself; nothing is noted of one that never began.

        Best effort: the user must hear why the run ended, and not that this could not be noted.
        """
        with contextlib.suppress(OSError, FormatError):
            if self.progress.exists():
                append_line(self.progress, "end", words)

    def record(self) -> Record:
        """What was written down as it ran; empty for a run that left none."""
        return Reader(self.progress).read()
