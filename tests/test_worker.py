"""The worker on real models, as threads: same mathematics, every sample once, no matter the plan."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from builders import replica_shares
from in_threads import (
    CPU,
    check_same_gradients,
    even_plan,
    looped_plan,
    only_stage,
    profile_of,
    recomputing,
    run_in_threads,
    uneven_plan,
    with_batch_size,
)
from models import make_job, sgd
from penstock import Job, Remedy
from penstock.errors import WorkerError
from penstock.plan import Plan
from penstock.runtime.capture.capture import call_arguments
from penstock.runtime.stage.losses import WeightedLoss
from penstock.runtime.stage.losses import loss_of as loss_of_output
from penstock.runtime.stage.precision import autocast_for
from penstock.runtime.stage.weights import Weights
from penstock.runtime.transport.base import Pending
from penstock.runtime.transport.threads import LocalTransport
from penstock.runtime.worker.assemble import Assembly, capture_for_plan, make_epoch
from penstock.runtime.worker.data import load_microbatch
from penstock.sampling import Epoch
from penstock.schedule import Action, Kind, Schedule

REPLICATIONS = [(1,), (2,), (1, 1), (1, 2), (2, 1), (3, 1), (1, 3), (2, 3), (1, 1, 1)]
SHARES = [
    ((2, 1),),
    ((2, 1), (1,)),
    ((1, 3), (1,)),
    ((1,), (2, 1)),
    ((1,), (1, 3)),
    ((1,), (2, 1), (1,)),
    ((2, 1), (1, 3)),
    ((2,), (1, 1)),
]
"""Of each stage, what its replicas take of a round: in the first, a middle and the last stage."""


def shares_id(shares: tuple[tuple[int, ...], ...]) -> str:
    return "-".join("+".join(map(str, stage)) for stage in shares)


def single_process(job: Job, plan: Plan, scaler: torch.amp.GradScaler | None = None) -> dict[str, Tensor]:
    """The weights after all epochs in one process, with the same minibatches and microbatches."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=job.precision == "fp16")
    made = job.optimizer(list(job.model.named_parameters()))
    optimizers = [made] if isinstance(made, torch.optim.Optimizer) else made
    schedulers = [job.scheduler(optimizer) for optimizer in optimizers] if job.scheduler else []
    job.model.train()
    for number in range(job.epochs):
        epoch = make_epoch(job, plan, number)
        first = 0
        for count in epoch.minibatches:
            members = range(first, first + count)
            total = sum(epoch.samples[m] for m in members)
            for m in members:
                scaler.scale(loss_of(job, epoch, m) * (epoch.samples[m] / total)).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            if job.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.clip_norm)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            job.model.zero_grad()
            for scheduler in schedulers:
                if job.scheduler_steps == "minibatch":
                    scheduler.step()
            first += count
        for scheduler in schedulers:
            if job.scheduler_steps == "epoch":
                scheduler.step()
    return dict(job.model.named_parameters())


def loss_of(job: Job, epoch: Epoch, microbatch: int) -> Tensor:
    inputs, target = load_microbatch(job, epoch, microbatch)
    args, kwargs = call_arguments(inputs)
    with autocast_for(job.precision, CPU)():
        return job.loss(job.model(*args, **kwargs), target)


