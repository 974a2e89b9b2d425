"""Schedulers, parameter groups, clipping and seeds: training as in one process, whatever the plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from in_threads import CPU, Losses, even_plan, profile, profile_of, run_in_threads, train_keeping
from models import make_job
from penstock import Job
from penstock.errors import JobError, PlanError
from penstock.plan import Plan
from penstock.run import RunDirectory
from penstock.runtime.checkpoint.checkpoint import directory_of
from penstock.runtime.measure.measure import profile_job
from penstock.runtime.stage.weights import Weights
from penstock.runtime.sync.sync import sync_groups
from penstock.runtime.worker.assemble import Assembly, check_job, make_epoch
from penstock.schedule import Action, Kind
from test_docs import ROOT, blocks
from test_worker import check_same_weights, single_process

SYNCHRONOUS = pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
REPLICAS = pytest.mark.parametrize("replicas", [(1,), (1, 1), (1, 2), (2, 1), (1, 1, 1)], ids=str)
SMALL = {"samples": 11, "batch_size": 4, "epochs": 3}


def job_with(name: str, **fields: Any) -> Job:
    return replace(make_job(name, **SMALL), **fields)


def check_as_one_process(name: str, replicas: tuple[int, ...], schedule: str, **fields: Any) -> list[Assembly]:
    """With three microbatches accumulated per minibatch, and a last minibatch that nothing divides."""
    plan = even_plan(profile_of(name), replicas, schedule, microbatches=3)
    make = functools.partial(job_with, name, **fields)
    assemblies = run_in_threads(plan, make)
    check_same_weights(assemblies, single_process(make(), plan))
    return assemblies


# --- schedulers

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.3),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=9),
    "warm-up, then decay": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.7)],
        milestones=[3],
    ),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler_gives_the_weights_of_one_process(name: str) -> None:
    check_as_one_process("tied", (1, 2), "1f1b", scheduler=SCHEDULERS[name])


@SYNCHRONOUS
@REPLICAS
def test_scheduler_and_clipping_together_give_the_weights_of_one_process(
    replicas: tuple[int, ...], schedule: str
) -> None:
    check_as_one_process("tied", replicas, schedule, scheduler=SCHEDULERS["one cycle"], clip_norm=0.5)


def test_a_scheduler_may_step_per_epoch() -> None:
    for replicas in ((1, 2), (2, 1)):
        check_as_one_process("tied", replicas, "1f1b", scheduler=SCHEDULERS["lambda"], scheduler_steps="epoch")


def rates_at_steps(plan: Plan, make: Callable[[], Job], first_epoch: int = 0) -> list[dict[tuple[int, int], float]]:
    """For each worker, (epoch, first microbatch of a round) -> the rate of its update."""
    found: list[dict[tuple[int, int], float]] = [{} for _ in plan.devices]

    def work(assembly: Assembly) -> None:
        worker = assembly.worker
        for number in range(first_epoch, assembly.job.epochs):
            segment = assembly.segment(make_epoch(assembly.job, plan, number))

            def note(action: Action, number: int = number, segment: Any = segment) -> None:
                if action.kind is Kind.STEP:
                    place = (number, segment.schedule.rounds[action.stage][action.index])
                    (optimizer,) = worker.stages[action.stage].weights.optimizers.optimizers
                    found[worker.rank][place] = optimizer.param_groups[0]["lr"]

            worker.on_action = note
            worker.run(segment)

    run_in_threads(plan, make, work=work)
    return found


@pytest.mark.parametrize("replicas", [(1, 1), (1, 2), (2, 1), (1, 3), (2, 3)], ids=str)
def test_stages_that_update_less_often_have_the_same_rate_for_the_same_samples(replicas: tuple[int, ...]) -> None:
    make = functools.partial(job_with, "conv", scheduler=SCHEDULERS["lambda"])
    plan = even_plan(profile_of("conv"), replicas, "pipedream")
    for rates in rates_at_steps(plan, make):
        expected = {(epoch, minibatch): 0.1 / (1 + 3 * epoch + minibatch) for epoch, minibatch in rates}
        assert rates == pytest.approx(expected)  # three minibatches per epoch, of one microbatch each
    per_epoch = functools.partial(make, scheduler_steps="epoch")
    for rates in rates_at_steps(plan, per_epoch):
        assert rates == pytest.approx({(epoch, minibatch): 0.1 / (1 + epoch) for epoch, minibatch in rates})


@pytest.mark.parametrize("replicas", [(1, 2), (2, 1), (2, 3)], ids=str)
def test_rates_in_proportion_to_replicas_are_those_of_the_first_stage_times_the_ratio(
    replicas: tuple[int, ...],
) -> None:
    """Also with a scheduler on top; under a synchronous schedule all average the same samples."""
    make = functools.partial(job_with, "conv", lr_by_replicas=True, scheduler=SCHEDULERS["lambda"])
    ratio = replicas[1] / replicas[0]
    for schedule, microbatches, second in (("pipedream", 1, ratio), ("vertical", 1, ratio), ("1f1b", 2, 1.0)):
        plan = even_plan(profile_of("conv"), replicas, schedule, microbatches)
        for rank, rates in enumerate(rates_at_steps(plan, make)):
            factor = 1.0 if rank < replicas[0] else second
            assert rates[0, 0] == pytest.approx(0.1 * factor)
            assert rates[1, 0] == pytest.approx(0.1 * factor / 4)


@pytest.mark.parametrize(
    ("policy", "rate"),
    [
        (lambda o: lr_scheduler.StepLR(o, 30, gamma=0.1), lambda epoch: 0.1 ** (epoch // 30)),
        (lambda o: lr_scheduler.PolynomialLR(o, 90, power=2), lambda epoch: (1 - epoch / 90) ** 2),
        (lambda o: lr_scheduler.ExponentialLR(o, 0.97), lambda epoch: 0.97**epoch),
    ],
)
def test_torch_s_policies_with_a_warm_up_are_those_of_the_docs(policy: Any, rate: Callable[[int], float]) -> None:
    (parameter,) = nn.Linear(1, 1, bias=False).parameters()
    weights = Weights(
        {"weight": parameter},
        lambda named: torch.optim.SGD(named, lr=1.0),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o, 0.2, total_iters=4), policy(o)]),
    )
    for epoch in range(90):
        weights.step(epoch)
        (optimizer,) = weights.optimizers.optimizers
        assert optimizer.param_groups[0]["lr"] == pytest.approx(min(1.0, (epoch + 1) / 5) * rate(epoch), abs=1e-9)


def test_a_run_that_goes_on_has_the_rate_it_would_have_had() -> None:
    make = functools.partial(job_with, "conv", scheduler=SCHEDULERS["one cycle"])
    whole, rest = (
        rates_at_steps(even_plan(profile_of("conv"), replicas, schedule), make, first)
        for replicas, schedule, first in (((1, 1), "1f1b", 0), ((2, 1), "1f1b", 2))
    )
    assert rest[0] == {place: rate for place, rate in whole[0].items() if place[0] == 2}
    assert len(rest[0]) == 3


@pytest.mark.parametrize("steps", ["minibatch", "epoch"])
def test_a_checkpoint_goes_on_with_scheduler_clipping_and_several_optimizers_under_another_plan(
    steps: str, tmp_path: Path
) -> None:
    make = functools.partial(
        job_with,
        "tied",
        optimizer=muon_and_adam,
        scheduler=SCHEDULERS["cosine"],
        scheduler_steps=steps,
        clip_norm=0.5,
    )
    before, after = (even_plan(profile_of("tied"), replicas, "1f1b", 3) for replicas in ((1, 1, 1), (2, 1)))

    run = RunDirectory(tmp_path)
    train_keeping(before, make, run, every=2)
    saved = directory_of(run.checkpoints, 2)  # in the middle of an epoch
    check_same_weights(train_keeping(after, make, run, resume=saved), single_process(make(), before))


def test_a_scheduler_that_follows_a_measured_value_is_refused() -> None:
    plan = even_plan(profile_of("tied"), (1, 1), "1f1b", 2)
    with pytest.raises(JobError, match="ReduceLROnPlateau, which follows a measured value"):
        run_in_threads(plan, lambda: job_with("tied", scheduler=lr_scheduler.ReduceLROnPlateau))
    with pytest.raises(JobError, match=r"Job\.scheduler made a float"):
        run_in_threads(plan, lambda: job_with("tied", scheduler=lambda optimizer: 0.1))


# --- parameter groups and optimizers


def no_decay_for_vectors(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Both groups at every stage, even where one is empty."""
    is_vector = {name: name.endswith("bias") or name.startswith("norm") for name, _ in named}
    groups = [
        {"params": [p for name, p in named if not is_vector[name]], "weight_decay": 0.1},
        {"params": [p for name, p in named if is_vector[name]], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def muon_and_adam(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """Muon takes matrices alone; a stage may have none, or nothing but."""
    matrices = [(name, p) for name, p in named if p.dim() == 2 and name != "embed.weight"]
    others = [(name, p) for name, p in named if p.dim() != 2 or name == "embed.weight"]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=0.02))
    if others:
        made.append(torch.optim.AdamW(others, lr=0.01))
    return made


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "groups by name": no_decay_for_vectors,
    "fused AdamW": lambda named: torch.optim.AdamW(named, lr=0.01, fused=True),
    "foreach AdamW": lambda named: torch.optim.AdamW(named, lr=0.01, foreach=True),
    "fused SGD": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, fused=True),
    "foreach SGD": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, foreach=True),
    "Muon and AdamW": muon_and_adam,
}


