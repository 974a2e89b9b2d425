"""Parts of a model as stages: what a layer takes in a stage, rather than in a pass through the whole model.

A pass through all layers, one by one, tells how the layers compare, but not what a stage takes. The first layers of a
pass find caches that hold other code and data; in a pipeline the first layers of every stage do. A worker with part of
a model finds more of its weights in the caches than one with all of it. So halves and quarters of the model take whole
steps too, each as the one stage of a worker. A layer's seconds are scaled so that each quarter adds up to what it took.
What four quarters take more than two halves is what every further action costs, whatever its layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.profile import WorkerSeconds
from penstock.runtime.capture.split import Section, Splitter
from penstock.runtime.measure.worker_times import SameMessages, StepTimes, TrialWorker
from penstock.runtime.messages.values import Gradient

LARGEST_BYTES = 2**28
"""Of parameters. Larger models are not divided: the parts would take memory, and no cache holds much of them anyway."""
QUARTERS = 4


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


@dataclass(frozen=True)
class Part:
    """Some layers as the one stage of a worker."""

    layers: range
    section: Section
    worker: TrialWorker

    @property
    def crossing(self) -> frozenset[str]:
        """The names of the values that it receives or sends."""
        return frozenset((*self.section.receives, *self.section.sends))

    def messages(self, values: Mapping[str, Any], gradients: Mapping[str, Gradient], *, weighted: bool) -> SameMessages:
        section = self.section
        received, sent = ({name: values[name] for name in section.receives}, section.sends)
        return SameMessages(received, {name: gradients[name] for name in sent}, weighted=weighted)


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


def divided(seconds: Sequence[float], places: Sequence[int]) -> tuple[list[range], list[range]]:
    """Halves and quarters of the layers, by their seconds, cut at some of ``places``; none where these are too few."""
    if len(places) < QUARTERS - 1:
        return [], []
    before = list(itertools.accumulate(seconds, initial=0.0))
    chosen: list[int] = []
    for quarter in range(1, QUARTERS):
        left = [place for place in places if not chosen or place > chosen[-1]]
        enough = left[: len(left) - (QUARTERS - 1 - quarter)]  # later cuts need a place too
        chosen.append(min(enough, key=lambda place: abs(before[place] - before[-1] * quarter / QUARTERS)))
    return _ranges(chosen[1:2], len(seconds)), _ranges(chosen, len(seconds))


def _ranges(cuts: Sequence[int], count: int) -> list[range]:
    return [range(*pair) for pair in itertools.pairwise((0, *cuts, count))]


@dataclass(frozen=True)
class PartedSteps:
    """What whole steps took: with the whole model as one stage, and with each half and quarter of it."""

    whole: StepTimes
    halves: Sequence[StepTimes] = ()
    quarters: Sequence[StepTimes] = ()

    @property
    def parts(self) -> Sequence[StepTimes]:
        """The smallest that there are."""
        return self.quarters or (self.whole,)

    def _each_further(self, seconds: Callable[[StepTimes], float]) -> float:
        """What every further stage takes, whatever its layers."""
        if not self.quarters:
            return 0.0
        further_s = sum(map(seconds, self.quarters)) - sum(map(seconds, self.halves))
        return max(0.0, further_s) / (len(self.quarters) - len(self.halves))

    @property
    def own(self) -> WorkerSeconds:
        """A worker's own time: at least that of a stage that computes next to nothing."""
        least = self.whole.own
        return replace(
            least,
            forward_s=max(least.forward_s, self._each_further(_forward_s)),
            backward_s=max(least.backward_s, self._each_further(_backward_s)),
            backward_input_s=max(least.backward_input_s, self._each_further(lambda step: step.input_s)),
            backward_weight_s=max(least.backward_weight_s, self._each_further(lambda step: step.weight_s)),
            update_s=self._each_further(lambda step: step.update_s),
        )


def _forward_s(step: StepTimes) -> float:
    return step.forward_s + step.forward_switch_s


def _backward_s(step: StepTimes) -> float:
    return step.backward_s + step.backward_switch_s


def scaled_to_steps(
    layers: Sequence[LayerTimes], parts: Sequence[range], steps: PartedSteps, own: WorkerSeconds
) -> list[LayerTimes]:
    """So that the layers of each part add up to what it took, but for the worker's own time."""
    scaled = [
        each
        for part, step in zip(parts, steps.parts, strict=True)
        for each in _scaled_part([layers[layer] for layer in part], step, own)
    ]
    together_s = sum(_forward_s(step) + _backward_s(step) for step in steps.parts)
    together_s -= (len(steps.parts) - 1) * (own.forward_s + own.backward_s)
    crowded_s = max(0.0, _forward_s(steps.whole) + _backward_s(steps.whole) - together_s)
    return [
        replace(times, crowded_s=crowded_s * share)
        for times, share in zip(scaled, _shares(times.forward_s for times in scaled), strict=True)
    ]


def _scaled_part(layers: Sequence[LayerTimes], step: StepTimes, own: WorkerSeconds) -> list[LayerTimes]:
    totals_s = {
        "forward_s": step.forward_s - own.forward_s,
        "backward_s": step.backward_s - own.backward_s,
        "halved_forward_s": step.halved_forward_s - step.forward_switch_s - own.forward_s,
        "input_s": step.input_s - step.backward_switch_s - own.backward_input_s,
        "weight_s": step.weight_s - own.backward_weight_s,
    }
    sums_s = {name: sum(getattr(times, name) for times in layers) for name in totals_s}
    factors = {name: max(0.0, totals_s[name]) / sum_s if sum_s else 1.0 for name, sum_s in sums_s.items()}
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


def _shares(seconds: Iterable[float]) -> list[float]:
    each = list(seconds)
    total_s = sum(each)
    return [second / total_s if total_s else 0.0 for second in each]
