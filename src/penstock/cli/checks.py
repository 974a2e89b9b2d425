"""What can be wrong before torch is loaded, which takes seconds: files, directories and texts that a user named."""

from __future__ import annotations

import tempfile
from pathlib import Path

from penstock import codec
from penstock.errors import FormatError
from penstock.places import RUNS
from penstock.plan import Plan


def check_can_write(path: Path, option: str) -> None:
    """Raise unless something can be written at or into ``path``. Nothing is left behind."""
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
    """``None`` stands for a new one in the usual place."""
    if path is None:
        check_can_write(RUNS, "--run-dir")
        return
    if path.is_file():
        raise FormatError(f"{path}: a file where a run directory is expected; choose another with --run-dir")
    check_can_write(path, "--run-dir")


def check_plan_file(path: Path) -> None:
    codec.load(Plan, path)
