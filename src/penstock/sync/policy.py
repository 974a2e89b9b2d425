"""Which workers average together: pure decisions, the same on every worker, tested without processes."""

from __future__ import annotations

from typing import Protocol

from penstock.errors import PlanError


class SyncPolicy(Protocol):
    def group(self, owners: tuple[int, ...], worker: int, round_index: int) -> tuple[int, ...]:
        """The workers, among the ``owners`` of a parameter, whose gradients ``worker`` sums in this round."""
        ...


class AllReduce:
    """All owners in every round, which gives the mathematics of one process."""

    def group(self, owners: tuple[int, ...], worker: int, round_index: int) -> tuple[int, ...]:
        return owners


def sync_policy(name: str) -> SyncPolicy:
    if name == "all-reduce":
        return AllReduce()
    raise PlanError(f"sync {name!r} is unknown; choose all-reduce")
