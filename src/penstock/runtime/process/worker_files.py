"""The files that workers leave at the end of a run, from which worker 0 makes the trace and the result.

They are in the run directory, which all hosts see. The store would not do: it refuses values of more than 8 MiB.

workers/
    worker-00000.json         an Account
    worker-00000.events.npy   its events, as rows
    worker-00000.losses       the losses of the microbatches whose last stage it ran, appended as the run goes
"""

from __future__ import annotations

import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from penstock import codec
from penstock.clocks import Alignment
from penstock.errors import FormatError
from penstock.limits import is_usable
from penstock.plan import Plan
from penstock.run import EdgeError, RunDirectory
from penstock.runtime.messages.compress import Direction
from penstock.runtime.worker.events import ROW, EventLog, columns_of
from penstock.schedule import Staleness
from penstock.trace import Array, Columns


@dataclass(frozen=True, kw_only=True)
class Account:
    """What one worker reports about its part in the run."""

    origin_s: float
    """When the run began, by the worker's own clock."""
    clocks: tuple[Alignment, ...]
    """The clocks of machines that this worker has compared with worker 0's."""
    links: Mapping[str, str]
    """What carried the messages of each pair of workers."""
    device_kind: str
    compression: tuple[EdgeError, ...]
    staleness: Mapping[str, Mapping[str, int]]
    """For each stage, the number of microbatches by the age of their gradients."""
    events: tuple[int, ...] = ()
    """How many events each part of its log has."""

    FORMAT: ClassVar[str] = "penstock.account/1"


def losses_file(run: RunDirectory, worker: int) -> Path:
    return run.workers / f"worker-{worker:05d}.losses"


def leave_files(run: RunDirectory, worker: int, account: Account, log: EventLog) -> None:
    """Write this worker's events and then its account, so that an account never exists without its events."""
    rows = log.rows()
    events = _events_file(run, worker)
    try:
        events.parent.mkdir(parents=True, exist_ok=True)
        np.save(events, np.concatenate(rows), allow_pickle=False)
    except OSError as error:
        raise FormatError(f"{events}: cannot be written: {error.strerror}") from None
    codec.save(replace(account, events=tuple(map(len, rows))), _account_file(run, worker))


def accounts_of(run: RunDirectory, workers: int) -> list[Account]:
    """The accounts of all workers, after all have written them."""
    missing = [worker for worker in range(workers) if not _account_file(run, worker).exists()]
    if missing:
        raise FormatError(
            f"{_account_file(run, missing[0])}: worker {missing[0]} has written it, but it is not to be seen here; "
            "the run directory must be visible to all hosts under the same path"
        )
    return [codec.load(Account, _account_file(run, worker)) for worker in range(workers)]


def events_of(run: RunDirectory, accounts: Sequence[Account]) -> list[list[Columns]]:
    """The parts of each worker's log, in seconds since the run began at worker 0, by worker 0's clock."""
    of_worker = {worker: found for account in accounts for found in account.clocks for worker in found.workers}
    reference_s = accounts[0].origin_s

    def aligned(worker: int, rows: Array) -> Columns:
        origin_s, clock = accounts[worker].origin_s, of_worker[worker]
        columns = columns_of(rows, worker)
        start_s, end_s = (
            clock.to_reference(origin_s + own_s) - reference_s for own_s in (columns.start_s, columns.end_s)
        )
        return replace(columns, start_s=start_s, end_s=end_s)

    return [
        [aligned(worker, rows) for rows in np.split(_read_events(run, worker), np.cumsum(account.events)[:-1])]
        for worker, account in enumerate(accounts)
    ]


def clear(run: RunDirectory) -> None:
    """Remove the files, after their content is in the run's result and trace."""
    shutil.rmtree(run.workers, ignore_errors=True)


def _read_events(run: RunDirectory, worker: int) -> Array:
    path = _events_file(run, worker)
    try:
        rows: Array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from None
    if rows.dtype != ROW:
        raise FormatError(f"{path}: holds {rows.dtype} instead of a worker's events")
    return rows


def _account_file(run: RunDirectory, worker: int) -> Path:
    return run.workers / f"worker-{worker:05d}.json"


def _events_file(run: RunDirectory, worker: int) -> Path:
    return run.workers / f"worker-{worker:05d}.events.npy"


def staleness_of(accounts: Iterable[Account], stage: int) -> Staleness:
    """The staleness that all replicas of a stage have counted."""
    total = Counter[int]()
    for account in accounts:
        total.update({int(age): count for age, count in account.staleness.get(str(stage), {}).items()})
    return Staleness.counted(total)


def edge_error(plan: Plan, edge: Direction, total: float, count: int) -> EdgeError:
    """The compression error of an edge, as one worker has measured it."""
    source, target, direction = edge
    mean = total / count
    return EdgeError(
        source=source,
        target=target,
        sends=plan.stages[source].sends,
        direction=direction,
        error=mean if is_usable(mean) else None,
        looked_at=count,
    )


def edge_errors(accounts: Iterable[Account]) -> Iterator[EdgeError]:
    """The compression error of each edge, over all replicas."""
    found: dict[tuple[int, int, bool], list[EdgeError]] = defaultdict(list)
    for account in accounts:
        for each in account.compression:
            found[each.source, each.target, each.direction != "forward"].append(each)
    for _, parts in sorted(found.items()):
        looked_at = sum(part.looked_at for part in parts)
        total = math.fsum(math.nan if part.error is None else part.error * part.looked_at for part in parts)
        error = total / looked_at if is_usable(total) else None
        yield replace(parts[0], error=error, looked_at=looked_at)
