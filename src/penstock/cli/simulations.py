"""Tables and JSON answers for simulations, single and compared."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock import codec
from penstock.cli.cells import add_numbers, name_cell
from penstock.cli.show import show_staleness, staleness_answer, trace_answer
from penstock.plan import Plan
from penstock.report.bars import Bar, bars_svg
from penstock.simulate import Simulation, verdict_of
from penstock.sweep import Outcome
from penstock.units import show_bytes, show_seconds

Named = tuple[str, Simulation]
"""The text of a what-if change, and its simulation."""


def simulation_answer(base: Simulation, others: Sequence[Named] = ()) -> dict[str, Any]:
    """The stable keys of ``penstock simulate --json``."""
    plan, answer = base.plan, trace_answer(base.trace)
    for worker, found in enumerate(answer["workers"]):
        found |= {
            "averaging": base.averaging(worker),
            "bubble": base.bubble(worker),
            "peak_memory_bytes": base.peak_bytes[worker],
            "device_memory_bytes": _device_bytes(plan, worker),
        }
    return {
        **answer,
        "staleness": [staleness_answer(stage) for stage in plan.staleness],
        "bottleneck": codec.encode(verdict_of(base)),
        "links": [
            {**link.place._asdict(), "bytes_per_s": link.bytes_per_s, "occupied": base.occupied(link)}
            for link in base.links
        ],
        "what_if": [{"change": text, **summary(other, base)} for text, other in others],
    }


def summary(played: Simulation, base: Simulation | None = None) -> dict[str, Any]:
    """The main figures of a simulation, with the ratio of its throughput to that of ``base`` if given."""
    workers = range(len(played.trace.workers))
    rate = played.trace.samples_per_s
    answer = {
        "samples_per_s": rate,
        "bubble": fmean(map(played.bubble, workers)),
        "peak_memory_bytes": max(played.peak_bytes),
        "fits": all(fits(played, worker) for worker in workers),
        "bottleneck": codec.encode(verdict_of(played)),
    }
    return answer | ({"ratio": _ratio(rate, base.trace.samples_per_s)} if base else {})


def fits(played: Simulation, worker: int) -> bool:
    limit = _device_bytes(played.plan, worker)
    return limit is None or played.peak_bytes[worker] <= limit


def _device_bytes(plan: Plan, worker: int) -> int | None:
    return plan.cluster.devices[plan.devices[worker]].memory_bytes


def _ratio(rate: float, beside: float) -> float | None:
    return rate / beside if beside > 0 else None


def simulation_table(base: Simulation, others: Sequence[Named] = ()) -> RenderableType:
    parts: list[RenderableType] = [_workers_table(base), Text(verdict_of(base).text)]
    if base.plan.is_asynchronous:
        found = ", ".join(f"stage {at}: {show_staleness(stage)}" for at, stage in enumerate(base.plan.staleness))
        parts.append(Text(f"staleness (updates between a forward and the one with its gradient): {found}"))
    return Group(*parts, *([_comparison_table(base, others)] if others else []))


def _workers_table(played: Simulation) -> Table:
    trace, predicted = played.trace, played.plan.predicted_samples_per_s
    beside = "" if predicted is None else f"; the plan predicts {predicted:.1f}"
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"simulated: {trace.samples_per_s:.1f} samples/s over {show_seconds(trace.span_s)}{beside}",
        caption="shares of the whole time; averaging with the wait for others, bubble the rest of waiting",
    )
    table.add_column("worker")
    add_numbers(table, ("computing", "averaging", "bubble", "peak memory"))
    for worker, name in enumerate(trace.workers):
        shares = (trace.utilisation(worker), played.averaging(worker), played.bubble(worker))
        table.add_row(name_cell(name), *map("{:.0%}".format, shares), _memory(played, worker))
    return table


def _memory(played: Simulation, worker: int) -> str:
    limit = _device_bytes(played.plan, worker)
    if limit is None:
        return show_bytes(played.peak_bytes[worker])
    share = f"{played.peak_bytes[worker] / limit:.0%} of {show_bytes(limit)}"
    return f"{show_bytes(played.peak_bytes[worker])} ({share}{'' if fits(played, worker) else ': DOES NOT FIT'})"


def _comparison_table(base: Simulation, others: Sequence[Named]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, title="what if", padding=(0, 1, 0, 0))
    table.add_column("change")
    add_numbers(table, ("samples/s", "ratio", "bubble", "peak\nmemory"))
    table.add_column("bottleneck", no_wrap=True)
    for name, played in [("as it is", base), *others]:
        line = summary(played, base)
        table.add_row(
            name_cell(name),
            f"{line['samples_per_s']:.1f}",
            "-" if line["ratio"] is None else f"{line['ratio']:.2f}",
            f"{line['bubble']:.0%}",
            show_bytes(line["peak_memory_bytes"]) + ("" if line["fits"] else "\nDOES NOT FIT"),
            line["bottleneck"]["limit"],
        )
    return Group(table, *(Text(f"- {name}: {verdict_of(played).text}") for name, played in others))


def sweep_table(outcomes: Sequence[Outcome]) -> RenderableType:
    """A row for each combination. What all have in common is in the title instead of a column."""
    parts = {part: [getattr(each.case, part) for each in outcomes] for part in ("source", "cluster", "schedule")}
    same = [names[0] for part, names in parts.items() if len(set(names)) == 1]
    different = [part for part in parts if len(set(parts[part])) > 1]
    table = Table(box=box.SIMPLE_HEAD, title=", ".join([*same, "fastest first"]), padding=0)
    for part in different:
        table.add_column(part, no_wrap=part == "schedule", min_width=len(part))
    table.add_column("replicas", min_width=len("replicas"))
    add_numbers(table, ("micro-\nbatches", "samples/s", "bubble", "peak\nmemory"))
    table.add_column("bottleneck", no_wrap=True)
    for outcome in outcomes:
        cells: list[RenderableType] = [*"-----", "cannot be"]
        if outcome.possible:
            cells = [
                name_cell("-".join(map(str, outcome.replicas))),
                str(outcome.microbatches),
                f"{outcome.samples_per_s:.1f}",
                f"{outcome.bubble:.0%}",
                show_bytes(outcome.peak_memory_bytes),
                outcome.limit,
            ]
        table.add_row(*(name_cell(getattr(outcome.case, part)) for part in different), *cells)
    return Group(table, *(Text(f"- {each.case}: {each.text}") for each in outcomes if not each.possible))


def sweep_svg(outcomes: Sequence[Outcome]) -> str:
    """A bar for each combination, coloured by schedule."""
    colours = list(dict.fromkeys(outcome.case.schedule for outcome in outcomes))
    bars = [
        Bar(
            str(each.case),
            each.samples_per_s,
            f"{each.samples_per_s:.1f} samples/s" if each.possible else "cannot be",
            colours.index(each.case.schedule),
        )
        for each in outcomes
    ]
    return bars_svg(bars, about="Simulated samples per second of each combination")
