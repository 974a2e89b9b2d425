"""Why a run was slower or faster than predicted, in one sentence.

A minibatch took longer or shorter than predicted. The difference is accounted for on the worker that waits least for
others, since that one sets the pace. Its time is divided without remainder into computing, updates, averaging, waiting
and what lies between actions, in the measured trace and in the simulated one. What differs most is the main cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from penstock.plan import Plan
from penstock.schedule import Action, Kind, dependencies
from penstock.trace import Event, Trace
from penstock.units import show_seconds

AGREED = 0.05
"""A difference of throughput that needs no explanation."""
WORTH_SAYING = 0.2
"""The share of the difference from which a further cause is named."""
LONG_PAUSE = 3.0
"""Loading that takes so many times the usual is not loading, but a pause: an evaluation, a checkpoint."""

COMPUTING, UPDATES, AVERAGING = "computing", "updates", "averaging"
WAITING, MESSAGES, LOADING, BETWEEN = "waiting", "messages", "loading", "between actions"
STEADY = "steady state"
"""Causes. The last is the difference between the prediction and a simulation as long as the run."""

Shares = Mapping[str, float]
"""The share of a worker's time by what it is spent on. The shares add up to 1."""


@dataclass(frozen=True)
class Explanation:
    cause: str
    """The main cause, or empty if measured and predicted times agree."""
    text: str


def explain(plan: Plan, measured: Trace, simulated: Trace) -> Explanation:
    """Both traces are of the plan, and about equally long."""
    rates = (plan.predicted_samples_per_s or simulated.samples_per_s, measured.samples_per_s)
    if min(*rates, simulated.samples_per_s) <= 0:
        return Explanation("", "The run is too short to compare its throughput with the prediction.")
    numbers = f"{rates[1]:.1f} samples/s measured, {rates[0]:.1f} predicted"
    off = rates[1] / rates[0] - 1
    if abs(off) <= AGREED:
        return Explanation("", f"Measured and predicted throughput agree to within {AGREED:.0%} ({numbers}).")
    predicted_s, measured_s, simulated_s = (
        plan.profile.batch_size / rate for rate in (*rates, simulated.samples_per_s)
    )
    taken, played = _spent(plan, measured), _spent(plan, simulated)
    worker = min(taken, key=lambda each: taken[each][WAITING])
    spent = {cause: (played[worker][cause] * simulated_s, taken[worker][cause] * measured_s) for cause in taken[worker]}
    spent[STEADY] = (predicted_s, simulated_s)
    direction = 1.0 if measured_s > predicted_s else -1.0
    more_s = {cause: direction * (after - before) for cause, (before, after) in spent.items()}
    main, *others = sorted(more_s, key=more_s.__getitem__, reverse=True)
    total_s = abs(measured_s - predicted_s)
    named = [
        f"{cause} {_signed(direction * more_s[cause])}" for cause in others if more_s[cause] > WORTH_SAYING * total_s
    ]
    also = f"; also {', '.join(named)}" if named else ""
    why = _in_words(main, *spent[main], slowdowns(measured, simulated), worker, measured.workers)
    share = f"{_signed(direction * more_s[main])} of {_signed(direction * total_s)} per minibatch"
    faster = "faster" if off > 0 else "slower"
    return Explanation(
        main, f"The run was {abs(off):.0%} {faster} than predicted ({numbers}), mainly because {why} ({share}){also}."
    )


def _in_words(
    cause: str, before_s: float, after_s: float, times: Mapping[int, float], worker: int, names: Sequence[str]
) -> str:
    """A clause with numbers per minibatch."""
    instead = f"{show_seconds(after_s)} instead of {show_seconds(before_s)}"
    if cause == COMPUTING:
        here, others = times[worker], [ratio for each, ratio in times.items() if each != worker]
        if all(abs(ratio - here) <= abs(here - 1) / 2 for ratio in others):
            return f"every action took {here:.2f} times its predicted time: the machine"
        return f"the actions of {names[worker]} took {here:.2f} times their predicted time, others {median(others):.2f}"
    return {
        UPDATES: f"updates took {instead}",
        AVERAGING: f"averaging gradients took {instead}",
        WAITING: f"{names[worker]} waited {instead} for other workers: the schedule",
        MESSAGES: f"{names[worker]} waited {instead} for messages on their way",
        LOADING: f"loading data took {instead}",
        BETWEEN: f"{names[worker]} spent {instead} between actions: its own work, evaluations and checkpoints",
        STEADY: f"a simulation as long as the run takes {instead}: the prediction is of a long run",
    }[cause]


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{show_seconds(abs(seconds))}"


