"""What workers say to each other: one contract for workers that are processes and workers that are threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pytest
import torch.distributed as dist

from penstock.errors import WorkerError
from penstock.runtime.peers.peers import Peers
from penstock.runtime.peers.store import StorePeers
from penstock.runtime.peers.threads import Board, ThreadPeers
from penstock.runtime.process.launch import launch_workers

NEXT_GENERATION = """
import torch
from penstock.runtime.links.choice import choose_links
from penstock.runtime.peers.store import find_others, join, leave

others = find_others(30.0)
for generation in range(2):
    peers = join(others, "gloo", 30.0, generation=generation)
    assert peers.told("its number") == [None, None]
    peers.meet("begin")
    peers.tell("its number", generation)
    assert [peers.ask(worker, "its number") for worker in range(2)] == [generation] * 2
    links = choose_links(peers, [(0, 1)], [(0, 1)], device=torch.device("cpu"))
    tensor = torch.full((1000,), 1.0 + peers.rank)
    links.transport.all_reduce(tensor, (0, 1), 30.0)
    assert tensor.sum() == 3000
    peers.meet("end")
    leave(peers)
"""


class Form(Protocol):
    def __call__(self, size: int, *, generation: int = 0, timeout_s: float = 10.0) -> list[Peers]:
        """Everybody's end; all of one form know each other."""
        ...


@pytest.fixture(params=["threads", "hash store", "tcp store"])
def form(request: pytest.FixtureRequest) -> Form:
    board, one = Board(), dist.HashStore()
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)

    def make(size: int, *, generation: int = 0, timeout_s: float = 10.0) -> list[Peers]:
        if request.param == "threads":
            return [ThreadPeers(board, rank, size, generation=generation, timeout_s=timeout_s) for rank in range(size)]
        stores = [
            one
            if request.param == "hash store"
            else dist.TCPStore("127.0.0.1", server.port, None, is_master=False, wait_for_workers=False)
            for _ in range(size)
        ]
        return [
            StorePeers(store, rank, size, generation=generation, timeout_s=timeout_s)
            for rank, store in enumerate(stores)
        ]

    return make


def everybody(peers: list[Peers], work: Callable[[Peers], Any]) -> list[Any]:
    """What each worker's work returns, or the error that it raises."""

    def result(mine: Peers) -> Any:
        try:
            return work(mine)
        except WorkerError as error:
            return error

    with ThreadPoolExecutor(len(peers)) as pool:
        return list(pool.map(result, peers))


def test_a_worker_knows_who_it_is(form: Form) -> None:
    found = [(peers.rank, peers.size, peers.generation) for peers in form(3, generation=5)]
    assert found == [(0, 3, 5), (1, 3, 5), (2, 3, 5)]


def test_nobody_leaves_a_meeting_before_all_have_come(form: Form) -> None:
    came: list[int] = []

    def work(peers: Peers) -> list[int]:
        seen = []
        for number in range(3):
            time.sleep(0.02 * ((peers.rank + number) % 3))
            came.append(number)
            peers.meet("begin")
            seen.append(came.count(number))
            peers.meet("end")
        return seen

    assert everybody(form(3), work) == [[3, 3, 3]] * 3


def test_everybodys_part_is_known_to_all_by_rank(form: Form) -> None:
    def work(peers: Peers) -> list[Any]:
        return [peers.gather("say", {"rank": peers.rank, "round": number, "more": [None, 0.5]}) for number in range(3)]

    expected = [[{"rank": rank, "round": number, "more": [None, 0.5]} for rank in range(3)] for number in range(3)]
    assert everybody(form(3), work) == [expected] * 3


def test_all_agree_on_the_largest_number(form: Form) -> None:
    assert (
        everybody(form(3), lambda peers: [peers.agree("choose", n) for n in (peers.rank, -peers.rank)]) == [[2, 0]] * 3
    )


def test_the_newest_word_stands_and_is_read_without_waiting(form: Form) -> None:
    first, second = form(2, timeout_s=0.2)
    assert first.told("news") == [None, None]
    second.tell("news", ["old"])
    second.tell("news", ["new"])
    assert first.told("news") == [None, ["new"]]
    first.tell("news", 1)
    assert second.told("news") == [1, ["new"]]
    assert first.ask(1, "news") == ["new"]


