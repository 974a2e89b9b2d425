"""Stand-ins for the parts of a worker that compute: computing is a timed wait. Everything else is the real runtime:
worker, mailbox, weights and their versions, sync, and tensors that really travel.

Emulated seconds pass ``dilation`` times as slowly as real ones, so that the real work takes only a small share of the
time. Tensors are ``shrink`` times smaller than those they stand for, but are paced by the true sizes: copying the
weights of sixteen GPUs through one machine's memory would take longer than the GPUs do.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.graph import Value, ValueTensor
from penstock.runtime.capture.split import Section
from penstock.runtime.emulate.network import Arrival, EmulatedNetwork, Stream
from penstock.runtime.messages.values import Gradient, gradient_of, tensors_in
from penstock.runtime.stage.stage import StageModule
from penstock.runtime.stage.weights import Version, Weights
from penstock.runtime.sync.sync import GradientSync
from penstock.runtime.transport.base import Channel, Pending, Transport
from penstock.schedule import Kind


class DilatedClock:
    """Emulated seconds since it was made. Each takes ``dilation`` real seconds."""

    def __init__(self, dilation: float) -> None:
        self.dilation = dilation
        self._start_s = time.perf_counter()

    def __call__(self) -> float:
        return (time.perf_counter() - self._start_s) / self.dilation

    def sleep_until(self, moment_s: float) -> None:
        while (left_s := moment_s - self()) > 0:
            time.sleep(left_s * self.dilation)

    @contextmanager
    def lasting(self, seconds: float) -> Iterator[None]:
        """Makes the block inside take this long, or longer if the real work does."""
        end_s = self() + seconds
        yield
        self.sleep_until(end_s)


def shrunk(num_bytes: float, shrink: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that stands for so many bytes."""
    return torch.zeros(max(1, round(num_bytes / shrink / dtype.itemsize)), dtype=dtype)


def emulated_value(value: Value, num_bytes: float, shrink: float) -> Tensor | tuple[Tensor, ...]:
    """A tensor that stands for a value of so many bytes; a tuple for a value of several tensors."""
    if value.tensors:
        shares = [each.num_bytes / max(1, value.num_bytes) for each in value.tensors]
        return tuple(
            _tensor_like(each, num_bytes * share, shrink) for each, share in zip(value.tensors, shares, strict=True)
        )
    return _tensor_like(value, num_bytes, shrink)


def _tensor_like(tensor: Value | ValueTensor, num_bytes: float, shrink: float) -> Tensor:
    dtype = torch.float32 if tensor.is_float32 or not tensor.dtype else getattr(torch, tensor.dtype)
    return shrunk(num_bytes, shrink, dtype).requires_grad_(tensor.differentiable)


