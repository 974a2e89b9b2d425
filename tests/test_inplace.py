"""Operations in place and buffers: a cut anywhere computes what the model computes, one microbatch after another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from in_threads import check_same_gradients, even_plan, only_stage, profile, run_in_threads
from models import sgd
from penstock import Job
from penstock.profile import Profile
from test_worker import check_same_weights, single_process


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))


class PartOverwritten(Linears):
    """Through views: of a value that others read before and after, and of the model's input."""

    def forward(self, x: Tensor) -> Tensor:
        x[:, 1] = 0
        h = self.a(x)
        early = h + self.b(x)
        h[:, 0].mul_(2.0)
        h[:, 2:] = early[:, :2]
        return self.c(h) * early + x


class ViewOutlives(Linears):
    """A view taken before its whole is overwritten is read afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        left, right = h[:, :2], h.view(-1, 2, 2)
        kept = h + self.b(x)
        h.mul_(0.5)
        right[:, 1] += 1.0
        return self.c(kept) + h + torch.cat([left, right[:, 1]], dim=1)


class Twice(Linears):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).view(-1, 2, 2)
        h[:, 0] += 1.0
        g = h.flatten(1) * 2.0
        h.mul_(3.0)
        h[:, 1].add_(self.b(g).view(-1, 2, 2)[:, 0])
        return self.c(h.flatten(1)) + g


class Averaging(Linears):
    """Buffers that the model itself keeps: read before and after they change, in place and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.steps += 1
        h = self.a(x) - self.mean
        g = torch.tanh(self.b(h))
        self.mean.mul_(0.5).add_(0.5 * g.detach().mean(0))
        y = self.c(g) * self.mean + h
        self.scale = 0.5 * self.scale + y.detach().abs().mean(0)
        return {"y": y / self.scale, "nested": ([self.steps, None], 3)}


class Residual(Linears):
    """As in torchvision's ResNet: the sum is made in place, and the activation overwrites it again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.relu = nn.LayerNorm(4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.a(x))
        out = self.norm(self.b(x))
        out += x
        out = self.relu(out)
        out = self.c(out)
        out += x
        return self.relu(out)


class WritesIntoCopies(Linears):
    """Operations that may copy and here do, for every batch of two samples or more."""

    def forward(self, x: Tensor) -> Tensor:
        columns = self.a(x).permute(1, 0).contiguous()
        columns[:, 0] += 9.0
        mixed = self.b(x).view(-1, 2, 2).transpose(1, 2).reshape(-1, 4)
        mixed[:, 1] *= 2.0
        wide = self.c(x).to(torch.float64)
        wide[:, 2] -= 1.0
        return columns.permute(1, 0) + mixed + wide.to(torch.float32)


class WritesIntoWhatDidNotCopy(Linears):
    """The same operations where they return their argument, which is read afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        early = h + self.b(x)
        h.reshape(-1, 2, 2)[:, 0] += 1.0
        h.contiguous()[:, 1] *= 2.0
        h.to(torch.float32)[:, 2] -= 1.0
        nn.functional.dropout(h, 0.0).mul_(3.0)
        return self.c(h) + early


class WritesIntoOneOfSeveral(Linears):
    """An operation that makes several tensors, and views of a mask that has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        largest, _ = h.topk(2, dim=1)
        kept = largest * 2.0
        largest += 1.0
        left, _ = (mask := (x > 0).float()).chunk(2, dim=1)
        left.fill_(1.0)
        return self.b(h) * mask + self.c(torch.cat([largest, kept], dim=1))


class CopyAndSource(Linears):
    """Both a copy and what it was copied from are read after the copy was overwritten."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        columns = h.permute(1, 0).contiguous()
        columns[:, 0] += 9.0
        h[:, 1] *= 2.0
        return self.b(columns.permute(1, 0)) * h + self.c(h)


MODELS = pytest.mark.parametrize(
    "model",
    [
        PartOverwritten,
        ViewOutlives,
        Twice,
        Averaging,
        Residual,
        WritesIntoCopies,
        WritesIntoWhatDidNotCopy,
        WritesIntoOneOfSeveral,
    ],
)


def make_job(model: type[nn.Module]) -> Job:
    torch.manual_seed(0)

    def loss(output: Any, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output["y"] if isinstance(output, dict) else output, target)

    data = [(x, x.flip(0)) for x in torch.randn(9, 4)]
    return Job(model=model(), data=data, loss=loss, optimizer=sgd, batch_size=4)


def made_profile(model: type[nn.Module]) -> Profile:
    found = profile(make_job(model))
    assert found.front_end == "export"
    return found


@MODELS
def test_every_layer_a_stage_of_its_own_has_the_gradients_of_one_process(model: type[nn.Module]) -> None:
    found = made_profile(model)
    plan = even_plan(found, (1,) * len(found.graph.layers), "1f1b", microbatches=2)
    check_same_gradients(plan, lambda: make_job(model))


@MODELS
def test_captured_without_values_it_has_the_gradients_of_one_process(model: type[nn.Module]) -> None:
    built = replace(make_job(model), model=model)
    plan = even_plan(profile(built), (1, 1, 1), "1f1b", microbatches=2)
    check_same_gradients(plan, lambda: built)


@MODELS
def test_training_and_buffers_are_those_of_one_process(model: type[nn.Module]) -> None:
    plan = even_plan(made_profile(model), (1, 1), "1f1b", microbatches=2)
    job = make_job(model)
    assemblies = run_in_threads(plan, lambda: make_job(model))
    check_same_weights(assemblies, single_process(job, plan))
    found = {name: buffer for each in assemblies for name, buffer in only_stage(each).module.section.buffers.items()}
    torch.testing.assert_close(found, dict(job.model.named_buffers()))


def test_a_buffer_is_read_and_written_in_one_layer() -> None:
    layers = [layer.name for layer in made_profile(Averaging).graph.layers]
    assert "a" in layers
    assert "b" not in layers  # between the reading of `mean` and its writing


def test_a_copy_and_its_source_are_told_apart() -> None:
    found = made_profile(CopyAndSource)
    for cuts in (1, 2, len(found.graph.layers)):
        plan = even_plan(found, (1,) * cuts, "1f1b", microbatches=2)
        check_same_gradients(plan, lambda: make_job(CopyAndSource))
