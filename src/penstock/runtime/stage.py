"""Forward and backward of one stage, microbatch by microbatch, on the weight versions they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import WorkerError
from penstock.runtime.split import Section
from penstock.runtime.weights import Version, Weights


@dataclass(frozen=True)
class _InFlight:
    version: Version
    received: dict[str, Tensor]
    made: dict[str, Tensor]
    loss: Tensor | None


class StageModule:
    """Computes a section and keeps what its backward will need."""

    def __init__(self, section: Section, weights: Weights, loss: Callable[[Any, Any], Tensor]) -> None:
        """``loss`` takes what the section's output node holds, and the target."""
        self.section, self.weights = section, weights
        self._loss = loss
        self._in_flight: dict[int, _InFlight] = {}
        self.losses: dict[int, float] = {}
        """of microbatches whose forward is over, at the stage that makes the output"""

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def forward(
        self, microbatch: int, inputs: Sequence[Any], received: Mapping[str, Tensor], target: Any
    ) -> dict[str, Tensor]:
        """Compute, and return the values that other stages read, by name. What is received must be leaf tensors."""
        leaves = {name: received[name] for name in self.section.receives}
        version = self.weights.acquire()
        with torch.enable_grad():
            arguments = [inputs[position] for position in self.section.reads] + list(leaves.values())
            sent, output = self.section.run(version.leaves, arguments)
            loss = self._loss(output, target) if self.section.makes_output else None
        made = dict(zip(self.section.sends, sent, strict=True))
        for name, value in made.items():
            if not isinstance(value, Tensor):
                raise WorkerError(
                    f"value {name!r} crosses a cut but is a {type(value).__name__}, not a tensor; "
                    "plan with the layers on both sides of it in one stage"
                )
        if loss is not None:
            self.losses[microbatch] = float(loss.detach())
        self._in_flight[microbatch] = _InFlight(version, leaves, made, loss)
        return made

    def backward(
        self,
        microbatch: int,
        gradients: Mapping[str, list[Tensor | None]],
        *,
        loss_weight: float,
        scale: float,
    ) -> dict[str, Tensor | None]:
        """Add the microbatch's gradients to the round's; return those of the values received, by name.

        ``gradients`` holds, per value sent, what each stage that reads it found; they are summed.
        """
        state = self._in_flight.pop(microbatch)
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        for name, value in state.made.items():
            parts = [part for part in gradients.get(name, ()) if part is not None]
            if value.requires_grad and parts:
                roots.append(value)
                seeds.append(parts[0] if len(parts) == 1 else torch.stack(parts).sum(0))
        if state.loss is not None and state.loss.requires_grad:
            roots.append(state.loss)
            seeds.append(torch.full_like(state.loss, loss_weight))
        if roots:
            self.weights.backward(state.version, lambda: torch.autograd.backward(roots, seeds), scale)
        self.weights.release(state.version)
        return {name: leaf.grad for name, leaf in state.received.items()}
