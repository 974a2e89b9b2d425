"""What the launcher tells the workers that it starts: a task, as JSON on their command line.

    python -m penstock.cli.worker train '{"job": "train.py", ...}'

All workers of a launcher get the same task; the environment says which worker each of them is. Workers that torchrun
starts have no task: they read the user's own command.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock import codec
from penstock.runtime.process.options import TrainOptions


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    job: Path
    plan: Path
    run: Path
    """The run directory. The launcher has made it and holds its lock."""
    options: TrainOptions


@dataclass(frozen=True, kw_only=True)
class VerifyTask:
    job: Path
    plan: Path
    gradients: Path
    """The directory where workers leave their gradients."""
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class MeasureTask:
    """Measuring the cluster; worker 0 writes the cluster file and prints the answer."""

    output: Path
    timeout_s: float
    as_json: bool


Task = TrainTask | VerifyTask | MeasureTask
_KINDS: dict[str, type[Task]] = {"train": TrainTask, "verify": VerifyTask, "measure": MeasureTask}


def command_of(task: Task) -> list[str]:
    """The arguments with which Python runs a worker of this task."""
    (kind,) = [name for name, cls in _KINDS.items() if isinstance(task, cls)]
    return ["-m", "penstock.cli.worker", kind, json.dumps(codec.encode(task))]


def parse_task(words: Sequence[str]) -> Task:
    """The task in a worker's ``sys.argv[1:]``."""
    kind, text = words
    return codec.decode_from("the worker's task", _KINDS[kind], codec.parse_json(text, "the worker's task"))
