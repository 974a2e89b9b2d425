"""Forward and backward of one stage, microbatch by microbatch, on the weight versions they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import WorkerError
from penstock.runtime.capture.randomness import drawing
from penstock.runtime.capture.split import Section
from penstock.runtime.messages.values import Gradient, detached, gradient_of, leaves_of, obstacle, tensors_in
from penstock.runtime.stage.deferred import Deferring, PutOff
from penstock.runtime.stage.losses import Term, WeightedLoss
from penstock.runtime.stage.precision import Autocast
from penstock.runtime.stage.recompute import Computed, FirstForward
from penstock.runtime.stage.weights import Version, Weights


class _Made(NamedTuple):
    sent: dict[str, Any]
    loss: Tensor | None


class _InFlight(NamedTuple):
    version: Version
    received: dict[str, Tensor | tuple[Tensor, ...]]
    """The leaves of each value."""
    made: Callable[[], _Made]
    """kept since the forward, or made again for the backward"""
    later: PutOff
    """what the first half of its backward leaves to the second"""


class _HalfDone(NamedTuple):
    version: Version
    scale: float
    round_number: int | None
    later: PutOff


class StageModule:
    """Computes a section and keeps what its backward will need: all that autograd saved, or the inputs alone."""

    def __init__(
        self,
        section: Section,
        weights: Weights,
        loss: Callable[[Any, Any], Tensor | WeightedLoss],
        *,
        recompute: bool = False,
        in_halves: bool = False,
        autocast: Autocast = nullcontext,
    ) -> None:
        """``loss`` takes what the section's output node holds, and the target; it is called once per microbatch.

        ``in_halves`` lets a backward be taken in two: see ``penstock.runtime.stage.deferred``.
        """
        self.section, self.weights = section, weights
        self._loss, self._autocast = loss, autocast
        self._first_forward = FirstForward(section) if recompute else None
        self._in_halves = in_halves
        self._in_flight: dict[int, _InFlight] = {}
        self._half_done: dict[int, _HalfDone] = {}
        self.losses: dict[int, float] = {}
        """at the stage that makes the output: known after the forward or, if it recomputes, after the backward. A mean
        over the samples, or the sum of a weighted loss"""
        self.loss_weights: dict[int, float] = {}
        """of weighted losses, as long as they are in ``losses``"""

    @property
    def in_flight(self) -> int:
        return len(self._in_flight) + len(self._half_done)

    def take_loss(self, microbatch: int, samples: int) -> Term | None:
        """A microbatch's part of the mean loss, once, where its backward is over and it made the output."""
        if microbatch not in self.losses:
            return None
        loss, weight = self.losses.pop(microbatch), self.loss_weights.pop(microbatch, None)
        return Term(loss * samples, samples) if weight is None else Term(loss, weight)

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
        """Compute on a version of the weights, the newest if none is named, and return the values that other stages
        read, by name. The tensors received must be leaves. ``staleness`` is what the gradient's will be. Layers draw
        random numbers by ``key``."""
        arguments = [inputs[position] for position in self.section.reads]
        arguments += [received[name] for name in self.section.received_names]
        leaves = {name: leaves_of(received[name]) for name in self.section.received_names}
        version = self.weights.acquire(version_number, staleness)
        later = PutOff(version.trained_ids)
        if self._first_forward is None:
            made = self._make(partial(self.section.run, version.leaves, arguments), microbatch, target, later, key)
            self._in_flight[microbatch] = _InFlight(version, leaves, lambda: made, later)
            return made.sent
        with self._autocast(), drawing(key):
            (values, _), again = self._first_forward.run(version.leaves, arguments)
        make = partial(self._make, again.run, microbatch, target, later, key)
        self._in_flight[microbatch] = _InFlight(version, leaves, make, later)
        return {name: detached(value) for name, value in self._by_name(values).items()}

    def _make(self, compute: Callable[[], Computed], microbatch: int, target: Any, later: PutOff, key: int) -> _Made:
        """What the backward starts from, with the graph behind it."""
        deferring = Deferring(later) if self._in_halves else nullcontext()
        with torch.enable_grad(), self._autocast(), drawing(key), deferring:
            values, output = compute()
            loss = self._loss(output, target) if self.section.makes_output else None
        if isinstance(loss, WeightedLoss):
            loss, self.loss_weights[microbatch] = loss
        if loss is not None:
            self.losses[microbatch] = float(loss.detach())
        return _Made(self._by_name(values), loss)

    def _by_name(self, values: Sequence[Any]) -> dict[str, Any]:
        made = dict(zip(self.section.sent_names, values, strict=True))
        for name, value in made.items():
            if what := obstacle(value):
                raise WorkerError(
                    f"value {name!r} crosses a cut but is a {what}, which cannot be sent; "
                    "profile the job again and plan it, so that the layers on both sides of it are in one stage"
                )
        return made

    def backward(
        self,
        microbatch: int,
        gradients: Mapping[str, Sequence[Gradient]],
        *,
        loss_weight: float,
        scale: float,
        round_number: int | None = None,
    ) -> dict[str, Gradient]:
        """Add the microbatch's gradients to those of its round, by default the one that the next step consumes; return
        those of the values received, by name.

        ``gradients`` holds, per value sent, what each stage that reads it found; they are summed tensor by tensor.
        """
        found = self.backward_input(
            microbatch, gradients, loss_weight=loss_weight, scale=scale, round_number=round_number
        )
        self.backward_weight(microbatch)
        return found

    def backward_weight(self, microbatch: int) -> None:
        """The second half: what the first has left."""
        half = self._half_done.pop(microbatch)
        if half.later:
            self.weights.backward(half.version, half.later.make, half.scale, half.round_number)
        self.weights.finish(half.version, half.round_number)

    def backward_input(
        self,
        microbatch: int,
        gradients: Mapping[str, Sequence[Gradient]],
        *,
        loss_weight: float,
        scale: float,
        round_number: int | None = None,
    ) -> dict[str, Gradient]:
        """The first half of a backward: all that can't be put off."""
        state = self._in_flight.pop(microbatch)
        made = state.made()
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        for tensor, found in _gradients_found(made.sent, gradients):
            parts = [part for part in found if part is not None]
            if tensor.requires_grad and parts:
                roots.append(tensor)
                seeds.append(parts[0] if len(parts) == 1 else torch.stack(parts).sum(0))
        if made.loss is not None and made.loss.requires_grad:
            roots.append(made.loss)
            seeds.append(torch.full_like(made.loss, loss_weight))
        if roots:
            compute = partial(torch.autograd.backward, roots, seeds)
            self.weights.backward(state.version, compute, scale, round_number)
        self._half_done[microbatch] = _HalfDone(state.version, scale, round_number, state.later)
        return {name: gradient_of(leaves) for name, leaves in state.received.items()}


def _gradients_found(
    sent: Mapping[str, Any], gradients: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[Tensor, Sequence[Tensor | None]]]:
    """Every tensor of the values sent, with what each stage that reads it found."""
    for name, value in sent.items():
        found = gradients.get(name, ())
        if isinstance(value, Tensor):
            yield value, found
        elif found:
            yield from zip(tensors_in(value), zip(*found, strict=True), strict=True)
