"""Why a run was slower than predicted: for each cause, a trace in which nothing else has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from builders import chain_profile, flat_cluster, plan_of
from penstock.cluster import Device
from penstock.plan import Plan, Prediction
from penstock.schedule import Action, Kind
from penstock.simulate import explain, simulate
from penstock.trace import Event, Trace

MINIBATCHES = 40
TWO_STAGES = plan_of(
    chain_profile([0.01, 0.01], batch_size=4, value_bytes=1000), flat_cluster(2), [[0], [1]], schedule="pipedream"
)
SYNCHRONOUS = plan_of(
    chain_profile([0.01, 0.01], batch_size=4, value_bytes=1000),
    flat_cluster(2),
    [[0], [1]],
    schedule="1f1b",
    microbatches=4,
)
REPLICAS = plan_of(
    chain_profile([0.01], batch_size=4, parameter_bytes=10**6), flat_cluster(2), [[0]], [2], schedule="pipedream"
)


def predicting(plan: Plan, seconds: float) -> Plan:
    return replace(
        plan,
        prediction=Prediction(
            seconds_per_minibatch=seconds, lower_bound_s=seconds, data_parallel_s=None, one_device_s=None
        ),
    )


def with_steady_prediction(plan: Plan) -> Plan:
    return predicting(plan, plan.profile.batch_size / simulate(plan, MINIBATCHES).samples_per_s)


def at_speeds(plan: Plan, *speeds: float) -> Plan:
    return replace(plan, cluster=replace(plan.cluster, devices=tuple(Device(speed=speed) for speed in speeds)))


def with_link(plan: Plan, **fields: float) -> Plan:
    level = replace(plan.cluster.levels[0], **fields)
    return replace(plan, cluster=replace(plan.cluster, levels=(level,)))


def with_slow_updates(plan: Plan) -> Plan:
    (kind,) = plan.profile.seconds
    rows = tuple(replace(row, update_s=0.02) for row in plan.profile.seconds[kind])
    return replace(plan, profile=replace(plan.profile, seconds={kind: rows}))


def one_in_flight(plan: Plan) -> Plan:
    return replace(plan, stages=tuple(replace(stage, in_flight=1) for stage in plan.stages))


def delayed(trace: Trace, delay_s: Callable[[Event], float]) -> Trace:
    """As if every worker took so much longer to come to an action; all workers keep in step."""
    late_s, events = 0.0, []
    for event in sorted(trace.events, key=lambda event: event.start_s):
        late_s += delay_s(event)
        events.append(replace(event, start_s=event.start_s + late_s, end_s=event.end_s + late_s))
    return replace(trace, origin="measured", events=tuple(events))


CHANGES: dict[str, tuple[Plan, Callable[[Plan], Plan], str, str]] = {
    "a slow machine": (TWO_STAGES, lambda plan: at_speeds(plan, 0.5, 0.5), "computing", "every action took 2.00 times"),
    "a slow device": (TWO_STAGES, lambda plan: at_speeds(plan, 1.0, 0.5), "computing", "stage 1 on device 1 took 2.00"),
    "a slow link": (SYNCHRONOUS, lambda plan: with_link(plan, latency_s=0.05), "messages", "messages on their way"),
    "slow averaging": (
        REPLICAS,
        lambda plan: with_link(plan, bytes_per_s=2e7),
        "averaging",
        "averaging gradients took",
    ),
    "slow updates": (TWO_STAGES, with_slow_updates, "updates", "updates took 20 ms instead of 0"),
    "waiting": (TWO_STAGES, one_in_flight, "waiting", "for other workers: the schedule"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_main_cause_is_named_first_and_with_numbers(change: str) -> None:
    plan, changed, cause, words = CHANGES[change]
    plan = with_steady_prediction(plan)
    found = explain(plan, simulate(changed(plan), MINIBATCHES), simulate(plan, MINIBATCHES))
    assert found.cause == cause, found
    assert words in found.text
    assert "slower than predicted" in found.text
    assert found.text.endswith(".")
    assert ". " not in found.text  # one sentence


def test_loading_of_data_is_told_from_waiting_for_it_at_other_stages() -> None:
    plan = with_steady_prediction(SYNCHRONOUS)
    simulated = simulate(plan, MINIBATCHES)
    first = Action(0, Kind.FORWARD, 0)[:2]
    measured = delayed(simulated, lambda event: 0.02 if event.action[:2] == first else 0.0)
    found = explain(plan, measured, simulated)
    assert found.cause == "loading"
    assert "loading data took 80 ms instead of 0" in found.text


def test_pauses_and_a_workers_own_time_are_told_from_loading() -> None:
    plan = with_steady_prediction(SYNCHRONOUS)
    simulated = simulate(plan, MINIBATCHES)
    evaluations = {Action(0, Kind.FORWARD, 4 * minibatch) for minibatch in (15, 20, 25)}
    found = explain(plan, delayed(simulated, lambda event: float(event.action in evaluations)), simulated)
    assert found.cause == "between actions"
    assert "evaluations and checkpoints" in found.text


def test_a_run_as_predicted_says_so() -> None:
    plan = with_steady_prediction(TWO_STAGES)
    found = explain(plan, simulate(at_speeds(plan, 0.97, 0.97), MINIBATCHES), simulate(plan, MINIBATCHES))
    assert found.cause == ""
    assert "agree to within 5%" in found.text


def test_a_run_faster_than_predicted_is_explained_too() -> None:
    plan = with_steady_prediction(TWO_STAGES)
    found = explain(plan, simulate(at_speeds(plan, 2.0, 2.0), MINIBATCHES), simulate(plan, MINIBATCHES))
    assert found.cause == "computing"
    assert "100% faster" in found.text
    assert "every action took 0.50 times" in found.text


def test_what_the_simulator_itself_plays_otherwise_is_not_blamed_on_the_machine() -> None:
    plan = with_steady_prediction(SYNCHRONOUS)
    plan = predicting(plan, plan.prediction.seconds_per_minibatch / 2)
    found = explain(plan, simulate(plan, MINIBATCHES), simulate(plan, MINIBATCHES))
    assert found.cause == "steady state"
    assert "the prediction is of a long run" in found.text


def test_further_causes_follow_the_main_one() -> None:
    plan = with_steady_prediction(REPLICAS)
    changed = with_link(at_speeds(plan, 0.4, 0.4), bytes_per_s=2e7)
    found = explain(plan, simulate(changed, MINIBATCHES), simulate(plan, MINIBATCHES))
    assert {found.cause} < {"computing", "averaging"}
    assert ("averaging +" if found.cause == "computing" else "computing +") in found.text


def test_a_trace_without_events_is_no_comparison() -> None:
    plan = with_steady_prediction(TWO_STAGES)
    nothing = Trace(origin="measured", workers=plan.worker_names, samples=(), events=())
    assert "too short" in explain(plan, nothing, simulate(plan, 2)).text
