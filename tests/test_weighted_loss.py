"""Means over tokens: a padded language model trains as one process does with the whole minibatch at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from in_threads import (
    even_plan,
    looped_plan,
    profile,
    recomputing,
    run_in_threads,
    uneven_plan,
    with_batch_size,
)
from models import Tied
from penstock import Job
from penstock.errors import JobError, PlanError
from penstock.plan import Plan
from penstock.profile import Profile
from penstock.runtime.process.loss_file import ROW, per_minibatch
from penstock.runtime.stage.losses import WeightedLoss, loss_of
from penstock.runtime.worker.assemble import Assembly, make_epoch
from penstock.runtime.worker.data import load_batch
from test_evaluate import run_with_evaluators
from test_worker import (
    asynchronous_reference,
    check_same_weights,
    sections_reference,
)

WORDS, LENGTH, PADDING = 20, 6, -100
EXACT = {"rtol": 1e-9, "atol": 1e-11}


def untied() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WORDS))


def mean_over_tokens(output: Tensor, target: Tensor) -> Tensor:
    """As people write it; not a number where there is padding alone."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING)


def tokens_in(target: Tensor) -> Tensor:
    return (target != PADDING).sum()


def sum_over_tokens(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING, reduction="sum")
    return total, tokens_in(target)


FORMS: dict[str, dict[str, Any]] = {
    "pair": {"loss": sum_over_tokens},
    "weigh": {"loss": mean_over_tokens, "weigh": tokens_in},
    "plain": {"loss": mean_over_tokens},
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9, weight_decay=1e-3)


def padded_job(form: str = "pair", *, tied: bool = True, samples: int = 23, batch_size: int = 8, **fields: Any) -> Job:
    """Sentences of 0 to 6 tokens, in float64 so that only mistakes differ."""
    torch.manual_seed(0)
    model = (Tied() if tied else untied()).double()
    tokens = torch.randint(0, WORDS, (samples, LENGTH))
    targets = tokens.clone()
    for number, target in enumerate(targets):
        target[(5 * number) % (LENGTH + 1) :] = PADDING
    job = Job(
        model=model, data=list(zip(tokens, targets, strict=True)), optimizer=sgd, batch_size=batch_size, **FORMS[form]
    )
    return replace(job, **fields)


@functools.cache
def profile_of(form: str, tied: bool = True) -> Profile:
    return profile(padded_job(form, tied=tied))