def check_same_weights(
    assemblies: list[Assembly], expected: dict[str, Tensor], rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    seen = set()
    for assembly in assemblies:
        for stage in assembly.worker.stages.values():
            for name, parameter in stage.weights.parameters.items():
                torch.testing.assert_close(parameter.data, expected[name].data, rtol=rtol, atol=atol)
                seen.add(name)
            assert stage.module.in_flight == 0
    assert seen == set(expected)


@pytest.mark.parametrize("replicas", REPLICATIONS, ids=lambda r: "-".join(map(str, r)))
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("name", ["tied", "branches"])
def test_synchronous_training_is_that_of_one_process(name: str, schedule: str, replicas: tuple[int, ...]) -> None:
    """Invariant 1, with uneven replication, tied weights, values that skip stages, and a last batch nothing divides."""
    make = functools.partial(make_job, name, samples=11, batch_size=4, epochs=2)
    plan = even_plan(profile_of(name), replicas, schedule, microbatches=3)
    check_same_weights(run_in_threads(plan, make), single_process(make(), plan))


@pytest.mark.parametrize(("positions", "laps", "replicas"), [(1, 2, 1), (2, 2, 1), (2, 1, 1), (2, 2, 2), (1, 3, 2)])
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
@pytest.mark.parametrize("name", ["tied", "branches"])
def test_several_stages_on_a_worker_train_as_one_process_does(
    name: str, schedule: str, positions: int, laps: int, replicas: int
) -> None:
    """Ties between stages of one worker, and of several; values handed over within a worker; a short last minibatch."""
    make = functools.partial(make_job, name, samples=11, batch_size=4, epochs=2)
    plan = looped_plan(profile_of(name), positions, laps, schedule, 3, replicas)
    check_same_weights(run_in_threads(plan, make), single_process(make(), plan))


@pytest.mark.parametrize("shares", SHARES, ids=shares_id)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_replicas_with_unequal_shares_train_as_one_process_does(
    schedule: str, shares: tuple[tuple[int, ...], ...]
) -> None:
    make = functools.partial(make_job, "tied", samples=23, batch_size=8)
    plan = uneven_plan(with_batch_size(profile_of("tied"), 8), shares, schedule, microbatches=7)
    check_same_weights(run_in_threads(plan, make), single_process(make(), plan))


@pytest.mark.parametrize("stages", [2, 4])
def test_a_translator_with_attention_has_the_gradients_of_one_process(stages: int) -> None:
    """As GNMT: what the encoder made and what the attention found are read by many layers further on."""
    plan = even_plan(profile_of("translator"), (1,) * stages, "1f1b", microbatches=2)
    check_same_gradients(plan, lambda: make_job("translator"))


@pytest.mark.parametrize("name", ["conv", "undecided", "recurrent"])
def test_other_models_too(name: str) -> None:
    plan = even_plan(profile_of(name), (2, 1), "1f1b", microbatches=2)
    check_same_weights(run_in_threads(plan, lambda: make_job(name)), single_process(make_job(name), plan))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    replicas=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    samples=st.integers(1, 13),
    batch_size=st.integers(1, 6),
    microbatches=st.integers(1, 6),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    data=st.data(),
)
def test_same_weights_for_any_replication_shares_accumulation_and_remainder(
    replicas: list[int], samples: int, batch_size: int, microbatches: int, schedule: str, data: st.DataObject
) -> None:
    profile = with_batch_size(profile_of("tied"), batch_size)
    plan = uneven_plan(profile, data.draw(replica_shares(replicas)), schedule, min(microbatches, batch_size))
    make = functools.partial(make_job, "tied", samples=samples, batch_size=batch_size)
    check_same_weights(run_in_threads(plan, make), single_process(make(), plan))


class Recording:
    """Data that remembers which samples were asked for."""

    def __init__(self, data: Any) -> None:
        self.data, self.asked = data, Counter[int]()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.asked[index] += 1
        return self.data[index]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize(
    "shares",
    [((1,), (1, 1)), ((1, 1), (1,)), ((1, 1, 1), (1,)), ((1,), (1, 1, 1)), ((1, 1), (1, 1, 1)), *SHARES],
    ids=shares_id,
)
def test_every_sample_exactly_once_per_epoch(shares: tuple[tuple[int, ...], ...], schedule: str) -> None:
    """Invariants 3 and 4: at the stage that reads inputs and at the stage that reads targets."""

    def make() -> Job:
        job = make_job("conv", samples=23, batch_size=4, epochs=2)
        return replace(job, data=Recording(job.data))

    plan = uneven_plan(profile_of("conv"), shares, schedule, 3 if schedule == "1f1b" else 1)

    def forget_capture_then_train(assembly: Assembly) -> None:
        assembly.job.data.asked.clear()  # type: ignore[attr-defined]
        for number in range(2):
            assembly.worker.run(assembly.segment(make_epoch(assembly.job, plan, number)))

    assemblies = run_in_threads(plan, make, work=forget_capture_then_train)
    for stage in (0, len(shares) - 1):
        asked: Counter[int] = Counter()
        for assembly in assemblies:
            if stage in assembly.worker.stages:
                asked.update(assembly.job.data.asked)  # type: ignore[attr-defined]
        assert asked == dict.fromkeys(range(23), 2)


