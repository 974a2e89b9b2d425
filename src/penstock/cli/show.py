"""Tables and JSON answers for profiles, plans, traces, runs, verifications, clusters and benchmarks.

Costs are never computed here: they come from `PlanCosts`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock import codec
from penstock.bench.rows import BenchRow
from penstock.cli.cells import Names, add_numbers, letters, name_cell
from penstock.cluster import Device, Level
from penstock.limits import per_second
from penstock.plan import Plan
from penstock.plan_costs import PlanCosts
from penstock.profile import Profile
from penstock.report.outcome import Outcome
from penstock.report.stages import bottleneck_text, show_memory
from penstock.run import EdgeError
from penstock.schedule import Action, Kind, Staleness
from penstock.survey import LevelFindings, Survey
from penstock.trace import Trace
from penstock.units import (
    show_bytes,
    show_numbers,
    show_seconds,
    write_bytes,
    write_bytes_per_s,
    write_seconds,
)


def plain_console() -> Console:
    """A console that prints names from files as they are, without interpreting markup or emoji codes."""
    return Console(markup=False, emoji=False)


def print_table(table: RenderableType) -> None:
    plain_console().print(table)


def profile_table(profile: Profile) -> Table:
    kind, seconds = next(iter(profile.seconds.items()))
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{profile.model} on {kind}: {profile.microbatch_size} samples, captured by {profile.front_end}",
        caption=f"total {show_seconds(_total_s(profile))} per microbatch and update"
        + _other_sizes(profile)
        + (f"\nnot captured by torch.export: {profile.reason}" if profile.reason else ""),
        padding=(0, 1, 0, 0),
    )
    for column in ("layer", "kind"):
        table.add_column(column)
    add_numbers(table, ("forward", "backward\ninput", "backward\nweight", "weights", "kept for\nbackward"))
    for layer, row in zip(profile.graph.layers, seconds, strict=True):
        weights = sum(parameter.num_bytes for parameter in profile.graph.parameters_of([layer.id]))
        times = (row.forward_s, row.backward_input_s, row.backward_weight_s)
        table.add_row(
            name_cell(layer.name),
            name_cell(layer.kind.partition("(")[0]),  # an imported kind has the module's arguments with it
            *map(show_seconds, times),
            show_bytes(weights),
            show_bytes(layer.saved_bytes),
        )
    return table


def _other_sizes(profile: Profile) -> str:
    """A line with the seconds per sample at each measured microbatch size; empty if only one was measured."""
    kind = next(iter(profile.seconds))
    layers = [layer.is_input for layer in profile.graph.layers]

    def each_s(size: float) -> float:
        rows = zip(profile.at(size).seconds[kind], layers, strict=True)
        total_s = sum(r.forward_s + r.backward_input_s + r.backward_weight_s for r, is_input in rows if not is_input)
        return total_s / size

    sizes = profile.measured_sizes[::-1]
    if len(sizes) < 2:
        return ""
    return "\na sample takes " + ", ".join(f"{show_seconds(each_s(size))} of {size:g}" for size in sizes)


def _total_s(profile: Profile) -> float:
    rows = next(iter(profile.seconds.values()))
    return sum(row.forward_s + row.backward_input_s + row.backward_weight_s + row.update_s for row in rows)


def plan_answer(plan: Plan) -> dict[str, Any]:
    """The stable keys of ``penstock plan --json``."""
    prediction, costs = plan.prediction, PlanCosts(plan)
    data_parallel_s = prediction.data_parallel_s
    return {
        "model": plan.profile.model,
        "cluster": plan.cluster.name,
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "seconds_per_minibatch": prediction.seconds_per_minibatch,
        "samples_per_s": plan.predicted_samples_per_s,
        "lower_bound": prediction.lower_bound_s,
        "gap": prediction.gap,
        "latency_s": prediction.latency_s,
        "speedup_over_data_parallel": _rate(data_parallel_s, prediction.latency_s or prediction.seconds_per_minibatch),
        "bottleneck": dict(zip(("from_stage", "to_stage"), costs.bottleneck(), strict=True)),
        "notes": [note for note in (plan.extrapolated, prediction.passed_over) if note],
        "stages": [_stage_answer(costs, index) for index in range(len(plan.stages))],
    }


def _rate(amount: float | None, seconds: float) -> float | None:
    return None if amount is None else per_second(amount, seconds)


def _stage_answer(costs: PlanCosts, index: int) -> dict[str, Any]:
    plan, stage = costs.plan, costs.plan.stages[index]
    worker = plan.pipeline.workers[index][0]
    graph = plan.profile.graph
    return {
        "layers": list(stage.layers),
        "first_layer": graph.by_id[stage.layers[0]].name,
        "last_layer": graph.by_id[stage.layers[-1]].name,
        "devices": list(stage.devices),
        "shares": list(stage.shares),
        "recompute": stage.recompute,
        "sends": stage.sends,
        "in_flight": stage.in_flight,
        "forward_s": costs.compute_s(Action(index, Kind.FORWARD, 0), worker),
        "backward_s": costs.compute_s(Action(index, Kind.BACKWARD, 0), worker),
        "update_s": costs.compute_s(Action(index, Kind.STEP, 0), worker),
        "microbatch_s": costs.stage_s(index),
        "input_bytes": costs.input_bytes(index),
        "output_bytes": costs.output_bytes(index),
        "parameter_bytes": costs.model.parameter_bytes(stage.layers),
        "memory_bytes": costs.stage_memory_bytes(index),
        "memory_share": costs.memory_share(index),
        "staleness": staleness_answer(plan.staleness[index]),
    }


def staleness_answer(staleness: Staleness) -> dict[str, float]:
    """How many updates lie between a microbatch's forward and the update with its gradient."""
    return {"mean": staleness.mean, "most": staleness.most}


