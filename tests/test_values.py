"""What may cross a cut: values for several stages, without gradients, of integers, in nested outputs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from in_threads import check_same_gradients, even_plan, profile, run_in_threads
from models import sgd
from penstock import Job
from penstock.profile import Profile
from test_worker import check_same_weights, single_process


class Sundry(nn.Module):
    """One value for many stages: with a gradient, detached, for its largest element alone; a mask; a weight unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.table = nn.Embedding(6, 6)
        self.unused = nn.Linear(6, 6)

    def forward(self, x: Tensor, length: Tensor) -> tuple[Any, ...]:
        h = self.layers[0](x)
        mask = torch.arange(6) < length[:, None]
        a = torch.tanh(self.layers[1](h)) + h.detach()
        b = self.layers[2](a).masked_fill(mask, 0.0)
        c = self.layers[3](b) + self.table(h.argmax(dim=1)) + h
        return c, {"all": [a, (mask, b.argmax(dim=1))], "none": None, "size": x.shape[1]}


def make_job() -> Job:
    torch.manual_seed(0)
    inputs = [(x, torch.tensor(i % 5)) for i, x in enumerate(torch.randn(9, 6))]

    def loss(output: Any, target: Tensor) -> Tensor:
        last, rest = output
        a, (mask, top) = rest["all"]
        assert rest["none"] is None
        assert rest["size"] == 6
        assert mask.dtype == torch.bool
        assert top.dtype == torch.long
        return nn.functional.cross_entropy(last, target) + (a * mask).square().mean()

    data = [(pair, torch.tensor(i % 6)) for i, pair in enumerate(inputs)]
    return Job(model=Sundry(), data=data, loss=loss, optimizer=sgd, batch_size=4)


@functools.cache
def sundry_profile() -> Profile:
    return profile(make_job())


def every_layer_a_stage() -> tuple[int, ...]:
    return (1,) * len(sundry_profile().graph.layers)


@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (1, 2, 1, 1), None], ids=str)
def test_gradients_are_those_of_one_process(replicas: tuple[int, ...] | None) -> None:
    plan = even_plan(sundry_profile(), replicas or every_layer_a_stage(), "1f1b", microbatches=3)
    check_same_gradients(plan, make_job)


def test_training_is_that_of_one_process() -> None:
    plan = even_plan(sundry_profile(), every_layer_a_stage(), "gpipe", microbatches=2)
    expected = {name: p for name, p in single_process(make_job(), plan).items() if not name.startswith("unused")}
    check_same_weights(run_in_threads(plan, make_job), expected)


def test_a_value_that_several_stages_read_is_one_value_of_the_profile() -> None:
    most = max(sundry_profile().graph.values, key=lambda value: len(value.consumers))
    assert len(most.consumers) >= 4
    assert most.differentiable
