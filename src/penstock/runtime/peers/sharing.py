"""What every worker says of itself, known to all of them."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from penstock.errors import WorkerError
from penstock.runtime.peers.reason import short_reason


def share(name: str, part: Any, timeout_s: float) -> list[Any]:
    """Everybody's part, through the store, as JSON; returns when all have given theirs."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    keys = [f"penstock/share/{name}/{worker}" for worker in range(dist.get_world_size())]
    store.set(keys[rank], json.dumps(part))
    try:
        return [json.loads(store.get(key)) for key in keys]
    except RuntimeError as error:
        missing = [str(worker) for worker, key in enumerate(keys) if not store.check([key])]
        raise WorkerError(
            f"worker {rank} waited for worker {', '.join(missing)} (at most {timeout_s:g} s): {short_reason(error)}"
        ) from error
