"""Remedies for stale gradients under asynchronous schedules.

Staleness is the number of updates of a stage's weights between a microbatch's forward and the update with its gradient.
Where there is none, as under synchronous schedules and in the last stage, remedies change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import JobError


@dataclass(frozen=True, kw_only=True)
class Remedy:
    rate_steps: int = 0
    """For this many minibatches, a stage's learning rate is lowered by its staleness, less and less (PipeMare's T1)."""
    look_ahead: float = 0.0
    """Forwards use the weights expected at their update. Each expected step is this factor times the one before: 1
    repeats the last step (SpecTrain), a momentum below 1 is Nesterov's look-ahead (Ajanthan et al., 2025)."""

    def __post_init__(self) -> None:
        if not isinstance(self.rate_steps, int) or self.rate_steps < 0:
            raise JobError(f"Remedy.rate_steps is {self.rate_steps!r}; it must be a whole number of minibatches, or 0")
        if not 0 <= self.look_ahead <= 1:
            raise JobError(f"Remedy.look_ahead is {self.look_ahead!r}; it must be between 0 (off) and 1")

    def rate(self, staleness: int, minibatches: int) -> float:
        """The factor on a learning rate after so many minibatches: 1 / delay^p, with p falling from 1 to 0.

        The delay counts the update itself, as in PipeMare, whose last stage has a delay of 1 and its full rate.
        """
        if minibatches >= self.rate_steps:
            return 1.0
        return float((1 + staleness) ** (minibatches / self.rate_steps - 1))

    def distance(self, staleness: int) -> float:
        """How far to move from a version's weights, in multiples of the last update."""
        return float(sum(self.look_ahead**step for step in range(1, staleness + 1)))
