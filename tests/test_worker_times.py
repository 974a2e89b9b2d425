"""A worker's own time: how it is timed, and what is fitted to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import law
from penstock.runtime.measure.layer_times import SizeTrial
from penstock.runtime.measure.update_times import UpdateCosts, fit_updates
from penstock.runtime.measure.worker_times import StepTimes, TrialStage, TrialWorker, nearly_nothing, typical

PARTS = ((1, 40), (2, 4000), (6, 50_000), (12, 8_000_000), (3, 600))
"""Tensors and bytes of some updates."""
terms = st.builds(UpdateCosts, st.floats(1e-6, 1e-3), st.floats(1e-7, 1e-4), st.floats(1e-11, 1e-8))


@law
@given(terms)
def test_the_terms_of_exact_updates_are_found(costs: UpdateCosts) -> None:
    rows = [(count, size, costs.call_s + count * costs.tensor_s + size * costs.byte_s) for count, size in PARTS]
    assert fit_updates(rows) == pytest.approx(costs, rel=1e-3)


@law
@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 10**9), st.floats(0.0, 1.0)), max_size=8))
def test_no_updates_give_a_term_below_zero(rows: list[tuple[int, int, float]]) -> None:
    found = fit_updates(rows)
    assert all(0 <= term < float("inf") for term in found)
    if not rows:
        assert found == (0.0, 0.0, 0.0)


def test_updates_that_take_less_the_more_they_update_are_all_call() -> None:
    found = fit_updates([(1, 100, 3e-3), (10, 1000, 2e-3), (20, 10**6, 2e-3)])
    assert found.call_s == pytest.approx(2.2e-3, rel=0.2)
    assert (found.tensor_s, found.byte_s) == (0.0, 0.0)


def test_typical_seconds_are_the_mean_of_the_middle_half() -> None:
    assert typical([100.0, 2.0, 3.0, 0.0]) == 2.5
    assert typical([5.0]) == 5.0


def take_all_turns(worker: TrialWorker, feed: SizeTrial, times: StepTimes) -> None:
    """Plain steps, and beside an empty stage, by whole backwards and by halves."""
    worker.run(feed, [times])
    for in_halves in (False, True):
        worker.run(feed, [times], in_halves=in_halves, beside=True)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_few_runs_tell_all_of_a_workers_own_time(microbatches: int) -> None:
    """By a clock on which everything takes a second."""
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    (stage, inputs), (halved, _) = (nearly_nothing(torch.device("cpu"), in_halves=halves) for halves in (False, True))
    feed = SizeTrial(1, microbatches, inputs, None, lambda: (inputs, None))
    worker, times = TrialWorker([TrialStage(stage, halved)], clock, torch.device("cpu")), StepTimes(microbatches)
    take_all_turns(worker, feed, times)
    own = times.own
    assert (own.forward_s, own.backward_s, own.backward_input_s, own.backward_weight_s, own.between_s) == (1.0,) * 5
    assert (times.forward_s, times.backward_s, times.update_s, times.load_s) == (1.0, 1.0, 1.0, 0.0)
    assert (times.halved_forward_s, times.input_s, times.weight_s) == (1.0,) * 3
    assert times.copy_s == (0.0 if microbatches == 1 else None)
    assert len(stage.losses) == stage.in_flight == 0


def test_loading_is_what_is_between_actions_where_a_microbatch_is_loaded_beyond_what_is_elsewhere() -> None:
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    (stage, inputs), (halved, _) = (nearly_nothing(torch.device("cpu"), in_halves=halves) for halves in (False, True))

    def load() -> tuple[list[object], None]:
        nonlocal now_s
        now_s += 7.0
        return inputs, None

    worker, times = TrialWorker([TrialStage(stage, halved)], clock, torch.device("cpu")), StepTimes(4)
    take_all_turns(worker, SizeTrial(1, 4, inputs, None, load), times)
    assert times.load_s == 7.0
    assert times.own.between_s == 1.0


def test_actions_are_told_apart_by_the_action_before_them() -> None:
    """By a clock that moves when the stage computes. What came before has left other things in the caches: found on a
    mixture of experts, whose forwards take a fifth more after a backward than after a forward."""
    now_s, last = 0.0, "nothing"
    (stage, inputs), (halved, _) = (nearly_nothing(torch.device("cpu"), in_halves=halves) for halves in (False, True))
    seconds = {
        "forward": {"forward": 3.0, "backward": 4.0, "step": 6.0, "nothing": 99.0},
        "backward": {"backward": 5.0, "forward": 7.0},
        "step": {"backward": 2.0},
    }

    def taking(name: str, compute: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal now_s, last
            now_s += seconds[name][last]
            last = name
            return compute(*args, **options)

        return call

    stage.forward = taking("forward", stage.forward)  # type: ignore[method-assign]
    stage.backward = taking("backward", stage.backward)  # type: ignore[method-assign]
    stage.weights.step = taking("step", stage.weights.step)  # type: ignore[method-assign]
    worker, times = TrialWorker([TrialStage(stage, halved)], lambda: now_s, torch.device("cpu")), StepTimes(4)
    worker.run(SizeTrial(1, 4, inputs, None, lambda: (inputs, None)), [times])
    assert (times.forward_s, times.forward_switch_s, times.first_forward_s) == (3.0, 1.0, 3.0)
    assert (times.backward_s, times.backward_switch_s) == (5.0, 2.0)
    last, always_after = "nothing", StepTimes(1)
    worker.run(SizeTrial(1, 1, inputs, None, lambda: (inputs, None)), [always_after])
    assert (always_after.forward_s, always_after.forward_switch_s, always_after.first_forward_s) == (6.0, 0.0, 0.0)
    assert (always_after.backward_s, always_after.backward_switch_s) == (7.0, 0.0)
