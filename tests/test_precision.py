"""Mixed precision: what torch.autocast and torch.amp.GradScaler do in one process, whatever the plan."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from in_threads import even_plan, only_stage, profile, profile_of, recomputing, run_in_threads
from models import make_job
from penstock import Job
from penstock.errors import JobError, PlanError
from penstock.job import Precision
from penstock.plan import Plan
from penstock.runtime.process.verify import compare, save_gradients
from penstock.runtime.worker.assemble import Assembly, check_job, make_epoch
from penstock.schedule import Action, Kind
from test_worker import check_same_weights, single_process

LOW = pytest.mark.parametrize("precision", ["bf16", "fp16"])
REPLICAS = pytest.mark.parametrize("replicas", [(1,), (1, 1), (1, 2), (2, 1)], ids=str)


def job_in(precision: Precision, name: str, **fields: Any) -> Job:
    return replace(make_job(name, samples=11, batch_size=4, epochs=2), precision=precision, **fields)


def plan_in(precision: Precision, name: str, replicas: tuple[int, ...], schedule: str, microbatches: int = 1) -> Plan:
    return even_plan(replace(profile_of(name), precision=precision), replicas, schedule, microbatches)


@LOW
@REPLICAS
@pytest.mark.parametrize("name", ["conv", "branches"])
def test_training_in_low_precision_is_that_of_one_process(
    name: str, replicas: tuple[int, ...], precision: Precision
) -> None:
    """To float32's tolerance: every operation has the same operands in the same precision."""
    plan, make = plan_in(precision, name, replicas, "1f1b", 3), functools.partial(job_in, precision, name)
    low = single_process(make(), plan)
    check_same_weights(run_in_threads(plan, make), low)
    full = single_process(job_in("float32", name), plan)
    assert any((low[n] - full[n]).abs().max() > 1e-5 for n in low), "nothing was computed in low precision"


@LOW
def test_a_tied_weight_in_two_stages_is_within_the_precision(precision: Precision) -> None:
    """One process sums its gradients in low precision, since it keeps the weight's cast; two stages in the weight's."""
    plan, make = plan_in(precision, "tied", (1, 1), "1f1b", 3), functools.partial(job_in, precision, "tied")
    check_same_weights(run_in_threads(plan, make), single_process(make(), plan), rtol=1e-2, atol=1e-3)


def test_low_precision_recomputed_is_the_same_to_the_last_bit() -> None:
    plan, make = plan_in("bf16", "conv", (1, 1), "1f1b", 3), functools.partial(job_in, "bf16", "conv")
    kept, again = (run_in_threads(each, make) for each in (plan, recomputing(plan)))
    for one, two in zip(kept, again, strict=True):
        for name, parameter in only_stage(one).weights.parameters.items():
            assert torch.equal(parameter, only_stage(two).weights.parameters[name])


def test_asynchronous_training_in_bf16_keeps_weights_in_float32() -> None:
    assemblies = run_in_threads(plan_in("bf16", "conv", (1, 1), "pipedream"), lambda: job_in("bf16", "conv"))
    for assembly in assemblies:
        weights = only_stage(assembly).weights
        assert {p.dtype for p in weights.parameters.values()} <= {torch.float32}
        states = [weights.optimizers.state_of(p)["momentum_buffer"] for p in weights.parameters.values()]
        assert {state.dtype for state in states} <= {torch.float32}


def overflowing(job: Job, batches: set[int], microbatches: int) -> Job:
    """The job with a loss too large for float16's gradients in some minibatches."""
    calls = iter(range(10**6))

    def loss(output: Any, target: Any) -> Tensor:
        found = job.loss(output, target)
        return found * 1e30 if next(calls) // microbatches in batches else found

    return replace(job, loss=loss)


@pytest.mark.parametrize("replicas", [(1,), (1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_the_loss_scale_is_that_of_grad_scaler(replicas: tuple[int, ...], clip_norm: float | None) -> None:
    """With overflows in between: the same scales, the same updates left out, at all workers."""
    make = functools.partial(job_in, "fp16", "conv", epochs=4, clip_norm=clip_norm)
    plan = plan_in("fp16", "conv", replicas, "1f1b", 2)
    bad, interval = {1, 2, 7}, 3

    class Noting(torch.amp.GradScaler):
        def update(self, new_scale: Any = None) -> None:
            super().update(new_scale)
            expected.append(self.get_scale())

    expected: list[float] = []
    reference = Noting("cpu", growth_interval=interval)
    weights = single_process(overflowing(make(), bad, 2), plan, reference)
    assert len(set(expected)) > 2
    found: dict[int, list[float]] = {}

    def work(assembly: Assembly) -> None:
        worker = assembly.worker
        scaler = worker.scaler
        assert scaler is not None
        scaler.growth_interval, scales = interval, found.setdefault(worker.rank, [])

        def note(action: Action) -> None:
            if action.kind is Kind.STEP:
                scales.append(scaler.scale)

        worker.on_action = note
        for number in range(assembly.job.epochs):
            worker.run(assembly.segment(make_epoch(assembly.job, plan, number)))

    assemblies = run_in_threads(plan, lambda: overflowing(make(), bad, 2), work=work)
    assert list(found.values()) == [expected] * len(plan.devices)
    check_same_weights(assemblies, weights)


def test_fp16_under_an_asynchronous_schedule_is_refused_with_the_choices() -> None:
    with pytest.raises(PlanError, match=r"take precision bf16.*or plan with --schedule gpipe or 1f1b"):
        check_job(job_in("fp16", "conv"), plan_in("fp16", "conv", (1, 1), "pipedream"))


def test_a_plan_for_another_precision_is_refused() -> None:
    with pytest.raises(PlanError, match="the plan is for precision float32, the job has bf16"):
        check_job(job_in("bf16", "conv"), plan_in("float32", "conv", (1, 1), "1f1b", 2))


def test_a_precision_that_is_none_is_an_error() -> None:
    with pytest.raises(JobError, match="choose 'float32', 'bf16' or 'fp16'"):
        job_in("int4", "conv")  # type: ignore[arg-type]


def test_a_profile_is_of_the_precision_that_will_run() -> None:
    full, low = (profile(job_in(precision, "conv")) for precision in ("float32", "bf16"))  # type: ignore[arg-type]
    assert (full.precision, low.precision) == ("float32", "bf16")
    values = [{v.name: v.num_bytes for v in each.graph.values} for each in (full, low)]
    assert values[1]["conv2d"] * 2 == values[0]["conv2d"]


@LOW
@pytest.mark.parametrize("name", ["tied", "conv"])
def test_verify_compares_in_the_job_s_precision(name: str, precision: Precision, tmp_path: Path) -> None:
    plan, make = plan_in(precision, name, (1, 2), "1f1b", 3), functools.partial(job_in, precision, name)
    run_in_threads(plan, make, work=lambda assembly: save_gradients(assembly, tmp_path))
    verification = compare(make(), plan, tmp_path)
    assert verification.passed, verification
    assert not compare(replace(make(), precision="float32"), plan, tmp_path).passed
