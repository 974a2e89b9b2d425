"""The origin of a run: the command, the versions, and the state of the job file in git."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar

from penstock import __version__

GIT_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class GitState:
    commit: str
    dirty: bool
    """Whether a file of the repository differs from the commit, or the job file is not in it."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    command: tuple[str, ...]
    working_directory: str
    job: str
    """The job file."""
    host: str
    began_unix_s: float
    versions: Mapping[str, str]
    """Versions of python, penstock and torch."""
    git: GitState | None
    """None if the job file is in no repository, or git is not installed."""

    FORMAT: ClassVar[str] = "penstock.provenance/1"


def provenance_of(job_file: Path) -> Provenance:
    """The provenance of a run of this job that this process starts now."""
    return Provenance(
        command=("penstock", *sys.argv[1:]),
        working_directory=str(Path.cwd()),
        job=str(job_file),
        host=socket.gethostname(),
        began_unix_s=time.time(),
        versions={"python": platform.python_version(), "penstock": __version__, "torch": _version_of("torch")},
        git=git_state(job_file),
    )


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def git_state(file: Path) -> GitState | None:
    directory, name = file.resolve().parent, file.resolve().name
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None
    return GitState(commit=commit, dirty=bool(changes) or not _git(directory, "ls-files", "--", name))


def _git(directory: Path, *arguments: str) -> str | None:
    """The output of git; None if it fails or is not installed."""
    # Takes no lock that the user's own git could run into, and starts no program from the repository's settings.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, check=True, timeout=GIT_TIMEOUT_S, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
