"""Backwards taken in two halves: which gradients are put off, and what may follow an operation that puts one off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from in_threads import check_same_gradients, even_plan, profile, recomputing, run_in_threads
from models import sgd
from penstock import Job, Remedy
from penstock.runtime.stage.deferred import Deferring, PutOff
from penstock.runtime.stage.weights import Version, Weights


class WeightsMadeByAStage(nn.Module):
    """The first half of the model makes the weights and the bias that the second half multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.kernel, self.table = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.own_bias = nn.Parameter(torch.randn(6))
        self.own_weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        square = x.t() @ x
        weight, kernel, table = self.weight(square), self.kernel(square), self.table(square)
        h = torch.tanh(self.first(x))
        h = torch.tanh(self.second(h))
        h = torch.tanh(F.linear(h, weight, self.own_bias))
        h = torch.tanh(F.linear(h, self.own_weight, table[0]))
        h = torch.tanh(torch.addmm(self.own_bias, h, weight))
        h = torch.tanh(F.conv1d(h[:, None], kernel[:3, None, :3], None, 1, 1)).sum(1)
        return h + F.embedding(h.argmax(dim=1), table)


class InPlace(nn.Module):
    """Writes into the result of every operation whose weight gradient can be put off."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.conv = nn.Conv1d(5, 5, 3, padding=1)
        self.product, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
        self.head = nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).mul_(0.5)
        h = F.relu(self.up(h), inplace=True)
        h = self.down(h)
        h /= 8**0.5
        h.view(-1, 2, 4)[:, 0].clamp_(max=0.2)
        h = self.conv(h).tanh_()
        h = torch.addmm(self.bias, h.view(-1, 8), self.product).sigmoid_().view(h.shape)
        return self.head(h).clamp_(-5, 5)


def job_of_vectors(model: Callable[[], nn.Module], **fields: Any) -> Job:
    torch.manual_seed(0)
    made, inputs = model(), torch.randn(8, 6)
    data = list(zip(inputs, torch.randn(8, 6), strict=True))
    return Job(model=made, data=data, loss=F.mse_loss, optimizer=sgd, batch_size=4, epochs=1, **fields)


def job_of_tokens(model: Callable[[], nn.Module], **fields: Any) -> Job:
    torch.manual_seed(0)
    made, tokens = model(), torch.randint(0, 20, (8, 5))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    return Job(
        model=made,
        data=list(zip(tokens, tokens, strict=True)),
        loss=loss,
        optimizer=sgd,
        batch_size=4,
        epochs=1,
        **fields,
    )


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_weights_that_another_stage_made_get_their_gradients(stages: int) -> None:
    def make() -> Job:
        return job_of_vectors(WeightsMadeByAStage)

    plan = even_plan(profile(make()), (1,) * stages, "zb-h1", microbatches=2)
    check_same_gradients(plan, make)


def test_weights_that_another_stage_made_train_the_layer_that_made_them() -> None:
    def make() -> Job:
        return job_of_vectors(WeightsMadeByAStage)

    before = {name: value.clone() for name, value in make().model.state_dict().items()}
    plan = even_plan(profile(make()), (1, 1), "zb-h1", microbatches=2)
    for assembly in run_in_threads(plan, make):
        for stage in assembly.worker.stages.values():
            for name, parameter in stage.weights.parameters.items():
                assert not torch.equal(parameter.data, before[name]), name


def put_off(version: Version, compute: Callable[[], Tensor]) -> tuple[PutOff, Mapping[str, Tensor | None]]:
    """What is left after the first half, and the gradients that the first half has found."""
    later = PutOff(version.trained_ids)
    with Deferring(later):
        made = compute()
    made.sum().backward()  # type: ignore[no-untyped-call]
    return later, {name: leaf.grad for name, leaf in version.trained.items()}


def weights_of(**parameters: nn.Parameter) -> Weights:
    return Weights(parameters, lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))


def test_a_trained_weight_is_put_off_and_a_received_one_is_not() -> None:
    weights = weights_of(own=nn.Parameter(torch.randn(3, 3)))
    version, received = weights.acquire(), torch.randn(3, 3, requires_grad=True)
    later, found = put_off(version, lambda: F.linear(F.linear(torch.randn(2, 3), version.leaves["own"]), received))
    assert received.grad is not None
    assert found["own"] is None
    later.make()
    assert version.leaves["own"].grad is not None


@pytest.mark.parametrize("own", ["weight", "bias"])
def test_a_linear_of_which_only_one_operand_is_trained_loses_neither_gradient(own: str) -> None:
    other = {"weight": "bias", "bias": "weight"}[own]
    tensors = {"weight": torch.randn(3, 3), "bias": torch.randn(3)}
    version = weights_of(**{own: nn.Parameter(tensors[own])}).acquire()
    operands = {own: version.leaves[own], other: tensors[other].requires_grad_()}
    later, _ = put_off(version, lambda: F.linear(torch.randn(2, 3), operands["weight"], operands["bias"]))
    later.make()
    assert all(operand.grad is not None for operand in operands.values())


def test_leaves_that_look_ahead_are_put_off_as_the_version_they_come_from() -> None:
    weights = weights_of(own=nn.Parameter(torch.randn(3, 3)))
    weights.remedy = Remedy(look_ahead=1.0)
    for _ in range(2):
        version = weights.acquire()
        weights.backward(version, lambda leaf=version.leaves["own"]: leaf.sum().backward(), 1.0)  # type: ignore[misc]
        weights.finish(version)
        weights.step()
    ahead = weights.acquire(staleness=1)
    assert ahead.leaves["own"] is not weights.acquire().leaves["own"]
    later, found = put_off(ahead, lambda: F.linear(torch.randn(2, 3), ahead.leaves["own"]))
    assert later
    assert found["own"] is None


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_stage_puts_off_every_product_with_its_own_weights(
    precision: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Job:
        return job_of_tokens(InPlace, precision=precision)

    shapes, add = set(), PutOff.add
    monkeypatch.setattr(PutOff, "add", lambda self, leaf, make: (shapes.add(leaf.shape), add(self, leaf, make)))
    plan = even_plan(profile(make()), (1, 1), "zb-h1", microbatches=2)
    run_in_threads(recomputing(plan) if recompute else plan, make)
    assert shapes == {parameter.shape for parameter in make().model.parameters()}


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_results_of_products_with_weights_may_be_overwritten(stages: int) -> None:
    def make() -> Job:
        return job_of_tokens(InPlace)

    plan = even_plan(profile(make()), (1,) * stages, "zb-h1", microbatches=2)
    check_same_gradients(plan, make)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear of vectors": lambda w, b: F.linear(torch.ones(4), w, b),
    "linear of matrices": lambda w, b: F.linear(torch.ones(3, 4), w, b),
    "linear of sequences": lambda w, b: F.linear(torch.ones(2, 3, 4), w, b),
    "linear of sequences without a bias": lambda w, b: F.linear(torch.ones(2, 3, 4), w),
    "linear of what is not contiguous": lambda w, b: F.linear(torch.ones(2, 4, 3).mT, w, b),
    "linear of nothing": lambda w, b: F.linear(torch.ones(2, 0, 4), w, b),
    "addmm": lambda w, b: torch.addmm(b, torch.ones(3, 4), w),
    "embedding": lambda w, b: F.embedding(torch.tensor([[0, 1], [2, 3]]), w),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_a_result_may_be_overwritten_whole_and_through_a_view(operation: Callable[[Tensor, Tensor], Tensor]) -> None:
    weight, bias = torch.randn(4, 4), torch.randn(4)

    def gradients(leaves: Mapping[str, Tensor], later: PutOff) -> list[Tensor | None]:
        with Deferring(later):
            made = operation(leaves["weight"], leaves["bias"])
        made.mul_(3).view(-1)[::2].sigmoid_()
        made.sum().backward()  # type: ignore[no-untyped-call]
        later.make()
        return [leaf.grad for leaf in leaves.values()]

    versions = [weights_of(weight=nn.Parameter(weight), bias=nn.Parameter(bias)).acquire() for _ in range(2)]
    expected = gradients(versions[0].leaves, PutOff(()))
    for found, wanted in zip(gradients(versions[1].leaves, PutOff(versions[1].trained_ids)), expected, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_the_result_of_a_convolution_may_be_overwritten(dimensions: int) -> None:
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1](2, 2, 3)
    inputs = torch.randn(1, 2, *[4] * dimensions)
    convolution(inputs).relu_().sum().backward()
    expected = [parameter.grad for parameter in convolution.parameters()]
    convolution.zero_grad()
    later = PutOff({id(parameter) for parameter in convolution.parameters()})
    with Deferring(later):
        made = convolution(inputs)
    made.relu_().sum().backward()
    assert all(parameter.grad is None for parameter in convolution.parameters())
    later.make()
    for parameter, gradient in zip(convolution.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