def test_who_asks_waits_for_the_first_word(form: Form) -> None:
    def work(peers: Peers) -> Any:
        if peers.rank == 0:
            return peers.ask(1, "its host")
        time.sleep(0.1)
        return peers.tell("its host", "there")

    assert everybody(form(2), work) == ["there", None]


def test_two_threads_of_a_worker_do_different_things_at_once(form: Form) -> None:
    """As training does, whose checkpoints are written by a thread."""
    peers = form(2)

    def work(mine: Peers) -> int:
        for _ in range(20):
            mine.tell("progress", mine.rank)
            with mine.together("write"):
                pass
        return mine.rank

    assert sorted(everybody(peers * 2, work)) == [0, 0, 1, 1]
    assert peers[0].told("progress") == [0, 1]


def test_a_generation_sees_nothing_of_the_one_before(form: Form) -> None:
    before = form(3)
    for peers in before:
        peers.tell("news", "old")
    everybody(before, lambda peers: peers.gather("say", "old"))
    after = form(2, generation=1, timeout_s=0.2)
    assert after[0].told("news") == [None, None]
    (error,) = everybody(after[:1], lambda peers: peers.gather("say", "new"))
    assert "worker 0 waited for worker 1 to say" in str(error)
    assert [peers.told("news") for peers in before] == [["old"] * 3] * 3
    again = form(2, generation=2)
    assert everybody(again, lambda peers: peers.gather("say", "new")) == [["new"] * 2] * 2


# --- who was waited for


@pytest.mark.parametrize("wait", [lambda peers: peers.meet("join"), lambda peers: peers.gather("join", 1)])
def test_a_meeting_names_those_who_have_not_come_within_the_deadline(
    form: Form, wait: Callable[[Peers], object]
) -> None:
    start_s = time.monotonic()
    errors = everybody(form(4, timeout_s=0.3)[:2], wait)
    assert time.monotonic() - start_s < 5.0
    for rank, error in enumerate(errors):
        assert str(error).startswith(f"worker {rank} waited for worker 2, 3 to join (at most 0.3 s): ")
        assert str(error).endswith(". See what that worker reports; raise --timeout if it is only slow")


def test_who_asks_in_vain_names_the_worker(form: Form) -> None:
    with pytest.raises(WorkerError, match=r"^worker 0 waited for worker 1 to tell its host \(at most 0\.2 s\)"):
        form(2, timeout_s=0.2)[0].ask(1, "its host")


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ({}, "waited for worker 1, 2 to join"),
        ({1: "7.25"}, "waited for worker 2 to join"),
        ({1: "7.25", 2: "7.5"}, "waited for worker 1 to join"),
        ({1: "8.25", 2: "6.5"}, "waited for worker 2 to join"),
        ({1: "7.25", 2: "7.25"}, "waited for one of the workers 1, 2 to join"),
    ],
)
def test_what_fails_that_all_do_together_names_those_who_have_not_come(
    form: Form, places: dict[int, str], named: str
) -> None:
    peers = form(3, timeout_s=9.0)
    for worker, place in places.items():
        peers[worker]._set(f"together/join/{worker}", place)
    for _ in range(6):
        with peers[0].together("join"):
            pass
    with (
        pytest.raises(WorkerError, match=rf"^worker 0 {named} \(at most 9 s\): timed out\. See"),
        peers[0].together("join"),
    ):
        raise RuntimeError("timed out")


def test_a_thread_that_fails_wakes_those_who_wait() -> None:
    board = Board()
    peers = [ThreadPeers(board, rank, 2, timeout_s=60.0) for rank in range(2)]

    def work(mine: Peers) -> None:
        if mine.rank == 1:
            board.fail("worker 1: no more")
        else:
            mine.meet("end")

    error, _ = everybody(list(peers), work)
    assert "worker 0 waited for worker 1 to end (at most 60 s): another worker failed: worker 1: no more." in str(error)


@pytest.mark.processes
def test_processes_begin_another_generation_over_the_same_store() -> None:
    launch_workers(["-c", NEXT_GENERATION], 2, threads=1, timeout_s=60.0)
