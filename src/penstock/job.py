"""What a user asks to be trained. A job file is a Python file with ``def job() -> penstock.Job``."""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from penstock.errors import JobError
from penstock.remedy import Remedy

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


Precision = Literal["float32", "bf16", "fp16"]


class Samples(Protocol):
    """A map-style dataset, or simply a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """Ends training when so many evaluations in a row have brought nothing better."""

    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    patience: int = 1

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise JobError(f"EarlyStop.mode is {self.mode!r}; choose 'min' or 'max'")
        if not isinstance(self.patience, int) or self.patience < 1:
            raise JobError(f"EarlyStop.patience is {self.patience!r}; it must be a whole number of at least 1")

    def stops(self, values: Sequence[float | None]) -> bool:
        """Whether to stop after evaluations with these values of the metric; None is a value that is no number."""
        sign = 1 if self.mode == "min" else -1
        ranked = [math.inf if value is None else sign * value for value in values]
        return bool(ranked) and len(ranked) - 1 - ranked.index(min(ranked)) >= self.patience


@dataclass(frozen=True, kw_only=True)
class Job:
    model: nn.Module | Callable[[], nn.Module]
    """any module, unmodified, built alike in every worker; or a function that builds it, if it is too large for one"""
    data: Samples
    """(inputs, target) by index. Inputs go to the model: a tensor or tuple by position, a dict by name"""
    loss: Callable[[Any, Any], Any]
    """loss(model output, target): a tensor, the mean over the samples; or (sum, weight), for other means"""
    optimizer: Callable[[Any], Optimizer | Sequence[Optimizer]]
    """makes the optimizer of a stage, or several, from its (name, parameter) pairs, which all of torch.optim take"""
    batch_size: int
    """samples per minibatch, which is one optimizer step"""
    epochs: int = 1
    seed: int = 0
    """of the order of the samples, of all random numbers that samples and layers draw, and of the initial values if
    ``model`` is a function"""
    weigh: Callable[[Any], Tensor | float] | None = None
    """weigh(target): what ``loss`` divides by where it is no mean over the samples, such as the number of tokens"""
    on_nonfinite_loss: Literal["warn", "stop"] = "warn"
    """whether training goes on, after a warning, when a loss is infinite or not a number"""
    collate: Callable[[list[Any]], Any] | None = None
    """turns a list of samples into a batch; torch's default_collate if not given"""
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    """makes the learning-rate scheduler of an optimizer: any of torch.optim.lr_scheduler that follows a step count"""
    scheduler_steps: Literal["minibatch", "epoch"] = "minibatch"
    """after what a scheduler steps"""
    lr_by_replicas: bool = False
    """multiply a stage's learning rate by how many more microbatches than the first stage's its updates average"""
    clip_norm: float | None = None
    """the most that the norm of all gradients together may be, as in clip_grad_norm_; for synchronous schedules"""
    evaluation: Samples | None = None
    """held-out data, evaluated after every epoch: forwards only, in eval mode"""
    metrics: Mapping[str, Callable[[Any, Any], Tensor | float | tuple[Tensor | float, Tensor | float]]] = field(
        default_factory=dict
    )
    """of an evaluation, besides the loss: metric(model output, target), a mean over the samples or (sum, weight)"""
    evaluate_every: int | None = None
    """minibatches of an epoch after which to evaluate too"""
    early_stop: EarlyStop | None = None
    sync_batch_norm: bool = False
    """take the statistics of batch norm over the microbatches that replicas run together"""
    compile: bool = False
    """run each stage through torch.compile"""
    precision: Precision = "float32"
    """what a stage computes in, by torch.autocast; weights stay as they are. fp16 is for synchronous schedules"""
    remedy: Remedy | None = None
    """what is done about stale gradients, for asynchronous schedules; others have none"""

    @property
    def updates_together(self) -> bool:
        """Whether an update needs something of all stages at once, as only synchronous schedules have it."""
        return self.clip_norm is not None or self.precision == "fp16"

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs"):
            number = getattr(self, name)
            if not isinstance(number, int) or number < 1:
                raise JobError(f"Job.{name} is {number!r}; it must be a whole number of at least 1")
        if self.scheduler_steps not in ("minibatch", "epoch"):
            raise JobError(f"Job.scheduler_steps is {self.scheduler_steps!r}; choose 'minibatch' or 'epoch'")
        if self.on_nonfinite_loss not in ("warn", "stop"):
            raise JobError(f"Job.on_nonfinite_loss is {self.on_nonfinite_loss!r}; choose 'warn' or 'stop'")
        if self.weigh is not None and not callable(self.weigh):
            raise JobError(f"Job.weigh is {self.weigh!r}; give a function of the target, or None")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise JobError(f"Job.clip_norm is {self.clip_norm!r}; it must be above 0, or None to leave gradients alone")
        if self.evaluate_every is not None and (not isinstance(self.evaluate_every, int) or self.evaluate_every < 1):
            raise JobError(f"Job.evaluate_every is {self.evaluate_every!r}; it must be a whole number of at least 1")
        if self.evaluation is None and (self.metrics or self.evaluate_every or self.early_stop):
            raise JobError(
                "Job.metrics, evaluate_every and early_stop are of evaluations; give Job.evaluation its data"
            )
        if self.evaluation is not None and len(self.evaluation) < 1:
            raise JobError("Job.evaluation is empty; give it at least one sample, or leave it out")
        if "loss" in self.metrics:
            raise JobError("Job.metrics has 'loss', which is always evaluated by Job.loss; choose another name")
        if self.early_stop is not None and self.early_stop.metric not in ("loss", *self.metrics):
            raise JobError(
                f"Job.early_stop watches {self.early_stop.metric!r}; evaluations have "
                f"{', '.join(('loss', *self.metrics))}"
            )
        if self.precision not in get_args(Precision):
            raise JobError(f"Job.precision is {self.precision!r}; choose 'float32', 'bf16' or 'fp16'")
        if self.remedy is not None and not isinstance(self.remedy, Remedy):
            raise JobError(f"Job.remedy is {self.remedy!r}; give a penstock.Remedy, or None")
        if not hasattr(self.data, "__len__") or not hasattr(self.data, "__getitem__"):
            raise JobError("Job.data has no length or no items by index; give a map-style dataset (or a list)")
        if len(self.data) < 1:
            raise JobError("Job.data is empty; give it at least one sample")


def check_job_file(path: Path) -> None:
    """Raise unless it is a file of Python. It is read, not run, so this needs no torch."""
    if not path.is_file():
        raise JobError(f"{path}: no such job file")
    try:
        ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise JobError(f"{path}:{error.lineno}: {error.msg}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise JobError(f"{path}: cannot be read as Python: {error}") from None


def misspelt(error: TypeError, source: str) -> JobError | None:
    """What to say where a job function gave Job, EarlyStop or Remedy other arguments than they have."""
    for cls in (Job, EarlyStop, Remedy):
        words = str(error)
        if not words.startswith(f"{cls.__name__}.__init__() "):
            continue
        names = [each.name for each in fields(cls)]
        found = re.search(r"unexpected keyword argument '(\w+)'", words)
        if found is None:
            return JobError(f"{source}: {words.replace('.__init__()', '')}; {cls.__name__} has {', '.join(names)}")
        close = difflib.get_close_matches(found[1], names, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"it has {', '.join(names)}"
        return JobError(f"{source}: {cls.__name__} has no {found[1]!r}; {remedy}")
    return None
