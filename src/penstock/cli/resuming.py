"""Says how to resume a run that ended early."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.run import RunDirectory


class Checkpoints:
    """The checkpoints that a run completes after this object is made. Older ones in its directory do not count."""

    def __init__(self, run: RunDirectory, resumed: Path | None) -> None:
        """``resumed`` is the checkpoint that the run itself was resumed from, if any."""
        self.run, self.resumed = run, resumed
        self._before = self._newest()

    def _newest(self) -> tuple[Path, int] | None:
        newest = self.run.newest_checkpoint()
        return None if newest is None else (newest, newest.stat().st_ctime_ns)

    def how_to_go_on(self, command: Callable[[Path], str]) -> str:
        """A sentence for the user. ``command`` makes the command that resumes from a checkpoint."""
        newest = self._newest()
        if newest is not None and newest != self._before:
            return f"checkpoint {newest[0]} is complete; go on with: {command(newest[0])}"
        if self.resumed is not None:
            return f"no checkpoint of this run was complete yet; go on with: {command(self.resumed)}"
        return "no checkpoint of this run was complete yet; start it again"


def command_to_go_on(arguments: Sequence[str], job: Path, plan: Path, checkpoint: Path) -> str:
    """The command line of a run of `train`, changed to resume from ``checkpoint`` under the run's plan."""
    kept, left = [], list(arguments)
    while left:
        word = left.pop(0)
        option, equals, _ = word.partition("=")
        if option in ("--resume", "--init", "--cluster"):
            del left[: 0 if equals else 1]
        else:
            kept.append(word)
    if str(plan) not in kept and str(job) in kept:
        kept.insert(kept.index(str(job)) + 1, str(plan))
    return shlex.join(["penstock", *kept, "--resume", str(checkpoint)])
