"""Tables and JSON answers of the values. Nothing here computes a cost of its own."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from penstock.cost import PlanCosts
from penstock.plan import Plan
from penstock.profile import Profile
from penstock.schedule import Action, Kind
from penstock.trace import Trace
from penstock.units import show_bytes, show_seconds


def print_table(table: Table) -> None:
    # Names come from files: they are neither markup nor emoji.
    Console(markup=False, emoji=False).print(table)


def profile_table(profile: Profile) -> Table:
    kind, seconds = next(iter(profile.seconds.items()))
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{profile.model} on {kind}: {profile.microbatch_size} samples, captured by {profile.front_end}",
        caption=f"total {show_seconds(_total_s(profile))} per microbatch and update",
    )
    for column in ("layer", "kind"):
        table.add_column(column, overflow="fold")
    for column in ("forward", "backward input", "backward weight", "parameters", "kept for backward"):
        table.add_column(column, justify="right")
    for layer, row in zip(profile.graph.layers, seconds, strict=True):
        weights = sum(parameter.num_bytes for parameter in profile.graph.parameters_of([layer.id]))
        times = (row.forward_s, row.backward_input_s, row.backward_weight_s)
        table.add_row(
            layer.name,
            layer.kind.partition("(")[0],  # an imported kind has the module's arguments with it
            *map(show_seconds, times),
            show_bytes(weights),
            show_bytes(layer.saved_bytes),
        )
    return table


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
        "samples_per_s": _rate(plan.profile.batch_size, prediction.seconds_per_minibatch),
        "lower_bound": prediction.lower_bound_s,
        "gap": prediction.gap,
        "speedup_over_data_parallel": _rate(data_parallel_s, prediction.seconds_per_minibatch),
        "stages": [_stage_answer(costs, index) for index in range(len(plan.stages))],
    }


def _rate(amount: float | None, seconds: float) -> float | None:
    return amount / seconds if amount is not None and seconds > 0 else None


def _stage_answer(costs: PlanCosts, index: int) -> dict[str, Any]:
    plan, stage = costs.plan, costs.plan.stages[index]
    worker = plan.pipeline.workers[index][0]
    graph = plan.profile.graph
    return {
        "layers": list(stage.layers),
        "first_layer": graph.by_id[stage.layers[0]].name,
        "last_layer": graph.by_id[stage.layers[-1]].name,
        "devices": list(stage.devices),
        "in_flight": stage.in_flight,
        "forward_s": costs.compute_s(Action(index, Kind.FORWARD, 0), worker),
        "backward_s": costs.compute_s(Action(index, Kind.BACKWARD, 0), worker),
        "update_s": costs.compute_s(Action(index, Kind.STEP, 0), worker),
        "parameter_bytes": costs.model.parameter_bytes(stage.layers),
        "memory_bytes": max(map(costs.memory_bytes, plan.pipeline.workers[index])),
    }


def plan_table(plan: Plan) -> Table:
    answer = plan_answer(plan)
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{plan.profile.model} on {plan.cluster.name}, schedule {plan.schedule}",
        caption=_summary(answer),
    )
    for column in ("stage", "layers", "devices"):
        table.add_column(column, overflow="fold")
    for column in ("in flight", "compute", "weights", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    stages = answer["stages"]
    costs = PlanCosts(plan)
    load = [costs.stage_s(index) for index in range(len(stages))]
    for index, stage in enumerate(stages):
        slowest = len(stages) > 1 and load[index] == max(load)
        table.add_row(
            f"{index} *" if slowest else str(index),
            f"{stage['first_layer']} .. {stage['last_layer']} ({len(stage['layers'])})",
            _ranges(stage["devices"]),
            str(stage["in_flight"]),
            show_seconds(stage["forward_s"] + stage["backward_s"] + stage["update_s"]),
            *(show_bytes(stage[key]) for key in ("parameter_bytes", "memory_bytes")),
        )
    return table


def _ranges(numbers: list[int]) -> str:
    """0-3, 8: as people write them."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _summary(answer: dict[str, Any]) -> str:
    speedup = answer["speedup_over_data_parallel"]
    beside = f"{speedup:.2f}x data parallelism; " if speedup is not None else ""
    rate = answer["samples_per_s"]
    rate = f"{rate:.1f} samples/s" if rate is not None else "no time at all, as the profile has none"
    star = "; * slowest stage" if len(answer["stages"]) > 1 else ""
    return f"predicted {rate}; {beside}{answer['gap']:.0%} above the lower bound{star}"


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
    durations: dict[str, list[float]] = defaultdict(list)
    for event in trace.events:
        if event.worker == worker:
            durations[event.action.kind.value].append(event.end_s - event.start_s)
    return {kind: statistics.median(values) for kind, values in sorted(durations.items())}


