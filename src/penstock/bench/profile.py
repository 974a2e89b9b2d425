"""Do the measured layers add up to the model? Sum of layer times against the whole step, interleaved."""

from __future__ import annotations

import statistics

from penstock.bench.contenders import Whole, steps_per_s
from penstock.bench.jobs import JOBS, bench_job, bench_profile
from penstock.bench.rows import Findings, Row
from penstock.cluster import ANY_KIND
from penstock.profile import Profile
from penstock.runtime.machine.machine import share_of_machine

ROUNDS = 5
WHOLE_S = 1.0
TOLERANCE = 0.15


def run() -> Findings:
    with share_of_machine(threads=1):
        return Findings([_case(name) for name in JOBS])


def _case(name: str) -> Row:
    job = bench_job(name)
    sums, wholes = [], []
    for _ in range(ROUNDS):
        sums.append(summed_s(bench_profile(job, repeats=5)))
        wholes.append(1 / steps_per_s(Whole(job, job.batch_size), WHOLE_S))
    ratio = statistics.median(sums) / statistics.median(wholes)
    return Row(
        case=name,
        metric=f"sum of layer seconds / whole step (within {TOLERANCE:.0%})",
        value=statistics.median(sums),
        baseline=statistics.median(wholes),
        ratio=ratio,
        target=1.0,
        met=abs(ratio - 1) <= TOLERANCE,
    )


def summed_s(profile: Profile) -> float:
    """Forward, backward and update of all layers."""
    update_s = sum(row.update_s for row in profile.seconds_on(ANY_KIND))
    return sum(profile.compute_s(ANY_KIND)) + update_s
