"""What a training run leaves behind: a directory with the plan, the trace, the result and the checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from penstock import codec
from penstock.errors import FormatError
from penstock.plan import Plan
from penstock.schedule import Staleness
from penstock.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Result:
    samples: int
    """trained on, all epochs together"""
    seconds: float
    """of training: the pipeline filling, running and draining, without start-up and checkpoints"""
    losses: tuple[float | None, ...]
    """of each minibatch, a mean over its samples; None where it was not a number"""
    checkpoint: str | None
    """the newest, relative to the run"""
    device_kinds: Mapping[str, str]
    """worker number -> what it ran on"""
    staleness: tuple[Staleness, ...] = ()
    """of each stage, as its weights met the gradients"""

    FORMAT: ClassVar[str] = "penstock.result/1"


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def newest_checkpoint(self) -> Path | None:
        complete = sorted(self.checkpoints.glob("step-*/checkpoint.json")) if self.checkpoints.is_dir() else []
        return complete[-1].parent if complete else None

    def load(self) -> tuple[Plan, Trace, Result]:
        if not self.path.is_dir():
            raise FormatError(f"{self.path}: no such run directory")
        if not self.result.exists():
            raise FormatError(f"{self.path}: holds no finished run (result.json is missing); train to the end first")
        return codec.load(Plan, self.plan), codec.load(Trace, self.trace), codec.load(Result, self.result)
