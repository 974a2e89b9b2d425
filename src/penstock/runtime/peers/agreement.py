"""How the workers of a run agree on its directory: worker 0 opens it and tells the others."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from penstock import codec, errors
from penstock.errors import WorkerError
from penstock.run import RunDirectory

KEY = "penstock/run"
LOOKS, BETWEEN_LOOKS_S = 50, 0.2
"""A network file system may show a new file late."""


class Store(Protocol):
    """What is used of torch's."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


def agree_on_run(
    store: Store, rank: int, meet: Callable[[], object], open_run: Callable[[], RunDirectory]
) -> RunDirectory:
    """The directory of the run. If worker 0 cannot open it, all workers raise its error.

    ``meet`` returns when all workers have called it: none may end before all have heard.
    """
    if rank != 0:
        told = json.loads(store.get(KEY))
        meet()
        return _as_told(told, rank)
    try:
        run = open_run()
        told = {"path": str(run.path.absolute()), "provenance": codec.read_text(run.provenance)}
    except Exception as error:
        store.set(KEY, json.dumps({"error": type(error).__name__, "words": str(error)}))
        meet()
        raise
    store.set(KEY, json.dumps(told))
    meet()
    return run


def _as_told(told: dict[str, str], rank: int) -> RunDirectory:
    if "error" in told:
        raise getattr(errors, told["error"], WorkerError)(told["words"])
    run = RunDirectory(Path(told["path"]))
    for _ in range(LOOKS):
        if run.provenance.is_file() and codec.read_text(run.provenance) == told["provenance"]:
            return run
        time.sleep(BETWEEN_LOOKS_S)
    raise WorkerError(
        f"worker {rank} on {socket.gethostname()} does not see {run.path}, where worker 0 keeps the run; "
        "give --run-dir a directory that all hosts share"
    )