def slowdowns(measured: Trace, simulated: Trace) -> dict[int, float]:
    """For each worker that computes, the measured time of an action divided by the predicted one, on average."""
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
    found = {}
    for worker in range(len(measured.workers)):
        means = []
        for trace in (measured, simulated):
            mine = trace.of_worker(worker)
            computing = mine[mine.of_kind(*kinds)]
            means.append(float(computing.seconds.mean()) if len(computing) else 0.0)
        if means[1] > 0:
            found[worker] = means[0] / means[1]
    return found


def _spent(plan: Plan, trace: Trace) -> dict[int, Shares]:
    """What each worker spends its time on in steady state, without warm-up and drain."""
    moments = _Moments(plan, trace)
    parts = {worker: list(moments.parts(worker)) for worker in range(len(trace.workers))}
    loading_s = [part.seconds for of_worker in parts.values() for part in of_worker if part.cause == LOADING]
    usual_s = median(loading_s) if loading_s else 0.0
    return {worker: _shares(of_worker, usual_s) for worker, of_worker in parts.items()}


class _Part(NamedTuple):
    """A part of a worker's time, and its cause."""

    cause: str
    seconds: float
    loads: bool = False
    """Whether the worker also loads data in this time."""


def _shares(parts: Iterable[_Part], usual_loading_s: float) -> Shares:
    spent = dict.fromkeys((COMPUTING, UPDATES, AVERAGING, WAITING, MESSAGES, LOADING, BETWEEN), 0.0)
    for cause, seconds, loads in parts:
        # A stage that also waits for messages is assumed to load for as long as stages that only load.
        most_s = usual_loading_s * (LONG_PAUSE if cause == LOADING else 1.0) if loads else 0.0
        spent[LOADING] += min(seconds, most_s)
        spent[BETWEEN if cause == LOADING else cause] += max(0.0, seconds - most_s)
    total_s = sum(spent.values())
    return {cause: seconds / total_s if total_s > 0 else 0.0 for cause, seconds in spent.items()}


class _Moments:
    """The times at which the results of a trace were ready."""

    def __init__(self, plan: Plan, trace: Trace) -> None:
        self.pipeline, self._by_worker = plan.pipeline, defaultdict[int, list[Event]](list)
        self._loading = {0, len(plan.stages) - 1} | _readers_of_inputs(plan)
        self._made: dict[Action, Event] = {}
        self._met_s: dict[tuple[int, int], float] = {}
        """For each SYNC, the time at which the last worker is ready."""
        for event in trace.events:
            self._by_worker[event.worker].append(event)
            if event.action.kind is Kind.SYNC:
                meeting = self._meeting(event.action)
                self._met_s[meeting] = max(event.start_s, self._met_s.get(meeting, event.start_s))
            else:
                self._made[event.action.result] = event

    def parts(self, worker: int) -> Iterator[_Part]:
        """The time of a worker from action to action, divided without gaps."""
        for before, event in pairwise(_steady(self._by_worker[worker])):
            action, free_s = event.action, min(before.end_s, event.start_s)
            needs = [self._made[need] for need in dependencies(action, self.pipeline) if need in self._made]
            sources_s = [made.end_s for made in needs if made.worker != worker]
            waited_s = max(0.0, min(event.start_s, max(sources_s, default=free_s)) - free_s)
            yield _Part(WAITING, waited_s)
            loads = action.kind is Kind.FORWARD and action.stage in self._loading
            cause = MESSAGES if sources_s else LOADING if loads else BETWEEN
            yield _Part(cause, event.start_s - free_s - waited_s, loads)
            seconds = event.end_s - event.start_s
            if action.kind is Kind.SYNC:
                alone_s = min(seconds, self._met_s[self._meeting(action)] - event.start_s)
                yield _Part(WAITING, alone_s)
                yield _Part(AVERAGING, seconds - alone_s)
            else:
                yield _Part(UPDATES if action.kind is Kind.STEP else COMPUTING, seconds)

    def _meeting(self, action: Action) -> tuple[int, int]:
        return self.pipeline.sync_stages[action.stage][0], action.index


def _readers_of_inputs(plan: Plan) -> set[int]:
    graph = plan.profile.graph
    values = [value for value in graph.values if graph.by_id[value.producer].is_input]
    return {plan.stage_of_layer[consumer] for value in values for consumer in value.consumers}


def _steady(events: Sequence[Event]) -> Sequence[Event]:
    """The events between two updates, without the first and last quarter; all if there are fewer than two updates."""
    places = {event.action.index: place for place, event in enumerate(events) if event.action.kind is Kind.STEP}
    rounds = sorted(places)
    if len(rounds) < 2:
        return events
    quarter = (len(rounds) - 1) // 4
    return events[places[rounds[quarter]] : places[rounds[len(rounds) - 1 - quarter]] + 1]