def trace_table(trace: Trace) -> Table:
    answer = trace_answer(trace)
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{trace.origin}: {answer['samples_per_s']:.1f} samples/s over {show_seconds(answer['seconds'])}",
    )
    table.add_column("worker")
    table.add_column("busy", justify="right")
    kinds = [kind.value for kind in Kind]
    for kind in kinds:
        table.add_column(f"median {kind}", justify="right")
    for worker in answer["workers"]:
        medians = worker["median_s"]
        cells = [show_seconds(medians[kind]) if kind in medians else "-" for kind in kinds]
        table.add_row(worker["name"], f"{worker['utilisation']:.0%}", *cells)
    return table


def comparison_table(measured: Trace, predicted: Trace) -> Table:
    """Predicted against measured, worker by worker."""
    table = Table(box=box.SIMPLE_HEAD, title="predicted against measured")
    table.add_column("what")
    for column in ("predicted", "measured", "measured / predicted"):
        table.add_column(column, justify="right")
    one, two = trace_answer(predicted), trace_answer(measured)
    table.add_row("samples/s", *_pair(one["samples_per_s"], two["samples_per_s"], "{:.1f}".format))
    for expected, found in zip(one["workers"], two["workers"], strict=True):
        table.add_section()
        table.add_row(f"{found['name']}: busy", *_pair(expected["utilisation"], found["utilisation"], "{:.0%}".format))
        for kind in expected["median_s"]:
            if kind in found["median_s"]:
                cells = _pair(expected["median_s"][kind], found["median_s"][kind], show_seconds)
                table.add_row(f"{found['name']}: {kind}", *cells)
    return table


def _pair(predicted: float, measured: float, show: Any) -> tuple[str, str, str]:
    return show(predicted), show(measured), f"{measured / predicted:.2f}" if predicted > 0 else "-"


def verification_answer(found: Any) -> dict[str, Any]:
    keys = (
        "microbatches",
        "loss",
        "loss_difference",
        "gradients",
        "largest_difference",
        "worst_parameter",
        "tolerance",
        "passed",
    )
    return {key: getattr(found, key) for key in keys}


def verification_table(found: Any) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title="gradients are the same" if found.passed else "GRADIENTS DIFFER", show_header=False
    )
    table.add_row("compared", f"{found.gradients} gradients over {found.microbatches} microbatches")
    table.add_row("largest difference", f"{found.largest_difference:.2e} (relative), in {found.worst_parameter}")
    table.add_row("loss", f"{found.loss:.6f}, difference {found.loss_difference:.2e} (relative)")
    table.add_row("tolerance", f"{found.tolerance:.0e}")
    return table


def bench_table(name: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"penstock bench {name}")
    table.add_column("case", overflow="fold")
    table.add_column("metric", overflow="fold")
    for column in ("value", "baseline", "ratio", "target"):
        table.add_column(column, justify="right")
    table.add_column("met")
    for row in rows:
        numbers = ("-" if row[key] is None else f"{row[key]:.4g}" for key in ("value", "baseline", "ratio", "target"))
        met = "-" if row["met"] is None else ("yes" if row["met"] else "NO")
        table.add_row(row["case"], row["metric"], *numbers, met)
    return table
