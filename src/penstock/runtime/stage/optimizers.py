"""What updates a stage's parameters: the job's optimizer, or several of them, each at the scheduler's rate."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from penstock.errors import JobError

Named = Sequence[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[Any], Optimizer | Sequence[Optimizer]]
MakeScheduler = Callable[[Optimizer], LRScheduler]


def make_optimizers(make: MakeOptimizer, named: Named) -> tuple[Optimizer, ...]:
    """The job's optimizers of these parameters; none where there is nothing to train."""
    if not named:
        return ()
    try:
        made = make(list(named))
    except ValueError as error:
        if "empty parameter list" in str(error):
            raise JobError(
                f"Job.optimizer made an optimizer of no parameters from {_some(named)}: a stage has only a part of the "
                "model. Return a list of optimizers and leave out those without parameters"
            ) from error
        if "with/without names" in str(error):
            raise JobError(
                f"Job.optimizer made a group of no parameters from {_some(named)}, which torch takes for one without "
                "names: a stage has only a part of the model. Put parameters alone into groups, "
                '{"params": [p for name, p in named if ...]}, or leave out empty groups'
            ) from error
        raise
    found = (made,) if isinstance(made, Optimizer) else tuple(made)
    for each in found:
        if not isinstance(each, Optimizer):
            raise JobError(f"Job.optimizer made a {type(each).__name__}; return a torch optimizer, or a list of them")
    return found


def scaled_rates(make: MakeOptimizer, factor: float) -> MakeOptimizer:
    """The same optimizers at so many times the learning rate; schedulers begin from that."""

    def made(named: Any) -> tuple[Optimizer, ...]:
        optimizers = make_optimizers(make, named)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["lr"] * factor
        return optimizers

    return made


class Optimizers:
    """Schedulers follow a count that all stages share, never a stage's own updates.

    The count says how many minibatches (or epochs) of the run came before the gradients that are applied. A
    scheduler is stepped until it has seen as many, so stages that update at different moments, or less often, have
    the same rate for the same samples, and a run that goes on from a checkpoint has caught up at its first update.
    """

    def __init__(self, make: MakeOptimizer, make_scheduler: MakeScheduler | None, named: Named) -> None:
        self.optimizers = make_optimizers(make, named)
        self.schedulers = tuple(_scheduler(make_scheduler, o) for o in self.optimizers) if make_scheduler else ()
        self._count = 0

    def step(self, count: int, rate: float = 1.0) -> None:
        """Update with the parameters' gradients, at ``rate`` times the learning rate after ``count`` steps of the
        scheduler."""
        if self.schedulers and self._count == 0 < count:
            with warnings.catch_warnings():  # on resuming, a scheduler does step before its optimizer
                warnings.simplefilter("ignore", UserWarning)
                self._catch_up(count)
        else:
            self._catch_up(count)
        for optimizer in self.optimizers:
            with _at_rate(optimizer, rate):
                optimizer.step()

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        for optimizer in self.optimizers:
            if parameter in optimizer.state:
                state: dict[str, Any] = optimizer.state[parameter]
                return state
        return {}

    def set_state(self, parameter: Tensor, state: dict[str, Any]) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if any(parameter is member for member in group["params"]):
                    optimizer.state[parameter] = {k: _placed(k, v, parameter, group) for k, v in state.items()}

    def _catch_up(self, count: int) -> None:
        for scheduler in self.schedulers:
            for _ in range(self._count, count):
                scheduler.step()
        self._count = count


@contextmanager
def _at_rate(optimizer: Optimizer, rate: float) -> Iterator[None]:
    """For one update only: what the scheduler made of the learning rate stays its own."""
    if rate == 1.0:
        yield
        return
    own = [group["lr"] for group in optimizer.param_groups]
    for group, learning_rate in zip(optimizer.param_groups, own, strict=True):
        group["lr"] = learning_rate * rate
    yield
    for group, learning_rate in zip(optimizer.param_groups, own, strict=True):
        group["lr"] = learning_rate


def _scheduler(make: MakeScheduler, optimizer: Optimizer) -> LRScheduler:
    scheduler = make(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise JobError(
            "Job.scheduler made a ReduceLROnPlateau, which follows a measured value; "
            "choose a scheduler that follows the number of steps"
        )
    if not isinstance(scheduler, LRScheduler):
        raise JobError(
            f"Job.scheduler made a {type(scheduler).__name__}; return one of torch.optim.lr_scheduler, "
            "such as lambda optimizer: StepLR(optimizer, 1000)"
        )
    return scheduler


def _placed(key: str, value: Any, parameter: Tensor, group: dict[str, Any]) -> Any:
    """State lives with its parameter; step counts on the CPU, unless the update is one kernel that reads them."""
    if not isinstance(value, Tensor):
        return value
    with_parameter = value.dim() > 0 or (key == "step" and (group.get("fused") or group.get("capturable")))
    return value.to(parameter.device) if with_parameter else value


def _some(named: Named) -> str:
    names = [name for name, _ in named]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
