"""Seconds of updates and averaging, per call, per tensor and per byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from penstock.runtime.measure.worker_times import NO_DEADLINE_S
from penstock.runtime.stage.optimizers import MakeOptimizer
from penstock.runtime.stage.weights import Version, Weights
from penstock.runtime.sync.sync import GradientSync
from penstock.runtime.transport.threads import LocalExchange, LocalTransport
from penstock.sync import sync_policy

TypicalSeconds = Callable[[Callable[[], Any], Callable[[], Any]], float]
"""Times its first argument repeatedly, each time after calling the second."""


class UpdateCosts(NamedTuple):
    """Seconds of an update: for calling the optimizer, for each tensor and for each byte."""

    call_s: float
    tensor_s: float
    byte_s: float

    def parameter_s(self, num_bytes: int) -> float:
        return self.tensor_s + num_bytes * self.byte_s


def step_times(
    parameters: Mapping[str, nn.Parameter], make_optimizer: MakeOptimizer, typical_s: TypicalSeconds, *, stashed: bool
) -> list[tuple[int, int, float]]:
    """Number, bytes and seconds of updates of all parameters, and of the smaller ones.

    With ``stashed``, a microbatch in flight keeps the old weights, so the update makes a copy of them.
    """
    return [
        (len(part), _nbytes(part), _step_s(part, make_optimizer, typical_s, stashed=stashed))
        for part in _parts(parameters)
    ]


def _step_s(
    parameters: Mapping[str, nn.Parameter], make_optimizer: MakeOptimizer, typical_s: TypicalSeconds, *, stashed: bool
) -> float:
    weights = Weights(parameters, make_optimizer)
    gradients = {name: torch.randn_like(p) for name, p in parameters.items()}  # zeros take another time
    held: list[Version] = []

    def prepare() -> None:
        weights.gradients.update(gradients)
        if stashed:  # as in a stage with two microbatches in flight
            held.append(weights.acquire())
            if len(held) > 1:
                weights.release(held.pop(0))

    return typical_s(weights.step, prepare)


class _NothingMoves(LocalTransport):
    """Sends nothing: gradients are gathered and put back, but sending is not part of a worker's own time."""

    def all_reduce(self, tensor: Tensor, workers: tuple[int, ...], timeout_s: float) -> None:
        return

    def carries(self, workers: tuple[int, ...]) -> bool:
        return False


def average_times(parameters: Mapping[str, nn.Parameter], typical_s: TypicalSeconds) -> list[tuple[int, int, float]]:
    """Number, bytes and seconds of averaging the gradients of all parameters, and of the smaller ones."""
    transport = _NothingMoves(0, LocalExchange())
    sync = GradientSync(
        dict.fromkeys(parameters, (0, 1)), sync_policy("all-reduce"), transport=transport, timeout_s=NO_DEADLINE_S
    )

    def seconds(part: Mapping[str, nn.Parameter]) -> float:
        weights = Weights(part, lambda named: ())
        weights.gradients.update({name: torch.zeros_like(p) for name, p in part.items()})
        return typical_s(lambda: sync.run([weights], 0), lambda: None)

    return [(len(part), _nbytes(part), seconds(part)) for part in _parts(parameters)]


def _parts(parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
    """The smallest, the smaller half, and all."""
    by_size = sorted(parameters, key=lambda name: parameters[name].nbytes)
    for count in sorted({1, len(by_size) // 2, len(by_size)} - {0}):
        yield {name: parameters[name] for name in by_size[:count]}


def _nbytes(parameters: Mapping[str, nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters.values())


def fit_updates(rows: Sequence[tuple[int, int, float]]) -> UpdateCosts:
    """Least squares of relative errors over (tensors, bytes, seconds), with no negative term."""
    if not rows:
        return UpdateCosts(0.0, 0.0, 0.0)
    seconds = np.array([max(row[2], 1e-12) for row in rows])
    table = np.array([[1.0, row[0], row[1]] for row in rows]) / seconds[:, None]
    kept = np.flatnonzero(table.any(axis=0)).tolist()  # parameters may have no bytes
    while True:
        found, *_ = np.linalg.lstsq(table[:, kept] / table[:, kept].max(axis=0), np.ones(len(rows)), rcond=None)
        if (found >= 0).all() or len(kept) == 1:
            break
        kept.pop(int(np.argmin(found)))
    terms = np.zeros(3)
    terms[kept] = np.maximum(found, 0.0) / table[:, kept].max(axis=0)
    return UpdateCosts(*terms.tolist())
