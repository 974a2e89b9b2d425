"""One contract for every transport: threads over LocalTransport, processes over the others."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from penstock.errors import WorkerError
from penstock.runtime.links import choice
from penstock.runtime.messages.dense import TensorLayout
from penstock.runtime.messages.header import decode_header, encode_header
from penstock.runtime.peers.store import StorePeers
from penstock.runtime.transport import shared_memory
from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.process_group import TorchTransport
from penstock.runtime.transport.shared_memory import MOST_BYTES, PIECE_BYTES, SharedMemoryTransport
from penstock.runtime.transport.threads import LocalExchange, LocalTransport
from penstock.schedule import Kind

F, B = Kind.FORWARD, Kind.BACKWARD
BOTH = (0, 1)
Part = Callable[[Transport], Any]


def keeps_order(transport: Transport) -> list[int]:
    if transport.rank == 0:
        sends = [transport.send(torch.full((4,), i), (1, F), i) for i in range(5)]
        for send in sends:
            send.wait(10.0)
        return []
    tensors = [torch.zeros(4, dtype=torch.int64) for _ in range(5)]
    receives = [transport.receive(tensor, (0, F), i) for i, tensor in enumerate(tensors)]
    for receive in receives:
        receive.wait(10.0)
    return [int(tensor[0]) for tensor in tensors]


def moves_every_dtype(transport: Transport) -> bool:
    tensors = [
        torch.arange(6).reshape(2, 3).to(dtype) for dtype in (torch.float32, torch.float64, torch.int64, torch.bool)
    ]
    tensors.append(torch.tensor(3.0))
    for number, tensor in enumerate(tensors):
        if transport.rank == 0:
            transport.send(tensor, (1, B), number).wait(10.0)
        else:
            found = torch.empty_like(tensor)
            transport.receive(found, (0, B), number).wait(10.0)
            assert torch.equal(found, tensor)
    return True


def a_late_activation_does_not_hold_up_a_gradient(transport: Transport) -> bool:
    if transport.rank == 0:
        transport.send(torch.ones(3), (1, B), 0).wait(10.0)
        time.sleep(0.2)
        transport.send(torch.ones(3), (1, F), 0).wait(10.0)
        return True
    activation, gradient = torch.zeros(3), torch.zeros(3)
    late = transport.receive(activation, (0, F), 0)
    transport.receive(gradient, (0, B), 0).wait(10.0)
    first = bool(activation.sum() == 0)
    late.wait(10.0)
    return first and float(activation.sum()) == 3.0


def sending_never_blocks(transport: Transport) -> bool:
    """The receiver posts nothing before it hears, on the other channel, that all sends have returned."""
    big, word = torch.ones(1_000_000), torch.ones(1)
    if transport.rank == 0:
        pending = [transport.send(big, (1, F), i) for i in range(4)]
        transport.send(word, (1, B), 0).wait(10.0)
        for each in pending:
            each.wait(10.0)
        return True
    transport.receive(torch.empty_like(word), (0, B), 0).wait(10.0)
    for i in range(4):
        transport.receive(torch.empty_like(big), (0, F), i).wait(10.0)
    return True


def sums_over_the_group(transport: Transport) -> list[float]:
    tensor = torch.tensor([1.0, 2.0]) * (transport.rank + 1)
    transport.all_reduce(tensor, BOTH, 10.0)
    transport.all_reduce(tensor, BOTH, 10.0)
    return tensor.tolist()


def a_receive_has_a_deadline(transport: Transport) -> str:
    if transport.rank == 0:
        time.sleep(3.0)
        return "slept"
    start_s = time.monotonic()
    with pytest.raises(WorkerError):
        transport.receive(torch.zeros(3), (0, F), 0).wait(0.3)
    return "in time" if time.monotonic() - start_s < 2.5 else "late"


def run_in_local_threads(part: Part) -> list[Any]:
    exchange, results = LocalExchange(), [None, None]

    def run(rank: int) -> None:
        results[rank] = part(LocalTransport(rank, exchange))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in BOTH]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return results


def over_torch(rank: int) -> Transport:
    return TorchTransport([BOTH], timeout_s=30.0)


def peers_of(rank: int) -> StorePeers:
    store = dist.distributed_c10d._get_default_store()
    return StorePeers(store, rank, dist.get_world_size(), timeout_s=30.0)


def over_shared_memory(rank: int, most_bytes: int = MOST_BYTES) -> Transport:
    with patch.object(shared_memory, "MOST_BYTES", most_bytes):
        lines = choice._open_lines(peers_of(rank), [BOTH])
    assert lines
    return SharedMemoryTransport(TorchTransport([BOTH], timeout_s=30.0), lines, rings=[BOTH])


def over_little_shared_memory(rank: int) -> Transport:
    """One buffer: nothing large passes but in pieces."""
    return over_shared_memory(rank, most_bytes=0)


def run_in_processes(part: Part, make: Callable[[int], Transport], ranks: Sequence[int] = BOTH) -> list[Any]:
    context = mp.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = context.Queue()
    processes = [context.Process(target=_process, args=(part, make, rank, len(ranks), port, answers)) for rank in ranks]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    try:
        for _ in ranks:
            rank, result = answers.get(timeout=60)
            results[rank] = result
    except queue.Empty:
        pytest.fail("the processes gave no answer")
    finally:
        for process in processes:
            process.join(20.0)
            process.kill()
    return [results[rank] for rank in ranks]


def _process(part: Part, make: Callable[[int], Transport], rank: int, world: int, port: int, answers: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    answers.put((rank, part(make(rank))))
    dist.destroy_process_group()


RUNNERS = [
    pytest.param(run_in_local_threads, id="local"),
    *(
        pytest.param(partial(run_in_processes, make=make), id=name, marks=pytest.mark.processes)
        for name, make in (
            ("torch", over_torch),
            ("shared-memory", over_shared_memory),
            ("little-shared-memory", over_little_shared_memory),
        )
    ),
]


@pytest.mark.parametrize("run", RUNNERS)
def test_messages_of_a_channel_keep_their_order(run: Callable[[Part], list[Any]]) -> None:
    assert run(keeps_order)[1] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("run", RUNNERS)
def test_tensors_of_any_dtype_arrive_as_they_left(run: Callable[[Part], list[Any]]) -> None:
    assert run(moves_every_dtype) == [True, True]


@pytest.mark.parametrize("run", RUNNERS)
def test_the_two_directions_do_not_wait_for_each_other(run: Callable[[Part], list[Any]]) -> None:
    assert run(a_late_activation_does_not_hold_up_a_gradient) == [True, True]


@pytest.mark.parametrize("run", RUNNERS)
def test_sending_never_blocks(run: Callable[[Part], list[Any]]) -> None:
    assert run(sending_never_blocks) == [True, True]


@pytest.mark.parametrize("run", RUNNERS)
def test_all_reduce_sums_over_the_group(run: Callable[[Part], list[Any]]) -> None:
    assert run(sums_over_the_group) == [[6.0, 12.0], [6.0, 12.0]]


@pytest.mark.parametrize("run", RUNNERS)
def test_a_receive_has_a_deadline(run: Callable[[Part], list[Any]]) -> None:
    assert run(a_receive_has_a_deadline)[1] == "in time"


THREE = (0, 1, 2)


def over_a_ring(rank: int) -> Transport:
    with patch.object(choice, "_memory_is_faster", lambda *_: True):
        pairs = [(0, 1), (0, 2), (1, 2)]
        return choice.choose_links(peers_of(rank), [BOTH, THREE], pairs, device=torch.device("cpu")).transport


def sums_around_a_ring(transport: Transport) -> bool:
    """Of more than a piece, of fewer numbers than workers, of none; all get the same bits, by memory alone."""
    rank = transport.rank
    same = []
    with patch.object(TorchTransport, "all_reduce", side_effect=AssertionError):
        for size in (0, 1, 2, 1000, 3 * PIECE_BYTES // 4 + 7):
            everyone = [torch.randn(size, generator=torch.Generator().manual_seed(worker)) for worker in THREE]
            mine = everyone[rank].clone()
            transport.all_reduce(mine, THREE, 30.0)
            same.append(torch.allclose(mine, sum(everyone), atol=1e-5))
            if rank in BOTH:
                again = torch.ones(size, dtype=torch.float64) * (rank + 1)
                transport.all_reduce(again, BOTH, 30.0)
                same.append(bool((again == 3).all()))
    copies = torch.stack([mine] * 3)
    copies[:] = 0
    copies[rank] = mine
    dist.all_reduce(copies)
    return all(same) and all(torch.equal(copies[0], each) for each in copies)


@pytest.mark.processes
def test_workers_of_a_host_sum_through_memory() -> None:
    assert run_in_processes(sums_around_a_ring, over_a_ring, THREE) == [True] * 3


def the_peer_dies(transport: Transport) -> str:
    if transport.rank == 0:
        transport.send(torch.ones(3), (1, F), 0).wait(10.0)
        return "gone"
    transport.receive(torch.zeros(3), (0, F), 0).wait(10.0)
    start_s = time.monotonic()
    with pytest.raises(WorkerError, match="worker 0 has ended"):
        transport.receive(torch.zeros(3), (0, F), 1).wait(30.0)
    return "in time" if time.monotonic() - start_s < 20.0 else "late"


@pytest.mark.processes
def test_shared_memory_reports_a_dead_peer_before_the_deadline_and_names_it() -> None:
    assert run_in_processes(the_peer_dies, over_shared_memory)[1] == "in time"


def what_is_chosen(transport: Transport) -> list[str]:
    with patch.object(choice, "_memory_is_faster", lambda *_: True):
        found = choice.choose_links(peers_of(transport.rank), [BOTH], [BOTH], device=torch.device("cpu"))
    assert sums_over_the_group(found.transport) == [6.0, 12.0]
    return list(found.chosen.values())


def what_is_chosen_without_memory(transport: Transport) -> list[str]:
    with patch.object(choice, "make_file", side_effect=OSError):
        return what_is_chosen(transport)


@pytest.mark.processes
@pytest.mark.parametrize(("part", "name"), [(what_is_chosen, "shared memory"), (what_is_chosen_without_memory, "gloo")])
def test_workers_of_a_host_share_memory_if_they_can(part: Part, name: str) -> None:
    assert run_in_processes(part, over_torch) == [[name], [name]]


def test_a_header_says_what_is_coming() -> None:
    layout = (
        TensorLayout(torch.bfloat16, (3, 0, 5), True),
        None,
        TensorLayout(torch.bool, ()),
        TensorLayout(torch.float32, (7, 2, 4), order=(2, 0, 1)),
    )
    header, description = encode_header(layout)
    assert description is None
    assert decode_header(header.tolist(), None) == layout
