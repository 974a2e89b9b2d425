"""Invariant 2: a backward uses the weights of its own forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from models import Scale, sgd
from penstock.remedy import Remedy
from penstock.runtime.stage.weights import Weights

# (module, input, whether its backward for the input reads the weights)
CASES = {
    "linear": (lambda: nn.Linear(6, 6), (4, 6)),
    "convolution": (lambda: nn.Conv2d(2, 2, 3, padding=1), (4, 2, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 6)),
    "multiply": (lambda: Scale(6), (4, 6)),
}


def forward(module: nn.Module, leaves: dict[str, Tensor], x: Tensor) -> Tensor:
    result: Tensor = torch.func.functional_call(module, leaves, (x,))
    return result.square().sum()


@pytest.mark.parametrize("name", CASES)
def test_backward_uses_the_weights_of_its_forward(name: str) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape, requires_grad=True)
    expected = torch.autograd.grad(forward(module, dict(module.named_parameters()), x), [x, *module.parameters()])

    weights = Weights(dict(module.named_parameters()), sgd)
    version = weights.acquire()
    loss = forward(module, version.leaves, x)
    for _ in range(3):  # three steps while the microbatch is in flight
        weights.gradients.update({key: torch.randn_like(p) for key, p in weights.parameters.items()})
        weights.step()
    weights.backward(version, loss.backward, scale=1.0)
    torch.testing.assert_close(x.grad, expected[0])
    for key, gradient in zip(weights.parameters, expected[1:], strict=True):
        torch.testing.assert_close(weights.gradients[key], gradient)


@pytest.mark.parametrize("name", ["convolution", "layer norm", "multiply"])
def test_swapping_data_under_a_live_graph_would_be_wrong(name: str) -> None:
    """The trap that versions avoid, so that nobody simplifies them away."""
    make, shape = CASES[name]
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape, requires_grad=True)
    (expected,) = torch.autograd.grad(forward(module, dict(module.named_parameters()), x), [x])
    loss = forward(module, dict(module.named_parameters()), x)
    for parameter in module.parameters():
        parameter.data = parameter.data + 1.0
    (found,) = torch.autograd.grad(loss, [x])
    assert not torch.allclose(found, expected)


def one_parameter() -> Weights:
    return Weights({"w": nn.Parameter(torch.ones(1000))}, lambda named: torch.optim.SGD(named, lr=0.5))


def give_gradient(weights: Weights) -> None:
    weights.gradients.update({"w": torch.ones(1000)})


def test_a_step_with_nothing_in_flight_copies_nothing() -> None:
    weights = one_parameter()
    where = weights.parameters["w"].data_ptr()
    for _ in range(3):
        version = weights.acquire()
        weights.release(version)
        give_gradient(weights)
        weights.step()
    assert weights.parameters["w"].data_ptr() == where
    assert weights.version == 3


def test_a_version_costs_memory_only_while_it_is_in_flight() -> None:
    weights = one_parameter()
    places = set()
    in_flight = [weights.acquire()]
    for step in range(6):  # depth 2, as a first stage of two
        in_flight.append(weights.acquire())
        weights.release(in_flight.pop(0))
        give_gradient(weights)
        weights.step()
        places.add(weights.parameters["w"].data_ptr())
        assert weights.version == step + 1
    assert len(places) <= 2


def test_versions_in_flight_keep_their_values() -> None:
    weights = one_parameter()
    held = []
    for _ in range(4):
        held.append(weights.acquire())
        give_gradient(weights)
        weights.step()
    assert [float(version.leaves["w"].detach()[0]) for version in held] == [1.0, 0.5, 0.0, -0.5]
    assert float(weights.parameters["w"].detach()[0]) == -1.0


def test_who_looks_equally_far_ahead_of_a_version_shares_its_leaves_and_no_other_sees_them() -> None:
    weights = Weights(
        {"w": nn.Parameter(torch.ones(1000))},
        lambda named: torch.optim.SGD(named, lr=0.5),
        remedy=Remedy(look_ahead=1.0),
    )
    assert weights.acquire(staleness=2).leaves["w"][0] == 1.0  # no update yet to go on from
    for _ in range(2):
        give_gradient(weights)
        weights.step()
    once, again, further, plain = (weights.acquire(staleness=ahead) for ahead in (1, 1, 3, 0))
    assert once is again
    assert [float(each.leaves["w"].detach()[0]) for each in (once, further, plain)] == [-0.5, -1.5, 0.0]
    give_gradient(weights)
    weights.step()
    assert [float(each.leaves["w"].detach()[0]) for each in (once, further, plain)] == [-0.5, -1.5, 0.0]


def test_a_step_counts_the_updates_since_the_forwards_whose_gradients_it_applies() -> None:
    weights = one_parameter()
    held = [weights.acquire() for _ in range(3)]
    for version in held:
        weights.finish(version)
        give_gradient(weights)
        weights.step()
    weights.release(weights.acquire())  # without a backward: nobody's gradient
    weights.step()
    assert weights.staleness == {0: 1, 1: 1, 2: 1}


def test_gradients_accumulate_over_a_round_with_their_scales() -> None:
    weights = one_parameter()
    for scale in (1.0, 1.0, 0.5, 0.25):
        version = weights.acquire()
        loss = version.leaves["w"].sum()
        weights.backward(version, lambda loss=loss: loss.backward(), scale)  # type: ignore[misc]
        weights.release(version)
    torch.testing.assert_close(weights.gradients["w"], torch.full((1000,), 2.75))


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    parameters = {"used": nn.Parameter(torch.ones(2)), "unused": nn.Parameter(torch.ones(2))}
    weights = Weights(parameters, lambda named: torch.optim.SGD(named, lr=0.1, weight_decay=0.1))
    weights.gradients.update({"used": torch.ones(2)})
    weights.step()
    assert torch.equal(parameters["unused"].data, torch.ones(2))


def test_frozen_parameters_are_used_and_not_updated() -> None:
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    weights = Weights({"frozen": frozen, "free": nn.Parameter(torch.ones(3))}, sgd)
    version = weights.acquire()
    loss = (version.leaves["frozen"] * version.leaves["free"]).sum()
    weights.backward(version, loss.backward, scale=1.0)
    weights.step()
    assert torch.equal(frozen.data, torch.ones(3))
    assert float(weights.parameters["free"].detach()[0]) < 1.0
