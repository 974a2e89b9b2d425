"""Profiling: what is measured, and that the model is as it was afterwards."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from builders import flat_cluster, law
from in_threads import profile
from models import MODELS, make_job
from penstock import codec
from penstock.planner import make_plan
from penstock.profile import Profile
from penstock.runtime.measure.layer_times import LayerRun, times_of
from penstock.runtime.measure.measure import UNCERTAINTY, profile_job, sizes_to_measure


@pytest.mark.parametrize("name", MODELS)
def test_profiling_leaves_the_model_untouched(name: str) -> None:
    """Weights, buffers, gradients, mode, random state."""
    job = make_job(name)
    job.model.eval()
    for parameter in job.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, random_state = copy.deepcopy(job.model.state_dict()), torch.get_rng_state()
    profile(job)
    for key, tensor in job.model.state_dict().items():
        assert torch.equal(tensor, before[key]), key
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in job.model.parameters() if p.grad is not None)
    assert not any(module.training for module in job.model.modules())
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("name", MODELS)
def test_a_profile_of_a_real_model_round_trips(name: str) -> None:
    made = profile(make_job(name))
    assert codec.loads(Profile, codec.dumps(made), "profile.json") == made


def test_bytes_are_those_of_the_tensors() -> None:
    made = profile(make_job("conv", batch_size=4))
    layers = {layer.name: layer for layer in made.graph.layers}
    values = {value.producer: value for value in made.graph.values}
    assert values[0].num_bytes == 4 * 4 * 4 * 4 * 4  # samples, channels, height, width, float32
    assert sum(p.num_bytes for p in made.graph.parameters_of([layers["0"].id])) == (4 * 9 + 4) * 4
    assert layers["4"].saved_bytes == 0  # flatten keeps nothing
    momentum = made.graph.parameter_by_name["0.weight"].state_bytes
    assert momentum == made.graph.parameter_by_name["0.weight"].num_bytes


def test_what_two_layers_keep_is_counted_once() -> None:
    """ReLU keeps its output, and the linear layer behind it the same tensor as its input."""
    job = make_job("conv")
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    flat = [(x.flatten(), y) for x, y in (job.data[i] for i in range(len(job.data)))]
    made = profile(type(job)(model=model, data=flat, loss=job.loss, optimizer=job.optimizer, batch_size=4))
    kept = {layer.name: layer.saved_bytes for layer in made.graph.layers}
    assert kept["1"] == 4 * 8 * 4
    assert kept["2"] == 0


def test_a_tied_weight_is_one_parameter_of_two_layers() -> None:
    made = profile(make_job("tied"))
    users = [layer.name for layer in made.graph.layers if "embed.weight" in layer.parameters]
    assert users == ["embed", "head"]


def test_backward_for_input_and_for_weight_are_told_apart() -> None:
    made = profile(make_job("conv"))
    seconds = dict(zip((layer.name for layer in made.graph.layers), made.seconds["cpu"], strict=True))
    assert seconds["0"].backward_weight_s > 0
    assert seconds["1"].backward_weight_s == 0  # no weights
    assert seconds["1"].backward_input_s > 0
    assert all(row.forward_s > 0 for row in made.seconds["cpu"])


def test_layers_and_the_workers_own_time_add_up_to_the_steps_of_halves() -> None:
    """By a clock on which everything takes a second: so does the forward, backward and update of each half."""
    ticks = itertools.count()
    made = profile_job(
        make_job("conv"),
        clock=lambda: float(next(ticks)),
        device=torch.device("cpu"),
        microbatch_size=2,
        threads=1,
        repeats=2,
        progress=lambda done, total: None,
    )
    own = made.worker["cpu"]
    assert own.between_s == own.backward_input_s == own.backward_weight_s == pytest.approx(1.0)
    for rows in (made.seconds["cpu"], *(size.seconds["cpu"] for size in made.other_sizes)):
        assert own.forward_s + sum(row.forward_s for row in rows) / 2 == pytest.approx(1.0)
        backward_s = sum(row.backward_input_s + row.backward_weight_s for row in rows)
        assert own.backward_s + backward_s / 2 == pytest.approx(1.0)
        assert own.update_s + sum(row.update_s for row in rows) == pytest.approx(1.0)


def test_what_it_costs_to_go_layer_by_layer_is_not_part_of_a_layers_seconds() -> None:
    """Found on models with many small layers: stages that had more of them were predicted slower than they are."""
    empty_whole, empty_halves = [LayerRun(1.0, 1.0, 0.0)], [LayerRun(1.0, 1.0, 0.5)]
    times = times_of([LayerRun(3.0, 5.0, 0.0)], [LayerRun(3.5, 3.0, 3.0)], empty_whole, empty_halves)
    assert (times.forward_s, times.backward_s) == pytest.approx((2.0, 4.0))
    assert (times.halved_forward_s, times.input_s, times.weight_s) == pytest.approx((2.5, 2.0, 2.5))
    assert times.weight_share == pytest.approx(2.5 / 4.5)


def test_a_layer_that_takes_no_longer_than_an_empty_one_still_takes_some_time() -> None:
    times = times_of(
        [LayerRun(1.0, 1.0, 0.0)], [LayerRun(1.0, 1.0, 0.0)], [LayerRun(1.1, 1.1, 0.0)], [LayerRun(1.1, 1.1, 0.0)]
    )
    assert (times.forward_s, times.input_s, times.weight_s) == pytest.approx((0.1, 0.1, 0.0))


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, [1]), (2, [2, 1]), (4, [4, 2]), (8, [8, 4, 1]), (64, [64, 32, 8, 2]), (7, [7, 3])]
)
def test_few_sizes_are_measured(largest: int, sizes: list[int]) -> None:
    assert sizes_to_measure(largest) == sizes


@law
@given(st.integers(1, 10**5))
def test_sizes_are_whole_and_fall_from_the_largest(largest: int) -> None:
    sizes = sizes_to_measure(largest)
    assert sizes[0] == largest
    assert all(small < large for large, small in itertools.pairwise(sizes))
    assert sizes[-1] >= 1
    assert sum(sizes) < 2 * largest


def test_costs_of_smaller_microbatches_are_measured_too() -> None:
    made = profile(make_job("conv", samples=16, batch_size=8))
    assert made.measured_sizes == (1, 4, 8)
    for size in made.other_sizes:
        share = size.microbatch_size / 8
        assert list(size.value_bytes) == [value.num_bytes * share for value in made.graph.values]
        saved = zip(size.saved_bytes, [layer.saved_bytes for layer in made.graph.layers], strict=True)
        assert all(share * large <= small <= large for small, large in saved)  # batch norm keeps means at any size
        assert [row.update_s for row in size.seconds["cpu"]] == [row.update_s for row in made.seconds["cpu"]]
        assert all(row.forward_s >= 0 for row in size.seconds["cpu"])
    assert made.load_s > 0
    assert made.worker["cpu"].forward_s > 0
    assert made.uncertainty == UNCERTAINTY
    assert made.smallest_microbatch == 1


def test_stages_load_where_inputs_and_targets_are_read() -> None:
    made = profile(make_job("conv"))
    assert [layer.reads_data for layer in made.graph.layers] == [
        index in (0, len(made.graph.layers) - 1) for index in range(len(made.graph.layers))
    ]


def test_a_size_that_the_model_does_not_take_is_left_out() -> None:
    """Batch norm over one sample is refused by torch."""
    job = make_job("conv", samples=16, batch_size=8)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    flat = [(x.flatten(), y) for x, y in (job.data[i] for i in range(len(job.data)))]
    made = profile(type(job)(model=model, data=flat, loss=job.loss, optimizer=job.optimizer, batch_size=8))
    assert made.measured_sizes == (4, 8)
    assert made.smallest_microbatch == 2
    plan = make_plan(made, flat_cluster(4), schedule="1f1b")
    assert plan.microbatches <= 4
    assert codec.loads(Profile, codec.dumps(made), "profile.json") == made


def test_a_size_that_the_job_asks_for_and_the_model_does_not_take_is_an_error() -> None:
    job = make_job("conv", samples=4, batch_size=1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    with pytest.raises(Exception, match="more than 1 value per channel"):
        profile(type(job)(model=model, data=job.data, loss=job.loss, optimizer=job.optimizer, batch_size=1))


@pytest.mark.parametrize("microbatch_size", [1, 2, 4])
def test_a_part_of_a_minibatch_can_be_profiled(microbatch_size: int) -> None:
    """By a slow clock, so that everything is repeated as seldom as can be."""
    ticks = itertools.count()
    made = profile_job(
        make_job("tied", batch_size=4),
        clock=lambda: float(next(ticks)),
        device=torch.device("cpu"),
        microbatch_size=microbatch_size,
        threads=1,
        repeats=1,
        progress=lambda done, total: None,
    )
    assert made.measured_sizes[-1] == microbatch_size
    assert made.worker["cpu"].between_s == 1.0
