"""Memory that two processes map: who may open it, how few descriptors it takes, and who sees that the other ended."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from penstock.errors import WorkerError
from penstock.runtime.links import choice
from penstock.runtime.machine.machine import descriptors_explained
from penstock.runtime.peers.reason import short_reason
from penstock.runtime.transport.shared_file import MadeFile, OpenedFile, Place
from penstock.runtime.transport.shared_memory import Line, is_supported, make_file, open_file

pytestmark = pytest.mark.skipif(not is_supported(), reason="shared memory is for Linux on x86-64")

FIRST, MOST = 2**16, 2**24


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def place_of(fd: int, token: int = 0) -> Place:
    return Place(os.getpid(), fd, token)


def test_a_line_to_a_peer_keeps_one_descriptor_however_much_it_grows() -> None:
    before = descriptors()
    mine, theirs = make_file(), make_file()
    assert descriptors() - before == 2
    line = Line.over(mine, open_file(theirs.place))
    for outlet in line.outlets.values():
        for size in (2**17, 2**18, 2**20):
            outlet._grow(size)
    assert descriptors() - before == 2
    del line, mine, theirs, outlet
    assert descriptors() == before


def test_the_other_is_there_as_long_as_it_has_the_file_mapped() -> None:
    made = MadeFile(FIRST, MOST)
    opened = OpenedFile(made.place, FIRST, MOST)
    assert not made.is_left()
    del opened
    assert made.is_left()


def test_a_lock_does_not_vanish_when_another_descriptor_of_the_file_closes() -> None:
    """As POSIX record locks do."""
    made = MadeFile(FIRST, MOST)
    opened = OpenedFile(made.place, FIRST, MOST)
    again = os.open(f"/proc/self/fd/{made.fd}", os.O_RDWR)
    os.close(os.dup(again))
    os.close(again)
    assert not made.is_left()
    assert opened.address


FORK = f"""
import os, sys, time
from penstock.runtime.transport.shared_file import MadeFile, OpenedFile, Place
opened = OpenedFile(Place(*map(int, sys.argv[1:])), {FIRST}, {MOST})
made = MadeFile({FIRST}, {MOST})
child = os.fork()
if child == 0:
    del opened, made
    time.sleep(60)
print(child, flush=True)
os._exit(0)
"""


@pytest.mark.processes
def test_a_child_that_a_worker_has_forked_does_not_keep_its_lock() -> None:
    """As the processes of a data loader may outlast the worker for a while."""
    made = MadeFile(FIRST, MOST)
    command = [sys.executable, "-c", FORK, *map(str, made.place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        child = int(worker.stdout.readline())
        worker.wait()
        try:
            deadline = time.monotonic() + 20
            while not made.is_left() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert made.is_left()
            assert Path(f"/proc/{child}").exists()
        finally:
            os.kill(child, 9)


def test_memory_that_grows_is_seen_by_both() -> None:
    made = MadeFile(FIRST, MOST)
    opened = OpenedFile(made.place, FIRST, MOST)
    offset = made.grow(2**20)
    ctypes.memset(made.address + offset, 7, 2**20)
    assert ctypes.string_at(opened.address + offset, 2**20) == b"\7" * 2**20


# --- what is opened


def test_only_memory_that_a_worker_made_to_share_is_opened(tmp_path: Path) -> None:
    file = (tmp_path / "file").open("w+b")
    file.write(bytes(FIRST))
    file.flush()
    other, small = os.memfd_create("other"), os.memfd_create("penstock")
    os.posix_fallocate(other, 0, FIRST)
    os.posix_fallocate(small, 0, FIRST - 1)
    reads, writes = os.pipe()
    try:
        for fd in (file.fileno(), other, small, reads):
            with pytest.raises(OSError, match="is not memory that a worker of this user shares"):
                OpenedFile(place_of(fd), FIRST, MOST)
    finally:
        file.close()
        for fd in (other, small, reads, writes):
            os.close(fd)


def test_memory_of_another_user_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    made = MadeFile(FIRST, MOST)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(OSError, match="is not memory that a worker of this user shares"):
        OpenedFile(made.place, FIRST, MOST)


def test_memory_with_another_token_is_not_opened() -> None:
    made = MadeFile(FIRST, MOST)
    before = descriptors()
    with pytest.raises(OSError, match="is not the file that was told of"):
        OpenedFile(made.place._replace(token=made.place.token ^ 1), FIRST, MOST)
    assert descriptors() == before
    assert made.is_left()


@pytest.mark.parametrize(
    "word", ["/etc/passwd", [1, 2], [1, "2/../../..", 3], [-1, 2, 3], [1, 2, 2**64], [1, 2.0, 3], {}]
)
def test_a_place_that_is_none_is_refused(word: object) -> None:
    with pytest.raises(WorkerError, match="worker 3 says that the memory to share is at"):
        Place.told(word, 3)


# --- descriptors run out


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors(), before[1]))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in taken:
            os.close(fd)


def test_a_worker_without_descriptors_says_so_and_what_to_do() -> None:
    def make() -> None:
        with no_descriptors_left(), descriptors_explained():
            choice._make_file()

    with pytest.raises(
        WorkerError, match=r"worker 0 has \d+ files open, and may open no more; .*ulimit -n 4096"
    ) as found:
        make()
    assert isinstance(found.value.__cause__, OSError)
    assert found.value.__cause__.errno == errno.EMFILE


def test_a_library_without_descriptors_is_explained_too_and_other_errors_are_left_alone() -> None:
    """gloo's is a RuntimeError."""
    with pytest.raises(WorkerError, match="may open no more"), descriptors_explained():
        raise RuntimeError("[enforce fail at loop.cc:105] fd_ != -1. -1 vs -1. epoll_create: Too many open files")
    with pytest.raises(RuntimeError, match="another"), descriptors_explained():
        raise RuntimeError("another")


def test_a_reason_without_a_message_is_its_kind() -> None:
    assert short_reason(RuntimeError()) == "RuntimeError"
    assert short_reason(ValueError(" \n ")) == "ValueError"
