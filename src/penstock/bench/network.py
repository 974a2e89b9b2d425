"""Two hosts of one core each, joined by a real network at several rates: Penstock's plan for what it measures of that
network, against DistributedDataParallel and torch.distributed.pipelining.

All take the same minibatch for an update and run by turns in the same two processes. Penstock's plan is the default,
asynchronous one with nothing compressed.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from penstock import codec
from penstock.bench.hosts import Hosts, make_hosts
from penstock.bench.jobs import bench_job, bench_profile
from penstock.bench.rows import Column, Findings
from penstock.bench.why import config_of
from penstock.cluster import Cluster, load_cluster
from penstock.planner import Hints, make_plan
from penstock.profile import Profile
from penstock.report.chart import Line, Panel, chart_svg
from penstock.runtime.machine.machine import share_of_machine
from penstock.units import show_bits_per_s

CASE = "vgg11"
WORKERS = 2
RATES = (None, 1e9 / 8, 200e6 / 8, 100e6 / 8)
"""bytes per second; None for what the machine can"""
MICROBATCHES = (2, 4)
"""of the synchronous pipelines, of which the better counts"""
SLOW, TIMES_DATA_PARALLEL = 200e6 / 8, 5.3
TIMEOUT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class NetworkRow:
    rate: str
    measured_bytes_per_s: float
    plan: str
    """replicas of each stage, and the schedule"""
    data_parallel: float
    """samples/s of DistributedDataParallel"""
    torch_pipeline: float
    """of torch.distributed.pipelining's 1F1B, with Penstock's cut for it"""
    synchronous: float
    """of Penstock's own 1f1b on the same cut: the gradients of one process"""
    penstock: float
    """of Penstock's plan for the measured network"""
    to_best_peer: float
    to_data_parallel: float
    target: float
    """of the last"""
    met: bool

    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("network"),
        *(Column(title, right=True) for title in ("DDP", "torch\n1F1B", "1f1b", "Penstock")),
        Column("its plan"),
        *(Column(title, right=True) for title in ("/ best\nof torch", "/ DDP")),
        Column("met"),
    )
    CAPTION: ClassVar[str] = (
        "samples/s of VGG-11 (28 M parameters) on two hosts of one core, 32 samples to an update, medians of three; "
        f"synchronous pipelines with the better of {' and '.join(map(str, MICROBATCHES))} microbatches. To reach: the "
        f"better peer, and {TIMES_DATA_PARALLEL} times DistributedDataParallel at 200 Mbit/s and less"
    )

    @property
    def cells(self) -> tuple[str, ...]:
        rates = (self.data_parallel, self.torch_pipeline, self.synchronous, self.penstock)
        ratios = (self.to_best_peer, self.to_data_parallel)
        shown = *(f"{rate:.1f}" for rate in rates), self.plan, *(f"{ratio:.2f}" for ratio in ratios)
        return f"{self.rate}\n({show_bits_per_s(self.measured_bytes_per_s)})", *shown, "yes" if self.met else "NO"

    @property
    def footnote(self) -> str:
        return ""


def run() -> Findings:
    with make_hosts(WORKERS) as hosts:
        with share_of_machine(threads=1):
            profile = bench_profile(bench_job(CASE), repeats=10)
        rows = [_row(hosts, profile, rate) for rate in RATES]
    return Findings(rows, network_svg(rows))


def _row(hosts: Hosts, profile: Profile, bytes_per_s: float | None) -> NetworkRow:
    rate = "no limit" if bytes_per_s is None else show_bits_per_s(bytes_per_s)
    sys.stderr.write(f"bench network: {rate}\n")
    hosts.set_rate(bytes_per_s)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        cluster = measured_cluster(hosts, directory / "cluster.toml")
        plan = make_plan(
            profile, cluster, hints=Hints(straight=True)
        )  # replicas would each add a minibatch to an update
        codec.save(plan, directory / "penstock.json")
        for count in MICROBATCHES:
            cut = Hints(replicas=(1,) * WORKERS)
            made = make_plan(profile, cluster, schedule="1f1b", microbatches=count, hints=cut)
            codec.save(made, directory / f"1f1b {count}.json")
        hosts.run_workers(["-m", "penstock.bench.apart", CASE, name], timeout_s=TIMEOUT_S)
        rates = json.loads((directory / "rates").read_text(encoding="utf-8"))
    median = {contender: statistics.median(found) for contender, found in rates.items()}
    return network_row(
        rate=rate,
        slow=bytes_per_s is not None and bytes_per_s <= SLOW,
        measured_bytes_per_s=cluster.levels[-1].bytes_per_s,
        plan=f"{config_of(plan)} {plan.schedule}",
        median=median,
    )


def measured_cluster(hosts: Hosts, path: Path) -> Cluster:
    """What `penstock cluster measure` finds there, with one worker on each host."""
    hosts.run_workers(
        ["-m", "penstock", "cluster", "measure", "--overwrite", "--output", str(path), "--json"], timeout_s=TIMEOUT_S
    )
    return load_cluster(path)


def network_row(
    *, rate: str, slow: bool, measured_bytes_per_s: float, plan: str, median: dict[str, float]
) -> NetworkRow:
    data_parallel = median["torch data parallel"]
    torch_pipeline = max(median[f"torch 1f1b {count}"] for count in MICROBATCHES)
    to_best_peer = median["penstock"] / max(data_parallel, torch_pipeline)
    to_data_parallel = median["penstock"] / data_parallel
    target = TIMES_DATA_PARALLEL if slow else 1.0
    return NetworkRow(
        rate=rate,
        measured_bytes_per_s=measured_bytes_per_s,
        plan=plan,
        data_parallel=data_parallel,
        torch_pipeline=torch_pipeline,
        synchronous=max(median[f"1f1b {count}"] for count in MICROBATCHES),
        penstock=median["penstock"],
        to_best_peer=to_best_peer,
        to_data_parallel=to_data_parallel,
        target=target,
        met=to_best_peer >= 1.0 and to_data_parallel >= target,
    )


def network_svg(rows: Sequence[NetworkRow]) -> str:
    """Samples per second against the network's bandwidth, as measured."""

    def line(name: str, field: str) -> Line:
        points = sorted((8e-6 * row.measured_bytes_per_s, getattr(row, field)) for row in rows)
        return Line(name, tuple((float(f"{x:.2g}"), y) for x, y in points))

    lines = (
        line("Penstock", "penstock"),
        line("torch 1F1B", "torch_pipeline"),
        line("DDP", "data_parallel"),
    )
    return chart_svg(
        [Panel(x_label="bandwidth as measured, Mbit/s", y_label="samples/s", lines=lines)],
        about="Samples per second of VGG-11 on two hosts, by the network's bandwidth",
    )
