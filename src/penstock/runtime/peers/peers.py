"""What a worker needs of the others besides tensors.

A *generation* is a set of workers that know each other. Its number is part of every key that they use, so the next
generation can begin in the same processes, over the same store, and sees nothing of the one before.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.errors import WorkerError
from penstock.runtime.peers.reason import short_reason

_INSIDE, _LEFT = 0.25, 0.5
"""Added to the number of times that a worker has done something together with the others."""


class Peers(ABC):
    """One worker's end of a generation. Parts and words are whatever JSON can express.

    ``what`` completes the error "worker 0 waited for worker 1 to ...", ``topic`` "... waited for worker 1 to tell ...".
    Threads of one worker may use its ``Peers`` at the same time, for different things.
    """

    def __init__(self, rank: int, size: int, *, generation: int, timeout_s: float) -> None:
        self.rank, self.size, self.generation, self.timeout_s = rank, size, generation, timeout_s
        self._times = Counter[str]()
        """How often this worker has begun each thing that all do."""

    def meet(self, what: str) -> None:
        """Wait until all workers have called it."""
        self.gather(what, None)

    def gather(self, what: str, part: Any) -> list[Any]:
        """Everybody's part, by rank. Returns when all have given theirs."""
        number = self._count(what)
        keys = self._keys(f"gather/{what}/{number}")
        try:
            self._set(keys[self.rank], json.dumps(part))
            self._wait(keys)
            parts = [json.loads(text) for text in self._read(keys)]
            if number > 1:  # all have come to this one, so all have read the one before
                self._remove(f"gather/{what}/{number - 1}/{self.rank}")
        except RuntimeError as error:
            raise self._late(self._without(keys), what, error) from error
        return parts

    def agree(self, what: str, number: int) -> int:
        """The largest number that any worker gives. Returns when all have given theirs."""
        return int(max(self.gather(what, number)))

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Put this around what all workers do with a deadline of its own: if it fails, the error names those who have
        not come. Nothing waits here."""
        number, keys = self._count(what), self._keys(f"together/{what}")
        try:
            self._set(keys[self.rank], str(number + _INSIDE))
            yield
            self._set(keys[self.rank], str(number + _LEFT))
        except RuntimeError as error:
            raise self._late(self._absent(keys, number), what, error) from error

    def tell(self, topic: str, words: Any) -> None:
        """Leave word for the others. It stands until this worker's next word on the topic."""
        self._set(f"told/{topic}/{self.rank}", json.dumps(words))

    def told(self, topic: str) -> list[Any]:
        """Everybody's newest word, by rank; None for a worker that has left none. Does not wait."""
        keys = self._keys(f"told/{topic}")
        if self._has(keys):
            return [json.loads(text) for text in self._read(keys)]
        return [json.loads(self._read([key])[0]) if self._has([key]) else None for key in keys]

    def ask(self, worker: int, topic: str) -> Any:
        """A worker's newest word. Waits for the first."""
        key = f"told/{topic}/{worker}"
        try:
            self._wait([key])
            return json.loads(self._read([key])[0])
        except RuntimeError as error:
            raise self._late(f"worker {worker}", f"tell {topic}", error) from error

    def _count(self, what: str) -> int:
        self._times[what] += 1
        return self._times[what]

    def _keys(self, prefix: str) -> list[str]:
        return [f"{prefix}/{worker}" for worker in range(self.size)]

    def _late(self, whom: str, what: str, error: RuntimeError) -> WorkerError:
        return WorkerError(
            f"worker {self.rank} waited for {whom} to {what} (at most {self.timeout_s:g} s): "
            f"{short_reason(error)}. See what that worker reports; raise --timeout if it is only slow"
        )

    def _without(self, keys: Sequence[str]) -> str:
        """Those who have not given their part."""
        try:
            missing = [str(worker) for worker, key in enumerate(keys) if not self._has([key])]
        except RuntimeError:
            return _NOBODY_JOINS
        return f"worker {', '.join(missing)}" if missing else "a worker that has ended"

    def _absent(self, keys: Sequence[str], number: int) -> str:
        """Those who have not come; if all have, those who may have stopped inside."""
        try:
            places = [float(self._read([key])[0]) if self._has([key]) else -1.0 for key in keys]
        except RuntimeError:
            return _NOBODY_JOINS
        missing = [worker for worker, place in enumerate(places) if place < number + _INSIDE]
        inside = [worker for worker, place in enumerate(places) if place < number + _LEFT and worker != self.rank]
        if missing or len(inside) == 1:
            return f"worker {', '.join(map(str, missing or inside))}"
        return f"one of the workers {', '.join(map(str, inside))}" if inside else "a worker that has left"

    # What a form provides. A failure, a deadline that has passed included, is a RuntimeError.

    @abstractmethod
    def _set(self, key: str, text: str) -> None: ...

    @abstractmethod
    def _has(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""

    @abstractmethod
    def _read(self, keys: Sequence[str]) -> list[str]:
        """The texts of keys that are there."""

    @abstractmethod
    def _wait(self, keys: Sequence[str]) -> None:
        """Return when all of them are there, or raise after ``timeout_s``."""

    @abstractmethod
    def _remove(self, key: str) -> None: ...


_NOBODY_JOINS = "the others, and the launcher that joins them has ended"
