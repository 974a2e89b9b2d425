"""The figures of a run as PNG files, for slides and papers. Needs matplotlib, which nothing else in Penstock needs."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import codec
from penstock.errors import FormatError
from penstock.report.content import report_content
from penstock.report.outcome import Outcome
from penstock.report.stages import KIND_NAMES
from penstock.report.svg import colours as page_colours
from penstock.schedule import Kind
from penstock.trace import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOTS_PER_INCH = 150
WIDTH_IN = 9.0
MICROBATCHES = 12
"""Microbatches that the timeline shows from end to end."""


def write_figures(path: Path, outcome: Outcome) -> list[Path]:
    """Write every figure for which the run has data: as named files in a directory, or all in one ``.png`` file."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise FormatError("--png needs matplotlib, which is not installed; pip install 'penstock[figures]'") from None
    found = list(_figures(outcome))
    with rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        if path.suffix.lower() == ".png" and not path.is_dir():
            heights = [height_in for _, height_in, _ in found]
            figure = Figure(figsize=(WIDTH_IN, sum(heights)), dpi=DOTS_PER_INCH, layout="constrained")
            parts = figure.subfigures(len(found), height_ratios=heights, squeeze=False)[:, 0]
            for part, (_, _, draw) in zip(parts, found, strict=True):
                draw(part)
            return [_saved(figure, path)]
        written = []
        for name, height_in, draw in found:
            figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DOTS_PER_INCH, layout="constrained")
            draw(figure)
            written.append(_saved(figure, path / f"{name}.png"))
        return written


def _saved(figure: Any, path: Path) -> Path:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    codec.write_bytes(drawn.getvalue(), path)
    return path


Draw = Callable[[Any], None]


def _figures(outcome: Outcome) -> Iterator[tuple[str, float, Draw]]:
    """Name, height in inches, and the function that draws it."""
    content, (colours, _) = report_content(outcome), page_colours()
    rows_in = 0.22 * len(outcome.measured.workers)
    yield "timeline", 1.6 + 2 * rows_in, lambda figure: _timeline(figure, outcome, content, colours)
    yield "utilisation", 1.4 + rows_in, lambda figure: _utilisation(figure.subplots(), content, colours)
    if content["loss"]["points"]:
        yield "loss", 3.5, lambda figure: _loss(figure.subplots(), content["loss"], colours)
    if content["evaluations"]:
        yield "evaluations", 3.5, lambda figure: _evaluations(figure, content["evaluations"], colours)
    course = content["course"]
    if course is not None:
        yield "throughput", 3.5, lambda figure: _throughput(figure.subplots(), course, colours)
        if any(value is not None for values in course["memory_bytes"] for value in values):
            names = outcome.measured.workers
            yield "memory", 1.0 + 3 * rows_in, lambda figure: _memory(figure, course, names, colours)


def _timeline(figure: Any, outcome: Outcome, content: dict[str, Any], colours: dict[str, str]) -> None:
    """Some microbatches in steady state, measured above simulated, both starting with the same microbatch."""
    upper, lower = figure.subplots(2, sharex=True)
    views = [
        _View(outcome.measured_events, content["traces"][0]),
        _View(outcome.simulated.events, content["traces"][1]),
    ]
    end_s = max(view.end_s for view in views)
    for axes, view, timeline in zip((upper, lower), views, content["traces"], strict=True):
        names = [worker["name"] for worker in timeline["workers"]]
        for kind in Kind:
            for odd in (0, 1):
                bars = [
                    (event.worker, event.start_s - view.begin_s, event.end_s - event.start_s)
                    for event in view.events
                    if event.action.kind is kind and event.action.index % 2 == odd
                    if event.end_s > view.begin_s and event.start_s - view.begin_s < end_s
                ]
                if bars:
                    rows, lefts, widths = zip(*bars, strict=True)
                    colour, label = colours[f"--{kind.value}{'-odd' * odd}"], KIND_NAMES[kind] if not odd else None
                    axes.barh(rows, widths, left=lefts, height=0.8, color=colour, label=label)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_title(timeline["origin"], loc="left")
    lower.set_xlim(0, end_s)
    lower.set_xlabel("seconds")
    handles, labels = upper.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper right", ncols=len(handles), frameon=False)


