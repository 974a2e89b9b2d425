from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import chain_graph, chain_profile, flat_cluster, law, layer_seconds, plan_of, profile_of, profiles
from penstock.cluster import Cluster, Device, Level
from penstock.cost import CostModel, message, ring_allreduce, ring_terms, stashes_weights
from penstock.errors import ProfileError
from penstock.graph import Layer, LayerGraph, Value
from penstock.plan import Stage
from penstock.plan_costs import PlanCosts
from penstock.profile import LayerSeconds, Profile
from penstock.schedule import Action, family


def model(profile: Profile | None = None, cluster: Cluster | None = None, microbatch_size: float = 1) -> CostModel:
    return CostModel(
        profile=profile or chain_profile([1.0]), cluster=cluster or flat_cluster(4), microbatch_size=microbatch_size
    )


@law
@given(st.integers(2, 16), st.integers(1, 10**9), st.floats(1e3, 1e11), st.floats(0, 1e-2))
def test_a_ring_all_reduce_moves_two_times_all_but_one_share_in_as_many_steps(
    workers: int, num_bytes: int, bytes_per_s: float, latency_s: float
) -> None:
    costs = model(cluster=flat_cluster(workers, bytes_per_s=bytes_per_s, latency_s=latency_s))
    moved_s = 2 * (workers - 1) / workers * num_bytes / bytes_per_s
    assert costs.allreduce_s(num_bytes, range(workers)) == pytest.approx(moved_s + 2 * (workers - 1) * latency_s)


@law
@given(st.integers(2, 16), st.integers(0, 10**9), st.floats(1e3, 1e11), st.floats(0, 1e-2))
def test_the_terms_of_a_ring_add_up_to_its_seconds(
    workers: int, num_bytes: int, bytes_per_s: float, latency_s: float
) -> None:
    link = Level(size=workers, bytes_per_s=bytes_per_s, latency_s=latency_s)
    step_s, wire_s = ring_terms(num_bytes, link)
    seconds = ring_allreduce(num_bytes, workers).seconds(link)
    assert (workers - 1) * (step_s + wire_s / workers) == pytest.approx(seconds)


def test_an_all_reduce_of_one_device_or_of_nothing_is_free() -> None:
    costs = model(cluster=flat_cluster(4, latency_s=1.0))
    assert costs.allreduce_s(10**9, [2]) == 0.0
    assert costs.allreduce_s(0, [0, 1, 2]) == 0.0


def test_an_all_reduce_across_hosts_goes_at_the_rate_between_hosts() -> None:
    levels = (Level(size=2, bytes_per_s=100.0), Level(size=2, bytes_per_s=10.0))
    costs = model(cluster=Cluster(name="c", devices=(Device(),) * 4, levels=levels))
    assert costs.allreduce_s(100, [0, 1]) == pytest.approx(1.0)
    assert costs.allreduce_s(100, [1, 2]) == pytest.approx(10.0)


def test_a_message_costs_latency_and_bytes_over_bandwidth_and_nothing_for_nothing() -> None:
    link = flat_cluster(2, bytes_per_s=100.0, latency_s=0.5).link(0, 1)
    assert message(200).seconds(link) == pytest.approx(2.5)
    assert message(0).seconds(link) == 0.0


@law
@given(profiles(one_size=True), st.floats(0.25, 16.0), st.floats(0.25, 4.0))
def test_seconds_and_bytes_of_one_measured_size_scale_with_the_samples_but_updates_do_not(
    profile: Profile, times: float, speed: float
) -> None:
    cluster = Cluster(name="c", devices=(Device(speed=speed),), levels=(Level(size=1, bytes_per_s=1.0),))
    layers = profile.graph.order
    small = model(profile, cluster, profile.microbatch_size)
    large = model(profile, cluster, profile.microbatch_size * times)
    rows = profile.seconds["cpu"]
    assert small.forward_s(layers, 0) == pytest.approx(sum(row.forward_s for row in rows) / speed)
    assert large.forward_s(layers, 0) == pytest.approx(times * small.forward_s(layers, 0))
    assert large.backward_s(layers, 0) == pytest.approx(times * small.backward_s(layers, 0))
    assert large.update_s(layers, 0, stashed=True) == pytest.approx(small.update_s(layers, 0, stashed=True))
    first, rest = layers[:1], layers[1:]
    assert large.forward_bytes(first, rest) == pytest.approx(times * small.forward_bytes(first, rest))
    assert large.parameter_bytes(layers) == small.parameter_bytes(layers)


