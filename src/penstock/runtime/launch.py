"""Starts the workers of a plan on this machine with torch's elastic launcher, and ends them, whatever happens."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from penstock import errors
from penstock.errors import PenstockError, WorkerError


class Interrupted(Exception):  # noqa: N818  (not an error: it was asked for)
    """The user or the system ended the run; carries the exit code that says so."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"signal {signal_number}")
        self.exit_code = 128 + signal_number


def is_worker() -> bool:
    """Whether this process was started by torchrun or by ``launch_workers``."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch_workers(arguments: Sequence[str], workers: int, threads: int) -> None:
    """Run ``python ARGUMENTS`` in so many processes and wait for all of them.

    If one fails, the others are ended and its own error is raised. On a signal all are ended.
    """
    for noisy in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        log_line_prefix_template="",
    )
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except SignalException as error:
        raise Interrupted(int(error.sigval)) from None
    except KeyboardInterrupt:
        raise Interrupted(2) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        kind, reason = _reason(failure)
        first, *more = reason.splitlines()
        raise kind("\n".join([f"worker {rank} failed: {first}; the others were stopped", *more])) from None


def _reason(failure: object) -> tuple[type[PenstockError], str]:
    """What the first worker to fail said of it, as the kind of error it was."""
    message = getattr(failure, "message", "")
    if isinstance(message, dict):
        message = message.get("message", "")
    text = str(message).strip().splitlines()
    if not text or "errors.html" in text[-1]:  # torch's placeholder for a worker that left no word
        return WorkerError, f"it ended with exit code {getattr(failure, 'exitcode', '?')}"
    kind, colon, reason = text[0].partition(": ")
    known = getattr(errors, kind, None)
    return (known, "\n".join([reason, *text[1:]])) if colon and known else (WorkerError, text[0])
