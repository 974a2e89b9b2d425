"""Workers that are processes: they know each other through torch's store and a process group."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from penstock.errors import WorkerError
from penstock.runtime.peers.peers import Peers
from penstock.runtime.peers.reason import short_reason

log = logging.getLogger(__name__)


class StorePeers(Peers):
    """Through a store, under a prefix with the generation's number."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        generation: int = 0,
        barrier: Callable[[], object] | None = None,
    ) -> None:
        """``barrier`` returns when all workers have called it; by default they wait in the store.

        A process group's barrier finds at once that a peer is gone; the store only knows that it has not come. A wait
        in the store also keeps other threads of this worker from using it.
        """
        super().__init__(rank, size, generation=generation, timeout_s=timeout_s)
        self.store = PrefixStore(f"penstock/generation-{generation}", store)
        self._barrier = barrier

    def meet(self, what: str) -> None:
        if self._barrier is None:
            super().meet(what)
            return
        with self.together(what):
            self._barrier()

    def _set(self, key: str, text: str) -> None:
        self.store.set(key, text)

    def _has(self, keys: Sequence[str]) -> bool:
        return self.store.check(list(keys))

    def _read(self, keys: Sequence[str]) -> list[str]:
        return [text.decode() for text in self.store.multi_get(list(keys))]

    def _wait(self, keys: Sequence[str]) -> None:
        self.store.wait(list(keys), timedelta(seconds=self.timeout_s))

    def _remove(self, key: str) -> None:
        self.store.delete_key(key)


class Meeting(NamedTuple):
    """Where the processes that were started together find each other."""

    store: Store
    rank: int
    size: int


def find_others(timeout_s: float) -> Meeting:
    """The launcher (or torchrun) has said where, in the environment."""
    limit = timedelta(seconds=timeout_s)
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise WorkerError(
            f"worker {os.environ['RANK']} could not join the others at {where} (at most {timeout_s:g} s): "
            f"{short_reason(error)}. Start all {os.environ['WORLD_SIZE']} workers; raise --timeout if some are slow"
        ) from error
    store.set_timeout(limit)
    return Meeting(store, rank, size)


def join(meeting: Meeting, backend: str, timeout_s: float, *, generation: int = 0) -> StorePeers:
    """Begin a generation: its default process group, and what its workers say to each other."""
    store, rank, size = meeting
    peers = StorePeers(store, rank, size, generation=generation, timeout_s=timeout_s, barrier=dist.barrier)
    with peers.together("join"):
        dist.init_process_group(
            backend, store=peers.store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )
    return peers


def leave(peers: Peers) -> None:
    """End a generation. Everything is written by now, so that a peer that hangs costs time but not the run."""
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    leaving.start()
    leaving.join(peers.timeout_s)
    if leaving.is_alive():
        log.warning("worker %s left without the others, who did not answer within %g s", peers.rank, peers.timeout_s)