class _View:
    """The part of a trace that the timeline shows."""

    def __init__(self, events: Sequence[Event], timeline: dict[str, Any]) -> None:
        steady = timeline["steady"] or {"microbatch": 0, "at_s": 0.0}
        self.events = events
        self.begin_s = timeline["origin_s"] + steady["at_s"]
        shown = range(steady["microbatch"], steady["microbatch"] + MICROBATCHES)
        ends_s = [e.end_s for e in events if e.action.of_microbatch and e.action.index in shown]
        self.end_s = max(ends_s or [event.end_s for event in events], default=self.begin_s + 1.0) - self.begin_s


def _utilisation(axes: Axes, content: dict[str, Any], colours: dict[str, str]) -> None:
    workers = content["comparison"]["workers"]
    for at, which in ((-0.2, "measured"), (0.2, "predicted")):
        rows = [worker + at for worker in range(len(workers))]
        busy = [worker["utilisation"][which] for worker in workers]
        syncing = [worker["syncing"][which] for worker in workers]
        alpha = 1.0 if which == "measured" else 0.5
        axes.barh(rows, busy, height=0.36, color=colours["--F"], label=f"computing, {which}", alpha=alpha)
        if any(syncing):
            axes.barh(
                rows, syncing, left=busy, height=0.36, color=colours["--SYNC"], label=f"syncing, {which}", alpha=alpha
            )
    axes.set_yticks(range(len(workers)), [worker["name"] for worker in workers])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the time; the rest is bubble")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)


def _loss(axes: Axes, loss: dict[str, Any], colours: dict[str, str]) -> None:
    at = [min((i + 1) * loss["every"], loss["minibatches"]) for i in range(len(loss["points"]))]
    axes.plot(at, _numbers(loss["points"]), color=colours["--F"], linewidth=1.2)
    axes.set_xlabel("minibatch")
    axes.set_ylabel("loss")


def _evaluations(figure: Any, evaluations: list[dict[str, Any]], colours: dict[str, str]) -> None:
    names = list(evaluations[0]["values"])
    at = [each["steps"] for each in evaluations]
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        axes.plot(at, _numbers([each["values"].get(name) for each in evaluations]), "o-", color=colours["--F"])
        axes.set_xlabel("minibatches trained")
        axes.set_ylabel(name)


def _throughput(axes: Axes, course: dict[str, Any], colours: dict[str, str]) -> None:
    axes.plot(course["at_s"], course["samples_per_s"], color=colours["--F"], label="measured")
    predicted = course["predicted"]["samples_per_s"]
    if predicted is not None:
        axes.axhline(predicted, color=colours["--ink"], linestyle="--", linewidth=1, label="predicted")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("samples per second")
    axes.legend(frameon=False)


def _memory(figure: Any, course: dict[str, Any], names: tuple[str, ...], colours: dict[str, str]) -> None:
    """One strip per worker, all at the same scale."""
    strips = figure.subplots(len(names), sharex=True, sharey=True, squeeze=False)[:, 0]
    for worker, (axes, name) in enumerate(zip(strips, names, strict=True)):
        held = [value / 1e6 for value in _numbers(course["memory_bytes"][worker])]
        axes.fill_between(course["at_s"], held, color=colours["--F"], alpha=0.4, linewidth=0)
        axes.plot(course["at_s"], held, color=colours["--F"], linewidth=1)
        if course["simulated_bytes"]:
            simulated = [value / 1e6 for value in course["simulated_bytes"][worker]]
            axes.plot(course["at_s"], simulated, color=colours["--bad"], linewidth=1)
        axes.axhline(
            course["predicted"]["memory_bytes"][worker] / 1e6, color=colours["--ink"], linestyle="--", linewidth=1
        )
        axes.set_ylabel(name, rotation=0, ha="right", va="center")
    strips[0].set_ylim(bottom=0)
    strips[0].set_title("MB; filled: measured, line: simulated, dashed: predicted peak", loc="left")
    strips[-1].set_xlabel("seconds")


def _numbers(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]
