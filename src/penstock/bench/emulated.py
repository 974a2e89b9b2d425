"""Rows of PipeDream's Table 1 run on emulated devices: speed-up over data parallelism, beside simulated, published."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from penstock.bench.published import TABLE_1
from penstock.bench.rows import Column, Findings
from penstock.bench.table1 import compare, profiles_directory
from penstock.bench.why import Compared, config_of
from penstock.plan import Plan
from penstock.runtime.emulate.emulate import emulate
from penstock.simulate import simulate

CASES = ("VGG-16 4x4 A", "AlexNet 4x4 A", "GNMT-16 4x4 A", "GNMT-8 3x4 A")
ROUNDS = 8
CLOSE = 0.1


@dataclass(frozen=True)
class Rates:
    """Minibatches per second of a plan."""

    simulated: float
    emulated: float

    @property
    def ratio(self) -> float:
        return self.emulated / self.simulated


@dataclass(frozen=True, kw_only=True)
class EmulatedRow:
    case: str
    config: str
    published: float
    """The published speed-up over data parallelism."""
    simulated: float
    """The same speed-up, simulated."""
    emulated: float
    """The same speed-up, on emulated devices."""
    data_parallel: Rates
    pipelined: Rates
    met: bool
    """Whether both plans run as fast as simulated, to a tenth."""

    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("case"),
        Column("replicas"),
        *(Column(title, right=True) for title in ("published", "simulated", "emulated")),
        *(Column(f"ratio,\n{what}", right=True) for what in ("DP", "pipeline")),
        Column("met"),
    )
    CAPTION: ClassVar[str] = (
        "speed-up over data parallelism of the published configuration, with the cuts that suit it best; "
        "A = 4@12GB/s in hosts at 1.25GB/s. Ratio: emulated / simulated throughput, to be within a tenth of 1"
    )

    @property
    def cells(self) -> tuple[str, ...]:
        speedups = (self.published, self.simulated, self.emulated)
        ratios = (self.data_parallel.ratio, self.pipelined.ratio)
        shown = *(f"{speedup:.2f}" for speedup in speedups), *(f"{ratio:.3f}" for ratio in ratios)
        return self.case, self.config, *shown, "yes" if self.met else "NO"

    @property
    def footnote(self) -> str:
        return ""


def run() -> Findings:
    return Findings(list(_rows(profiles_directory())))


def _rows(profiles: Path) -> Iterator[EmulatedRow]:
    for published in TABLE_1:
        if published.case not in CASES:
            continue
        compared = compare(published, profiles)
        if isinstance(compared, Compared):
            yield emulated_row(compared)
        else:
            sys.stderr.write(f"bench table1: {published.case}: {compared}\n")


def emulated_row(compared: Compared) -> EmulatedRow:
    data_parallel = _rates(compared.published.case, compared.data_parallel)
    pipelined = _rates(compared.published.case, compared.as_published)
    return EmulatedRow(
        case=compared.published.case,
        config=config_of(compared.as_published),
        published=compared.published.speedup,
        simulated=pipelined.simulated / data_parallel.simulated,
        emulated=pipelined.emulated / data_parallel.emulated,
        data_parallel=data_parallel,
        pipelined=pipelined,
        met=all(abs(rates.ratio - 1) <= CLOSE for rates in (data_parallel, pipelined)),
    )


def _rates(case: str, plan: Plan) -> Rates:
    sys.stderr.write(f"bench table1: {case}, {config_of(plan)}\n")
    minibatches = ROUNDS * max(plan.pipeline.round_sizes) + 2 * len(plan.devices)
    traces = simulate(plan, minibatches), emulate(plan, minibatches).trace
    return Rates(*(trace.samples_per_s / plan.profile.batch_size for trace in traces))
