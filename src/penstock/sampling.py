"""Which samples are in which microbatch: a pure function of the data's size, the batch size, the seed and the epoch.

Every worker evaluates it for itself, so a stage that reads inputs and the stage that reads targets
agree without a message, and every sample is seen exactly once per epoch whatever the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.errors import JobError


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One pass over the data, or part of one, divided into minibatches and those into microbatches.

    Sizes differ by at most one within a minibatch. The last minibatch takes what is left; it has fewer microbatches
    only if it has fewer samples than that.
    """

    num_samples: int
    batch_size: int
    microbatches: int
    seed: int
    number: int = 0
    first_minibatch: int = 0
    """The first minibatch; those before it in this epoch are not included."""
    last_minibatch: int | None = None
    """The minibatch to stop at, which is not included."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise JobError("the job's data is empty; give it at least one sample")
        if self.microbatches > self.batch_size:
            raise JobError(
                f"{self.microbatches} microbatches from a batch of {self.batch_size} samples; "
                "raise batch_size or plan with fewer microbatches"
            )

    @cached_property
    def minibatches(self) -> tuple[int, ...]:
        """The number of microbatches of each minibatch."""
        return self._all_minibatches[self.first_minibatch : self.last_minibatch]

    @cached_property
    def samples(self) -> tuple[int, ...]:
        """The number of samples of each microbatch."""
        return self._all_samples[self.first_microbatch : self.first_microbatch + sum(self.minibatches)]

    @cached_property
    def first_microbatch(self) -> int:
        """The number of microbatch 0 in the whole epoch."""
        return sum(self._all_minibatches[: self.first_minibatch])

    @cached_property
    def minibatches_before(self) -> tuple[int, ...]:
        """For each microbatch, the minibatches of the whole run before its own."""
        first = self.number * len(self._all_minibatches) + self.first_minibatch
        return tuple(first + i for i, count in enumerate(self.minibatches) for _ in range(count))

    def indices(self, microbatch: int) -> list[int]:
        """The samples of one microbatch."""
        if not 0 <= microbatch < len(self.samples):
            raise IndexError(f"microbatch {microbatch} of {len(self.samples)}")
        start = int(self._starts[self.first_microbatch + microbatch])
        indices: list[int] = self._permutation[start : start + self.samples[microbatch]].tolist()
        return indices

    @property
    def is_end(self) -> bool:
        """Whether it includes the end of the epoch."""
        return self.minibatches_done == len(self._all_minibatches)

    @property
    def minibatches_done(self) -> int:
        """Minibatches of the whole epoch up to the end of this part."""
        return self.first_minibatch + len(self.minibatches)

    def parts(self, *every: int) -> list[Epoch]:
        """The rest of this epoch in parts, which end where the number of minibatches in the whole epoch is a multiple
        of one of these numbers, and at its end."""
        total, first = len(self._all_minibatches), self.first_minibatch
        if first >= total:
            return []
        ends = sorted({end for number in every for end in range(number, total, number) if end > first} | {total})
        starts = [first, *ends[:-1]]
        return [replace(self, first_minibatch=s, last_minibatch=e) for s, e in zip(starts, ends, strict=True)]

    @cached_property
    def _all_minibatches(self) -> tuple[int, ...]:
        return tuple(min(self.microbatches, size) for size in self._minibatch_sizes)

    @cached_property
    def _all_samples(self) -> tuple[int, ...]:
        return tuple(
            size // count + (1 if i < size % count else 0)
            for size, count in zip(self._minibatch_sizes, self._all_minibatches, strict=True)
            for i in range(count)
        )

    @cached_property
    def _minibatch_sizes(self) -> tuple[int, ...]:
        full, rest = divmod(self.num_samples, self.batch_size)
        return (self.batch_size,) * full + ((rest,) if rest else ())

    @cached_property
    def _starts(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.concatenate(([0], np.cumsum(self._all_samples[:-1], dtype=np.int64)))

    @cached_property
    def _permutation(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.random.default_rng((self.seed % 2**64, self.number)).permutation(self.num_samples)
