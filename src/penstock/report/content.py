"""The content of the report as plain data: the numbers of a run and their predictions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from statistics import fmean, median
from typing import Any

from penstock import __version__, codec
from penstock.plan import Plan, Stage
from penstock.plan_costs import PlanCosts
from penstock.report.curves import course, marks
from penstock.report.outcome import Outcome
from penstock.report.stages import bottleneck_text
from penstock.run import Result
from penstock.schedule import Action, Kind
from penstock.trace import Event, Trace
from penstock.units import show_numbers

# With more, the page would open slowly and show nothing more to the eye.
MAX_EVENTS = 200_000
MAX_LOSS_POINTS = 2_000


def report_content(outcome: Outcome) -> dict[str, Any]:
    plan, result = outcome.plan, outcome.result
    return {
        "version": __version__,
        "model": plan.profile.model,
        "schedule": plan.schedule,
        "cluster": plan.cluster.name,
        "batch_size": plan.profile.batch_size,
        "microbatches": plan.microbatches,
        "device_kinds": sorted(set(result.device_kinds.values())),
        "samples": result.samples,
        "seconds": result.seconds,
        "headline": outcome.headline,
        "comparison": _comparison(outcome),
        "traces": _timelines(outcome),
        "plan": _plan(plan),
        "staleness": _staleness(plan, result),
        "loss": loss_curve(result.losses),
        "compression": codec.encode(result.compression),
        "evaluations": codec.encode(result.evaluations),
        "course": course(outcome),
        "marks": marks(outcome.record),
        "clocks": codec.encode(result.clocks),
    }


def _comparison(outcome: Outcome) -> dict[str, Any]:
    plan, measured, simulated = outcome.plan, outcome.measured, outcome.simulated
    rates = [plan.predicted_samples_per_s, measured.samples_per_s]
    minibatch_s = [plan.profile.batch_size / rate if rate else None for rate in rates]
    workers = range(len(plan.devices))
    utilisation = [[trace.utilisation(worker) for worker in workers] for trace in (simulated, measured)]
    seconds = [_seconds(trace) for trace in (simulated, measured)]
    medians = [[{kind: median(each) for kind, each in row.items()} for row in rows] for rows in seconds]
    syncing = [_share_syncing(rows, trace) for rows, trace in zip(seconds, (simulated, measured), strict=True)]
    kinds = [kind for kind in Kind if any(kind in row for rows in medians for row in rows)]
    return {
        "explanation": outcome.explanation.text,
        "samples_per_s": _compare(*rates),
        "minibatch_s": _compare(*minibatch_s),
        "utilisation": _compare(*map(fmean, utilisation)),
        "kinds": [kind.value for kind in kinds],
        "workers": [
            {
                "name": measured.workers[worker],
                "utilisation": _compare(*(column[worker] for column in utilisation)),
                "syncing": _compare(*(column[worker] for column in syncing)),
                "seconds": {kind.value: _compare(*(of[worker].get(kind) for of in medians)) for kind in kinds},
            }
            for worker in workers
        ],
    }


def _compare(predicted: float | None, measured: float | None) -> dict[str, float | None]:
    ratio = measured / predicted if predicted and measured is not None else None
    return {"predicted": predicted, "measured": measured, "ratio": ratio}


def _seconds(trace: Trace) -> list[dict[Kind, list[float]]]:
    """The seconds of each worker's actions, by kind."""
    seconds: list[dict[Kind, list[float]]] = [defaultdict(list) for _ in trace.workers]
    for event in trace.events:
        seconds[event.worker][event.action.kind].append(event.end_s - event.start_s)
    return seconds


def _share_syncing(seconds: Sequence[dict[Kind, list[float]]], trace: Trace) -> list[float]:
    """The share of each worker's time that is neither computing nor idle."""
    return [sum(row.get(Kind.SYNC, ())) / trace.span_s if trace.span_s > 0 else 0.0 for row in seconds]


def _timelines(outcome: Outcome) -> list[dict[str, Any]]:
    """The measured and the simulated timeline, each with the time at which the same steady-state microbatch begins."""
    measured, measured_gap = _drawable(outcome.measured_events, _gap(outcome))
    simulated, simulated_gap = _drawable(outcome.simulated.events)
    steady = steady_microbatch(_begins_s(measured), _begins_s(simulated), outcome.plan.microbatches)
    stages_of = outcome.plan.pipeline.stages_of
    rows = sorted(
        range(len(stages_of)), key=stages_of.__getitem__
    )  # workers are numbered by host, pipelines read by stage
    return [
        _timeline(outcome.measured, measured, measured_gap, steady, rows),
        _timeline(outcome.simulated, simulated, simulated_gap, steady, rows),
    ]


