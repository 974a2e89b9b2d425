"""Parts of a model as stages: what a layer takes in a stage, rather than in a pass through the whole model.

A pass through all layers, one by one, tells how the layers compare, but not what a stage takes. The first layers of a
pass find caches that hold other code and data; in a pipeline the first layers of every stage do. A worker with part of
a model finds more of its weights in the caches than one with all of it. So parts of the model take whole steps too:

- each half as the one stage of a worker: the seconds of its layers are scaled to add up to what it took;
- each half as two stages, its quarters, of one worker: with the same half of the model in the caches, what two stages
  take more than one is what every further action costs, whatever its layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.profile import WorkerSeconds
from penstock.runtime.capture.split import Splitter
from penstock.runtime.measure.worker_times import StepTimes

LARGEST_BYTES = 2**28
"""Of parameters. Larger models are not divided: the parts would take memory, and no cache holds much of them anyway."""
QUARTERS = 4
MOST_OWN = 0.9
"""A worker's own time is at most this share of any stage's action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    forward_s: float
    backward_s: float
    halved_forward_s: float
    """The forward, where the backward is taken in halves."""
    input_s: float
    weight_s: float
    """The two halves of the backward."""
    forward_switch_s: float = 0.0
    """What a forward takes more after an action of another kind or stage."""
    backward_switch_s: float = 0.0
    """What a backward takes more after an action of another kind or stage."""
    cold_s: float = 0.0
    """What the first forward after an update takes more."""
    crowded_s: float = 0.0
    """What a microbatch takes more on a worker that has all layers."""

    @property
    def weight_share(self) -> float:
        """Of the backward."""
        return self.weight_s / (self.input_s + self.weight_s) if self.weight_s else 0.0


def places_to_cut(splitter: Splitter, opaque: Collection[str]) -> list[int]:
    """The layers before which a model can be cut: no value that cannot be sent crosses there."""
    count = len(splitter.captured.layers)
    crossed = {
        place
        for node, readers in splitter.consumers.items()
        if node.name in opaque
        for place in range(splitter.layer_of[node] + 1, max(readers) + 1)
    }
    return [place for place in range(1, count) if place not in crossed]


@dataclass(frozen=True)
class Division:
    """The layers of a model, in their order, cut into halves and these into quarters; or none where it is whole."""

    count: int
    halves: Sequence[range] = ()
    quarters: Sequence[range] = ()

    @property
    def parts(self) -> Sequence[range]:
        return self.halves or (range(self.count),)


def divided(seconds: Sequence[float], places: Sequence[int]) -> Division:
    """By what the layers take, cut at some of ``places``; not at all where these are too few."""
    if len(places) < QUARTERS - 1:
        return Division(len(seconds))
    before = list(itertools.accumulate(seconds, initial=0.0))
    chosen: list[int] = []
    for quarter in range(1, QUARTERS):
        left = [place for place in places if not chosen or place > chosen[-1]]
        enough = left[: len(left) - (QUARTERS - 1 - quarter)]  # later cuts need a place too
        chosen.append(min(enough, key=lambda place: abs(before[place] - before[-1] * quarter / QUARTERS)))
    return Division(len(seconds), _ranges(chosen[1:2], len(seconds)), _ranges(chosen, len(seconds)))


def _ranges(cuts: Sequence[int], count: int) -> list[range]:
    return [range(*pair) for pair in itertools.pairwise((0, *cuts, count))]