def plan_table(plan: Plan) -> Table:
    answer, costs = plan_answer(plan), PlanCosts(plan)
    marks = [bottleneck_text(costs, index) for index in range(len(plan.stages))]
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        title=f"{plan.profile.model} on {plan.cluster.name}, schedule {plan.schedule}",
        caption="; ".join(["time, in and out per microbatch", *(f"* {mark}" for mark in marks if mark)])
        + "\n".join(["", *_staleness(plan), _summary(answer), *answer["notes"]]),
    )
    table.add_column("stage", no_wrap=True)
    for column in ("layers", "devices"):
        table.add_column(column, overflow="fold")
    add_numbers(table, ("in\nflight", "time", "in", "out", "memory"))
    for index, stage in enumerate(answer["stages"]):
        ends = (stage["first_layer"], stage["last_layer"])
        table.add_row(
            f"{index} *" if marks[index] else str(index),
            Names(ends, f" ({len(stage['layers'])})" + (", recomputed" if stage["recompute"] else "")),
            _devices(stage),
            str(stage["in_flight"]),
            show_seconds(stage["microbatch_s"]),
            show_bytes(stage["input_bytes"]),
            show_bytes(stage["output_bytes"]) + ("" if stage["sends"] == "exact" else f" {stage['sends']}"),
            show_memory(costs, index),
        )
    return table


def _staleness(plan: Plan) -> list[str]:
    if not plan.is_asynchronous:
        return []
    return [f"staleness of the stages: {', '.join(map(show_staleness, plan.staleness))} updates"]


def show_staleness(staleness: Staleness) -> str:
    """The mean, and the maximum where it differs."""
    most = f" (most {staleness.most})" if staleness.mean < staleness.most else ""
    return f"{staleness.mean:.3g}{most}"


def _devices(stage: dict[str, Any]) -> str:
    """The devices of a stage; each with its share of microbatches if the shares are unequal."""
    if len(set(stage["shares"])) == 1:
        return show_numbers(stage["devices"])
    return ", ".join(f"{device} x{share}" for device, share in zip(stage["devices"], stage["shares"], strict=True))


def _summary(answer: dict[str, Any]) -> str:
    rate = answer["samples_per_s"]
    parts = [f"predicted {rate:.1f} samples/s" if rate is not None else "no time at all, as the profile has none"]
    if answer["latency_s"] is not None:
        parts.append(f"latency {show_seconds(answer['latency_s'])}")
    elif answer["speedup_over_data_parallel"] is not None:
        parts.append(f"{answer['speedup_over_data_parallel']:.2f}x data parallelism")
    return "; ".join([*parts, f"{answer['gap']:.0%} above the lower bound"])


