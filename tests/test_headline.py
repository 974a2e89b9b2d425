"""The one line on top of a report: for each thing that can bound a pipeline, a run that it bounds."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from builders import chain_profile, flat_cluster, plan_of
from penstock.plan import Plan
from penstock.simulate import headline, play, simulate
from penstock.simulate.headline import as_measured
from test_explain import REPLICAS, SYNCHRONOUS, TWO_STAGES, at_speeds, with_link

MINIBATCHES = 40
UNEVEN = plan_of(
    chain_profile([0.01, 0.03], batch_size=4, value_bytes=1000), flat_cluster(2), [[0], [1]], schedule="pipedream"
)


def line(plan: Plan, ran: Plan | None = None) -> str:
    """Of a run of a plan that went as another was simulated."""
    return headline(play(plan, MINIBATCHES), replace(simulate(ran or plan, MINIBATCHES), origin="measured"))


def test_the_slower_stage_the_idle_share_and_a_slow_machine_are_named() -> None:
    assert re.fullmatch(
        r"Stage 1 bounds the pipeline; workers were idle 3\d% of the time; "
        r"the machine was 30% slower than when profiled\.",
        line(UNEVEN, at_speeds(UNEVEN, 0.7, 0.7)),
    )
    assert line(UNEVEN).endswith("the machine was as fast as when profiled.")
    assert line(UNEVEN, at_speeds(UNEVEN, 1.5, 1.5)).endswith("the machine was 50% faster than when profiled.")


def test_one_slow_worker_is_named() -> None:
    assert line(TWO_STAGES, at_speeds(TWO_STAGES, 1.0, 0.5)).endswith(
        "; stage 1 on device 1 was 50% slower than when profiled, the other workers as fast."
    )


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (with_link(TWO_STAGES, bytes_per_s=2e4), r"The link (out of|into) device \d bounds the pipeline"),
        (with_link(REPLICAS, bytes_per_s=2e6), "Averaging at stage 0 bounds the run"),
        (with_link(SYNCHRONOUS, latency_s=1.0), "Waiting bounds the pipeline"),
        (plan_of(chain_profile([0.01, 0.01]), flat_cluster(1), [[0, 1]]), "Stage 0 bounds the run"),
    ],
    ids=["link", "averaging", "waiting", "one stage"],
)
def test_what_bounds_a_run_is_named(plan: Plan, words: str) -> None:
    assert re.match(words + "; ", line(plan))


def test_a_run_without_a_trace_is_said_to_be_one() -> None:
    empty = replace(simulate(TWO_STAGES, 1), events=())
    assert "left no trace" in headline(play(TWO_STAGES, 1), empty)


def test_links_carry_for_as_many_microbatches_as_were_measured() -> None:
    played = play(TWO_STAGES, MINIBATCHES)
    twice = as_measured(played, simulate(TWO_STAGES, 2 * MINIBATCHES))
    assert [link.carried_bytes for link in twice.links] == [2 * link.carried_bytes for link in played.links]
