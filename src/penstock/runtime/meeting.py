"""What all workers do together: if it fails, the error says which of them have not come."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from penstock.errors import WorkerError
from penstock.runtime.transport import short_reason

_INSIDE, _LEFT = 0.25, 0.5
"""Added to the number of a meeting."""


@contextmanager
def together(doing: str, timeout_s: float, *, number: int = 0, store: dist.Store | None = None) -> Iterator[None]:
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


def _whom(board: dist.Store, keys: list[str], rank: int, number: int) -> str:
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
