"""How much memory a worker's process holds in tensors, cheaply enough to look at while it trains."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

import torch
from torch import Tensor

EVERY_S = 0.05
"""A look costs about 40 microseconds on a CPU."""


class MemoryMeter:
    """The most seen since last asked, beginning with what the process held before training.

    On a CPU it then follows what malloc has given out: what a process takes of the machine says little, as it keeps
    what is freed. It looks at moments, so a peak between two of them passes unseen; a GPU's allocator misses none.
    """

    def __init__(self, device: torch.device, held_bytes: int) -> None:
        """``held_bytes`` is what the process holds now."""
        self.device, self._held_bytes = device, held_bytes
        self._in_use = _malloced() if device.type == "cpu" else None
        self._before = self._now()
        self._most: int | None = None
        self._looked_s = -EVERY_S

    def look(self, now_s: float) -> None:
        """Call it when memory is likely to be high, as often as you like."""
        if now_s - self._looked_s >= EVERY_S:
            self._looked_s = now_s
            self._note(self._now())

    def take(self) -> int | None:
        """Of the time since the last call; None where it cannot be measured."""
        if self.device.type == "cuda":
            self._note(torch.cuda.max_memory_allocated(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._note(self._now())
        most, self._most = self._most, None
        return most

    def _note(self, in_use: int | None) -> None:
        if in_use is not None and self._before is not None:
            held = in_use - self._before + self._held_bytes
            self._most = held if self._most is None else max(self._most, held)

    def _now(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return None if self._in_use is None else self._in_use()


def held_bytes(device: torch.device) -> int:
    """What all tensors of this process take on a device: weights, data, whatever the job has there.

    On a CPU they are looked up among the objects that the garbage collector knows; those that it has frozen are not.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and each.layout is torch.strided:  # type(): a proxy may lie of its class
            storage = each.untyped_storage()
            if storage.device.type == device.type:
                found[storage._cdata] = storage.nbytes()
    return sum(found.values())


class _Mallinfo2(ctypes.Structure):
    """From glibc's malloc.h."""

    _NAMES = (
        *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
        *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
    )
    _fields_ = tuple((name, ctypes.c_size_t) for name in _NAMES)


def _malloced() -> Callable[[], int] | None:
    """Bytes given out and not given back, in all arenas and mappings; there is no such thing before glibc 2.33."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo2.restype = _Mallinfo2

    def in_use() -> int:
        found = mallinfo2()
        return int(found.uordblks + found.hblkhd)

    return in_use
