"""Workers that are threads of one process: for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.runtime.peers.peers import Peers


@dataclass
class Board:
    """What the ThreadPeers of one process share, of all their generations."""

    condition: threading.Condition = field(default_factory=threading.Condition)
    texts: dict[str, str] = field(default_factory=dict)
    failed: str | None = None

    def fail(self, reason: str) -> None:
        """Wake whoever waits: a worker is gone."""
        with self.condition:
            self.failed = self.failed or reason
            self.condition.notify_all()


class ThreadPeers(Peers):
    def __init__(self, board: Board, rank: int, size: int, *, timeout_s: float, generation: int = 0) -> None:
        super().__init__(rank, size, generation=generation, timeout_s=timeout_s)
        self._board = board

    def _set(self, key: str, text: str) -> None:
        with self._board.condition:
            self._board.texts[self._own(key)] = text
            self._board.condition.notify_all()

    def _has(self, keys: Sequence[str]) -> bool:
        return all(self._own(key) in self._board.texts for key in keys)

    def _read(self, keys: Sequence[str]) -> list[str]:
        return [self._board.texts[self._own(key)] for key in keys]

    def _wait(self, keys: Sequence[str]) -> None:
        deadline_s = time.monotonic() + self.timeout_s
        with self._board.condition:
            while not self._has(keys):
                if self._board.failed is not None:
                    raise RuntimeError(f"another worker failed: {self._board.failed}")
                if not self._board.condition.wait(max(0.0, deadline_s - time.monotonic())):
                    raise RuntimeError(f"nothing came within {self.timeout_s:g} s")

    def _remove(self, key: str) -> None:
        del self._board.texts[self._own(key)]

    def _own(self, key: str) -> str:
        return f"generation-{self.generation}/{key}"
