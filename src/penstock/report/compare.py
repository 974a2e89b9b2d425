"""Runs side by side: the results of each, and how their plans differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from penstock import __version__
from penstock.errors import FormatError
from penstock.plan import Plan, Stage
from penstock.plan_costs import PlanCosts
from penstock.report.content import loss_curve
from penstock.report.curves import course
from penstock.report.outcome import Outcome
from penstock.simulate.headline import as_measured
from penstock.units import show_bytes, show_numbers, show_seconds

FINAL_MINIBATCHES = 20
"""The final loss is a mean over so many minibatches, since that of one is mostly noise."""
MISSING = "-"

Runs = Mapping[str, Outcome]
"""The outcomes of runs, by name."""


def names_of(paths: Sequence[Path]) -> list[str]:
    """The name of a run is that of its directory or, if two are equal, the path as given."""
    short = [path.resolve().name for path in paths]
    names = [str(path) if short.count(name) > 1 else name for path, name in zip(paths, short, strict=True)]
    if len(set(names)) < len(names):
        raise FormatError(f"{', '.join(names)}: the same run twice; give different ones to compare")
    return names


def comparison_answer(runs: Runs) -> dict[str, Any]:
    """The stable keys of ``penstock report A B --json``."""
    return {
        "runs": [{"name": name, **_summary(outcome)} for name, outcome in runs.items()],
        "differences": plan_differences([outcome.plan for outcome in runs.values()]),
    }


def _summary(outcome: Outcome) -> dict[str, Any]:
    plan, result, costs = outcome.plan, outcome.result, PlanCosts(outcome.plan)
    ran, workers = as_measured(outcome.played, outcome.measured), range(len(outcome.plan.devices))
    held = [each for moment in outcome.record.moments for each in moment.memory_bytes if each is not None]
    losses = [loss for loss in result.losses[-FINAL_MINIBATCHES:] if loss is not None]
    return {
        "samples_per_s": outcome.measured.samples_per_s,
        "predicted_samples_per_s": plan.predicted_samples_per_s,
        "seconds": result.seconds,
        "samples": result.samples,
        "final_loss": fmean(losses) if losses else None,
        "evaluation": dict(result.evaluations[-1].values) if result.evaluations else {},
        "idle": fmean(map(ran.bubble, workers)),
        "predicted_idle": fmean(map(outcome.played.bubble, workers)),
        "peak_memory_bytes": max(held, default=None),
        "predicted_memory_bytes": max(costs.stage_memory_bytes(stage) for stage in range(len(plan.stages))),
        "verdict": outcome.headline,
    }


def plan_differences(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """What differs between plans: its name, and its value in each plan."""
    facts = [_facts(plan) for plan in plans]
    names = dict.fromkeys(name for each in facts for name in each)
    rows = [{"what": name, "values": [each.get(name, MISSING) for each in facts]} for name in names]
    return [row for row in rows if len(set(row["values"])) > 1]


def _facts(plan: Plan) -> dict[str, str]:
    return {
        "model": plan.profile.model,
        "layers": str(len(plan.profile.graph.layers)),
        "cluster": plan.cluster.name,
        "workers": str(len(plan.devices)),
        "schedule": plan.schedule,
        "minibatch": f"{plan.profile.batch_size} samples",
        "microbatches": str(plan.microbatches),
        "stages": str(len(plan.stages)),
        **{f"stage {index}": _stage_in_words(plan, stage) for index, stage in enumerate(plan.stages)},
    }


def _stage_in_words(plan: Plan, stage: Stage) -> str:
    own, graph = set(stage.layers), plan.profile.graph
    layers = [graph.by_id[layer].name for layer in graph.order if layer in own]
    ends = " .. ".join(dict.fromkeys((layers[0], layers[-1])))
    devices = ("device " if len(stage.devices) == 1 else "devices ") + show_numbers(stage.devices)
    words = [f"{ends} ({len(layers)})", devices, f"{stage.in_flight} in flight"]
    if len(set(stage.shares)) > 1:
        words.append(f"shares {'-'.join(map(str, stage.shares))}")
    if stage.recompute:
        words.append("recomputed")
    if stage.sends != "exact":
        words.append(f"sends {stage.sends}")
    return ", ".join(words)


def figure_rows(answer: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """The rows of a table of runs: a title, and the value of each run."""
    runs = answer["runs"]
    first = runs[0]["samples_per_s"]

    def rate(run: Mapping[str, Any]) -> str:
        beside = f" ({run['samples_per_s'] / first:.2f}x)" if run is not runs[0] and first > 0 else ""
        return f"{run['samples_per_s']:.1f}{beside}"

    rows = [
        ("samples/s", [rate(run) for run in runs]),
        ("predicted samples/s", [_shown(run["predicted_samples_per_s"], "{:.1f}".format) for run in runs]),
        ("time", [show_seconds(run["seconds"]) for run in runs]),
        ("samples", [f"{run['samples']:,}" for run in runs]),
        ("final loss", [_shown(run["final_loss"], "{:.4f}".format) for run in runs]),
        ("idle (bubble)", [f"{run['idle']:.1%}" for run in runs]),
        ("simulated idle", [f"{run['predicted_idle']:.1%}" for run in runs]),
        ("peak memory", [_shown(run["peak_memory_bytes"], show_bytes) for run in runs]),
        ("predicted peak memory", [show_bytes(run["predicted_memory_bytes"]) for run in runs]),
    ]
    for metric in dict.fromkeys(name for run in runs for name in run["evaluation"]):
        values = [_shown(run["evaluation"].get(metric), "{:.4f}".format) for run in runs]
        rows.append((f"last evaluation: {metric}", values))
    return [(name, values) for name, values in rows if set(values) != {MISSING}]


def _shown(value: float | None, show: Any) -> str:
    return MISSING if value is None else str(show(value))


def comparison_content(runs: Runs) -> dict[str, Any]:
    """The content of the page: the answer, and the curves to overlay."""
    answer = comparison_answer(runs)
    return {
        "version": __version__,
        "runs": [
            {
                "name": name,
                "verdict": outcome.headline,
                "batch_size": outcome.plan.profile.batch_size,
                "loss": loss_curve(outcome.result.losses),
                "course": course(outcome),
            }
            for name, outcome in runs.items()
        ],
        "figures": [{"what": what, "values": values} for what, values in figure_rows(answer)],
        "differences": answer["differences"],
    }
