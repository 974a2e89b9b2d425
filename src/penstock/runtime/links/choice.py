"""Chooses how each pair of workers communicates: workers of one host time gloo and shared memory, and use the
faster."""

from __future__ import annotations

import errno
import itertools
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.plan import Plan
from penstock.runtime.links.trials import Prober
from penstock.runtime.machine.machine import host_id
from penstock.runtime.peers.peers import Peers
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
    """what this worker talks through, by pair"""
    backend: str
    """torch's, for what does not go through shared memory"""


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
    peers: Peers, groups: Sequence[tuple[int, ...]], pairs: Iterable[Pair], *, device: torch.device
) -> ChosenLinks:
    """Every worker calls it, with the same groups and pairs, once in a generation."""
    with peers.together("make groups"):
        base = TorchTransport(groups, peers.timeout_s)
    mine = sorted(pair for pair in set(pairs) if peers.rank in pair)
    chosen = dict.fromkeys(mine, base.backend)
    if device.type != "cpu":
        return ChosenLinks(base, chosen, base.backend)
    lines = _open_lines(peers, mine)
    through_memory = SharedMemoryTransport(base, lines)
    for low, high in mine:  # in one order everywhere, so that nobody waits in a circle
        peer = high if peers.rank == low else low
        if peer in lines and _memory_is_faster(peers, (low, high), base, through_memory):
            chosen[low, high] = SHARED_MEMORY
        else:
            lines.pop(peer, None)
    return ChosenLinks(SharedMemoryTransport(base, lines, _rings(peers, groups, lines)), chosen, base.backend)


def _rings(peers: Peers, groups: Sequence[tuple[int, ...]], lines: Collection[int]) -> list[tuple[int, ...]]:
    """The groups of this worker in which all of them have lines to those beside them."""
    peers.tell("its lines", sorted(lines))
    known = {worker: set(peers.ask(worker, "its lines")) for group in groups if peers.rank in group for worker in group}
    return [
        group
        for group in groups
        if peers.rank in group and all(high in known[low] and low in known[high] for low, high in around(group))
    ]


def _open_lines(peers: Peers, pairs: Sequence[Pair]) -> dict[int, Line]:
    """Lines to the peers that share memory with this worker; both ends agree on which these are."""
    peers.tell("its host", host_id() if is_supported() else None)
    others = [worker for pair in pairs for worker in pair if worker != peers.rank]
    near = [peer for peer in others if is_supported() and peers.ask(peer, "its host") == host_id()]
    made = {peer: _make_file() for peer in near}
    for peer, file in made.items():
        peers.tell(f"where its memory for worker {peer} is", file and file.place)
    opened = {peer: _open_file(peers, peer) for peer in near}
    for peer in near:
        peers.tell(f"whether it shares memory with worker {peer}", made[peer] is not None and opened[peer] is not None)
    lines = {}
    for peer, own in made.items():
        theirs, is_ready = opened[peer], peers.ask(peer, f"whether it shares memory with worker {peers.rank}")
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


def _open_file(peers: Peers, peer: int) -> OpenedFile | None:
    word = peers.ask(peer, f"where its memory for worker {peers.rank} is")
    if word is None:
        return None
    place = Place.told(word, peer)
    try:
        return open_file(place)
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise
        return None  # another container, or not allowed


def _memory_is_faster(peers: Peers, pair: Pair, base: Transport, through_memory: Transport) -> bool:
    """The lower of the two times both and decides."""
    low, high = pair
    leads = peers.rank == low
    probers = [_prober(transport, peers.timeout_s) for transport in (base, through_memory)]
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
        peers.tell(f"whether memory is faster to worker {high}", math.prod(ratios) < 1)
    return bool(peers.ask(low, f"whether memory is faster to worker {high}"))


def _prober(transport: Transport, timeout_s: float) -> Prober:
    return Prober(
        transport=transport,
        clock=time.perf_counter,
        device=torch.device("cpu"),
        timeout_s=timeout_s,
        enough_s=ENOUGH_S,
    )
