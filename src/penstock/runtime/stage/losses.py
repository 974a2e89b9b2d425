"""The loss of a microbatch, and how losses and metrics add up: a mean over samples, or a sum with its weight."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from penstock.errors import JobError, PlanError
from penstock.job import Job
from penstock.runtime.capture.grouping import LOSS
from penstock.runtime.capture.randomness import keyed_function

log = logging.getLogger(__name__)


class WeightedLoss(NamedTuple):
    """The quotient of the sums of both, over the microbatches of a minibatch, is the minibatch's loss."""

    total: Tensor
    weight: float


class Term(NamedTuple):
    """A microbatch's part of a mean, in plain numbers."""

    total: float
    weight: float


def keyed_loss(job: Job) -> Job:
    """The job with a loss that draws its random numbers, if any, by the key of the microbatch."""
    return replace(job, loss=keyed_function(job.loss, LOSS))


def loss_of(job: Job, output: Any, target: Any) -> Tensor | WeightedLoss:
    """The job's loss of a microbatch: a mean over its samples, or a sum with a weight."""
    found = job.loss(output, target)
    if job.weigh is None:
        if isinstance(found, Tensor):
            return _one_number(found)
        return WeightedLoss(*_pair(found))
    if not isinstance(found, Tensor):
        raise JobError(
            f"Job.loss returned {type(found).__name__}, but with Job.weigh it must return a tensor, the mean; "
            "leave Job.weigh out if the loss returns (sum, weight)"
        )
    weight = _weight(job.weigh(target), "Job.weigh returned")
    # A mean over nothing may be 0 / 0, also in its backward. Nothing is its sum, without one.
    return WeightedLoss(_one_number(found) * weight if weight else found.detach().new_zeros(()), weight)


def loss_function(
    job: Job, rebuild: Callable[[Any], Any], *, weighted: bool
) -> Callable[[Any, Any], Tensor | WeightedLoss]:
    """The loss of what a graph's output node holds. All workers must know whether a weight goes with it."""

    def compute(output: Any, target: Any) -> Tensor | WeightedLoss:
        found = loss_of(job, rebuild(output), target)
        if isinstance(found, WeightedLoss) != weighted:
            returned, measured = "(sum, weight)", "a mean over the samples"
            if weighted:
                returned, measured = measured, returned
            raise PlanError(
                f"Job.loss returned {returned}, but when the plan's profile was measured it returned {measured}; "
                "profile and plan again"
            )
        return found

    return compute


def term(value: Any, samples: int, name: str) -> Term:
    """What a loss or a metric of a microbatch adds to a mean over many: a mean counts by its samples."""
    if isinstance(value, tuple):
        if len(value) != 2:
            raise JobError(f"{name} returned {len(value)} values; return one number, or (sum, weight)")
        return Term(_number(value[0], name), _weight(value[1], f"{name} returned weight"))
    return Term(_number(value, name) * samples, samples)


def mean_of(terms: Iterable[Term]) -> float:
    """Not a number where nothing was weighed."""
    pairs = list(terms)
    weight = sum(each.weight for each in pairs)
    return sum(each.total for each in pairs) / weight if weight else math.nan


def _pair(found: Any) -> tuple[Tensor, float]:
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Tensor):
        raise JobError(
            f"Job.loss returned {type(found).__name__}; return a tensor, the mean over the samples, or (sum, weight)"
        )
    return _one_number(found[0]), _weight(found[1], "Job.loss returned weight")


def _one_number(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise JobError(
            f"Job.loss made a tensor of shape {list(loss.shape)}; return one number, the mean over the samples, "
            "or (sum, weight)"
        )
    return loss


def _number(value: Any, name: str) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise JobError(
            f"{name} made a tensor of shape {list(value.shape)}; return one number, the mean over the samples, "
            "or (sum, weight)"
        )
    return float(value.detach() if isinstance(value, Tensor) else value)


def _weight(given: Any, what: str) -> float:
    if isinstance(given, Tensor) and given.numel() != 1:
        raise JobError(f"{what} of shape {list(given.shape)}; a weight is one number, such as a count of tokens")
    weight = float(given.detach() if isinstance(given, Tensor) else given)
    if not (math.isfinite(weight) and weight >= 0):
        raise JobError(f"{what} {weight}; a weight is a finite number of 0 or more, such as a count of tokens")
    return weight
