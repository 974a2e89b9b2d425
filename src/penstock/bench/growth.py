"""How planning grows with layers and devices: a chain on hosts of eight, each size planned in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.bench.rows import Row, at_most
from penstock.cluster import parse_cluster
from penstock.graph import Layer, LayerGraph, Parameter, Value
from penstock.planner import make_plan
from penstock.profile import LayerSeconds, Profile
from penstock.report.chart import Line, Panel, chart_svg

LAYERS = (100, 200, 400, 1000)
DEVICES = (16, 64, 256, 1024, 4096)
LARGE = (1000, 1024)
"""The size that must not take more than this."""
LARGE_CPU_S = 10.0
LARGE_PEAK_BYTES = 2e9


@dataclass(frozen=True, kw_only=True)
class Point:
    layers: int
    devices: int
    cpu_s: float
    """of planning alone"""
    peak_bytes: int
    """of the whole process"""
    gap: float
    """to the proven bound"""


def measure_growth() -> list[Point]:
    points = []
    for layers in LAYERS:
        sys.stderr.write(f"bench planner: chains of {layers:,} layers\n")
        points += [in_a_process(layers, devices) for devices in DEVICES]
    return points


def growth_rows(points: Sequence[Point]) -> list[Row]:
    rows = []
    for point in points:
        case = f"chain of {point.layers:,} layers, {point.devices:,} devices"
        if (point.layers, point.devices) == LARGE:
            rows.append(at_most(case, "CPU seconds", point.cpu_s, LARGE_CPU_S))
            rows.append(at_most(case, "peak bytes", point.peak_bytes, LARGE_PEAK_BYTES))
            rows.append(at_most(case, "gap to the lower bound", point.gap))
        else:
            rows.append(at_most(f"{case}, gap {point.gap:.1%}", "CPU seconds", point.cpu_s))
    return rows


def growth_svg(points: Sequence[Point]) -> str:
    """CPU seconds against devices and against layers."""
    by_layers = [
        Line(f"{count:,} layers", tuple((p.devices, p.cpu_s) for p in points if p.layers == count))
        for count in sorted({point.layers for point in points})
    ]
    by_devices = [
        Line(f"{count:,} devices", tuple((p.layers, p.cpu_s) for p in points if p.devices == count))
        for count in sorted({point.devices for point in points})
    ]
    seconds = "CPU seconds"
    return chart_svg(
        [
            Panel(x_label="devices, in hosts of 8", y_label=seconds, lines=tuple(by_layers)),
            Panel(x_label="layers of the chain", y_label=seconds, lines=tuple(by_devices)),
        ],
        about="CPU seconds to plan a chain, by devices and by layers",
    )


def chain_profile(layers: int) -> Profile:
    """Layers of unequal cost, the weights in the last ones, as in a convolutional net."""
    graph = LayerGraph(
        layers=tuple(Layer(id=i, name=f"l{i}", kind="Any", parameters=(f"w{i}",)) for i in range(layers)),
        values=tuple(Value(name=f"v{i}", producer=i, consumers=(i + 1,), num_bytes=10**6) for i in range(layers - 1)),
        parameters=tuple(Parameter(name=f"w{i}", num_bytes=10**4 * (1 + i * i // layers)) for i in range(layers)),
    )
    costs = [1e-3 * (1 + (i * 7919 % 13) / 13) for i in range(layers)]
    rows = tuple(LayerSeconds(forward_s=c, backward_input_s=c, backward_weight_s=c) for c in costs)
    return Profile(
        model="chain", front_end="made", batch_size=32, microbatch_size=32, graph=graph, seconds={"any": rows}
    )


def in_a_process(layers: int, devices: int) -> Point:
    """So that no plan's memory is counted for another's."""
    command = [sys.executable, "-m", "penstock.bench.growth", str(layers), str(devices)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Point(**json.loads(answer))


def measure(layers: int, devices: int) -> Point:
    """Plan a chain here."""
    profile, cluster = chain_profile(layers), parse_cluster(f"8@12GB/s,{devices // 8}@1.25GB/s")
    start_s = time.process_time()
    plan = make_plan(profile, cluster)
    cpu_s = time.process_time() - start_s
    return Point(layers=layers, devices=devices, cpu_s=cpu_s, peak_bytes=peak_bytes(), gap=plan.prediction.gap)


def peak_bytes() -> int:
    """From the kernel's status file: getrusage would count what the parent held when it started this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure(int(sys.argv[1]), int(sys.argv[2])))))
