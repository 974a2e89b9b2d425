"""Chooses how each pair of workers communicates: workers of one host time gloo and shared memory, and use the
faster."""

from __future__ import annotations

import errno
import itertools
import json
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import WorkerError
from penstock.plan import Plan
from penstock.runtime.links.trials import Prober
from penstock.runtime.machine.machine import host_id
from penstock.runtime.peers.meeting import together
from penstock.runtime.peers.reason import short_reason
from penstock.runtime.sync.sync import sync_groups
from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.process_group import TorchTransport
from penstock.runtime.transport.shared_file import MadeFile, OpenedFile, Place
from penstock.runtime.transport.shared_memory import Line, SharedMemoryTransport, is_supported, make_file, open_file
from penstock.survey import Pattern

Pair = tuple[int, int]
"""Two workers, the lower number first."""

SHARED_MEMORY = "shared memory"
ROUNDS = 3
"""Both are timed by turns and the best time of each counts: the first rounds have new pages and cold connections."""
SIZES = {Pattern.TO_AND_FRO: (2**16, 2**20), Pattern.STREAM: (2**18,)}
"""A worker in training waits for messages, and sends one while another is on its way."""
ENOUGH_S = 0.003
"""Seconds for each size and pattern. With all rounds in both directions, a pair takes 0.1 to 0.2 s."""


@dataclass(frozen=True)
class ChosenLinks:
    transport: Transport
    chosen: Mapping[Pair, str]
    """What this worker communicates through, for each pair that it is in."""


def talking_pairs(plan: Plan) -> list[Pair]:
    """The pairs of workers that exchange messages: those of stages between which a value passes, and neighbours in a
    group that averages."""
    pipeline = plan.pipeline
    pairs = {
        _pair(*workers)
        for stage, sources in enumerate(pipeline.reads)
        for source in sources
        for workers in itertools.product(pipeline.workers[source], pipeline.workers[stage])
    }
    pairs.update(pair for group in sync_groups(plan) for pair in around(group))
    return sorted((low, high) for low, high in pairs if low != high)


def _pair(one: int, other: int) -> Pair:
    return min(one, other), max(one, other)


def around(group: Sequence[int]) -> set[Pair]:
    """The pairs of neighbours on a ring through the group."""
    return {_pair(*workers) for workers in zip(group, (*group[1:], group[0]), strict=True)}


def choose_links(
    groups: Sequence[tuple[int, ...]], pairs: Iterable[Pair], *, device: torch.device, timeout_s: float
) -> ChosenLinks:
    """Every worker calls it, with the same arguments, once per process group."""
    with together("make groups", timeout_s):
        base = TorchTransport(groups, timeout_s)
    mine = sorted(pair for pair in set(pairs) if base.rank in pair)
    chosen = {pair: str(dist.get_backend()) for pair in mine}
    if device.type != "cpu":
        return ChosenLinks(base, chosen)
    board = _Board(base.rank, timeout_s)
    lines = _open_lines(board, mine)
    through_memory = SharedMemoryTransport(base, lines)
    for low, high in mine:  # in the same order everywhere, so that no cycle of waits can form
        peer = high if base.rank == low else low
        if peer in lines and _memory_is_faster(board, (low, high), base, through_memory):
            chosen[low, high] = SHARED_MEMORY
        else:
            lines.pop(peer, None)
    return ChosenLinks(SharedMemoryTransport(base, lines, _rings(board, groups, lines)), chosen)


def _rings(board: _Board, groups: Sequence[tuple[int, ...]], lines: Collection[int]) -> list[tuple[int, ...]]:
    """The groups of this worker in which all workers have lines to both neighbours."""
    board.tell("lines", sorted(lines))
    known = {worker: set(board.ask(worker, "lines")) for group in groups if board.rank in group for worker in group}
    return [
        group
        for group in groups
        if board.rank in group and all(high in known[low] and low in known[high] for low, high in around(group))
    ]


@dataclass(frozen=True)
class _Board:
    """The store, through which workers tell each other what they know."""

    rank: int
    timeout_s: float

    def tell(self, name: str, word: Any) -> None:
        dist.distributed_c10d._get_default_store().set(f"penstock/links/{self.rank}/{name}", json.dumps(word))

    def ask(self, worker: int, name: str) -> Any:
        try:
            return json.loads(dist.distributed_c10d._get_default_store().get(f"penstock/links/{worker}/{name}"))
        except RuntimeError as error:
            raise WorkerError(
                f"worker {self.rank} waited for worker {worker} to join (at most {self.timeout_s:g} s): "
                f"{short_reason(error)}"
            ) from error


def _open_lines(board: _Board, pairs: Sequence[Pair]) -> dict[int, Line]:
    """Lines to the peers that share memory with this worker. Both ends agree on which these are."""
    board.tell("host", host_id() if is_supported() else None)
    peers = [worker for pair in pairs for worker in pair if worker != board.rank]
    near = [peer for peer in peers if is_supported() and board.ask(peer, "host") == host_id()]
    made = {peer: _make_file() for peer in near}
    for peer, file in made.items():
        board.tell(f"memory for {peer}", file and file.place)
    opened = {peer: _open_file(board, peer) for peer in near}
    for peer in near:
        board.tell(f"ready for {peer}", made[peer] is not None and opened[peer] is not None)
    lines = {}
    for peer, own in made.items():
        theirs, is_ready = opened[peer], board.ask(peer, f"ready for {board.rank}")
        if is_ready and own is not None and theirs is not None:
            lines[peer] = Line.over(own, theirs)
    return lines


def _make_file() -> MadeFile | None:
    try:
        return make_file()
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise  # without descriptors gloo would not work either
        return None  # no memory to share


def _open_file(board: _Board, peer: int) -> OpenedFile | None:
    word = board.ask(peer, f"memory for {board.rank}")
    if word is None:
        return None
    place = Place.told(word, peer)
    try:
        return open_file(place)
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise
        return None  # another container, or not allowed


def _memory_is_faster(board: _Board, pair: Pair, base: Transport, through_memory: Transport) -> bool:
    """The worker with the lower number times both and decides."""
    low, high = pair
    leads = board.rank == low
    probers = [_prober(transport, board.timeout_s) for transport in (base, through_memory)]
    best_s: list[dict[tuple[Pattern, int], float]] = [{} for _ in probers]
    for _, (pattern, sizes) in itertools.product(range(ROUNDS), SIZES.items()):
        for prober, best in zip(probers, best_s, strict=True):
            if leads:
                for num_bytes, seconds in prober.lead(high, pattern, sizes):
                    best[pattern, num_bytes] = min(seconds, best.get((pattern, num_bytes), seconds))
            else:
                prober.follow(low, pattern)
    if leads:
        by_base, by_memory = best_s
        ratios = [by_memory[each] / by_base[each] for each in by_memory.keys() & by_base.keys()]
        board.tell(f"memory to {high}", math.prod(ratios) < 1)
    return bool(board.ask(low, f"memory to {high}"))


def _prober(transport: Transport, timeout_s: float) -> Prober:
    return Prober(
        transport=transport,
        clock=time.perf_counter,
        device=torch.device("cpu"),
        timeout_s=timeout_s,
        enough_s=ENOUGH_S,
    )
