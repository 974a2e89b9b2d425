"""What all workers do together, from joining to leaving. If it fails, the error says which of them have not come."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from penstock.errors import WorkerError
from penstock.runtime.peers.reason import short_reason

log = logging.getLogger(__name__)
_INSIDE, _LEFT = 0.25, 0.5
"""Added to the number of a meeting."""


@contextmanager
def together(doing: str, timeout_s: float, *, number: int = 0, store: Store | None = None) -> Iterator[None]:
    """Say in the store that this worker has come, and at the end that it has left.

    ``doing`` is the same for all workers. ``number`` counts where they do it again and again. Nothing waits here: what
    is done inside has a deadline of its own.
    """
    rank, workers = _place()
    keys = [f"penstock/{doing}/{worker}" for worker in range(workers)]
    board = store or dist.distributed_c10d._get_default_store()
    try:
        board.set(keys[rank], str(number + _INSIDE))
        yield
        board.set(keys[rank], str(number + _LEFT))
    except RuntimeError as error:
        raise WorkerError(
            f"worker {rank} waited for {_whom(board, keys, rank, number)} to {doing} (at most {timeout_s:g} s): "
            f"{short_reason(error)}. See what that worker reports; raise --timeout if it is only slow"
        ) from error


def _place() -> tuple[int, int]:
    """This worker's number and how many there are, also before they have joined."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _whom(board: Store, keys: list[str], rank: int, number: int) -> str:
    """Those who have not come; if all have, those who may have stopped inside."""
    try:
        places = [float(board.get(key)) if board.check([key]) else -1.0 for key in keys]
    except RuntimeError:
        return "the others, and the launcher that joins them has ended"
    missing = [worker for worker, place in enumerate(places) if place < number + _INSIDE]
    inside = [worker for worker, place in enumerate(places) if place < number + _LEFT and worker != rank]
    if missing or len(inside) == 1:
        return f"worker {', '.join(map(str, missing or inside))}"
    return f"one of the workers {', '.join(map(str, inside))}" if inside else "a worker that has left"


def join(backend: str, timeout_s: float) -> None:
    limit = timedelta(seconds=timeout_s)
    try:
        store, rank, workers = next(rendezvous("env://", timeout=limit))
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise WorkerError(
            f"worker {os.environ['RANK']} could not join the others at {where} (at most {timeout_s:g} s): "
            f"{short_reason(error)}. Start all {os.environ['WORLD_SIZE']} workers; raise --timeout if some are slow"
        ) from error
    store.set_timeout(limit)
    with together("join", timeout_s, store=store):
        dist.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=limit)


def leave(timeout_s: float) -> None:
    """Everything is written by now, so that a peer that hangs costs time but not the run."""
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    leaving.start()
    leaving.join(timeout_s)
    if leaving.is_alive():
        log.warning("worker %s left without the others, who did not answer within %g s", dist.get_rank(), timeout_s)
