"""Shapes that change from batch to batch: whatever a sender makes arrives, and training is that of one process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from in_threads import CPU, even_plan, profile, run_in_threads
from models import sgd
from penstock import Job
from penstock.errors import JobError
from penstock.plan import Plan
from penstock.runtime.capture.capture import capture
from penstock.runtime.messages.header import MARK
from penstock.runtime.messages.mailbox import Mailbox
from penstock.runtime.transport.base import Channel, Pending, Transport
from penstock.runtime.transport.threads import LocalExchange, LocalTransport
from penstock.runtime.worker.data import inputs_of_other_shapes, load_batch
from penstock.schedule import Action, Kind, Pipeline, build_schedule
from test_transport import RUNNERS
from test_worker import asynchronous_reference, check_same_weights, single_process

Message = list[Tensor | None]


def exchange_messages(transport: Transport, messages: Sequence[Message], samples: Sequence[int]) -> list[Message]:
    """Two workers in 1F1B; stage 0 sends each message forward, stage 1 the same one back. What came, in order."""
    pipeline = Pipeline(workers=((0,), (1,)), reads=((), (0,)))
    mailbox = Mailbox(pipeline, {(0, 1): len(messages[0])}, transport=transport, device=CPU, timeout_s=10.0)
    schedule = build_schedule("1f1b", pipeline, [len(messages)], [2, 1])
    came: list[Message] = []
    for _ in range(2):  # a second epoch starts with what the first one learned
        mailbox.begin(schedule, samples)
        for action in schedule.programs[transport.rank]:
            mailbox.post_receives()
            if action.kind not in (Kind.FORWARD, Kind.BACKWARD):
                continue
            other = 1 - action.stage
            sends = (action.kind is Kind.FORWARD) == (action.stage == 0)
            if sends:
                mailbox.send(action, other, messages[action.index])
            else:
                came.append(mailbox.take(Action(other, action.kind, action.index), action.stage))
        mailbox.finish()
    return came


def same(one: Message, two: Message) -> bool:
    return len(one) == len(two) and all(
        a is b if a is None or b is None else a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(one, two, strict=True)
    )


def like_the_mark() -> Tensor:
    """Values that begin as a message without values does."""
    return torch.cat([torch.tensor(list(MARK), dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)]).view(
        torch.float32
    )


MESSAGES: list[Message] = [
    [torch.ones(2, 3), torch.tensor(1)],
    [torch.ones(2, 3) * 2, torch.tensor(2)],
    [torch.ones(2, 3) * 3, torch.tensor(3)],
    [torch.ones(2, 300) * 4, torch.tensor(4)],
    [torch.ones(2, 1) * 5, None],
    [None, None],
    [torch.ones(2, 3) * 6, torch.tensor(6)],
    [like_the_mark(), torch.tensor(True)],
]


def changing(transport: Transport) -> bool:
    found = exchange_messages(transport, MESSAGES, [2] * len(MESSAGES))
    return len(found) == 16 and all(same(a, b) for a, b in zip(found, [*MESSAGES, *MESSAGES], strict=True))


@pytest.mark.parametrize("run", RUNNERS)
def test_messages_whose_layout_changes_arrive_as_they_left(run: Any) -> None:
    assert run(changing) == [True, True]


VALUES = [
    None,
    torch.zeros(0, 3),
    torch.ones(2, 3),
    torch.ones(3, 2),
    torch.tensor(7),
    torch.tensor(True),
    torch.tensor(MARK[0], dtype=torch.uint8),
    like_the_mark(),
]


def in_two_threads(messages: Sequence[Message], samples: Sequence[int]) -> list[Any]:
    exchange = LocalExchange()
    results: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            results[rank] = exchange_messages(LocalTransport(rank, exchange), messages, samples)
        except Exception as error:
            results[rank] = error
            exchange.fail(str(error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not exchange.messages
    return results


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(VALUES), st.sampled_from(VALUES), st.integers(1, 2)),
        min_size=1,
        max_size=9,
    )
)
def test_any_sequence_of_layouts_arrives_in_order(drawn: list[tuple[Tensor | None, Tensor | None, int]]) -> None:
    messages: list[Message] = [[one, two] for one, two, _ in drawn]
    for found in in_two_threads(messages, [samples for *_, samples in drawn]):
        assert not isinstance(found, Exception), found
        assert all(same(a, b) for a, b in zip(found, [*messages, *messages], strict=True))


class Counting(LocalTransport):
    sent = 0

    def send(self, tensor: Tensor, channel: Channel, number: int) -> Pending:
        self.sent += 1
        return super().send(tensor, channel, number)


def test_layouts_that_stay_cost_one_header_per_size() -> None:
    exchange = LocalExchange()
    transports = [Counting(rank, exchange) for rank in (0, 1)]
    messages: list[Message] = [[torch.ones(samples, 3)] for samples in (2, 2, 2, 2, 1)]
    threads = [
        threading.Thread(target=exchange_messages, args=(transport, messages, (2, 2, 2, 2, 1)))
        for transport in transports
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [transport.sent for transport in transports] == [2 * 5 + 2] * 2


class Average(nn.Module):
    """Takes sequences of any length, and computes with the length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        h = torch.tanh(self.first(self.embed(tokens)))
        h = torch.relu(self.second(h)) + h
        return self.head(h.sum(dim=1) / tokens.shape[1])


