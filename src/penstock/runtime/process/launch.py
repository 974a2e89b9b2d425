"""Starts the workers of a plan on this machine, and ends them, whatever happens.

The launcher holds the store through which workers find each other. Unlike torchrun's agent it starts nothing again and
waits for nobody long: a worker that does not end when it is told to is killed soon after.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from torch._C._distributed_c10d import TCPStore

from penstock import errors
from penstock.errors import PenstockError, WorkerError
from penstock.runtime.machine.out_of_memory import kills_so_far

LAUNCHER = "PENSTOCK_LAUNCHER"
"""In the environment of workers: the process id of the launcher that started them."""
LOOK_S = 0.05
GRACE_S = 2.0
"""How long workers have to end when they are told to."""
LAST_WORDS_S = 5.0
"""How long a worker that has reported an error has to end."""
_HOST = "127.0.0.1"
_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""In the environment of workers that torchrun started."""
_PR_SET_PDEATHSIG = 1  # from Linux's prctl.h
_STOPPED = "tT"
"""States of a process that a signal or a debugger has stopped."""


class Interrupted(SystemExit):
    """The user or the system ended the run. It is not an error: where nobody says more, the process ends with the exit
    code that tells so."""

    def __init__(self, signal_number: int) -> None:
        self.exit_code = 128 + signal_number
        super().__init__(self.exit_code)