def asynchronous_reference(job: Job, plan: Plan) -> dict[str, Tensor]:
    """One process that keeps every version of every stage's weights, and runs each microbatch on the right mix."""
    epoch = make_epoch(job, plan, 0)
    schedule = plan.schedule_for(epoch.minibatches)
    graph = plan.profile.graph
    owned = [[p.name for p in graph.parameters_of(stage.layers)] for stage in plan.stages]
    parameters = dict(job.model.named_parameters())
    optimizers = [job.optimizer([(n, parameters[n]) for n in names]) if names else None for names in owned]
    history = [[{n: parameters[n].detach().clone() for n in names}] for names in owned]
    job.model.train()
    gradients: dict[int, dict[str, Tensor]] = {}
    weights: dict[int, float] = {}
    done = [0] * len(plan.stages)
    for microbatch in range(len(epoch.samples)):
        mix = {n: t for s in range(len(owned)) for n, t in expected_weights(job, schedule, s, microbatch, history[s])}
        leaves = {n: t.clone().requires_grad_() for n, t in mix.items()}
        inputs, target = load_microbatch(job, epoch, microbatch)
        args, kwargs = call_arguments(inputs)
        output = torch.func.functional_call(job.model, leaves, args, kwargs)
        loss, weights[microbatch] = sum_and_weight(job, output, target, epoch.samples[microbatch])
        found = torch.autograd.grad(loss, list(leaves.values()))
        gradients[microbatch] = dict(zip(leaves, found, strict=True))
        for stage, names in enumerate(owned):
            last_round = len(schedule.rounds[stage]) - 1
            while done[stage] <= last_round and max(schedule.round_members(stage, done[stage])) <= microbatch:
                members = schedule.round_members(stage, done[stage])
                total = sum(weights[m] for m in members)
                for name in names:
                    parameters[name].grad = sum(gradients[m][name] for m in members) / total if total else None
                if optimizers[stage] is not None:
                    step_at_lowered_rate(
                        job, optimizers[stage], max(schedule.staleness(stage, m) for m in members), members[0]
                    )
                history[stage].append({n: parameters[n].detach().clone() for n in names})
                done[stage] += 1
    return parameters


def sum_and_weight(job: Job, output: Any, target: Any, samples: int) -> tuple[Tensor, float]:
    """Of a microbatch's loss; a mean over the samples is taken times their number."""
    found = loss_of_output(job, output, target)
    return (found.total, found.weight) if isinstance(found, WeightedLoss) else (found * samples, samples)


