"""Buffers of replicas: averaged where they changed, the same bits where they did not."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from in_threads import even_plan, only_stage, profile, run_in_threads, train_keeping
from penstock import Job
from penstock.run import RunDirectory
from penstock.runtime.checkpoint.state import state_of
from penstock.runtime.stage.buffers import ReplicaBuffers
from penstock.runtime.transport.threads import LocalExchange, LocalTransport
from penstock.runtime.worker.assemble import Assembly
from penstock.runtime.worker.evaluate import Evaluator
from test_evaluate import evaluated_job, run_with_evaluators

INF, NAN = float("inf"), float("nan")


class Counted(LocalTransport):
    """Counts the numbers it sums."""

    numbers = 0

    def all_reduce(self, tensor: Tensor, workers: tuple[int, ...], timeout_s: float) -> None:
        self.numbers += tensor.numel()
        super().all_reduce(tensor, workers, timeout_s)


def averaged(start: Tensor, *changed: Tensor, times: int = 1) -> tuple[list[Tensor], list[int]]:
    """Each replica's buffer after averaging what the replicas have made of it, and the numbers each has summed."""
    exchange, replicas = LocalExchange(), tuple(range(len(changed)))
    tensors = [start.clone() for _ in replicas]
    transports = [Counted(rank, exchange) for rank in replicas]
    buffers = [
        ReplicaBuffers({"buffer": tensor}, replicas, transport=transport, timeout_s=10.0)
        for tensor, transport in zip(tensors, transports, strict=True)
    ]
    for tensor, value in zip(tensors, changed, strict=True):
        tensor.copy_(value)

    def average(mine: ReplicaBuffers) -> None:
        for _ in range(times):
            mine.average()

    threads = [threading.Thread(target=average, args=(each,)) for each in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tensors, [transport.numbers for transport in transports]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and bytes(a.numpy().tobytes()) == bytes(b.numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_what_no_replica_has_changed_keeps_its_bits_and_is_not_sent(dtype: torch.dtype) -> None:
    table = torch.tensor([0.1, -0.0, INF, -INF, NAN, 1e-45, 7.3], dtype=dtype)
    tensors, numbers = averaged(table, table, table, table, times=3)
    assert all(same_bits(tensor, table) for tensor in tensors)
    assert numbers == [3, 3, 3]


def test_numbers_that_stay_keep_their_bits_beside_numbers_that_change() -> None:
    start = torch.tensor([0.1, -INF, NAN, 1.0])
    tensors, _ = averaged(start, *(torch.tensor([0.1, -INF, NAN, float(new)]) for new in (2, 3, 7)), times=2)
    expected = torch.tensor([0.1, -INF, NAN, 4.0])
    assert all(same_bits(tensor, expected) for tensor in tensors)


@pytest.mark.parametrize(
    ("start", "replicas", "mean"),
    [
        (1.0, (3.0, 5.0), 4.0),
        (1.0, (3.0, 1.0), 2.0),
        (-INF, (3.0, 5.0), 4.0),
        (-INF, (3.0, -INF), 3.0),
        (NAN, (NAN, 3.0), 3.0),
        (1.0, (INF, 1.0), INF),
        (1.0, (INF, 3.0), INF),
        (-INF, (INF, INF), INF),
        (1.0, (NAN, 3.0), NAN),
        (1.0, (INF, -INF), NAN),
    ],
)
def test_the_mean_of_what_replicas_changed(start: float, replicas: tuple[float, ...], mean: float) -> None:
    tensors, _ = averaged(torch.tensor(start), *map(torch.tensor, replicas))
    for tensor in tensors:
        torch.testing.assert_close(tensor, torch.tensor(mean), equal_nan=True)


class Masked(nn.Module):
    """Batch norm, and a mask that is infinite as those of language models are."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) @ (self.mask.softmax(-1))


def masked_job() -> Job:
    torch.manual_seed(0)
    return replace(evaluated_job("undecided"), model=Masked(), epochs=1)


def test_an_evaluation_leaves_an_infinite_mask_of_replicas_as_it_is() -> None:
    plan, found = even_plan(profile(masked_job()), (2,), "1f1b", 2), dict[int, dict[str, float]]()

    def work(assembly: Assembly, evaluator: Evaluator) -> None:
        found[assembly.worker.rank] = evaluator.run()

    for assembly in run_with_evaluators(plan, masked_job, work):
        assert torch.equal(only_stage(assembly).module.section.buffers["mask"], Masked().mask)
    assert all(torch.tensor(list(values.values())).isfinite().all() for values in found.values())


def load_checkpoint(directory: Path, assembly: Assembly) -> None:
    state_of(assembly).restore(directory)


def load_file(file: Path, assembly: Assembly) -> None:
    state_of(assembly).initialise(file)


@pytest.mark.parametrize("source", ["checkpoint", "file"])
def test_what_was_loaded_is_what_replicas_have_agreed_on(source: str, tmp_path: Path) -> None:
    """Bit for bit: nothing has changed since, so there is nothing to average, three times over."""
    plan, run = even_plan(profile(masked_job()), (3,), "1f1b", 3), RunDirectory(tmp_path / "run")
    train_keeping(plan, masked_job, run)
    newest = run.newest_checkpoint()
    assert newest is not None
    load: Callable[[Assembly], None] = functools.partial(load_checkpoint, newest)
    if source == "file":
        torch.manual_seed(1)
        state = {k: torch.rand_like(v) if v.is_floating_point() else v for k, v in Masked().state_dict().items()}
        torch.save(state, tmp_path / "weights.pt")
        load = functools.partial(load_file, tmp_path / "weights.pt")
    loaded: dict[int, dict[str, Tensor]] = {}

    def work(assembly: Assembly) -> None:
        buffers = only_stage(assembly).module.section.buffers
        load(assembly)
        loaded[assembly.worker.rank] = {name: buffer.clone() for name, buffer in buffers.items()}
        assembly.buffers[0].average()

    for assembly in run_in_threads(plan, masked_job, work=work):
        for name, buffer in only_stage(assembly).module.section.buffers.items():
            assert same_bits(buffer, loaded[assembly.worker.rank][name]), name