@dataclass(frozen=True)
class PartedSteps:
    """What whole steps took: of a worker with the whole model as one stage, and of workers with half of it each."""

    whole: StepTimes
    halves: Sequence[StepTimes] = ()
    """Of each half as one stage."""
    quarters: Sequence[StepTimes] = ()
    """Of each half as two stages, one after the other."""

    @property
    def parts(self) -> Sequence[StepTimes]:
        """Of the smallest parts that were a worker's only stage."""
        return self.halves or (self.whole,)

    @property
    def own(self) -> WorkerSeconds:
        """A worker's own time: at least that of a stage that computes next to nothing."""
        least = self.whole.own
        return replace(
            least,
            forward_s=self._own_s(least.forward_s, _forward_s),
            backward_s=self._own_s(least.backward_s, _backward_s),
            backward_input_s=max(least.backward_input_s, self._each_further(lambda step: step.input_s)),
            backward_weight_s=max(least.backward_weight_s, self._each_further(lambda step: step.weight_s)),
            update_s=self._each_further(lambda step: step.update_s),
        )

    def _own_s(self, least_s: float, seconds: Callable[[StepTimes], float]) -> float:
        """Not all of any stage: noise must leave its layers some time."""
        most_s = MOST_OWN * min(map(seconds, (self.whole, *self.halves, *self.quarters)))
        return min(max(least_s, self._each_further(seconds)), most_s)

    def _each_further(self, seconds: Callable[[StepTimes], float]) -> float:
        """What every further stage takes, whatever its layers."""
        if not self.quarters:
            return 0.0
        further_s = sum(map(seconds, self.quarters)) - sum(map(seconds, self.halves))
        return max(0.0, further_s) / (len(self.quarters) - len(self.halves))


def _forward_s(step: StepTimes) -> float:
    return step.forward_s + step.forward_switch_s


def _backward_s(step: StepTimes) -> float:
    return step.backward_s + step.backward_switch_s


def scaled_to_steps(
    layers: Sequence[LayerTimes], division: Division, steps: PartedSteps, own: WorkerSeconds
) -> list[LayerTimes]:
    """So that the layers of each part add up to what it took, but for the worker's own time."""
    compared = list(layers)
    for quarter, step in zip(division.quarters, steps.quarters, strict=True):
        compared[quarter.start : quarter.stop] = _weighed(layers[quarter.start : quarter.stop], step, own)
    scaled = [
        each
        for part, step in zip(division.parts, steps.parts, strict=True)
        for each in _scaled(compared[part.start : part.stop], step, own)
    ]
    together_s = sum(_forward_s(step) + _backward_s(step) for step in steps.parts)
    together_s -= (len(steps.parts) - 1) * (own.forward_s + own.backward_s)
    crowded_s = max(0.0, _forward_s(steps.whole) + _backward_s(steps.whole) - together_s)
    return [
        replace(times, crowded_s=crowded_s * share)
        for times, share in zip(scaled, _shares(times.forward_s for times in scaled), strict=True)
    ]


def _weighed(layers: Sequence[LayerTimes], step: StepTimes, own: WorkerSeconds) -> list[LayerTimes]:
    """A quarter's layers, to be compared with those of the other quarter of its half."""
    forward = _factor(_forward_s(step) - own.forward_s, sum(times.forward_s for times in layers))
    backward = _factor(_backward_s(step) - own.backward_s, sum(times.backward_s for times in layers))
    return [
        replace(
            times,
            forward_s=times.forward_s * forward,
            halved_forward_s=times.halved_forward_s * forward,
            backward_s=times.backward_s * backward,
            input_s=times.input_s * backward,
            weight_s=times.weight_s * backward,
        )
        for times in layers
    ]


def _scaled(layers: Sequence[LayerTimes], step: StepTimes, own: WorkerSeconds) -> list[LayerTimes]:
    totals_s = {
        "forward_s": step.forward_s - own.forward_s,
        "backward_s": step.backward_s - own.backward_s,
        "halved_forward_s": step.halved_forward_s - step.forward_switch_s - own.forward_s,
        "input_s": step.input_s - step.backward_switch_s - own.backward_input_s,
        "weight_s": step.weight_s - own.backward_weight_s,
    }
    factors = {
        name: _factor(total_s, sum(getattr(times, name) for times in layers)) for name, total_s in totals_s.items()
    }
    forward = _shares(times.forward_s for times in layers)
    backward = _shares(times.backward_s for times in layers)
    return [
        LayerTimes(
            **{name: getattr(times, name) * factor for name, factor in factors.items()},
            forward_switch_s=step.forward_switch_s * forward_share,
            backward_switch_s=step.backward_switch_s * backward_share,
            cold_s=step.first_forward_s * forward_share,
        )
        for times, forward_share, backward_share in zip(layers, forward, backward, strict=True)
    ]


def _factor(total_s: float, sum_s: float) -> float:
    return max(0.0, total_s) / sum_s if sum_s else 1.0


def _shares(seconds: Iterable[float]) -> list[float]:
    each = list(seconds)
    total_s = sum(each)
    return [second / total_s if total_s else 0.0 for second in each]