def single_process(job: Job, plan: Plan) -> dict[str, Tensor]:
    """The weights after training on whole minibatches, with the loss over all tokens of each."""
    optimizer = job.optimizer(list(job.model.named_parameters()))
    for number in range(job.epochs):
        epoch = make_epoch(job, plan, number)
        first = 0
        for count in epoch.minibatches:
            indices = [i for m in range(first, first + count) for i in epoch.indices(m)]
            inputs, target = load_batch(job, indices, seed=0)
            mean_over_tokens(job.model(inputs), target).backward()
            if job.clip_norm is not None:
                nn.utils.clip_grad_norm_(job.model.parameters(), job.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            first += count
    return dict(job.model.named_parameters())


def check_as_one_process(plan: Plan, make: Callable[[], Job]) -> None:
    check_same_weights(run_in_threads(plan, make), single_process(make(), plan), **EXACT)


@pytest.mark.parametrize("replicas", [(1,), (1, 1), (1, 2), (2, 1), (1, 1, 1), (3, 1)], ids=str)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_mean_over_tokens_is_that_of_the_whole_minibatch(schedule: str, replicas: tuple[int, ...]) -> None:
    """With microbatches of padding alone, a tied weight, and a last minibatch that nothing divides."""
    plan = even_plan(profile_of("pair"), replicas, schedule, microbatches=7)
    check_as_one_process(plan, functools.partial(padded_job, epochs=2))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_job_may_say_how_to_weigh_a_target_instead(schedule: str) -> None:
    for microbatches in (1, 3, 8):
        plan = even_plan(profile_of("weigh"), (1, 2), schedule, microbatches)
        assert not plan.profile.weighted_loss
        check_as_one_process(plan, functools.partial(padded_job, "weigh", epochs=2))


@pytest.mark.parametrize(("positions", "laps", "replicas"), [(1, 2, 1), (2, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_with_several_stages_on_a_worker(schedule: str, positions: int, laps: int, replicas: int) -> None:
    plan = looped_plan(profile_of("pair"), positions, laps, schedule, 4, replicas)
    check_as_one_process(plan, functools.partial(padded_job, epochs=2))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
def test_clipping_is_of_the_mean(schedule: str) -> None:
    plan = even_plan(profile_of("pair"), (1, 2), schedule if schedule != "interleaved" else "1f1b", microbatches=4)
    if schedule == "interleaved":
        plan = looped_plan(profile_of("pair"), 2, 2, schedule, 4)
    check_as_one_process(plan, functools.partial(padded_job, clip_norm=0.5, epochs=2))


@pytest.mark.parametrize("shares", [((2, 1), (1,)), ((1,), (1, 3)), ((2, 1), (1, 3))], ids=str)
def test_with_unequal_shares_and_recomputing(shares: tuple[tuple[int, ...], ...]) -> None:
    plan = uneven_plan(profile_of("pair"), shares, "1f1b", microbatches=7)
    check_as_one_process(plan, padded_job)
    check_as_one_process(recomputing(plan), padded_job)


@pytest.mark.parametrize("schedule", ["pipedream", "vertical", "2bw"])
@pytest.mark.parametrize("replicas", [(1,), (1, 1), (1, 1, 1), (1, 2), (2, 1), (2, 3)], ids=str)
def test_an_asynchronous_update_divides_by_the_weight_of_its_own_round(
    replicas: tuple[int, ...], schedule: str
) -> None:
    make = functools.partial(padded_job, tied=False, samples=53, batch_size=2)
    microbatches = 2 if schedule == "2bw" else 1
    if schedule == "2bw" and max(replicas) > microbatches:
        make, microbatches = functools.partial(make, batch_size=4), 4
    plan = even_plan(
        with_batch_size(profile_of("pair", tied=False), make().batch_size), replicas, schedule, microbatches
    )
    check_same_weights(run_in_threads(plan, make), asynchronous_reference(make(), plan), **EXACT)


@pytest.mark.parametrize("shares", [((2, 1), (1,)), ((1,), (1, 3))], ids=str)
def test_asynchronous_with_unequal_shares(shares: tuple[tuple[int, ...], ...]) -> None:
    make = functools.partial(padded_job, "weigh", tied=False, samples=53, batch_size=2)
    plan = uneven_plan(with_batch_size(profile_of("weigh", tied=False), 2), shares, "pipedream")
    check_same_weights(run_in_threads(plan, make), asynchronous_reference(make(), plan), **EXACT)


@pytest.mark.parametrize("replicas", [(1, 1), (2, 2)], ids=str)
def test_a_weight_shared_by_asynchronous_stages_gets_the_mean_of_all_its_gradients(replicas: tuple[int, ...]) -> None:
    make = functools.partial(padded_job, samples=53, batch_size=2)
    plan = even_plan(with_batch_size(profile_of("pair"), 2), replicas, "pipedream")
    assert plan.pipeline.ties
    expected = sections_reference(make(), plan)
    for assembly in run_in_threads(plan, make):
        for index, stage in assembly.worker.stages.items():
            for name, parameter in stage.weights.parameters.items():
                torch.testing.assert_close(parameter.data, expected[index][name], **EXACT)


@pytest.mark.parametrize("form", ["pair", "weigh"])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_minibatch_of_padding_alone_changes_no_weight(form: str, schedule: str) -> None:
    """Neither does weight decay, nor momentum."""

    def make() -> Job:
        job = padded_job(form, tied=False)
        data = [(tokens, torch.full_like(target, PADDING)) for tokens, target in job.data]  # type: ignore[attr-defined]
        return replace(job, data=data)

    plan = even_plan(profile_of(form, tied=False), (1, 2), schedule, microbatches=4 if schedule == "1f1b" else 1)
    before = {name: parameter.detach().clone() for name, parameter in make().model.named_parameters()}
    for assembly in run_in_threads(plan, make):
        for stage in assembly.worker.stages.values():
            for name, parameter in stage.weights.parameters.items():
                assert torch.equal(parameter.data, before[name]), name


@pytest.mark.parametrize("form", ["pair", "weigh"])
@pytest.mark.parametrize("replicas", [(1, 1), (1, 2), (2, 1)], ids=str)
def test_an_evaluation_is_over_all_tokens(form: str, replicas: tuple[int, ...]) -> None:
    def hits(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return ((output.argmax(-1) == target) & (target != PADDING)).sum(), tokens_in(target)

    def length(output: Tensor, target: Tensor) -> Tensor:
        return (target != PADDING).double().sum(1).mean()

    def make() -> Job:
        held_out = padded_job(samples=13).data
        return padded_job(form, evaluation=held_out, metrics={"hits": hits, "length": length})

    found: list[dict[str, float]] = []
    plan = even_plan(profile_of(form), replicas, "1f1b", 3)
    run_with_evaluators(plan, make, lambda assembly, evaluator: found.append(evaluator.run()))
    job = make()
    inputs, target = load_batch(replace(job, data=job.evaluation), range(13), seed=0)
    output = job.model(inputs).detach()
    total, weight = map(float, hits(output, target))
    expected = {
        "loss": float(mean_over_tokens(output, target)),
        "hits": total / weight,
        "length": float(length(output, target)),
    }
    assert all(each == pytest.approx(expected, rel=1e-12) for each in found)


def test_recorded_losses_are_over_all_tokens() -> None:
    """Of each minibatch, also where a stage recomputes and so knows its loss after the backward only."""
    make = functools.partial(padded_job, "weigh")
    for plan in (even_plan(profile_of("weigh"), (1, 2), "1f1b", 4), even_plan(profile_of("weigh"), (1, 2), "zb-h1", 4)):
        for each in (plan, recomputing(plan)):
            terms: list[tuple[int, float, float]] = []

            def work(assembly: Assembly, terms: Any = terms) -> None:
                epoch = make_epoch(assembly.job, assembly.plan, 0)
                assembly.worker.run(assembly.segment(replace(epoch, last_minibatch=1)))
                for stage in assembly.worker.stages.values():
                    for microbatch in list(stage.module.losses):
                        terms.append((microbatch, *stage.module.take_loss(microbatch, epoch.samples[microbatch])))

            run_in_threads(each, make, work=work)
            job, epoch = make(), make_epoch(make(), each, 0)
            inputs, target = load_batch(job, [i for m in range(4) for i in epoch.indices(m)], seed=0)
            expected = float(mean_over_tokens(job.model(inputs).detach(), target))
            assert per_minibatch([np.array(terms, ROW)], epoch.minibatches[:1]) == (pytest.approx(expected, rel=1e-12),)


@pytest.mark.parametrize("form", ["pair", "weigh"])
def test_early_averaging_divides_by_the_weight_of_all_replicas(form: str) -> None:
    """In buckets begun in the midst of the last backward, and in one after it."""
    plan = even_plan(profile_of(form, tied=False), (2, 1), "1f1b", microbatches=4)
    make = functools.partial(padded_job, form, tied=False, epochs=2)
    for bucket_bytes in (64, 2**30):
        assemblies = run_in_threads(plan, make, bucket_bytes=bucket_bytes)
        check_same_weights(assemblies, single_process(make(), plan), **EXACT)


def test_weights_travel_beside_compressed_gradients() -> None:
    plan = even_plan(profile_of("pair"), (1, 1, 1), "1f1b", microbatches=4)
    plan = replace(plan, stages=tuple(replace(stage, sends="bf16") for stage in plan.stages))

    def make() -> Job:
        return replace(padded_job(), model=Tied())

    check_same_weights(run_in_threads(plan, make), single_process(make(), plan), rtol=0.1, atol=0.02)


def test_fp16_takes_its_scale_out_of_the_mean() -> None:
    plan = even_plan(replace(profile_of("pair"), precision="fp16"), (1, 2), "1f1b", microbatches=4)

    def make() -> Job:
        return replace(padded_job(), model=Tied(), precision="fp16")

    def scale_low(assembly: Assembly) -> None:
        assert assembly.worker.scaler is not None
        assembly.worker.scaler.scale = 64.0  # so that no update is left out

    found = run_in_threads(plan, make, prepare=scale_low)
    assert {assembly.worker.scaler.scale for assembly in found if assembly.worker.scaler} == {64.0}
    check_same_weights(found, single_process(make(), plan), rtol=0.01, atol=0.01)


# --- what is refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss": lambda y, t: {"loss": y.sum()}}, r"Job\.loss returned dict; return a tensor"),
        ({"loss": lambda y, t: (y.sum(), t[:, 0])}, r"Job\.loss returned weight of shape \[\d+\]"),
        ({"loss": lambda y, t: (y.sum(), -1)}, r"Job\.loss returned weight -1"),
        ({"loss": lambda y, t: (y.sum(), math.nan)}, r"Job\.loss returned weight nan"),
        ({"loss": lambda y, t: y}, r"Job\.loss made a tensor of shape"),
        ({"weigh": tokens_in}, r"leave Job\.weigh out if the loss returns \(sum, weight\)"),
        ({"loss": mean_over_tokens, "weigh": lambda t: t}, r"Job\.weigh returned of shape"),
    ],
)
def test_a_loss_or_weight_of_another_form_is_an_error_that_names_it(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        profile(padded_job(**fields))


def test_a_plan_made_with_a_loss_of_the_other_form_is_refused() -> None:
    for planned, run, message in (
        ("plain", "pair", "returned \\(sum, weight\\)"),
        ("pair", "plain", "returned a mean"),
    ):
        plan = even_plan(profile_of(planned), (1, 1), "1f1b", microbatches=2)
        with pytest.raises(PlanError, match=f"{message}.*profile and plan again"):
            run_in_threads(plan, functools.partial(padded_job, run), timeout_s=10.0)


def test_a_weight_of_nothing_makes_a_loss_of_nothing() -> None:
    job = padded_job("weigh")
    output, target = torch.randn(2, LENGTH, WORDS, requires_grad=True), torch.full((2, LENGTH), PADDING)
    found = loss_of(job, output, target)
    assert isinstance(found, WeightedLoss)
    assert (float(found.total), found.weight) == (0.0, 0.0)
