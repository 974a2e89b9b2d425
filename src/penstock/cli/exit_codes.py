"""Runs a command as a process: its errors become lines on stderr and an exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable

from penstock.errors import PenstockError, WorkerError


def run_process(command: Callable[[], object]) -> None:
    """Wrong input is one clear line and exit code 2; a worker that fails is exit code 1."""
    if "RANK" in os.environ:  # a worker: Ctrl-C ends it at once, and its launcher reports the end of the run
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # The error of a deadline names the peer that was waited for; torch's warnings about sockets add nothing.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        command()
    except PenstockError as error:
        sys.stderr.write("\n".join([f"penstock: {error}", *getattr(error, "__notes__", ())]) + "\n")
        sys.exit(1 if isinstance(error, WorkerError) else 2)
