"""Compiled stages: the same mathematics, compiled once however many versions their weights have."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from in_threads import Losses, even_plan, only_stage, profile, profile_of, recomputing, run_in_threads
from models import Scale, make_job
from penstock import Job
from penstock.errors import JobError
from penstock.runtime.worker.assemble import Assembly
from penstock.runtime.worker.evaluate import Evaluator
from test_worker import asynchronous_reference, check_same_weights


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch(
        {"cpp_cache_precompile_headers": False, "cpp.simdlen": 1}
    ):  # slower for few kernels
        yield
    torch._dynamo.reset()


def test_compiled_stages_train_as_others_do_and_compile_once_for_all_versions() -> None:
    def make() -> Job:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), Scale(6), nn.Tanh(), nn.Linear(6, 4))
        return replace(make_job("undecided", samples=40), model=model)

    plan = even_plan(profile(make()), (1, 1), "pipedream")
    assemblies = run_in_threads(plan, lambda: replace(make(), compile=True), timeout_s=200)
    check_same_weights(assemblies, asynchronous_reference(make(), plan))
    assert only_stage(assemblies[0]).weights.version == 10
    assert counters["stats"]["unique_graphs"] == 2, "one for each stage"


def test_a_compiled_stage_recomputes_the_same_dropout_and_is_evaluated_without() -> None:
    def make() -> Job:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 4))
        return replace(make_job("undecided", samples=8), model=model, precision="bf16", compile=True)

    plan = even_plan(profile(make()), (1,), "1f1b", 2)
    evaluators: list[Evaluator] = []
    losses: list[float] = []

    def prepare(assembly: Assembly) -> None:
        evaluators.append(Evaluator(assembly, assembly.job.data))
        torch.manual_seed(1)

    def evaluate(assembly: Assembly) -> None:
        losses.append(evaluators[-1].run()["loss"])

    (kept,), (again,) = (
        run_in_threads(each, make, prepare=prepare, then=evaluate, timeout_s=200) for each in (plan, recomputing(plan))
    )
    for name, parameter in only_stage(kept).weights.parameters.items():
        assert torch.equal(parameter, only_stage(again).weights.parameters[name])
    model = make().model.eval()
    model.load_state_dict(only_stage(kept).weights.parameters)  # type: ignore[arg-type]
    inputs, targets = (torch.stack(column) for column in zip(*kept.job.data, strict=True))  # type: ignore[call-overload]
    with torch.autocast("cpu", torch.bfloat16):
        expected = float(kept.job.loss(model(inputs), targets).detach())
    assert losses == pytest.approx([expected] * 2, rel=1e-2)


def test_a_compiled_stage_draws_what_a_plain_one_does_and_compiles_no_seed() -> None:
    def make(compile: bool = False) -> Job:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 4))
        return replace(make_job("undecided", samples=20), model=model, compile=compile)

    plan = even_plan(profile(make()), (1, 1), "1f1b", 2)
    losses = [Losses(), Losses()]
    for is_compiled, found in zip((False, True), losses, strict=True):
        run_in_threads(plan, functools.partial(make, compile=is_compiled), prepare=found, timeout_s=200)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(set(losses[0].values())) == 10
    assert counters["stats"]["unique_graphs"] == 4, "each stage before and after its dropout, for all microbatches"


def test_without_a_compiler_a_job_that_compiles_says_what_to_do() -> None:
    plan = even_plan(profile_of("conv"), (1,), "1f1b", 2)
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(JobError, match="install g\\+\\+ or clang"),
    ):
        run_in_threads(plan, lambda: replace(make_job("conv"), compile=True))
