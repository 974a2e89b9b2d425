"""After assembly a worker's process holds its own stages, and computes as if it held the whole model."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from in_threads import CPU, even_plan, looped_plan, profile_of, run_in_threads
from models import make_job
from penstock.job import Job
from penstock.plan import Plan
from penstock.runtime.checkpoint.state import state_of
from penstock.runtime.machine.memory import held_bytes
from penstock.runtime.transport.threads import LocalExchange, LocalTransport
from penstock.runtime.worker.assemble import Assembly, assemble
from penstock.runtime.worker.evaluate import Evaluator
from penstock.runtime.worker.release import Share, release_other_layers
from test_evaluate import evaluated_job, in_one_process, run_with_evaluators

NAMES = ("conv", "noisy", "tied", "transformer", "branches", "undecided", "recurrent")


def release(assembly: Assembly) -> None:
    release_other_layers([Share(assembly.splitter, assembly.layers)])


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def own_tensors(assembly: Assembly) -> list[Tensor]:
    """Weights, buffers and constants of the stages that a worker runs."""
    sections = [stage.module.section for stage in assembly.worker.stages.values()]
    weights = [p for stage in assembly.worker.stages.values() for p in stage.weights.parameters.values()]
    return [*weights, *(tensor for s in sections for tensor in (*s.module.parameters(), *s.module.buffers()))]


def assembled(job: Job, plan: Plan, rank: int) -> Assembly:
    return assemble(
        job, plan, transport=LocalTransport(rank, LocalExchange()), clock=time.perf_counter, device=CPU, timeout_s=30.0
    )


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_worker_holds_the_tensors_of_its_own_stage_alone(name: str, rank: int) -> None:
    plan = even_plan(profile_of(name), (1, 1, 1), "1f1b")
    gc.collect()
    before = held_bytes(CPU)
    job = make_job(name)
    assert isinstance(job.model, nn.Module)
    whole = bytes_of([*job.model.parameters(), *job.model.buffers()])
    data = held_bytes(CPU) - before - whole
    assembly = assembled(job, plan, rank)
    release(assembly)
    own = bytes_of(own_tensors(assembly))
    assert own < whole
    assert held_bytes(CPU) - before - data == own


@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on_with_the_same_bits(name: str) -> None:
    plans = [even_plan(profile_of(name), (1, 2, 1), "1f1b", 2), looped_plan(profile_of(name), 2, 2, "interleaved", 2)]
    for plan in plans:
        make = functools.partial(make_job, name)
        expected, found = run_in_threads(plan, make), run_in_threads(plan, make, prepare=release)
        for one, other in zip(expected, found, strict=True):
            for left, right in zip(own_tensors(one), own_tensors(other), strict=True):
                assert torch.equal(left, right)


@pytest.mark.parametrize("name", ["conv", "tied", "undecided"])
def test_an_evaluation_has_what_it_needs(name: str) -> None:
    """Of its own graph too, which may use other layers' tensors where training does not."""
    plan, make = even_plan(profile_of(name), (1, 1, 1), "1f1b", 3), functools.partial(evaluated_job, name)
    found: list[dict[str, float]] = []

    def work(assembly: Assembly, evaluator: Evaluator) -> None:
        release_other_layers([Share(assembly.splitter, assembly.layers), Share(evaluator.splitter, evaluator.layers)])
        found.append(evaluator.run())

    assemblies = run_with_evaluators(plan, make, work)
    assert found[0] == found[1] == found[2]
    assert found[0] == pytest.approx(in_one_process(assemblies, make()), rel=1e-4, abs=1e-5)


class Spare(nn.Module):
    """Has a weight that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def spare_job() -> Job:
    torch.manual_seed(0)
    data = [(x, x) for x in torch.randn(8, 6)]
    return Job(
        model=Spare(),
        data=data,
        loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch_size=4,
    )


def test_what_no_layer_uses_is_kept_for_the_loss_and_for_checkpoints() -> None:
    from in_threads import profile

    plan = even_plan(profile(spare_job()), (1, 1), "1f1b")
    for rank in (0, 1):
        assembly = assembled(spare_job(), plan, rank)
        release(assembly)
        assert torch.equal(assembly.blueprint.model.spare.detach(), torch.ones(3))
        state = state_of(assembly)
        assert set(state.snapshot_of_unused()) == ({"model/spare"} if rank == 0 else set())
        assert state.names["layers.0.weight"] == "layers.0.weight"


def test_tensors_are_counted_once_and_only_where_they_are() -> None:
    gc.collect()
    before = held_bytes(CPU)
    tensor = torch.zeros(1000)
    others = [tensor[10:], tensor.view(10, 100), torch.zeros(1000, device="meta"), torch.zeros(10, 10).to_sparse()]
    values = bytes_of([others[3].values(), others[3].indices()])
    assert values == 0
    assert held_bytes(CPU) - before == 4000
