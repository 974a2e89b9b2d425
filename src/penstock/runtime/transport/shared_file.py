"""A file in memory that one process makes and another maps, and how the maker sees that the other has ended.

The file (memfd) never has a name: the other opens it by way of /proc, so nothing is left behind however a process
ends, and no mount's size limits it. Both map it once, with address space for all that it may grow to, and close the
descriptor. The maker alone keeps one, to let the file grow and to look at the other's lock.

Each locks a byte of the file for as long as it has the file mapped. The locks belong to the open file (OFD locks) and
not to the process: POSIX record locks vanish as soon as the process closes any descriptor of the file. A mapping keeps
its file open, so the lock needs no descriptor. A child that is forked gets neither the mapping nor, with the maker's
descriptor, the file that is locked: it does not keep the lock of a parent that has ended.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import struct
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import WorkerError

NAME = "penstock"
TOKEN_BYTES = 8
"""At the beginning of the file: a random number that the maker publishes with the place of the file."""

_MAKER, _OPENER = 0, 1
"""The byte of the file that each keeps locked while it has the file mapped."""
_MADV_DONTFORK = 10
_FLOCK = "hhqqi4x"
"""struct flock of 64-bit Linux."""


class Place(NamedTuple):
    """Where another process of this host finds a file."""

    process: int
    fd: int
    token: int

    @classmethod
    def told(cls, word: Any, worker: int) -> Place:
        """As a worker has published it; raises unless it has the form of one."""
        is_place = isinstance(word, list) and len(word) == len(cls._fields)
        if not is_place or any(type(each) is not int or not 0 <= each < 2**64 for each in word):
            raise WorkerError(
                f"worker {worker} says that the memory to share is at {str(word)[:100]}, which is not a process, a "
                "descriptor and a token; start all workers with the same version of Penstock"
            )
        return cls(*word)


class _Mapping:
    """The file from its beginning, with room to grow, and a lock on it."""

    def __init__(self, fd: int, side: int, num_bytes: int) -> None:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock_of(side))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        shared = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)
        found = libc.mmap(None, ctypes.c_size_t(num_bytes), *shared, fd, ctypes.c_long(0))
        if found in (None, ctypes.c_void_p(-1).value):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        libc.madvise(ctypes.c_void_p(found), ctypes.c_size_t(num_bytes), _MADV_DONTFORK)
        self.address = int(found)
        weakref.finalize(self, _unmap, self.address, num_bytes, os.getpid()).atexit = False


def _unmap(address: int, num_bytes: int, process: int) -> None:
    if os.getpid() == process:  # a forked child may have something else there
        ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes))


class MadeFile:
    """The maker's end."""

    def __init__(self, first_bytes: int, most_bytes: int) -> None:
        """``first_bytes`` are there from the start."""
        made = os.memfd_create(NAME, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(made, 0, first_bytes)
            token = os.urandom(TOKEN_BYTES)
            os.pwrite(made, token, 0)
            self._mapping = _Mapping(made, _MAKER, most_bytes)
            self.fd = os.open(f"/proc/self/fd/{made}", os.O_RDWR | os.O_CLOEXEC)  # opened again: without the lock
        finally:
            os.close(made)
        weakref.finalize(self, os.close, self.fd).atexit = False
        self.address, self._end = self._mapping.address, first_bytes
        self.place = Place(os.getpid(), self.fd, int.from_bytes(token, "little"))

    def grow(self, num_bytes: int) -> int:
        """Returns where the new part begins; raises OSError where there is no memory for it."""
        offset = self._end
        os.posix_fallocate(self.fd, offset, num_bytes)  # an error now rather than a fault at the first touch
        self._end += num_bytes
        return offset

    def is_left(self) -> bool:
        """Whether the other, which had it open, has ended: the kernel lets go of its lock, however it ended."""
        found = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, _lock_of(_OPENER))
        return bool(struct.unpack(_FLOCK, found)[0] == fcntl.F_UNLCK)


class OpenedFile:
    """The other's end."""

    def __init__(self, place: Place, first_bytes: int, most_bytes: int) -> None:
        """Raises OSError if there is no such file at that place, as in another container."""
        path = Path(f"/proc/{place.process}/fd/{place.fd}")
        sizes = range(first_bytes, most_bytes + 1)
        expected = _checked(path, path.stat(), sizes)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if _checked(path, os.fstat(fd), sizes) != expected:
                raise OSError(f"{path} has become another file")
            if os.pread(fd, TOKEN_BYTES, 0) != place.token.to_bytes(TOKEN_BYTES, "little"):
                raise OSError(f"{path} is not the file that was told of")  # process numbers of another container
            self._mapping = _Mapping(fd, _OPENER, most_bytes)
        finally:
            os.close(fd)
        self.address = self._mapping.address


def _checked(path: Path, found: os.stat_result, sizes: range) -> tuple[int, int]:
    """Which file it is; raises unless it may be one that a worker of this user has made to share."""
    is_ours = (
        str(path.readlink()) == f"/memfd:{NAME} (deleted)"
        and stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and found.st_size in sizes
    )
    if not is_ours:
        raise OSError(f"{path} is not memory that a worker of this user shares")
    return found.st_dev, found.st_ino


def _lock_of(side: int) -> bytes:
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, side, 1, 0)