def test_halves_of_a_backward_taken_apart_cost_more_and_the_schedules_that_do_so_count_it() -> None:
    rows = LayerSeconds(forward_s=1.0, backward_input_s=2.0, backward_weight_s=3.0, halving_s=0.4, apart_s=0.5)
    costs = model(profile_of(chain_graph(1), [rows]))
    assert costs.microbatch_s([0], 0, family("1f1b")) == pytest.approx(6.0)
    assert costs.microbatch_s([0], 0, family("zb-h1")) == pytest.approx(6.9)
    assert costs.forward_s([0], 0, halves=True) == pytest.approx(1.4)
    assert costs.backward_input_s([0], 0, halves=True) == pytest.approx(2.2)
    assert costs.backward_weight_s([0], 0, halves=True) == pytest.approx(3.3)


def test_costs_belong_to_layers_by_id_and_not_by_their_place_in_the_order() -> None:
    layers = (Layer(id=7, name="b", kind="Any"), Layer(id=3, name="a", kind="Any"))
    graph = LayerGraph(layers=layers, values=(Value(name="v", producer=3, consumers=(7,), num_bytes=1),))
    costs = model(profile_of(graph, [layer_seconds(5.0), layer_seconds(1.0)]))
    assert graph.order == (3, 7)
    assert (costs.forward_s([7], 0), costs.forward_s([3], 0)) == (5.0, 1.0)


def test_a_device_takes_the_seconds_of_its_own_kind() -> None:
    profile = replace(chain_profile([1.0]), seconds={"cpu": (layer_seconds(1.0),), "gpu": (layer_seconds(0.25),)})
    devices = (Device(kind="gpu"), Device(kind="cpu", speed=0.5), Device())
    costs = model(profile, Cluster(name="c", devices=devices, levels=(Level(size=3, bytes_per_s=1.0),)))
    assert [costs.forward_s([0], device) for device in range(3)] == [0.25, 2.0, 1.0]


def test_a_kind_that_was_not_profiled_is_refused_with_those_that_were() -> None:
    cluster = Cluster(name="c", devices=(Device(kind="TPU"),), levels=(Level(size=1, bytes_per_s=1.0),))
    with pytest.raises(ProfileError, match="no costs for device kind 'TPU', only for cpu; profile it there, or name"):
        model(cluster=cluster).forward_s([0], 0)


def test_a_value_crosses_forward_once_and_back_only_if_it_has_a_gradient() -> None:
    graph = LayerGraph(
        layers=tuple(Layer(id=i, name=f"l{i}", kind="Any") for i in range(3)),
        values=(
            Value(name="activation", producer=0, consumers=(1, 2), num_bytes=100),
            Value(name="mask", producer=0, consumers=(2,), num_bytes=10, differentiable=False),
        ),
    )
    profile = profile_of(graph, [layer_seconds(1.0)] * 3)
    assert model(profile, microbatch_size=2).forward_bytes({0}, {1, 2}) == 220
    costs = PlanCosts(plan_of(profile, flat_cluster(2), [[0], [1, 2]], microbatches=4))
    assert (costs.message_bytes(0, 1), costs.message_bytes(1, 0)) == (220, 200)


def test_memory_is_versions_and_gradient_of_weights_and_optimizer_state_and_activations_in_flight() -> None:
    graph = chain_graph(2, parameter_bytes=100, saved_bytes=7, tied=(0, 1))
    parameters = tuple(replace(parameter, state_bytes=1000) for parameter in graph.parameters)
    costs = model(profile_of(replace(graph, parameters=parameters), [layer_seconds(1.0)] * 2), microbatch_size=3)
    stage = Stage(layers=(0, 1), devices=(0,), in_flight=4)
    assert costs.stage_memory_bytes(stage, family("1f1b")) == 100 * 2 + 100 + 1000 + 4 * 3 * 14
    assert costs.stage_memory_bytes(stage, family("pipedream")) == 100 * 5 + 1000 + 4 * 3 * 14
    assert costs.stage_memory_bytes(stage, family("pipedream"), share=2) == 100 * 5 + 1000 + 7 * 3 * 14
    assert costs.stage_memory_bytes(stage, family("inference")) == 100 + 3 * 14


def test_with_all_forwards_first_a_replica_keeps_its_share_of_every_round() -> None:
    profile = chain_profile([1.0], batch_size=6, saved_bytes=10)
    for schedule, kept in (("gpipe", 2 * 3), ("1f1b", 2 * (3 - 1) + 1)):
        plan = plan_of(profile, flat_cluster(1), [[0]], schedule=schedule, microbatches=6, shares=[(2,)])
        plan = replace(plan, stages=(replace(plan.stages[0], in_flight=3),))
        assert PlanCosts(plan).memory_bytes(0) == pytest.approx(10 * kept)


