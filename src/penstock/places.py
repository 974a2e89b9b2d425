"""Where runs are kept: a new directory for each, a link to the latest, and a lock while one is under way.

penstock-runs/
    20261118-091327-train/           the time when it began, and the name of its job
    latest -> 20261118-091327-train
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import FormatError, JobError, PenstockError
from penstock.run import RunDirectory

RUNS = Path("penstock-runs")
LATEST = "latest"
LONGEST_NAME = 40

log = logging.getLogger(__name__)


@contextmanager
def open_run(path: Path | None, job: str) -> Iterator[RunDirectory]:
    """The directory of a run, locked: the given one, or a new one in ``RUNS``.

    A new one that nothing was written to is removed again.
    """
    run = new_run(job) if path is None else RunDirectory(_without_links(path))
    try:
        with in_use(run):
            yield run
    finally:
        if path is None:
            _remove_if_unused(run)


def _without_links(path: Path) -> Path:
    """A link, as ``latest`` is one, may lead elsewhere before the run ends."""
    return path if path.resolve() == path.absolute() else path.resolve()


def new_run(job: str, runs: Path = RUNS) -> RunDirectory:
    name = re.sub(r"[^\w.-]+", "-", job)[:LONGEST_NAME]
    try:
        runs.mkdir(parents=True, exist_ok=True)
        return RunDirectory(_new_directory(runs, f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"))
    except OSError as error:
        raise _unwritable(runs, error) from None


def _new_directory(parent: Path, name: str) -> Path:
    """With a number if there is one of that name. Only one process can make a directory, so no two get the same."""
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("unreachable")


def _remove_if_unused(run: RunDirectory) -> None:
    with contextlib.suppress(OSError):
        if {path.name for path in run.path.iterdir()} <= {run.lock.name}:
            run.lock.unlink(missing_ok=True)
            run.path.rmdir()
            run.path.parent.rmdir()  # if this was all there is


def make_latest(run: RunDirectory) -> None:
    """Point ``latest`` at a run of ``RUNS``, in one step; other runs are found by their own paths."""
    runs, link = RUNS.resolve(), RUNS / LATEST
    if run.path.name == LATEST or run.path.parent.resolve() != runs:
        return
    try:
        if link.is_dir() and not link.is_symlink():
            _set_aside(link)
        fresh = RUNS / f".{LATEST}-{run.path.name}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(run.path.name)
        fresh.replace(link)
    except (OSError, PenstockError) as error:
        log.warning("%s does not lead to %s: %s", link, run.path, error)


def _set_aside(directory: Path) -> None:
    """Earlier versions kept every run in a directory called ``latest``; what it holds stays, under another name."""
    changed = time.strftime("%Y%m%d-%H%M%S", time.localtime(directory.stat().st_mtime))
    with in_use(RunDirectory(directory)):
        aside = _new_directory(directory.parent, f"{changed}-earlier")
        directory.replace(aside)
    log.warning("%s was the directory of an earlier run; it is now %s", directory, aside)


@contextmanager
def in_use(run: RunDirectory, *, with_launcher: bool = False) -> Iterator[RunDirectory]:
    """Hold the lock of a run directory. The system frees it when the process ends, however that happens.

    Whoever starts a run must be alone when it takes the lock. It shares it from then on, so that worker 0, which it
    starts, holds the lock too: a directory is free when both have ended.
    """
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        file = run.lock.open("a+", encoding="utf-8")
    except OSError as error:
        raise _unwritable(run.path, error) from None
    with file:
        try:
            if not with_launcher:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise JobError(
                f"{run.path}: another run is under way here ({file.read().strip() or 'of an unknown process'}); "
                "give this one another --run-dir, or wait for that one to end"
            ) from None
        except OSError as error:
            log.warning("%s cannot be locked (%s); do not start another run there", run.path, error.strerror)
        if not with_launcher:
            with contextlib.suppress(OSError):  # it only tells whom to look for
                file.truncate(0)
                holder = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}\n"
                os.write(file.fileno(), holder.encode())  # unbuffered: closing the file must not fail for it
        yield run


def _unwritable(path: Path, error: OSError) -> FormatError:
    return FormatError(f"{path}: cannot be written: {error.strerror}; give a directory that can be with --run-dir")
