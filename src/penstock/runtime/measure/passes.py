"""Passes through a model: its layers one by one, and whole steps of workers that have all of it or a part.

At every microbatch size the two come by turns, so that a slow moment of the machine befalls more than one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.profile import WorkerSeconds
from penstock.runtime.capture.split import Section
from penstock.runtime.measure.layer_times import (
    MOST_REPEATS,
    QUICK_S,
    Kept,
    LayerRun,
    LayerTrial,
    SizeTrial,
    Timer,
    forget,
    through_all_layers,
    times_of,
)
from penstock.runtime.measure.part_times import (
    LARGEST_BYTES,
    Division,
    LayerTimes,
    PartedSteps,
    divided,
    places_to_cut,
    scaled_to_steps,
)
from penstock.runtime.measure.worker_times import Given, SameMessages, StepTimes, TrialStage, TrialWorker
from penstock.runtime.stage.optimizers import scaled_rates
from penstock.runtime.stage.stage import StageModule
from penstock.runtime.stage.weights import Weights

BLOCKS = 2
"""Every size is measured in so many blocks of passes, by turns with the other sizes."""
EMPTY_RUNS = 2
"""Of a layer that computes next to nothing, in each pass through the layers."""


@dataclass(frozen=True)
class Steps:
    """What was found in passes: of layers, of whole steps, and of the worker that takes them."""

    own: WorkerSeconds
    division: Division
    at: tuple[PartedSteps, ...]
    """At each size."""
    layers: tuple[list[LayerTimes], ...]
    """At each size."""


def take_passes(
    timer: Timer,
    sizes: Sequence[SizeTrial],
    progress: Callable[[int, int], None],
    *,
    opaque: Collection[str],
    weighted: bool,
) -> Steps:
    """All layers, and whole steps, at every size, largest first.

    ``opaque`` names the values that cannot be sent; ``weighted`` says whether the loss is a sum with a weight.
    """
    trial = _Trial(timer, opaque, weighted)
    # a worker's own time is found at the smallest size: beside large microbatches it does not count
    found = [_Passes(size, trial, finds_own=size is sizes[-1]) for size in sizes]
    for block, (_, passes) in enumerate(itertools.product(range(BLOCKS), found)):
        passes.take_block()
        progress(block + 1, BLOCKS * len(sizes))
    own, division = found[-1].steps.own, trial.division
    return Steps(
        own=own,
        division=division,
        at=tuple(passes.steps for passes in found),
        layers=tuple(scaled_to_steps(passes.layers, division, passes.steps, own) for passes in found),
    )


class _Turn(NamedTuple):
    """A way to take steps."""

    teams: Sequence[int]
    """0 is one worker with the whole model, 1 two with half of it each, 2 two with half of it each as two stages."""
    in_halves: bool = False
    beside: bool = False
    """Whether a stage that computes next to nothing runs beside it."""


_TURNS = (_Turn([0]), _Turn([1]), _Turn([1], in_halves=True), _Turn([2]))
_TURNS_FOR_OWN_TIME = (
    _Turn([0]),
    _Turn([1, 2]),
    _Turn([1, 2], in_halves=True),
    _Turn([0], beside=True),
    _Turn([0], in_halves=True, beside=True),
)
"""What one stage takes and what two take is compared, so they have their turn at about the same time."""


@dataclass(frozen=True)
class _Crew:
    """A worker with one or two stages."""

    sections: Sequence[Section]
    worker: TrialWorker

    def messages(self, kept: Kept, *, weighted: bool) -> SameMessages:
        given = [
            Given(
                [kept.values[name] for name in section.received_names],
                [kept.gradients[name] for name in section.sent_names],
            )
            for section in self.sections
        ]
        return SameMessages(given, weighted=weighted)


class _Trial:
    """Workers that take whole steps of a model, with all of it or with parts, and its layers one by one.

    The learning rate is 0. An update then takes as long and changes nothing, so a model that computes different things
    for different weights, as a mixture of experts does, is timed as it is.
    """

    def __init__(self, timer: Timer, opaque: Collection[str], weighted: bool) -> None:
        self.timer, self.weighted, self._opaque = timer, weighted, opaque
        every = range(len(timer.captured.layers))
        self.division = Division(len(every))
        whole = self._crew(every)
        self.teams: list[list[_Crew]] = [[whole]]
        copies = whole.sections[0].parameters
        self.leaves = {name: p.data.requires_grad_(p.requires_grad) for name, p in copies.items()}
        self.sums = {name: torch.zeros_like(leaf) for name, leaf in self.leaves.items() if leaf.requires_grad}
        self.layers = [LayerTrial(timer, timer.splitter.section([index]), self.leaves) for index in every]

    def divide(self, seconds: Sequence[float]) -> None:
        """By the seconds of each layer, once."""
        if len(self.teams) > 1 or sum(leaf.nbytes for leaf in self.leaves.values()) > LARGEST_BYTES:
            return
        self.division = divided(seconds, places_to_cut(self.timer.splitter, self._opaque))
        if self.division.halves:
            first, second, third, fourth = self.division.quarters
            self.teams.append([self._crew(half) for half in self.division.halves])
            self.teams.append([self._crew(first, second), self._crew(third, fourth)])

    def _crew(self, *stages: range) -> _Crew:
        timer, sections, made = self.timer, [], []
        for layers in stages:
            section = timer.splitter.section(layers)
            copies = {name: timer.blueprint.copy_of(p, timer.device) for name, p in section.parameters.items()}
            weights = Weights(copies, scaled_rates(timer.job.optimizer, 0.0))
            sections.append(replace(section, parameters=copies))
            whole, halved = (
                StageModule(section, weights, timer.loss, in_halves=in_halves, autocast=timer.autocast)
                for in_halves in (False, True)
            )
            made.append(TrialStage(whole, halved))
        return _Crew(sections, TrialWorker(made, timer.clock, timer.device, weighted=self.weighted))


class _Passes:
    """All that was timed at one size."""

    def __init__(self, size: SizeTrial, trial: _Trial, *, finds_own: bool) -> None:
        self.size, self.trial, self.taken = size, trial, 0
        self.runs: dict[bool, list[list[LayerRun]]] = {False: [], True: []}
        """By whether backwards were in halves: of every pass, the runs of all layers."""
        self.empty: dict[bool, list[LayerRun]] = {False: [], True: []}
        """By whether backwards were in halves: runs of a layer that computes next to nothing."""
        self._turns = _TURNS_FOR_OWN_TIME if finds_own else _TURNS
        self._steps: list[list[list[StepTimes]]] = []
        """Of each team, worker and stage."""
        self._kept, self._loaded = Kept({}, {}), size.next_microbatch()

    @property
    def layers(self) -> list[LayerTimes]:
        by_layer = (zip(*self.runs[halves], strict=True) for halves in (False, True))
        return [times_of(whole, halves, *self.empty.values()) for whole, halves in zip(*by_layer, strict=True)]

    @property
    def steps(self) -> PartedSteps:
        return PartedSteps(self._steps[0][0][0], *(list(itertools.chain(*team)) for team in self._steps[1:]))

    def take_block(self) -> None:
        """Passes, as many as every turn needs to be sure of it; more where they are quick."""
        timer, turns = self.trial.timer, len(self._turns)
        self._warm_up()  # memory of this size finds its place, too
        fewest, start_s = turns * -(-timer.repeats // (turns * BLOCKS)), timer.clock()
        for taken in itertools.count():
            is_quick = timer.clock() - start_s < QUICK_S / BLOCKS and taken < MOST_REPEATS / BLOCKS
            if taken >= fewest and not is_quick:
                break
            self._take()

    def _warm_up(self) -> None:
        """Not counted. The first of all tells where to divide the model."""
        runs = self._pass(in_halves=False)
        if self._steps:
            return
        self.trial.divide([run.forward_s + run.input_s for run in runs])
        self._steps = self._no_steps()
        self._step(self._turns[1])
        self._steps = self._no_steps()

    def _no_steps(self) -> list[list[list[StepTimes]]]:
        return [
            [[StepTimes(self.size.microbatches) for _ in crew.sections] for crew in team] for team in self.trial.teams
        ]

    def _take(self) -> None:
        """A pass through the layers, every other with backwards in halves, and the steps whose turn it is."""
        in_halves = self.taken % 2 == 1
        runs = self._pass(in_halves=in_halves)
        self.runs[in_halves].append(runs)
        empty = self.trial.timer.empty_layer
        self.empty[in_halves] += [empty.run(in_halves=in_halves) for _ in range(EMPTY_RUNS)]
        self._step(self._turns[self.taken % len(self._turns)])
        self.taken += 1

    def _pass(self, *, in_halves: bool) -> list[LayerRun]:
        """Another microbatch each time. The steps that follow receive what its layers made."""
        trial, size = self.trial, self.size
        forget(trial.leaves, trial.sums if size.adds else {})
        self._loaded = size.next_microbatch()
        runs, self._kept = through_all_layers(trial.layers, *self._loaded, in_halves=in_halves)
        return runs

    def _step(self, turn: _Turn) -> None:
        """A part must read the microbatch that what it receives was made of: microbatches may differ in shape."""
        teams, same = self.trial.teams, replace(self.size, next_microbatch=lambda: _copied(self._loaded))
        for number in turn.teams if len(teams) > 1 else [0]:
            for crew, times in zip(teams[number], self._steps[number], strict=True):
                messages, feed = crew.messages(self._kept, weighted=self.trial.weighted), same if number else self.size
                crew.worker.run(feed, times, messages, in_halves=turn.in_halves, beside=turn.beside)


def _copied(tree: Any) -> Any:
    """A model may write into its inputs while another microbatch still needs them."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)