def test_a_stage_that_recomputes_keeps_its_inputs_and_the_rest_of_one_microbatch() -> None:
    profile = chain_profile([1.0] * 3, value_bytes=10, saved_bytes=100, parameter_bytes=1000)
    stage = Stage(layers=(1, 2), devices=(0,), in_flight=5, recompute=True)
    buffers = 2 * 10
    assert model(profile).stage_memory_bytes(stage, family("1f1b")) == 2 * 2000 + 1000 + 5 * 10 + 200 + buffers
    assert model(profile).backward_s([1, 2], 0, recompute=True) == model(profile).backward_s([1, 2], 0) + 2.0


def test_a_plan_knows_the_seconds_of_each_action_and_meeting_and_the_bytes_of_each_message() -> None:
    profile = chain_profile([1.0, 2.0], batch_size=4, microbatch_size=2, value_bytes=30, parameter_bytes=60)
    plan = plan_of(profile, flat_cluster(3, bytes_per_s=10.0), [[0], [1]], [1, 2], microbatches=4)
    costs = PlanCosts(plan)
    assert costs.compute_s(Action.parse("0F0"), 0) == pytest.approx(0.5)
    assert costs.compute_s(Action.parse("1B0"), 2) == pytest.approx(2.0)
    assert costs.compute_s(Action.parse("1STEP0"), 1) == 0.0
    assert costs.message_bytes(0, 1) == costs.message_bytes(1, 0) == pytest.approx(15)
    assert costs.sync_s(0) == 0.0
    assert costs.sync_s(1) == pytest.approx(6.0)


def test_an_update_beside_microbatches_in_flight_copies_the_weights_first() -> None:
    graph = chain_graph(2)
    rows = [LayerSeconds(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, update_s=0.5, copy_s=0.25)] * 2
    model = CostModel(profile=profile_of(graph, rows), cluster=flat_cluster(1), microbatch_size=1)
    assert model.update_s([0, 1], 0, stashed=False) == pytest.approx(1.0)
    assert model.update_s([0, 1], 0, stashed=True) == pytest.approx(1.5)
    assert [stashes_weights(a, d) for a, d in ((True, 1), (True, 2), (False, 2))] == [False, True, False]


def test_the_bottleneck_is_the_slowest_stage_or_link() -> None:
    def costs(value_bytes: int) -> PlanCosts:
        profile = chain_profile([1.0, 3.0, 2.0], batch_size=1, value_bytes=value_bytes)
        return PlanCosts(plan_of(profile, flat_cluster(4, bytes_per_s=1.0), [[0], [1], [2]], [1, 1, 2]))

    assert costs(1).bottleneck() == (1, 1)
    assert costs(1).bottleneck_s() == costs(1).stage_s(1) == pytest.approx(9.0)
    assert costs(100).bottleneck() == (0, 1)
    assert costs(100).bottleneck_s() == costs(100).cut_s(0) == pytest.approx(100.0)


def test_memory_is_set_against_the_smallest_device_of_a_stage() -> None:
    profile = chain_profile([1.0, 1.0], parameter_bytes=100)
    plan = plan_of(profile, flat_cluster(3, memory_bytes=1000), [[0], [1]], [1, 2])
    devices = tuple(Device(memory_bytes=size) for size in (None, 800, 400))
    costs = PlanCosts(replace(plan, cluster=replace(plan.cluster, devices=devices)))
    assert costs.memory_share(0) is None
    assert costs.memory_share(1) == pytest.approx(costs.stage_memory_bytes(1) / 400)


def test_layers_take_the_time_of_the_slowest_replica() -> None:
    plan = plan_of(chain_profile([1.0, 2.0], batch_size=1), flat_cluster(2), [[0, 1]], [2])
    devices = (Device(), Device(speed=0.5))
    costs = PlanCosts(replace(plan, cluster=replace(plan.cluster, devices=devices)))
    assert costs.layers_s(0, [1]) == (pytest.approx(4.0), pytest.approx(8.0))


def test_a_value_for_several_stages_leaves_once_for_each() -> None:
    graph = chain_graph(3, value_bytes=10)
    values = (replace(graph.values[0], consumers=(1, 2)), graph.values[1])
    plan = plan_of(
        profile_of(replace(graph, values=values), [layer_seconds(1.0)] * 3, batch_size=1),
        flat_cluster(3),
        [[0], [1], [2]],
    )
    costs = PlanCosts(plan)
    assert [costs.output_bytes(stage) for stage in range(3)] == [20, 10, 0]
    assert [costs.input_bytes(stage) for stage in range(3)] == [0, 10, 20]
