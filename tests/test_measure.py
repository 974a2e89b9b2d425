"""Profiling: what is measured, and that the model is as it was afterwards."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from in_threads import profile
from models import MODELS, make_job
from penstock import codec
from penstock.profile import Profile
from penstock.runtime.measure import profile_job


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


def test_layers_and_the_workers_own_time_add_up_to_a_whole_step() -> None:
    """By a clock on which everything takes a second: so does the step's forward, backward and update. Halves of a
    backward taken apart are two things, and each layer's own."""
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
        assert own.forward_s + sum(row.forward_s for row in rows) == pytest.approx(1.0)
        backward_s = sum(row.backward_input_s + row.backward_weight_s for row in rows)
        assert own.backward_s + backward_s == pytest.approx(1.0)
        assert own.update_s + sum(row.update_s for row in rows) == pytest.approx(1.0)
    rows = made.seconds["cpu"]
    products = ["conv" in layer.kind.lower() or "linear" in layer.kind.lower() for layer in made.graph.layers]
    assert any(products)
    assert [row.halving_s for row in rows] == [1.0 if product else 0.0 for product in products]