def steady_microbatch(measured: Container[int], simulated: Iterable[int], microbatches: int) -> int | None:
    """A microbatch that both traces have, a quarter into those, when the pipeline has filled; the first of its
    minibatch. None if the traces have no microbatch in common."""
    common = sorted(microbatch for microbatch in simulated if microbatch in measured)
    if not common:
        return None
    found = common[len(common) // 4]
    first = found - found % microbatches
    return first if first in common else found


def _begins_s(events: Iterable[Event]) -> dict[int, float]:
    """When each microbatch begins at the first stage."""
    forwards = (event for event in events if event.action.stage == 0 and event.action.kind is Kind.FORWARD)
    return {event.action.index: event.start_s for event in forwards}


Gap = tuple[float, float]


def _drawable(events: Sequence[Event], gap: Gap | None = None) -> tuple[Sequence[Event], Gap | None]:
    """If there are too many events to draw, those at both ends. ``gap`` is a stretch without events."""
    if len(events) <= MAX_EVENTS:
        return events, gap
    first, last = events[: MAX_EVENTS // 2], events[-MAX_EVENTS // 2 :]
    return (*first, *last), (max(event.end_s for event in first), last[0].start_s)


def _timeline(
    trace: Trace, events: Sequence[Event], gap: Gap | None, steady: int | None, rows: Sequence[int]
) -> dict[str, Any]:
    """The events by worker, in the order of ``rows``."""
    by_worker: list[list[Event]] = [[] for _ in trace.workers]
    for event in events:
        by_worker[event.worker].append(event)
    origin_s = events[0].start_s if events else 0.0
    return {
        "origin": trace.origin,
        "origin_s": origin_s,
        "gap_s": [at_s - origin_s for at_s in gap] if gap else None,
        "steady": None if steady is None else {"microbatch": steady, "at_s": _begins_s(events)[steady] - origin_s},
        "workers": [{"name": trace.workers[row], **_packed(by_worker[row], origin_s)} for row in rows],
    }


def _gap(outcome: Outcome) -> Gap | None:
    """From the end of the recorded beginning to where the trace continues."""
    if outcome.beginning is None or not outcome.beginning.events or not outcome.measured.events:
        return None
    return max(event.end_s for event in outcome.beginning.events), outcome.measured.events[0].start_s


def _packed(events: Sequence[Event], origin_s: float) -> dict[str, Any]:
    """Nanoseconds from each end to the next start, and from there to its end: far smaller than plain events."""
    gaps, lengths, last_end = [], [], 0
    for event in events:
        start, end = round((event.start_s - origin_s) * 1e9), round((event.end_s - origin_s) * 1e9)
        gaps.append(start - last_end)
        lengths.append(end - start)
        last_end = end
    return {"actions": " ".join(str(event.action) for event in events), "gap_ns": gaps, "length_ns": lengths}


def _plan(plan: Plan) -> dict[str, Any]:
    costs = PlanCosts(plan)
    stages = [_stage(costs, index) for index in range(len(plan.stages))]
    prediction = plan.prediction
    return {
        "stages": stages,
        "layers": [layer for index in range(len(stages)) for layer in _layers(costs, index)],
        "minibatch_s": prediction.seconds_per_minibatch,
        "gap": prediction.gap,
        "data_parallel_s": prediction.data_parallel_s,
        "one_device_s": prediction.one_device_s,
    }


def _stage(costs: PlanCosts, index: int) -> dict[str, Any]:
    """Seconds are those of the stage's slowest replica, for which the others wait."""
    plan, stage = costs.plan, costs.plan.stages[index]
    layers, names = _in_order(plan, stage), plan.profile.graph.by_id
    workers = plan.pipeline.workers[index]
    forward_s, backward_s = (
        max(costs.compute_s(Action(index, kind, 0), worker) for worker in workers)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
    return {
        "first": names[layers[0]].name,
        "last": names[layers[-1]].name,
        "layers": len(layers),
        "devices": show_numbers(stage.devices),
        "in_flight": stage.in_flight,
        "parameter_bytes": costs.model.parameter_bytes(stage.layers),
        "forward_s": forward_s,
        "backward_s": backward_s,
        "microbatch_s": costs.stage_s(index),
        "input_bytes": costs.input_bytes(index),
        "output_bytes": costs.output_bytes(index),
        "sends": stage.sends,
        "memory_bytes": costs.stage_memory_bytes(index),
        "memory_share": costs.memory_share(index),
        "bottleneck": bottleneck_text(costs, index),
    }


def _layers(costs: PlanCosts, index: int) -> list[dict[str, Any]]:
    plan, stage = costs.plan, costs.plan.stages[index]
    layers = []
    for layer in _in_order(plan, stage):
        forward_s, backward_s = costs.layers_s(index, [layer])
        name = plan.profile.graph.by_id[layer].name
        layers.append({"name": name, "stage": index, "forward_s": forward_s, "backward_s": backward_s})
    return layers


def _in_order(plan: Plan, stage: Stage) -> list[int]:
    own = set(stage.layers)
    return [layer for layer in plan.profile.graph.order if layer in own]


def _staleness(plan: Plan, result: Result) -> list[dict[str, Any]]:
    """For each stage: the updates between a forward and the update with its gradient, and how many microbatches had
    each number."""
    return [
        {
            "predicted": predicted.mean,
            "measured": measured.mean,
            "most": measured.most,
            "microbatches": measured.microbatches,
        }
        for predicted, measured in zip(plan.staleness, result.staleness, strict=False)
    ]


def loss_curve(losses: Sequence[float | None]) -> dict[str, Any]:
    """The loss by minibatch. In a long run each point is a mean over several minibatches."""
    every = max(1, math.ceil(len(losses) / MAX_LOSS_POINTS))
    chunks = [losses[start : start + every] for start in range(0, len(losses), every)]
    return {
        "minibatches": len(losses),
        "every": every,
        "points": [_mean(chunk) for chunk in chunks],
        "first": losses[0] if losses else None,
        "final": losses[-1] if losses else None,
    }


def _mean(losses: Sequence[float | None]) -> float | None:
    """The mean; None for a loss that diverged, which leaves a gap."""
    known = [loss for loss in losses if loss is not None]
    return fmean(known) if len(known) == len(losses) else None
