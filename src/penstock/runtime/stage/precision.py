"""Mixed precision: what a stage computes in, and the scale of the loss that keeps float16's gradients in range."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from penstock.job import Precision
from penstock.runtime.stage.weights import Weights
from penstock.runtime.transport.base import Transport

Autocast = Callable[[], AbstractContextManager[object]]
"""Makes a context in which operations compute in the job's precision."""

_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_for(precision: Precision, device: torch.device) -> Autocast:
    """torch.autocast; each use begins without casts of weights that another has kept."""
    dtype = _DTYPES.get(precision)
    return nullcontext if dtype is None else partial(torch.autocast, device.type, dtype)


@dataclass(kw_only=True)
class LossScaler:
    """torch.amp.GradScaler's rule over the whole model, under a synchronous schedule.

    The last stage multiplies its loss by ``scale``. At the end of each minibatch all workers meet, as GlobalClip's do:
    a gradient that is not finite anywhere makes all of them leave this update out and halve the scale.
    """

    everybody: tuple[int, ...]
    transport: Transport
    device: torch.device
    timeout_s: float
    scale: float = 2.0**16
    good_updates: int = 0
    """since the scale last changed"""
    growth_interval: int = 2000
    _overflow: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._overflow = torch.zeros(1, device=self.device)

    def run(self, stages: Sequence[Weights]) -> None:
        """Bring the round's gradients of a worker's stages, summed over their owners already, to their true size, or
        discard them."""
        gradients = [gradient for weights in stages for gradient in weights.gradients.values()]
        largest = torch._foreach_norm(gradients, math.inf) if gradients else [torch.zeros((), device=self.device)]
        self._overflow.copy_(~torch.stack([norm.double() for norm in largest]).isfinite().all())
        if len(self.everybody) > 1:
            self.transport.all_reduce(self._overflow, self.everybody, self.timeout_s)
        if self._overflow.item() > 0:
            for weights in stages:
                weights.discard_gradients()
            self.scale, self.good_updates = self.scale * 0.5, 0
            return
        if gradients:
            torch._foreach_mul_(gradients, 1 / self.scale)
        self.good_updates += 1
        if self.good_updates == self.growth_interval:
            self.scale, self.good_updates = self.scale * 2.0, 0