class Recurrent(nn.Module):
    """Export unrolls what is recurrent to the length it sees, so this is left to fx."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.first = nn.Linear(8, 8)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        h = torch.tanh(self.first(self.embed(tokens)))
        found, last = self.gru(h)
        return self.head((found + h).sum(dim=1) / tokens.shape[1] + last[0])


class Layerwise(nn.Module):
    """Neither export nor fx can see through it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) if float(x.detach().sum()) > -1e9 else x


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def by_children() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(20, 8), Layerwise(8), Layerwise(8), Pool(), nn.Linear(8, 4))


PLANS = [
    *((make, replicas) for make in (Average, by_children) for replicas in ((1, 1), (1, 2), (2, 1), (1, 1, 1))),
    (Recurrent, (1, 1)),
]


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([tokens for tokens, _ in samples], batch_first=True)
    return tokens, torch.stack([label for _, label in samples])


def ragged_job(make: Any = Average, samples: int = 23, batch_size: int = 4) -> Job:
    torch.manual_seed(0)
    data = [(torch.randint(0, 20, (2 + (7 * i) % 11,)), torch.tensor(i % 4)) for i in range(samples)]
    return Job(
        model=make(), data=data, loss=F.cross_entropy, optimizer=sgd, batch_size=batch_size, epochs=2, collate=padded
    )


def ragged_plan(make: Any, replicas: Sequence[int], schedule: str, microbatches: int = 1) -> Plan:
    return even_plan(_profile(make), replicas, schedule, microbatches)


@functools.cache
def _profile(make: Any) -> Any:
    return profile(ragged_job(make))


@pytest.mark.parametrize(("make", "replicas"), PLANS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_sequences_of_any_length_train_as_in_one_process(make: Any, replicas: tuple[int, ...], schedule: str) -> None:
    plan = ragged_plan(make, replicas, schedule, microbatches=3)
    check_same_weights(
        run_in_threads(plan, lambda: ragged_job(make)),
        single_process(ragged_job(make), plan),
    )


@pytest.mark.parametrize(("make", "replicas"), PLANS)
def test_sequences_of_any_length_train_asynchronously_too(make: Any, replicas: tuple[int, ...]) -> None:
    def job() -> Job:
        return replace(ragged_job(make, samples=61), epochs=1)

    plan = ragged_plan(make, replicas, "pipedream")
    check_same_weights(run_in_threads(plan, job), asynchronous_reference(job(), plan))


@pytest.mark.parametrize(("make", "front_end"), [(Average, "export"), (Recurrent, "fx"), (by_children, "fx")])
def test_a_size_that_varies_in_the_data_is_no_number_in_the_graph(make: Any, front_end: str) -> None:
    job = ragged_job(make)
    inputs, _ = load_batch(job, range(4), seed=0)
    captured = capture(job.model, inputs, inputs_of_other_shapes(job, inputs))
    assert captured.front_end == front_end
    shorter = inputs[:, :3]
    interpreter = fx.Interpreter(fx.GraphModule(captured.root, captured.graph), graph=captured.graph)
    found = interpreter.run(*captured.bind(shorter), enable_io_processing=False)
    torch.testing.assert_close(captured.rebuild_output(found), job.model(shorter))


def test_a_size_that_the_graph_takes_as_fixed_is_a_named_error() -> None:
    """Not a result computed with the wrong number."""
    captured = capture(Average(), torch.zeros(4, 6, dtype=torch.long))
    with pytest.raises(JobError, match=r"tokens has shape \[4, 5\], but dimension 1 was 6 .* pad"):
        captured.bind(torch.zeros(4, 5, dtype=torch.long))


def test_data_of_one_shape_has_no_others() -> None:
    job = replace(ragged_job(), data=[(torch.zeros(5, dtype=torch.long), torch.tensor(0))] * 23)
    assert inputs_of_other_shapes(job, load_batch(job, range(4), seed=0)[0]) == []
