"""What a user asks to be trained. A job file is a Python file with ``def job() -> penstock.Job``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import JobError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class Samples(Protocol):
    """A map-style dataset, or simply a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Job:
    model: nn.Module
    """any module, unmodified; built alike in every worker"""
    data: Samples
    """(inputs, target) by index. Inputs go to the model: a tensor or tuple by position, a dict by name"""
    loss: Callable[[Any, Any], Tensor]
    """loss(model output, target), a mean over the samples"""
    optimizer: Callable[[Any], Optimizer]
    """makes the optimizer of a stage from its (name, parameter) pairs, which every torch.optim optimizer takes"""
    batch_size: int
    """samples per minibatch, which is one optimizer step"""
    epochs: int = 1
    seed: int = 0
    """of the order of the samples, and of dropout"""
    collate: Callable[[list[Any]], Any] | None = None
    """turns a list of samples into a batch; torch's default_collate if not given"""

    def __post_init__(self) -> None:
        for field in ("batch_size", "epochs"):
            number = getattr(self, field)
            if not isinstance(number, int) or number < 1:
                raise JobError(f"Job.{field} is {number!r}; it must be a whole number of at least 1")
        if not hasattr(self.data, "__len__") or not hasattr(self.data, "__getitem__"):
            raise JobError("Job.data has no length or no items by index; give a map-style dataset (or a list)")
        if len(self.data) < 1:
            raise JobError("Job.data is empty; give it at least one sample")
