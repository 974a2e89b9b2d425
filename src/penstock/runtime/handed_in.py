"""What worker 0 makes of what all workers hand in at the end of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.clocks import Alignment
from penstock.limits import is_usable
from penstock.plan import Plan
from penstock.run import EdgeError
from penstock.runtime.events import Timed, unpacked
from penstock.runtime.losses import Term, mean_of
from penstock.schedule import Staleness
from penstock.trace import Event


def on_one_clock(logs: Sequence[Any], alignments: Sequence[Alignment]) -> list[list[list[Event]]]:
    """Each worker's parts, [its origin, its log], as seconds since worker 0's origin by worker 0's clock."""
    of_worker = {worker: alignment for alignment in alignments for worker in alignment.workers}
    reference_s = logs[0][0]

    def event(worker: int, origin_s: float, timed: Timed) -> Event:
        start_s, end_s = (
            of_worker[worker].to_reference(origin_s + own_s) - reference_s for own_s in (timed.start_s, timed.end_s)
        )
        return Event(worker=worker, action=timed.action, start_s=start_s, end_s=end_s)

    return [
        [[event(worker, origin_s, timed) for timed in part] for part in unpacked(log)]
        for worker, (origin_s, log) in enumerate(logs)
    ]


def of_stage(ages: Sequence[dict[str, dict[str, int]]], stage: int) -> Staleness:
    """What all replicas of a stage have counted."""
    total = Counter[int]()
    for part in ages:
        total.update({int(age): count for age, count in part.get(str(stage), {}).items()})
    return Staleness.counted(total)


def per_minibatch(losses: Any, minibatches: Sequence[int]) -> tuple[float | None, ...]:
    """The loss of each minibatch, from rows of (microbatch, total, weight); None where it is no finite number."""
    by_microbatch = {int(microbatch): Term(total, weight) for microbatch, total, weight in losses}
    means: list[float | None] = []
    first = 0
    for count in minibatches:
        mean = mean_of(by_microbatch[m] for m in range(first, first + count) if m in by_microbatch)
        means.append(mean if is_usable(mean) else None)
        first += count
    return tuple(means)


def edge_errors(plan: Plan, parts: Iterable[Sequence[Any]]) -> Iterator[EdgeError]:
    """What the workers' meters found, [source, target, direction, errors], with replicas taken together."""
    found: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for source, target, direction, errors in parts:
        found[source, target, direction] += errors
    for (source, target, direction), errors in sorted(
        found.items(), key=lambda item: (item[0][:2], item[0][2] != "forward")
    ):
        mean = sum(errors) / len(errors)
        yield EdgeError(
            source=source,
            target=target,
            sends=plan.stages[source].sends,
            direction=direction,
            error=mean if is_usable(mean) else None,
            looked_at=len(errors),
        )
