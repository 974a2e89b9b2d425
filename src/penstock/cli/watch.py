"""The live view of ``penstock watch``, made from the progress file of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.cli.cells import add_numbers, name_cell
from penstock.errors import FormatError
from penstock.limits import per_second
from penstock.record import Moment, Reader, Record, Start
from penstock.run import RunDirectory
from penstock.units import show_bytes, show_clock

POLL_S = 0.5
QUIET_S = 30.0
"""How long a run or a worker may be silent before the view says so."""
LATELY = 20
"""How many of the newest records the current throughput is computed from."""
BARS = "▁▂▃▄▅▆▇█"
LAST_MARKS = 4
BUSY_WIDTH = 12


def read_run(run: RunDirectory) -> Reader:
    """A reader of the run's progress file. Raises if there is no such run, or if it has not begun."""
    if not run.path.is_dir():
        raise FormatError(f"{run.path}: no such run directory; start one with penstock train --run-dir {run.path}")
    if not run.progress.exists():
        raise FormatError(
            f"{run.path}: nothing has run here (progress.jsonl is missing); it appears when training begins, "
            "after profiling and planning"
        )
    return Reader(run.progress)


def follow(run: RunDirectory, console: Console, sleep: Callable[[float], None] = time.sleep) -> Record:
    """Wait for the run to begin and show it until it ends. The last view stays on the terminal."""
    reader = Reader(run.progress)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            record = reader.read()
            quiet_s = 0.0 if record.end else max(0.0, time.time() - reader.changed_unix_s)
            shown = view(record, console.width, quiet_s) if record.start else _waiting(run)
            live.update(shown, refresh=True)
            if record.end is not None:
                return record
            sleep(POLL_S)


def _waiting(run: RunDirectory) -> RenderableType:
    return Text(f"waiting for a run to begin in {run.path}: training comes after profiling and planning")


def answer(record: Record) -> dict[str, Any]:
    """The stable keys of ``penstock watch --json``."""
    start, moment = record.start, record.moments[-1] if record.moments else None
    return {
        "state": record.end or "running",
        "samples": moment.samples if moment else 0,
        "total_samples": start.samples if start else None,
        "minibatch": start.minibatch(moment.samples) if start and moment else 0,
        "seconds": moment.at_s if moment else 0.0,
        "samples_per_s": pace(record.moments),
        "seconds_left": _seconds_left(start, record.moments) if start and not record.end else None,
        "loss": moment.loss if moment else None,
        "busy": list(moment.busy) if moment else [],
        "memory_bytes": list(moment.memory_bytes) if moment else [],
    }


def pace(moments: Sequence[Moment]) -> float | None:
    """The current samples per second."""
    if not moments:
        return None
    last = moments[-1]
    at_s, samples = (moments[-LATELY].at_s, moments[-LATELY].samples) if len(moments) >= LATELY else (0.0, 0)
    return per_second(last.samples - samples, last.at_s - at_s)


def _seconds_left(start: Start, moments: Sequence[Moment]) -> float | None:
    now = pace(moments)
    return (start.samples - moments[-1].samples) / now if now else None


def view(record: Record, width: int, quiet_s: float) -> RenderableType:
    """One picture of a run. ``quiet_s`` is the time since its progress file last changed."""
    start, moments = record.start, record.moments
    if start is None or not moments:
        return Text(f"{start.model if start else 'run'}: the workers have started; nothing is finished yet")
    parts: list[RenderableType] = [_head(start, record), _figures(start, moments, width), _workers(start, moments[-1])]
    parts += [Text(f"{show_clock(mark.at_s)}  {mark.text}", style="dim") for mark in record.marks[-LAST_MARKS:]]
    if quiet_s > QUIET_S:
        parts.append(Text(f"no news for {show_clock(quiet_s)}: a worker waits, or the run has ended", style="yellow"))
    return Group(*parts)


def _head(start: Start, record: Record) -> RenderableType:
    moment = record.moments[-1]
    left_s = _seconds_left(start, record.moments)
    if record.end is not None:
        state = Text(record.end, style="green" if record.end == "finished" else "yellow")
    else:
        state = Text("running" if left_s is None else f"about {show_clock(left_s)} left")
    done = start.minibatch(moment.samples)
    row = Table.grid(padding=(0, 2))
    row.add_row(
        Text(start.model, style="bold"),
        ProgressBar(total=max(1, start.samples), completed=moment.samples, width=24),
        Text(f"{moment.samples / max(1, start.samples):.0%}"),
        Text(f"minibatch {done} of {start.first_minibatch + start.minibatches}"),
        Text(show_clock(moment.at_s)),
        state,
    )
    return row


def _figures(start: Start, moments: Sequence[Moment], width: int) -> RenderableType:
    now = pace(moments)
    predicted = "" if start.samples_per_s is None else f"predicted {start.samples_per_s:.1f}"
    rates = [
        (new.samples - old.samples) / (new.at_s - old.at_s) for old, new in pairwise(moments) if new.at_s > old.at_s
    ]
    losses = [moment.loss for moment in moments if moment.loss is not None]
    curve = max(10, min(60, width - 50))
    table = Table.grid(padding=(0, 2))
    table.add_row("samples/s", "-" if now is None else f"{now:.1f}", Text(sparkline(rates, curve, 0.0)), predicted)
    table.add_row("loss", f"{losses[-1]:.4f}" if losses else "-", Text(sparkline(losses, curve)), _range(losses))
    return table


def _range(losses: Sequence[float]) -> str:
    return f"{losses[0]:.4g} at first, least {min(losses):.4g}" if losses else ""


def _workers(start: Start, moment: Moment) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("worker")
    add_numbers(table, ("busy", "last done", "memory", "predicted peak"))
    for worker, name in enumerate(start.workers):
        held, busy = moment.memory_bytes[worker], moment.busy[worker]
        full = round(min(1.0, max(0.0, busy)) * BUSY_WIDTH)
        silent_s = moment.at_s - moment.heard_s[worker]
        done = moment.done[worker] or "-"
        table.add_row(
            name_cell(name),
            Text.assemble(("━" * full, "cyan"), ("╌" * (BUSY_WIDTH - full), "bright_black"), f" {busy:4.0%}"),
            done if silent_s < QUIET_S else Text(f"{done}, {show_clock(silent_s)} ago", style="yellow"),
            "-" if held is None else show_bytes(held),
            show_bytes(start.memory_bytes[worker]),
        )
    return table


def sparkline(values: Sequence[float], width: int, low: float | None = None) -> str:
    """A line of bars. Each of at most ``width`` columns is the mean of its part of the values; the scale begins at
    ``low``, or at the smallest column."""
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [fmean(values[begin:end]) for begin, end in pairwise(edges)]
    low, high = min(means) if low is None else low, max(means)
    steps = len(BARS) - 1
    return "".join(BARS[round(steps * (mean - low) / (high - low)) if high > low else 0] for mean in means)