class EmulatedWeights(Weights):
    """Real weights whose update takes the profile's seconds."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        update_s: Callable[[], float],
        clock: DilatedClock,
        average_s: float = 0.0,
    ) -> None:
        super().__init__(parameters, lambda named: torch.optim.SGD(named, lr=0.0))
        self.average_s, self._update_s, self._clock = average_s, update_s, clock

    def step(self, count: int = 0, *, keep: bool = False, rate: float = 1.0) -> None:
        with self._clock.lasting(self._update_s()):
            super().step(count, keep=keep, rate=rate)


class EmulatedSync(GradientSync):
    """Really averages, and takes the profile's seconds of a worker's own time besides the all-reduce."""

    def __init__(self, *args: Any, clock: DilatedClock, **options: Any) -> None:
        super().__init__(*args, **options)
        self._clock = clock

    def run(self, stages: Sequence[Weights], round_index: int) -> None:
        super().run(stages, round_index)
        own_s = max((weights.average_s for weights in stages if isinstance(weights, EmulatedWeights)), default=0.0)
        self._clock.sleep_until(self._clock() + own_s)


@dataclass(frozen=True)
class _Kept:
    version: Version
    received: Mapping[str, Any]
    round_number: int | None = None


class EmulatedStage(StageModule):
    """Keeps versions of weights and microbatches in flight as any stage does, and makes tensors of the right sizes."""

    def __init__(
        self,
        weights: EmulatedWeights,
        seconds: Callable[[Kind], float],
        *,
        makes: Mapping[str, Any],
        finals: Sequence[tuple[str, float]],
        clock: DilatedClock,
    ) -> None:
        """``seconds`` is called once for every action. ``finals`` are the parameters in the order in which a backward
        completes their gradients, each with the share of the backward that has passed by then."""
        section = Section(
            module=fx.GraphModule(nn.Module(), fx.Graph()),
            reads=(),
            received_names=(),
            sent_names=tuple(makes),
            makes_output=False,
            parameters=weights.parameters,
            local_names={},
            buffers={},
        )
        super().__init__(section, weights, lambda output, target: torch.zeros(()))
        self._seconds, self._makes, self._finals, self._clock = seconds, makes, finals, clock
        self._kept: dict[int, _Kept] = {}

    @property
    def in_flight(self) -> int:
        return len(self._kept)

    def forward(
        self,
        microbatch: int,
        inputs: Sequence[Any],
        received: Mapping[str, Any],
        target: Any,
        version_number: int | None = None,
        staleness: int = 0,
        *,
        key: int = 0,
    ) -> dict[str, Any]:
        with self._clock.lasting(self._seconds(Kind.FORWARD)):
            self._kept[microbatch] = _Kept(self.weights.acquire(version_number, staleness), received)
            return dict(self._makes)

    def backward(
        self,
        microbatch: int,
        gradients: Mapping[str, Sequence[Gradient]],
        *,
        loss_weight: float,
        scale: float,
        round_number: int | None = None,
    ) -> dict[str, Gradient]:
        found = self._gradients_of_inputs(microbatch, round_number)
        self._find_gradients(microbatch, self._seconds(Kind.BACKWARD))
        return found

    def backward_input(
        self,
        microbatch: int,
        gradients: Mapping[str, Sequence[Gradient]],
        *,
        loss_weight: float,
        scale: float,
        round_number: int | None = None,
    ) -> dict[str, Gradient]:
        with self._clock.lasting(self._seconds(Kind.INPUT)):
            return self._gradients_of_inputs(microbatch, round_number)

    def backward_weight(self, microbatch: int) -> None:
        self._find_gradients(microbatch, self._seconds(Kind.WEIGHT))

    def _gradients_of_inputs(self, microbatch: int, round_number: int | None) -> dict[str, Gradient]:
        kept = self._kept[microbatch]
        self._kept[microbatch] = _Kept(kept.version, {}, round_number)
        for value in kept.received.values():
            for leaf in tensors_in(value):
                leaf.grad = torch.zeros_like(leaf) if leaf.requires_grad else None
        return {name: gradient_of(value) for name, value in kept.received.items()}

    def _find_gradients(self, microbatch: int, seconds: float) -> None:
        """Wait for all gradients at once; or one by one, if averaging overlaps with the backward."""
        kept, start_s = self._kept.pop(microbatch), self._clock()

        def find_one_by_one() -> None:
            for name, share in self._finals:
                self._clock.sleep_until(start_s + share * seconds)
                torch.autograd.backward(kept.version.leaves[name].sum())

        with self._clock.lasting(seconds):
            overlaps = self.weights.on_final is not None
            find = find_one_by_one if overlaps else lambda: _make_gradients(kept.version)
            self.weights.backward(kept.version, find, 1.0, kept.round_number)
            self.weights.finish(kept.version, kept.round_number)


def _make_gradients(version: Version) -> None:
    """Make gradients as a backward does: added to those that exist."""
    for leaf in version.leaves.values():
        if leaf.grad is None:
            leaf.grad = torch.zeros_like(leaf)


class EmulatedTransport:
    """Sends real messages over another transport, and delivers them when the emulated network would."""

    def __init__(
        self, inner: Transport, devices: Sequence[int], network: EmulatedNetwork, shrink: float, clock: DilatedClock
    ) -> None:
        """``devices`` has the device of each worker."""
        self.rank, self._inner, self._devices = inner.rank, inner, devices
        self._network, self._shrink, self._clock = network, shrink, clock
        self._calls: dict[tuple[int, ...], int] = defaultdict(int)

    def send(self, tensor: Tensor, channel: Channel, number: int) -> Pending:
        peer, direction = channel
        ends = self._devices[self.rank], self._devices[peer]
        self._network.send((self.rank, peer, direction), number, ends, tensor.nbytes * self._shrink)
        return self._inner.send(tensor, channel, number)

    def receive(self, tensor: Tensor, channel: Channel, number: int) -> Pending:
        peer, direction = channel
        return _Paced(self._inner.receive(tensor, channel, number), self, (peer, self.rank, direction), number)

    def all_reduce(self, tensor: Tensor, workers: tuple[int, ...], timeout_s: float) -> None:
        self.begin_all_reduce(tensor, workers).wait(timeout_s)

    def carries(self, workers: tuple[int, ...]) -> bool:
        return self._network.cluster.carries([self._devices[worker] for worker in workers])

    def begin_all_reduce(self, tensor: Tensor, workers: tuple[int, ...]) -> Pending:
        devices = [self._devices[worker] for worker in workers]
        call, self._calls[workers] = self._calls[workers], self._calls[workers] + 1
        arrival = self._network.ring(workers, call, devices, tensor.nbytes * self._shrink)
        return _PacedSum(self._inner.begin_all_reduce(tensor, workers), self, arrival)

    def wait_for_message(self, stream: Stream, number: int) -> None:
        self.wait_for(self._network.claim(stream, number))

    def wait_for(self, arrival: Arrival) -> None:
        while (arrival_s := self._network.arrival_s(arrival)) > self._clock():
            self._clock.sleep_until(arrival_s)


@dataclass(frozen=True)
class _PacedSum:
    inner: Pending
    transport: EmulatedTransport
    arrival: Arrival

    def wait(self, timeout_s: float) -> None:
        self.inner.wait(timeout_s)  # then all workers are ready
        self.transport.wait_for(self.arrival)


@dataclass
class _Paced:
    inner: Pending
    transport: EmulatedTransport
    stream: Stream
    number: int
    over: bool = False

    def wait(self, timeout_s: float) -> None:
        if not self.over:
            self.inner.wait(timeout_s)
            self.transport.wait_for_message(self.stream, self.number)
            self.over = True