def trace_answer(trace: Trace) -> dict[str, Any]:
    return {
        "origin": trace.origin,
        "seconds": trace.span_s,
        "samples_per_s": trace.samples_per_s,
        "workers": [
            {"name": name, "utilisation": trace.utilisation(worker), "median_s": _medians(trace, worker)}
            for worker, name in enumerate(trace.workers)
        ],
    }


def _medians(trace: Trace, worker: int) -> dict[str, float]:
    return {kind.value: seconds for kind, seconds in sorted(trace.medians_s(worker).items())}


def trace_table(trace: Trace) -> Table:
    answer = trace_answer(trace)
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{trace.origin}: {answer['samples_per_s']:.1f} samples/s over {show_seconds(answer['seconds'])}",
        padding=(0, 1, 0, 0),
    )
    done = {kind for worker in answer["workers"] for kind in worker["median_s"]}
    kinds = [kind.value for kind in Kind if kind.value in done]
    table.caption = f"medians of: {letters(kinds)}" if kinds else "no actions"
    table.add_column("worker")
    add_numbers(table, ("busy", *kinds))
    for worker in answer["workers"]:
        medians = worker["median_s"]
        cells = [show_seconds(medians[kind]) if kind in medians else "-" for kind in kinds]
        table.add_row(name_cell(worker["name"]), f"{worker['utilisation']:.0%}", *cells)
    return table


def run_table(found: Outcome) -> RenderableType:
    """Predicted against measured, the bottleneck, why the two differ, and the errors of compression if any."""
    parts: list[RenderableType] = [_comparison_table(found), Text(found.headline), Text(found.explanation.text)]
    return Group(*parts, *([_compression_table(found.result.compression)] if found.result.compression else []))


def _comparison_table(found: Outcome) -> Table:
    """A row per stage and worker. Predicted throughput is the plan's own figure; the rest comes from a simulation."""
    plan, result = found.plan, found.result
    table = Table(box=box.SIMPLE_HEAD, title="predicted against measured")
    table.add_column("what")
    add_numbers(table, ("predicted", "measured", "measured /\npredicted"))
    one, two = trace_answer(found.simulated), trace_answer(found.measured)
    table.add_row("samples/s", *_pair(plan.predicted_samples_per_s, two["samples_per_s"], "{:.1f}".format))
    if plan.is_asynchronous:
        for index, (steady, seen) in enumerate(zip(plan.staleness, result.staleness, strict=False)):
            table.add_row(f"stage {index}: staleness", show_staleness(steady), show_staleness(seen), "")
    for expected, worker in zip(one["workers"], two["workers"], strict=True):
        table.add_section()
        busy = _pair(expected["utilisation"], worker["utilisation"], "{:.0%}".format)
        table.add_row(name_cell(f"{worker['name']}: busy"), *busy)
        for kind in expected["median_s"]:
            if kind in worker["median_s"]:
                cells = _pair(expected["median_s"][kind], worker["median_s"][kind], show_seconds)
                table.add_row(name_cell(f"{worker['name']}: {kind}"), *cells)
    kinds = {kind for worker in two["workers"] for kind in worker["median_s"]}
    table.caption = f"medians of: {letters(kinds)}" if kinds else None
    return table


def _compression_table(errors: Sequence[EdgeError]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title="lost by compression", caption="norm of what was lost / norm of what was sent, mean"
    )
    for column in ("edge", "what", "sent in"):
        table.add_column(column, no_wrap=True)
    add_numbers(table, ("relative\nerror", "messages\nlooked at"))
    for row in errors:
        what = "values" if row.direction == "forward" else "gradients"
        error = "not a number" if row.error is None else f"{row.error:.2e}"
        table.add_row(f"stage {row.source} to {row.target}", what, row.sends, error, str(row.looked_at))
    return table


def _pair(predicted: float | None, measured: float, show: Any) -> tuple[str, str, str]:
    shown = "-" if predicted is None else show(predicted)
    return shown, show(measured), f"{measured / predicted:.2f}" if predicted else "-"


