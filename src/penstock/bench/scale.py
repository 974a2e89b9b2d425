"""How the simulator grows with what there is to play: 1,024 workers in hosts of eight, each size in a process of its
own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from penstock.bench.growth import chain_profile, peak_bytes
from penstock.bench.rows import Column, Findings
from penstock.cluster import parse_cluster
from penstock.plan import Plan, Prediction, Stage
from penstock.report.chart import Line, Panel, chart_svg
from penstock.simulate import play
from penstock.units import show_bytes

WORKERS = 1024
MICROBATCHES = (125, 250, 500, 1000)
"""on each worker"""
LARGE = 4_000_000
"""Actions that must not take more than this."""
LARGE_CPU_S = 60.0
LARGE_PEAK_BYTES = 4e9

SHAPES = {
    "pipedream": "a stage on each",
    "pipedream x4": "four replicas of each stage",
    "interleaved": "two stages on each",
}


@dataclass(frozen=True, kw_only=True)
class Point:
    shape: str
    microbatches: int
    actions: int
    cpu_s: float
    """of building the schedule, playing it and finding rate and peak memory"""
    peak_bytes: int
    """of the whole process"""

    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("schedule"),
        *(Column(title, right=True) for title in ("microbatches", "actions", "CPU", "us per action", "peak memory")),
        Column("met"),
    )
    CAPTION: ClassVar[str] = (
        f"{WORKERS:,} workers; microbatches on each worker; above {LARGE:,} actions at most {LARGE_CPU_S:g} s and "
        f"{LARGE_PEAK_BYTES / 1e9:g} GB"
    )

    @property
    def met(self) -> bool | None:
        if self.actions <= LARGE:
            return None
        return self.cpu_s <= LARGE_CPU_S and self.peak_bytes <= LARGE_PEAK_BYTES

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            f"{self.shape}, {SHAPES[self.shape]}",
            f"{self.microbatches:,}",
            f"{self.actions:,}",
            f"{self.cpu_s:.1f} s",
            f"{self.cpu_s / self.actions * 1e6:.1f}",
            show_bytes(self.peak_bytes),
            "-" if self.met is None else ("yes" if self.met else "NO"),
        )

    @property
    def footnote(self) -> str:
        return ""


def run() -> Findings:
    points = []
    for shape in SHAPES:
        sys.stderr.write(f"bench simulator-scale: {shape}, {SHAPES[shape]}\n")
        points += [in_a_process(shape, microbatches) for microbatches in MICROBATCHES]
    return Findings(points, scale_svg(points))


def scale_svg(points: Sequence[Point]) -> str:
    """CPU seconds and peak memory against actions."""

    def lines(y: str, unit: float) -> tuple[Line, ...]:
        shapes = dict.fromkeys(point.shape for point in points)
        return tuple(
            Line(shape, tuple((p.actions / 1e6, getattr(p, y) / unit) for p in points if p.shape == shape))
            for shape in shapes
        )

    return chart_svg(
        [
            Panel(x_label="million actions", y_label="CPU seconds", lines=lines("cpu_s", 1.0), even=True),
            Panel(x_label="million actions", y_label="peak memory, GB", lines=lines("peak_bytes", 1e9), even=True),
        ],
        about="CPU seconds and peak memory of the simulator, by actions",
    )


def plan_of(shape: str, microbatches: int, workers: int = WORKERS) -> tuple[Plan, int]:
    """A plan of that shape, and how many minibatches give each worker so many microbatches."""
    replicas, laps = (4 if shape == "pipedream x4" else 1), (2 if shape == "interleaved" else 1)
    positions = workers // replicas
    profile = chain_profile(positions * laps)
    schedule, per_minibatch = shape.partition(" ")[0], 1
    if laps > 1:
        per_minibatch, profile = microbatches, replace(profile, batch_size=microbatches, microbatch_size=1)
    stages = tuple(
        Stage(
            layers=(index,),
            devices=tuple(range(index % positions * replicas, (index % positions + 1) * replicas)),
            in_flight=positions - index % positions,
        )
        for index in range(positions * laps)
    )
    plan = Plan(
        profile=profile,
        cluster=parse_cluster(f"8@12GB/s,{workers // 8}@1.25GB/s"),
        stages=stages,
        schedule=schedule,
        microbatches=per_minibatch,
        prediction=Prediction(seconds_per_minibatch=0.0, lower_bound_s=0.0, data_parallel_s=None, one_device_s=None),
    )
    return plan, replicas * microbatches // per_minibatch


def in_a_process(shape: str, microbatches: int) -> Point:
    """So that no size's memory is counted for another's."""
    command = [sys.executable, "-m", "penstock.bench.scale", shape, str(microbatches)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Point(**json.loads(answer))


def measure(shape: str, microbatches: int, workers: int = WORKERS) -> Point:
    plan, minibatches = plan_of(shape, microbatches, workers)
    start_s = time.process_time()
    played = play(plan, minibatches)
    _ = played.trace.samples_per_s, played.peak_bytes
    cpu_s = time.process_time() - start_s
    return Point(
        shape=shape,
        microbatches=microbatches,
        actions=len(played.schedule),
        cpu_s=cpu_s,
        peak_bytes=peak_bytes(),
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure(sys.argv[1], int(sys.argv[2])))))
