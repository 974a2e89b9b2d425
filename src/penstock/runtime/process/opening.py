"""How the workers of a run come to one run directory: worker 0 opens it and tells the others."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

from penstock import codec, errors
from penstock.errors import WorkerError
from penstock.run import RunDirectory
from penstock.runtime.peers.peers import Peers

TOPIC = "the run directory"
LOOKS, BETWEEN_LOOKS_S = 50, 0.2
"""A network file system may show a new file late."""


def open_together(peers: Peers, open_run: Callable[[], RunDirectory]) -> RunDirectory:
    """The directory of the run. If worker 0 cannot open it, all workers raise its error."""
    if peers.rank != 0:
        told = peers.ask(0, TOPIC)
        _all_have_heard(peers)
        return _as_told(told, peers.rank)
    try:
        run = open_run()
        told = {"path": str(run.path.absolute()), "provenance": codec.read_text(run.provenance)}
    except Exception as error:
        peers.tell(TOPIC, {"error": type(error).__name__, "words": str(error)})
        _all_have_heard(peers)
        raise
    peers.tell(TOPIC, told)
    _all_have_heard(peers)
    return run


def _all_have_heard(peers: Peers) -> None:
    """Worker 0 may hold the store, so that it must not end before."""
    peers.meet("open the run directory")


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
