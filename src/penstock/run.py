"""What a training run leaves: a directory with its provenance, plan, trace, result and checkpoints."""

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
    """The epoch during which, or after which, it took place, from 0."""
    steps: int
    """Minibatches trained before it, in all epochs together."""
    values: Mapping[str, float | None]
    """The loss and the metrics: means over the held-out samples, or by their weights. None if not a finite number."""

    def __str__(self) -> str:
        shown = "  ".join(f"{name} {'-' if v is None else format(v, '.4f')}" for name, v in self.values.items())
        return f"evaluation after {self.steps} minibatches (epoch {self.epoch + 1}): {shown}"


@dataclass(frozen=True, kw_only=True)
class EdgeError:
    """The error of compression between two stages: ||sent - arrived|| / ||sent||, a mean over some messages. None if
    not a number."""

    source: int
    target: int
    sends: str
    direction: str
    """Forward (values) or backward (their gradients)."""
    error: float | None
    looked_at: int
    """The number of messages measured: the first of each worker, and one in a hundred of the others."""


@dataclass(frozen=True, kw_only=True)
class Result:
    samples: int
    """Samples trained on, in all epochs together."""
    seconds: float
    """Seconds of training, including warm-up and drain of the pipeline, without start-up and the last checkpoint."""
    losses: tuple[float | None, ...]
    """The loss of each minibatch: a mean over its samples, or by their weights. None if not a finite number."""
    checkpoint: str | None
    """The newest checkpoint, relative to the run directory."""
    device_kinds: Mapping[str, str]
    """What each worker ran on, by its number."""
    links: Mapping[str, str] = field(default_factory=dict)
    """What carried the messages of each pair of workers (``0-1``)."""
    evaluations: tuple[Evaluation, ...] = ()
    """All evaluations, including those before the run was resumed."""
    stopped_early: bool = False
    compression: tuple[EdgeError, ...] = ()
    """The error of each compressed edge."""
    staleness: tuple[Staleness, ...] = ()
    """The staleness of each stage, counted when gradients were applied."""
    clocks: tuple[Alignment, ...] = ()
    """How the clocks of the machines were aligned, worker 0's first, and how exactly."""

    FORMAT: ClassVar[str] = "penstock.result/1"


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @property
    def provenance(self) -> Path:
        return self.path / "provenance.json"

    @property
    def lock(self) -> Path:
        """Held during a run."""
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
        """The trace of the first actions, if ``trace`` has only the newest."""
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
        """The files of the workers. They are removed when a run has ended well."""
        return self.path / "workers"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def complete_checkpoints(self) -> list[Path]:
        """The newest comes last. It need not have the most steps, since a run may go on from an earlier checkpoint."""
        found: list[tuple[int, str, Path]] = []
        for index in self.checkpoints.glob(f"step-*/{INDEX}"):
            place = index.parent
            with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                if place.suffix == "":
                    found.append((index.stat().st_mtime_ns, place.name, place))
        return [place for *_, place in sorted(found)]

    def newest_checkpoint(self) -> Path | None:
        complete = self.complete_checkpoints()
        return complete[-1] if complete else None

    def begin(self, plan: Plan, provenance: Provenance) -> None:
        """Write what is going to run. Removes what an earlier run in this directory said about its end."""
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
        """Note how a run ended that cannot do so itself. Does nothing for a run that never began.

        Best effort: the user must see why the run ended, not that this could not be noted.
        """
        with contextlib.suppress(OSError, FormatError):
            if self.progress.exists():
                append_line(self.progress, "end", words)

    def record(self) -> Record:
        """The progress record; empty for a run without one."""
        return Reader(self.progress).read()
