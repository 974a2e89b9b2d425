"""What a job may do about stale gradients under an asynchronous schedule.

Staleness is the number of updates that a stage's weights have seen between a microbatch's forward and the update with
its gradient. Where there is none, as under synchronous schedules and in the last stage, nothing here changes anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import JobError


@dataclass(frozen=True, kw_only=True)
class Remedy:
    rate_steps: int = 0
    """so many minibatches long a stage's learning rate is lowered by its staleness, ever less (PipeMare's T1)"""
    look_ahead: float = 0.0
    """forwards run on the weights expected at their update, each step of the way this much of the one before: 1 goes on
    as the last step did (SpecTrain), a momentum below 1 is Nesterov's look-ahead (Ajanthan et al., 2025)"""

    def __post_init__(self) -> None:
        if not isinstance(self.rate_steps, int) or self.rate_steps < 0:
            raise JobError(f"Remedy.rate_steps is {self.rate_steps!r}; it must be a whole number of minibatches, or 0")
        if not 0 <= self.look_ahead <= 1:
            raise JobError(f"Remedy.look_ahead is {self.look_ahead!r}; it must be between 0 (off) and 1")

    def rate(self, staleness: int, minibatches: int) -> float:
        """What a learning rate is multiplied by after so many minibatches: 1 / delay^p, p falling from 1 to 0.

        The delay counts the update itself, as in PipeMare, whose last stage has a delay of 1 and its full rate.
        """
        if minibatches >= self.rate_steps:
            return 1.0
        return float((1 + staleness) ** (minibatches / self.rate_steps - 1))

    def distance(self, staleness: int) -> float:
        """How many times the last update lies between the weights of a version and those to compute with."""
        return float(sum(self.look_ahead**step for step in range(1, staleness + 1)))