def is_worker() -> bool:
    """Whether this process was started by torchrun or by ``launch_workers``."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_launched() -> bool:
    """Whether it was ``launch_workers``, which shows its error."""
    return LAUNCHER in os.environ


def end_with_launcher() -> None:
    """Have the kernel end this worker when its launcher ends, however that comes about (Linux)."""
    if not (is_launched() or _TORCHRUN in os.environ) or not sys.platform.startswith("linux"):
        return  # nobody knows whether it was started by a process that stays
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if is_launched() and os.getppid() != int(os.environ[LAUNCHER]):  # it ended before this was asked for
        os.kill(os.getpid(), signal.SIGKILL)


def launch_workers(arguments: Sequence[str], workers: int, threads: int, timeout_s: float = 300.0) -> None:
    """Run ``python ARGUMENTS`` in so many processes and wait for all of them.

    If one fails, the others are ended and its own error is raised. On a signal all are ended. Once a worker has ended
    well the others have ``timeout_s`` to do the same.
    """
    with _signals() as signals, tempfile.TemporaryDirectory(prefix="penstock-") as words:
        store = TCPStore(_HOST, 0, None, is_master=True, wait_for_workers=False)
        started: list[_Worker] = []
        try:
            for rank in range(workers):
                environment = _environment(rank, workers, threads, store.port, Path(words))
                started.append(_Worker(rank, arguments, environment))
            _watch(started, signals, timeout_s)
        finally:
            _end(started, signals)


def _environment(rank: int, workers: int, threads: int, port: int, words: Path) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's word for a store that no worker holds
        "TORCHELASTIC_ERROR_FILE": str(words / f"{rank}.json"),
        "OMP_NUM_THREADS": str(threads),
        LAUNCHER: str(os.getpid()),
    }


class _Worker:
    def __init__(self, rank: int, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.rank, self.words = rank, Path(environment["TORCHELASTIC_ERROR_FILE"])
        # In a session of its own: Ctrl-C reaches the launcher alone, and a worker is ended with its own children.
        self.process = subprocess.Popen(
            [sys.executable, *arguments], env=os.environ | environment, start_new_session=True
        )

    @property
    def code(self) -> int | None:
        code: int | None = self.process.poll()
        return code

    def reported_unix_s(self) -> float | None:
        """When it wrote down its error, if it did."""
        try:
            return self.words.stat().st_mtime
        except FileNotFoundError:
            return None

    def has_failed(self) -> bool:
        if self.code is not None:
            return self.code != 0
        reported_s = self.reported_unix_s()
        return reported_s is not None and time.time() > reported_s + LAST_WORDS_S

    def is_stopped(self) -> bool:
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in _STOPPED

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.code is None:
                os.killpg(self.process.pid, number)


def _watch(workers: Sequence[_Worker], signals: _Signals, timeout_s: float) -> None:
    """Return when all have ended well."""
    kills, looked_s, deadline_s = kills_so_far(), time.time(), float("inf")
    while True:
        if signals.received:
            raise Interrupted(signals.received[0])
        if any(worker.has_failed() for worker in workers):
            # One that left no word ended after the last look. An error that was written before that came first.
            failed = [worker for worker in workers if worker.has_failed() or worker.reported_unix_s()]
            first = min(failed, key=lambda worker: worker.reported_unix_s() or looked_s)
            raise _error(first, workers, out_of_memory=kills_so_far() > kills)
        running = [worker for worker in workers if worker.code is None]
        if not running:
            return
        looked_s = time.time()
        if len(running) < len(workers):
            deadline_s = min(deadline_s, looked_s + timeout_s)
        if looked_s > deadline_s:
            late = ", ".join(str(worker.rank) for worker in running)
            raise WorkerError(f"worker {late} did not end within {timeout_s:g} s of the others{_stopped(workers)}")
        time.sleep(LOOK_S)


def _end(workers: Sequence[_Worker], signals: _Signals) -> None:
    """A second signal makes it quick."""
    asked, deadline_s = len(signals.received), time.monotonic() + GRACE_S
    for worker in workers:
        worker.signal(signal.SIGTERM)
    while any(worker.code is None for worker in workers):
        if time.monotonic() > deadline_s or len(signals.received) > max(1, asked):
            for worker in workers:
                worker.signal(signal.SIGKILL)
        time.sleep(LOOK_S)


def _error(failed: _Worker, workers: Sequence[_Worker], *, out_of_memory: bool) -> PenstockError:
    rank, code = failed.rank, failed.code
    kind, reason = _reported(failed.words)
    if reason is not None:
        first, *more = reason.splitlines()  # a table may stand below
        return kind("\n".join([f"worker {rank} failed: {first}; the others were stopped{_stopped(workers)}", *more]))
    if code == -signal.SIGKILL and out_of_memory:
        return WorkerError(
            f"worker {rank} was killed by the kernel, which had no memory left; the others were stopped. Plan for less "
            "memory (state what each device has in the cluster file), for more stages, or for smaller microbatches"
        )
    if code is not None and code < 0:
        return WorkerError(f"worker {rank} was killed by {_name(-code)}; the others were stopped")
    return WorkerError(f"worker {rank} failed: it ended with exit code {code}; the others were stopped")


def _name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _stopped(workers: Sequence[_Worker]) -> str:
    found = [str(worker.rank) for worker in workers if worker.is_stopped()]
    return f"; worker {', '.join(found)} was suspended (by SIGSTOP, or in a debugger)" if found else ""


def _reported(words: Path) -> tuple[type[PenstockError], str | None]:
    """What a worker said of its error, as the kind of error that it was."""
    try:
        message = json.loads(words.read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError):
        return WorkerError, None
    text = str(message.get("message", "") if isinstance(message, dict) else message).strip().splitlines()
    if not text:
        return WorkerError, None
    kind, colon, reason = text[0].partition(": ")
    known = getattr(errors, kind, None)
    return (known, "\n".join([reason, *text[1:]])) if colon and known else (WorkerError, text[0])


@dataclass
class _Signals:
    received: list[int]

    def take(self, number: int, frame: FrameType | None) -> None:
        """Only notes it: an exception in the midst of something else would leave workers behind."""
        self.received.append(number)


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    """Note signals instead of dying of them. Those that are ignored stay so (nohup). Once one has come the process is
    about to end, and further ones are ignored."""
    noted = _Signals([])
    before = {}
    in_main = threading.current_thread() is threading.main_thread()  # no other thread may set handlers
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT) if in_main else ():
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, noted.take)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if noted.received else handler)
