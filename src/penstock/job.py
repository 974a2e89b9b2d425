"""What a user asks to be trained. A job file is a Python file with ``def job() -> penstock.Job``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from penstock.errors import JobError
from penstock.remedy import Remedy

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


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
    optimizer: Callable[[Any], Optimizer | Sequence[Optimizer]]
    """makes the optimizer of a stage, or several, from its (name, parameter) pairs, which all of torch.optim take"""
    batch_size: int
    """samples per minibatch, which is one optimizer step"""
    epochs: int = 1
    seed: int = 0
    """of the order of the samples, and of dropout"""
    collate: Callable[[list[Any]], Any] | None = None
    """turns a list of samples into a batch; torch's default_collate if not given"""
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    """makes the learning-rate scheduler of an optimizer: any of torch.optim.lr_scheduler that follows a step count"""
    scheduler_steps: Literal["minibatch", "epoch"] = "minibatch"
    """after what a scheduler steps"""
    clip_norm: float | None = None
    """the most that the norm of all gradients together may be, as in clip_grad_norm_; for synchronous schedules"""
    remedy: Remedy | None = None
    """what is done about stale gradients, for asynchronous schedules; others have none"""

    def __post_init__(self) -> None:
        for field in ("batch_size", "epochs"):
            number = getattr(self, field)
            if not isinstance(number, int) or number < 1:
                raise JobError(f"Job.{field} is {number!r}; it must be a whole number of at least 1")
        if self.scheduler_steps not in ("minibatch", "epoch"):
            raise JobError(f"Job.scheduler_steps is {self.scheduler_steps!r}; choose 'minibatch' or 'epoch'")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise JobError(f"Job.clip_norm is {self.clip_norm!r}; it must be above 0, or None to leave gradients alone")
        if self.remedy is not None and not isinstance(self.remedy, Remedy):
            raise JobError(f"Job.remedy is {self.remedy!r}; give a penstock.Remedy, or None")
        if not hasattr(self.data, "__len__") or not hasattr(self.data, "__getitem__"):
            raise JobError("Job.data has no length or no items by index; give a map-style dataset (or a list)")
        if len(self.data) < 1:
            raise JobError("Job.data is empty; give it at least one sample")
