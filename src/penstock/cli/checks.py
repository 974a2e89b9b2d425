"""Checks of the user's files and directories that need no torch. Verbs make them before they load it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from penstock import codec
from penstock.errors import FormatError
from penstock.places import RUNS
from penstock.plan import Plan


def check_can_write(path: Path, option: str) -> None:
    """Raise unless the file or directory ``path`` can be written. Creates nothing that stays.

    ``option`` is the option that the path was given by."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    directory = place if place.is_dir() else place.parent
    try:
        if place.is_file() and place != path.absolute():
            raise NotADirectoryError(20, f"{place} is a file")
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise FormatError(f"{path}: cannot be written: {error.strerror}; choose another with {option}") from None


def check_run_directory(path: Path | None) -> None:
    """Raise unless a run can be written to ``path``; ``None`` is a new directory in ``penstock-runs``."""
    if path is None:
        check_can_write(RUNS, "--run-dir")
        return
    if path.is_file():
        raise FormatError(f"{path}: a file where a run directory is expected; choose another with --run-dir")
    check_can_write(path, "--run-dir")


def check_plan_file(path: Path) -> None:
    """Raise unless the file is a valid plan."""
    codec.load(Plan, path)
