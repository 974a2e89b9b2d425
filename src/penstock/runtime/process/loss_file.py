"""The losses of a run, on disk: every worker appends those that it sees to a file of its own, so that memory does not
grow with the run. At its end they become the loss of each minibatch."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from penstock.errors import JobError
from penstock.limits import is_usable
from penstock.runtime.stage.losses import Term, mean_of
from penstock.trace import Array

log = logging.getLogger(__name__)
ROW = np.dtype([("microbatch", "<f8"), ("total", "<f8"), ("weight", "<f8")])
"""Whole numbers below 2**53 are exact as floats, and one kind of number makes appending quick."""
BUFFERED = 4096
"""Rows that are kept in memory until they are written, 98 kB."""
AT_ONCE = 65_536
"""Rows that are read at a time."""
RECENT = 20
"""Microbatches in the loss that the progress line shows."""


class LossFile:
    """Appends rows to a file. A disk that fails is reported once, and ends the recording but not the run."""

    def __init__(self, path: Path) -> None:
        """What an earlier run left there is removed."""
        self.path = path
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        self._rows = array("d")
        self._failed = False

    def add(self, microbatch: int, total: float, weight: float) -> None:
        self._rows.extend((microbatch, total, weight))
        if len(self._rows) >= 3 * BUFFERED:
            self.flush()

    def flush(self) -> None:
        rows, self._rows = self._rows, array("d")
        if self._failed:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                _write_all(file.fileno(), np.asarray(rows).astype("<f8").tobytes())
        except OSError as error:
            self._failed = True
            log.warning(
                "%s: cannot be written: %s; training goes on, and its result will lack the losses from here on",
                self.path,
                error.strerror,
            )


def _write_all(descriptor: int, data: bytes) -> None:
    """A write may take a part only, as where a disk is about to be full."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def read_rows(path: Path) -> Iterator[Array]:
    """A part of the file at a time; nothing where there is none. A row that was only begun is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        while data := file.read(AT_ONCE * ROW.itemsize):
            yield np.frombuffer(data, ROW, len(data) // ROW.itemsize)


def per_minibatch(parts: Iterable[Array], minibatches: Sequence[int]) -> tuple[float | None, ...]:
    """The loss of each minibatch, from rows of ``ROW``; None where it is no finite number or was not recorded.

    ``minibatches`` has the number of microbatches of each. Microbatches are added up in their order, whichever worker
    saw them, so that a run repeated gives the same bits.
    """
    ends = np.cumsum(np.asarray(minibatches, np.int64))
    if not len(ends):
        return ()
    totals, weights = np.zeros((2, int(ends[-1])))
    for rows in parts:
        at = rows["microbatch"].astype(np.int64)
        totals[at], weights[at] = rows["total"], rows["weight"]
    starts = ends - minibatches
    with np.errstate(all="ignore"):
        means = np.add.reduceat(totals, starts) / np.add.reduceat(weights, starts)
    return tuple(mean if finite else None for mean, finite in zip(means.tolist(), np.isfinite(means), strict=True))


@dataclass
class LossLog:
    """The losses that a worker with the last stage sees, microbatch by microbatch. Only the newest stay in memory."""

    on_nonfinite: Literal["warn", "stop"] = "warn"
    file: LossFile | None = None
    _newest: deque[Term] = field(default_factory=lambda: deque(maxlen=RECENT))
    _warned: bool = False

    def add(self, microbatch: int, found: Term, minibatch: int) -> None:
        """``microbatch`` is its number in the run; ``minibatch`` counts those of the whole run before its own."""
        self._newest.append(found)
        if self.file is not None:
            self.file.add(microbatch, *found)
        if math.isfinite(found.total) or self._warned:
            return
        self._warned = True
        words = f"the loss of minibatch {minibatch + 1} is {'not a number' if math.isnan(found.total) else 'infinite'}"
        remedy = "lower the learning rate, clip gradients (Job.clip_norm), or look for such values in the data"
        if self.on_nonfinite == "stop":
            raise JobError(f"{words}, where Job.on_nonfinite_loss says to stop; {remedy}")
        log.warning(
            "%s; training goes on (Job.on_nonfinite_loss='stop' would end it); %s; later ones are not reported",
            words,
            remedy,
        )

    def recent(self) -> float | None:
        """A mean over the newest microbatches."""
        found = mean_of(self._newest)
        return found if is_usable(found) else None