def verification_answer(found: Any) -> dict[str, Any]:
    """The stable keys of ``penstock verify --json``; None where a number is not finite."""
    keys = (
        "microbatches",
        "loss",
        "loss_difference",
        "gradients",
        "largest_difference",
        "worst_parameter",
        "tolerance",
        "loss_tolerance",
        "compression",
        "apart_because",
        "reason",
        "passed",
    )
    values = {key: getattr(found, key) for key in keys}
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


def verification_table(found: Any) -> Table:
    exact = found.compression == "exact"
    good = "gradients are the same" if exact else f"gradients are the same but for {found.compression} rounding"
    table = Table(box=box.SIMPLE_HEAD, title=good if found.passed else "GRADIENTS DIFFER", show_header=False)
    table.add_row("compared", f"{found.gradients} gradients over {found.microbatches} microbatches")
    table.add_row("largest difference", f"{found.largest_difference:.2e} (relative), in {found.worst_parameter}")
    table.add_row("loss", f"{found.loss:.6f}, difference {found.loss_difference:.2e} (relative)")
    tolerance = f"{found.tolerance:g}, of the loss {found.loss_tolerance:g}"
    table.add_row("tolerance", tolerance if exact else f"{tolerance}: what travels in {found.compression} is rounded")
    if found.apart_because:
        table.add_row("loss taken", f"of each microbatch, not of the whole minibatch: {found.apart_because}")
    if found.reason:
        table.add_row("reason", found.reason)
    return table


def survey_answer(found: Survey, output: Path) -> dict[str, Any]:
    """The stable keys of ``penstock cluster measure --json``."""
    return {
        "output": str(output),
        "cluster": codec.encode(found.cluster),
        "hosts": codec.encode(found.hosts),
        "levels": codec.encode(found.levels),
        "remarks": list(found.remarks),
    }


def survey_table(found: Survey) -> RenderableType:
    """The devices and links of the cluster file, and how well they predict the measured times."""
    notes = [Text(f"- {remark}") for remark in found.remarks]
    return Group(_devices_table(found), _links_table(found), *(_checks_table(level) for level in found.levels), *notes)


def _devices_table(found: Survey) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=found.cluster.name)
    table.add_column("devices")
    for column in ("host", "kind"):
        table.add_column(column)
    add_numbers(table, ("memory each", "speed"))
    rows: dict[tuple[str, Device], list[int]] = defaultdict(list)
    for host in found.hosts:
        for worker in host.workers:
            rows[host.name, found.cluster.devices[worker]].append(worker)
    for (host_name, device), workers in rows.items():
        memory = "-" if device.memory_bytes is None else write_bytes(device.memory_bytes)
        table.add_row(show_numbers(workers), name_cell(host_name), name_cell(device.kind), memory, f"{device.speed:g}")
    return table


def _links_table(found: Survey) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("links", no_wrap=True)
    add_numbers(table, ("messages", "all-reduce", "a worker's\nown time", "all pairs\nat once"))
    for level in found.levels:
        cells = [f"{rate}\n{latency}" for rate, latency in map(_link, (level.level, level.level.ring))]
        copying = level.handling.bytes_per_s
        handling = f"{write_seconds(level.handling.seconds)} a message"
        cells.append(f"{handling}\n{write_bytes_per_s(copying)} copied" if copying else handling)
        share = "-" if level.share_at_once is None else f"{level.share_at_once:.0%} each\n({level.pairs_at_once} pairs)"
        table.add_row(level.reach, *cells, share)
    return table


def _link(level: Level) -> tuple[str, str]:
    return write_bytes_per_s(level.bytes_per_s), write_seconds(level.latency_s)


def _checks_table(level: LevelFindings) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"{level.reach}: predicted against measured")
    table.add_column("what", no_wrap=True)
    add_numbers(table, ("size", "predicted", "measured", "measured /\npredicted"))
    for check in level.checks:
        cells = _pair(check.predicted_s, check.measured_s, show_seconds)
        table.add_row(check.what, write_bytes(check.num_bytes), *cells)
    return table


def bench_table(name: str, rows: Sequence[BenchRow]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, title=f"penstock bench {name}", caption=rows[0].CAPTION or None)
    for column in rows[0].COLUMNS:
        table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row.cells)
    return Group(table, *(Text(f"- {row.footnote}") for row in rows if row.footnote))