@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_gives_the_weights_of_one_process(name: str, replicas: tuple[int, ...]) -> None:
    check_as_one_process("tied", replicas, "1f1b", optimizer=OPTIMIZERS[name], scheduler=SCHEDULERS["cosine"])


@pytest.mark.parametrize("text", blocks((ROOT / "docs" / "jobs.md").read_text(), "python"))
def test_what_the_docs_put_into_a_job_trains(text: str) -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(text, names)
    given = {field.name: names[field.name] for field in fields(Job) if field.name in names}
    assert given
    if "metrics" in given:
        given["evaluation"] = job_with("conv").data
    before = dict(job_with("conv").model.named_parameters())
    make = functools.partial(job_with, "conv", **given)
    plan = even_plan(profile(make()) if "loss" in given else profile_of("conv"), (1, 1), "pipedream")
    for worker in weights_of(run_in_threads(plan, make)):
        assert all(not torch.equal(tensor, before[name]) for name, tensor in worker.items())


def test_a_stage_may_have_only_some_of_the_groups() -> None:
    """One rate per group, of which a stage may have none: the groups keep their places."""

    def scheduler(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 0.9**step])

    assemblies = check_as_one_process("tied", (1, 1, 1, 1), "1f1b", optimizer=no_decay_for_vectors, scheduler=scheduler)
    sizes = [
        [len(group["params"]) for group in optimizer.param_groups]
        for assembly in assemblies
        for stage in assembly.worker.stages.values()
        for optimizer in stage.weights.optimizers.optimizers
    ]
    assert any(0 in each for each in sizes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda named: torch.optim.SGD([pair for pair in named if pair[1].dim() == 3]), "leave out those without"),
        (
            lambda named: torch.optim.SGD([{"params": named}, {"params": [p for p in named if p[0] == "none"]}]),
            "Put parameters alone into groups",
        ),
        (lambda named: [0.1], "return a torch optimizer, or a list of them"),
    ],
)
def test_an_optimizer_that_a_stage_cannot_have_is_an_error_with_a_remedy(make: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        Weights(dict(nn.Linear(2, 2).named_parameters()), make)


def test_a_job_with_several_optimizers_is_profiled() -> None:
    job = job_with("tied", optimizer=muon_and_adam)
    made = profile_job(
        job, clock=lambda: 0.0, device=CPU, microbatch_size=4, threads=1, repeats=1, progress=lambda done, total: None
    )
    assert all(parameter.state_bytes > 0 for parameter in made.graph.parameters)


# --- accumulation


@REPLICAS
@pytest.mark.parametrize("accumulated", [2, 4])
def test_accumulating_over_k_batches_is_one_batch_k_times_as_large(accumulated: int, replicas: tuple[int, ...]) -> None:
    whole = even_plan(profile_of("tied"), (1,), "1f1b", microbatches=1)
    parts = even_plan(profile_of("tied"), replicas, "1f1b", microbatches=accumulated)
    make = functools.partial(job_with, "tied", optimizer=OPTIMIZERS["fused AdamW"], clip_norm=0.5)
    check_same_weights(run_in_threads(parts, make), single_process(make(), whole))


# --- clipping


@SYNCHRONOUS
@REPLICAS
@pytest.mark.parametrize("name", ["tied", "branches"])
def test_clipping_is_that_of_the_whole_model(name: str, replicas: tuple[int, ...], schedule: str) -> None:
    """Replicas and tied weights count once; a rate of 1 makes a wrong scale seen."""
    check_as_one_process(
        name, replicas, schedule, clip_norm=0.3, optimizer=lambda named: torch.optim.SGD(named, lr=1.0)
    )


def test_a_norm_below_the_limit_leaves_gradients_alone() -> None:
    plan = even_plan(profile_of("tied"), (1, 2), "1f1b", 3)
    clipped, plain = (
        run_in_threads(plan, functools.partial(job_with, "tied", clip_norm=limit)) for limit in (1e6, None)
    )
    torch.testing.assert_close(weights_of(clipped), weights_of(plain), rtol=0, atol=0)


def test_a_gradient_that_is_not_a_number_spoils_all_stages_as_in_one_process() -> None:
    """And is not taken for a norm below the limit."""

    def make() -> Job:
        job = job_with("tied", clip_norm=1.0, epochs=1)
        return replace(job, loss=lambda y, t: job.loss(y, t) * float("nan"))

    found = weights_of(run_in_threads(even_plan(profile_of("tied"), (1, 2), "1f1b", 3), make))
    assert all(tensor.isnan().all() for worker in found for tensor in worker.values())


def test_clipping_under_an_asynchronous_schedule_is_refused_with_the_choices() -> None:
    plan = even_plan(profile_of("conv"), (1, 1), "pipedream")
    with pytest.raises(PlanError, match=r"--schedule gpipe or 1f1b or .*, or let the optimizer clip each stage"):
        check_job(job_with("conv", clip_norm=1.0), plan)


def test_a_stage_of_an_asynchronous_schedule_may_clip_by_its_own_norm_in_a_hook_of_the_optimizer() -> None:
    """As the documents say."""
    norms: list[float] = []

    def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        made = torch.optim.SGD(named, lr=0.1)

        def clip(*_: Any) -> None:
            nn.utils.clip_grad_norm_([p for _, p in named], 0.01)
            norms.append(float(nn.utils.get_total_norm([p.grad for _, p in named if p.grad is not None])))

        made.register_step_pre_hook(clip)
        return made

    plan = even_plan(profile_of("conv"), (1, 1), "pipedream")
    run_in_threads(plan, functools.partial(job_with, "conv", optimizer=optimizer))
    assert len(norms) == 2 * 9
    assert max(norms) <= 0.01 * (1 + 1e-4)


def test_only_a_job_whose_stages_update_together_has_a_group_of_all_workers() -> None:
    plan = even_plan(profile_of("conv"), (1, 2), "1f1b", 2)
    assert sync_groups(plan) == [(1, 2)]
    assert sync_groups(plan, together=True) == [(0, 1, 2), (1, 2)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_norm": 0.0}, r"Job\.clip_norm is 0\.0; it must be above 0"),
        ({"clip_norm": float("nan")}, r"Job\.clip_norm is nan"),
        ({"scheduler_steps": "update"}, "choose 'minibatch' or 'epoch'"),
    ],
)
def test_a_job_says_what_is_wrong_with_it(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        job_with("conv", **fields)


# --- seeds


def weights_of(assemblies: list[Assembly]) -> list[dict[str, Tensor]]:
    stages = [stage for each in assemblies for stage in each.worker.stages.values()]
    return [{n: p.data for n, p in stage.weights.parameters.items()} for stage in stages]


@SYNCHRONOUS
def test_a_run_repeated_gives_the_same_bits(schedule: str) -> None:
    """Three replicas: their gradients are summed in one order, whoever comes first."""
    plan = even_plan(profile_of("tied"), (3, 1), schedule, 3)
    make = functools.partial(job_with, "tied", clip_norm=0.5, scheduler=SCHEDULERS["cosine"])

    def once() -> tuple[Any, Any]:
        assemblies = run_in_threads(plan, make, prepare=(losses := Losses()))
        return weights_of(assemblies), losses

    first, second = once(), once()
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    other = weights_of(run_in_threads(plan, functools.partial(make, seed=1)))
    assert any(not torch.equal(a[n], b[n]) for a, b in zip(first[0], other, strict=True) for n in a)