def expected_weights(
    job: Job, schedule: Schedule, stage: int, microbatch: int, history: list[dict[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Of the schedule's version; or with look-ahead where momentum would carry them until the gradient is applied."""
    version = schedule.versions[stage][microbatch]
    for name, weight in history[version].items():
        expected = weight
        if version and job.remedy is not None:
            move = weight - history[version - 1][name]
            for _ in range(schedule.staleness(stage, microbatch)):
                move = move * job.remedy.look_ahead
                expected = expected + move
        yield name, expected


def step_at_lowered_rate(job: Job, optimizer: torch.optim.Optimizer, staleness: int, microbatch: int) -> None:
    """PipeMare's rule, for one microbatch to a minibatch."""
    (group,) = optimizer.param_groups
    own = group["lr"]
    if job.remedy is not None and job.remedy.rate_steps:
        group["lr"] = own / (1 + staleness) ** (1 - min(microbatch / job.remedy.rate_steps, 1))
    optimizer.step()
    group["lr"] = own


REMEDIES = {
    "learning rates": Remedy(rate_steps=15),
    "prediction": Remedy(look_ahead=1.0),
    "look-ahead": Remedy(look_ahead=0.9),
    "both": Remedy(rate_steps=20, look_ahead=0.5),
}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)  # a bias before batch norm has a gradient of rounding alone


@pytest.mark.parametrize("optimizer", [sgd, adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("replicas", [(1, 1, 1), (1, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("remedy", REMEDIES.values(), ids=REMEDIES)
def test_a_remedy_is_what_it_says(remedy: Remedy, replicas: tuple[int, ...], optimizer: Any) -> None:
    def make(remedy: Remedy | None = remedy) -> Job:
        return replace(make_job("conv", samples=101, batch_size=4), optimizer=optimizer, remedy=remedy)

    plan = even_plan(profile_of("conv"), replicas, "pipedream")
    expected = asynchronous_reference(make(), plan)
    check_same_weights(run_in_threads(plan, make), expected)
    without = asynchronous_reference(make(None), plan)
    assert not all(torch.allclose(expected[name], without[name], rtol=1e-3, atol=1e-4) for name in expected)


@pytest.mark.parametrize("schedule", ["vertical", "2bw"])
def test_looking_ahead_goes_from_the_version_of_the_schedule(schedule: str) -> None:
    def make() -> Job:
        return replace(make_job("conv", samples=101, batch_size=4), remedy=Remedy(look_ahead=0.9))

    plan = even_plan(profile_of("conv"), (1, 1, 1), schedule, microbatches=4 if schedule == "2bw" else 1)
    check_same_weights(run_in_threads(plan, make), asynchronous_reference(make(), plan))


def test_a_stage_that_recomputes_does_so_on_the_weights_that_it_looked_ahead_to() -> None:
    def make() -> Job:
        return replace(make_job("conv", samples=41, batch_size=4), remedy=Remedy(look_ahead=1.0))

    plan = even_plan(profile_of("conv"), (1, 1, 1), "pipedream")
    check_same_weights(run_in_threads(recomputing(plan), make), asynchronous_reference(make(), plan))


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_stages_that_share_a_weight_keep_it_equal_under_a_remedy(schedule: str) -> None:
    def make() -> Job:
        return replace(make_job("tied", samples=101, batch_size=4), remedy=REMEDIES["both"])

    plan = even_plan(profile_of("tied"), (1, 1, 1), schedule, microbatches=4 if schedule == "2bw" else 1)
    found: dict[str, Tensor] = {}
    for assembly in run_in_threads(plan, make):
        for stage in assembly.worker.stages.values():
            for name, parameter in stage.weights.parameters.items():
                torch.testing.assert_close(parameter.data, found.setdefault(name, parameter.data))


@pytest.mark.parametrize("remedy", REMEDIES.values(), ids=REMEDIES)
def test_a_remedy_changes_nothing_where_no_gradient_is_stale(remedy: Remedy) -> None:
    def make(remedy: Remedy | None = remedy) -> Job:
        return replace(make_job("conv", samples=23, batch_size=4), remedy=remedy)

    for plan in (
        even_plan(profile_of("conv"), (1, 1), "1f1b", microbatches=2),
        even_plan(profile_of("conv"), (1,), "pipedream"),
    ):
        with_it, without = (run_in_threads(plan, functools.partial(make, each)) for each in (remedy, None))
        for one, other in zip(with_it, without, strict=True):
            for index, stage in one.worker.stages.items():
                for name, parameter in stage.weights.parameters.items():
                    assert torch.equal(parameter, other.worker.stages[index].weights.parameters[name])


@pytest.mark.parametrize("schedule", ["pipedream", "vertical", "2bw"])
@pytest.mark.parametrize("replicas", [(1,), (1, 1), (1, 1, 1), (1, 2), (2, 1), (3, 1), (1, 3), (2, 3)], ids=str)
def test_asynchronous_training_uses_exactly_the_versions_of_the_schedule(
    replicas: tuple[int, ...], schedule: str
) -> None:
    make = functools.partial(make_job, "conv", samples=101, batch_size=4)
    plan = even_plan(profile_of("conv"), replicas, schedule, microbatches=4 if schedule == "2bw" else 1)
    check_same_weights(run_in_threads(plan, make), asynchronous_reference(make(), plan))


def sections_reference(job: Job, plan: Plan) -> list[dict[str, Tensor]]:
    """As above, section by section, so that each stage's uses of a shared weight may be of its own version."""
    epoch, (splitter, _) = make_epoch(job, plan, 0), capture_for_plan(job, plan, CPU)
    schedule = plan.schedule_for(epoch.minibatches)
    sections = [splitter.section(stage.layers) for stage in plan.stages]
    names = dict.fromkeys(name for section in sections for name in section.parameters)
    weights = {name: next(s.parameters[name] for s in sections if name in s.parameters) for name in names}
    optimizer = job.optimizer(list(weights.items()))
    history = [{name: weight.detach().clone() for name, weight in weights.items()}]
    found: dict[int, dict[str, Tensor]] = {}
    weights_of_losses: dict[int, float] = {}
    for microbatch in range(len(epoch.samples)):
        inputs, target = load_microbatch(job, epoch, microbatch)
        flat, values = splitter.captured.bind(inputs), {}
        leaves = []
        for stage, section in enumerate(sections):
            version = history[schedule.versions[stage][microbatch]]
            leaves.append({name: version[name].clone().requires_grad_() for name in section.parameters})
            arguments = [flat[place] for place in section.reads] + [values[name] for name in section.received_names]
            sent, output = section.run(leaves[stage], arguments)
            values.update(zip(section.sent_names, sent, strict=True))
        made = splitter.captured.rebuild_output(output)
        loss, weights_of_losses[microbatch] = sum_and_weight(job, made, target, epoch.samples[microbatch])
        loss.backward()
        found[microbatch] = {}
        for own in leaves:
            for name, leaf in own.items():
                if leaf.grad is not None:
                    found[microbatch][name] = found[microbatch].get(name, 0) + leaf.grad
        if microbatch == max(schedule.round_members(0, len(history) - 1)):
            members = schedule.round_members(0, len(history) - 1)
            total = sum(weights_of_losses[m] for m in members)
            for name, weight in weights.items():
                weight.grad = sum(found[m][name] for m in members) / total
            optimizer.step()
            history.append({name: weight.detach().clone() for name, weight in weights.items()})
    return [{name: history[-1][name] for name in section.parameters} for section in sections]


@pytest.mark.parametrize("schedule", ["pipedream", "vertical", "2bw"])
@pytest.mark.parametrize("replicas", [(1, 1), (1, 1, 1), (2, 2), (3, 3)], ids=str)
def test_a_weight_shared_by_stages_stays_equal_and_gets_all_its_gradients_under_asynchronous_schedules(
    replicas: tuple[int, ...], schedule: str
) -> None:
    make = functools.partial(make_job, "tied", samples=101, batch_size=4)
    plan = even_plan(profile_of("tied"), replicas, schedule, microbatches=4 if schedule == "2bw" else 1)
    assert plan.pipeline.ties
    expected = sections_reference(make(), plan)
    for assembly in run_in_threads(plan, make):
        for index, stage in assembly.worker.stages.items():
            for name, parameter in stage.weights.parameters.items():
                torch.testing.assert_close(parameter.data, expected[index][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shares", SHARES, ids=shares_id)
def test_asynchronous_updates_are_the_mean_over_a_round_also_with_unequal_shares(
    shares: tuple[tuple[int, ...], ...],
) -> None:
    make = functools.partial(make_job, "conv", samples=101, batch_size=4)
    plan = uneven_plan(profile_of("conv"), shares, "pipedream")
    check_same_weights(run_in_threads(plan, make), asynchronous_reference(make(), plan))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "pipedream"])
@pytest.mark.parametrize("replicas", [(2,), (1, 2), (2, 1), (3, 1)], ids=str)
def test_gradients_are_summed_in_the_midst_of_the_last_backward_of_their_round(
    schedule: str, replicas: tuple[int, ...]
) -> None:
    """All of them, on workers that have such a backward; and the sums are those of one message after it."""
    plan = even_plan(profile_of("conv"), replicas, schedule, microbatches=3 if schedule != "pipedream" else 1)
    begun, before_sync = Counter[int](), defaultdict[int, list[int]](list)

    class Noting(LocalTransport):
        def begin_all_reduce(self, tensor: Tensor, workers: tuple[int, ...]) -> Pending:
            begun[self.rank] += 1
            return super().begin_all_reduce(tensor, workers)

    def note(assembly: Assembly) -> None:
        rank, run = assembly.worker.rank, assembly.worker.sync.run

        def noting(stages: Sequence[Weights], round_index: int) -> None:
            before_sync[rank].append(begun.pop(rank, 0))
            run(stages, round_index)
            begun.pop(rank, 0)

        assembly.worker.sync.run = noting  # type: ignore[method-assign]

    make = functools.partial(make_job, "conv")
    early = run_in_threads(plan, make, transport=Noting, prepare=note)
    late = run_in_threads(plan, make, bucket_bytes=2**30)
    averaging = [worker for stage in plan.pipeline.workers if len(stage) > 1 for worker in stage]
    assert all(max(before_sync[worker]) > 1 for worker in averaging)
    for one, other in zip(early, late, strict=True):
        for name, parameter in only_stage(one).weights.parameters.items():
            assert torch.equal(parameter, only_stage(other).weights.parameters[name])


def test_a_failing_worker_ends_the_others_within_the_deadline() -> None:
    """Invariant 8."""
    plan = even_plan(profile_of("conv"), (1, 1), "1f1b", microbatches=2)

    def fail_in_the_middle(action: Action) -> None:
        if action == Action(1, Kind.BACKWARD, 1):
            raise ValueError("injected")

    def work(assembly: Assembly) -> None:
        if assembly.worker.rank == 1:
            assembly.worker.on_action = fail_in_the_middle
        assembly.worker.run(assembly.segment(make_epoch(assembly.job, plan, 0)))

    with pytest.raises(ValueError, match="injected"):
        run_in_threads(plan, lambda: make_job("conv"), work=work, timeout_s=10.0)


def test_a_wait_has_a_deadline_and_names_whom_it_waited_for() -> None:
    """Invariant 8: worker 1 never starts."""
    plan = even_plan(profile_of("conv"), (1, 1), "1f1b", microbatches=2)

    def work(assembly: Assembly) -> None:
        if assembly.worker.rank == 0:
            assembly.worker.run(assembly.segment(make_epoch(assembly.job, plan, 0)))

    with pytest.raises(WorkerError, match=r"worker 0 \(stage 0\) waited for 1B0 from worker 1 .*0\.3 s"):
        run_in_threads(plan, lambda: make_job("conv"), work=work, timeout_s=0.3)
