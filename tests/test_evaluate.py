"""Evaluation inside training: the eval-mode model of one process, on every held-out sample once, whatever the plan."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from in_threads import even_plan, only_stage, profile, profile_of, run_in_threads
from models import Undecided, make_job
from penstock import EarlyStop, Job
from penstock.errors import JobError, PlanError
from penstock.plan import Plan
from penstock.runtime.capture.capture import call_arguments
from penstock.runtime.worker.assemble import Assembly, make_epoch
from penstock.runtime.worker.data import load_microbatch
from penstock.runtime.worker.evaluate import Evaluator
from test_worker import Recording

HELD_OUT = 13


def first_output(output: Any) -> Tensor:
    return output["logits"] if isinstance(output, dict) else output


def accuracy(output: Any, target: Tensor) -> Tensor:
    return (first_output(output).argmax(-1) == target).float().mean()


def largest(output: Any, target: Tensor) -> float:
    return float(first_output(output).flatten(1).amax(1).mean())


def evaluated_job(name: str, **fields: Any) -> Job:
    held_out = make_job(name, samples=HELD_OUT + 1).data[1:]  # type: ignore[index]
    metrics = {"accuracy": accuracy, "largest": largest}
    return replace(
        make_job(name, samples=11, batch_size=4, epochs=2), **({"evaluation": held_out, "metrics": metrics} | fields)
    )


def run_with_evaluators(
    plan: Plan, make: Callable[[], Job], work: Callable[[Assembly, Evaluator], None]
) -> list[Assembly]:
    evaluators: dict[int, Evaluator] = {}

    def prepare(assembly: Assembly) -> None:
        assert assembly.job.evaluation is not None
        evaluators[assembly.worker.rank] = Evaluator(assembly, assembly.job.evaluation)

    return run_in_threads(
        plan, make, prepare=prepare, work=lambda assembly: work(assembly, evaluators[assembly.worker.rank])
    )


def train_and_evaluate(plan: Plan, make: Callable[[], Job]) -> tuple[list[Assembly], list[list[dict[str, float]]]]:
    """Evaluations of each worker, after each epoch."""
    found: dict[int, list[dict[str, float]]] = {rank: [] for rank in range(len(plan.devices))}

    def work(assembly: Assembly, evaluator: Evaluator) -> None:
        for number in range(assembly.job.epochs):
            assembly.worker.run(assembly.segment(make_epoch(assembly.job, plan, number)))
            found[assembly.worker.rank].append(evaluator.run())

    return run_with_evaluators(plan, make, work), list(found.values())


def in_one_process(assemblies: list[Assembly], job: Job) -> dict[str, float]:
    """The model with the workers' parameters and buffers in eval mode, one microbatch after another."""
    tensors: dict[str, Tensor] = {}
    for assembly in assemblies:
        stage = only_stage(assembly).module
        for name, tensor in (*stage.weights.parameters.items(), *stage.section.buffers.items()):
            assert tensor.dtype == torch.int64 or torch.equal(tensors.setdefault(name, tensor), tensor), name
    job.model.load_state_dict(tensors, strict=False)
    job.model.eval()
    held_out = replace(job, data=job.evaluation)
    epoch = make_epoch(held_out, assemblies[0].plan, 0)
    sums: Counter[str] = Counter()
    with torch.no_grad():
        for microbatch, samples in enumerate(epoch.samples):
            inputs, target = load_microbatch(held_out, epoch, microbatch)
            args, kwargs = call_arguments(inputs)
            output = job.model(*args, **kwargs)
            for name, metric in {"loss": job.loss, **job.metrics}.items():
                sums[name] += samples * float(metric(output, target))
    return {name: total / HELD_OUT for name, total in sums.items()}


@pytest.mark.parametrize("replicas", [(1,), (1, 1), (1, 2), (2, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ["conv", "noisy", "tied", "transformer", "branches", "undecided", "recurrent"])
def test_an_evaluation_is_that_of_one_process(name: str, replicas: tuple[int, ...]) -> None:
    """Dropout off, batch norm by its running statistics, which replicas have averaged; a last batch nothing divides."""
    make = functools.partial(evaluated_job, name)
    plan = even_plan(profile_of(name), replicas, "1f1b", 3)
    assemblies, found = train_and_evaluate(plan, make)
    assert all(each == found[0] for each in found), "workers disagree"
    assert found[0][-1] == pytest.approx(in_one_process(assemblies, make()), rel=1e-4, abs=1e-5)
    assert found[0][0] != found[0][1]


def test_modules_that_are_called_whole_are_in_eval_mode_too() -> None:
    """Where a model cannot be traced, its children are layers, dropout and batch norm among them."""

    def make() -> Job:
        torch.manual_seed(0)
        model = nn.Sequential(Undecided(), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4))
        return replace(evaluated_job("undecided"), model=model, data=make_job("undecided", samples=12).data)

    plan = even_plan(profile(make()), (2, 1), "1f1b", 2)
    assert plan.profile.front_end != "export"
    assemblies, found = train_and_evaluate(plan, make)
    assert found[0][-1] == pytest.approx(in_one_process(assemblies, make()), rel=1e-4, abs=1e-5)
    assert all(module.training for assembly in assemblies for module in assembly.job.model.modules())


def test_an_asynchronous_run_is_evaluated_on_the_newest_weights() -> None:
    make = functools.partial(evaluated_job, "conv")
    assemblies, found = train_and_evaluate(even_plan(profile_of("conv"), (2, 1), "pipedream"), make)
    assert found[1][-1] == pytest.approx(in_one_process(assemblies, make()), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["noisy", "tied", "undecided"])
def test_evaluating_changes_nothing_of_the_training(name: str) -> None:
    make = functools.partial(evaluated_job, name, seed=3)
    plan = even_plan(profile_of(name), (1,), "1f1b", 3)

    def without() -> Job:
        return replace(make(), evaluation=None, metrics={})

    def seeded(assembly: Assembly) -> None:
        torch.manual_seed(1)

    def evaluating(assembly: Assembly, evaluator: Evaluator) -> None:
        torch.manual_seed(1)
        for number in range(assembly.job.epochs):
            assembly.worker.run(assembly.segment(make_epoch(assembly.job, plan, number)))
            evaluator.run()

    (one,), (two,) = run_in_threads(plan, without, prepare=seeded), run_with_evaluators(plan, make, evaluating)
    for name, tensor in only_stage(one).module.section.parameters.items():
        assert torch.equal(tensor, only_stage(two).module.section.parameters[name])
    for name, tensor in only_stage(one).module.section.buffers.items():
        assert torch.equal(tensor, only_stage(two).module.section.buffers[name])


@pytest.mark.parametrize("replicas", [(1, 2), (3, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_every_held_out_sample_is_counted_once(replicas: tuple[int, ...], schedule: str) -> None:
    """Also where there are more than the workers run ahead."""

    def make() -> Job:
        held_out = Recording(make_job("conv", samples=301).data)
        return evaluated_job("conv", evaluation=held_out, epochs=1, metrics={})

    plan = even_plan(profile_of("conv"), replicas, schedule, 3 if schedule == "1f1b" else 1)

    def work(assembly: Assembly, evaluator: Evaluator) -> None:
        assembly.job.evaluation.asked.clear()  # type: ignore[attr-defined]
        evaluator.run()

    assemblies = run_with_evaluators(plan, make, work)
    for stage in (0, len(replicas) - 1):
        asked: Counter[int] = Counter()
        for assembly in assemblies:
            if stage in assembly.worker.stages:
                asked.update(assembly.job.evaluation.asked)  # type: ignore[union-attr]
        assert asked == dict.fromkeys(range(301), 1)


def test_replicas_average_what_batch_norm_has_seen_and_leave_constants_alone() -> None:
    """Three replicas: a third of three times a number is not that number."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 4)
            self.register_buffer("table", torch.rand(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x) * self.table)

    def make() -> Job:
        torch.manual_seed(0)
        return replace(make_job("undecided", samples=11, batch_size=4, epochs=2), model=Net())

    before = make().model.table
    plan = even_plan(profile(make()), (3,), "1f1b", 3)
    statistics: dict[int, Tensor] = {}

    def average(assembly: Assembly) -> None:
        statistics[assembly.worker.rank] = only_stage(assembly).module.section.buffers["norm.running_mean"].clone()
        for _ in range(3):
            assembly.buffers[0].average()

    assemblies = run_in_threads(plan, make, then=average)
    mean = torch.stack(list(statistics.values())).mean(0)
    assert not torch.equal(statistics[0], statistics[1])
    for assembly in assemblies:
        buffers = only_stage(assembly).module.section.buffers
        torch.testing.assert_close(buffers["norm.running_mean"], mean)
        assert torch.equal(buffers["table"], before)


class Turned(nn.Module):
    """In eval mode the parts that hold weights come in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.second(torch.tanh(self.first(x)))
        return self.first(torch.tanh(self.second(x)))


class Shorter(nn.Module):
    """In eval mode a part is left out, and operations of the same kind have other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.second = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.training:
            x = torch.tanh(x + self.extra(x))
        return self.second(torch.tanh(x) + x)


def test_a_model_that_is_shorter_in_eval_mode_is_evaluated_where_its_weights_are() -> None:
    def make() -> Job:
        torch.manual_seed(0)
        return replace(evaluated_job("undecided"), model=Shorter())

    for replicas in ((1, 1), (1, 1, 1, 1)):
        assemblies, found = train_and_evaluate(even_plan(profile(make()), replicas, "1f1b", 2), make)
        assert found[0][-1] == pytest.approx(in_one_process(assemblies, make()), rel=1e-4, abs=1e-5)


def test_a_model_that_eval_mode_turns_around_says_so() -> None:
    def make() -> Job:
        return replace(evaluated_job("undecided"), model=Turned())

    with pytest.raises(
        PlanError, match=r"cannot be cut where the plan cuts it: layer 'first' reads what stage 1 makes"
    ):
        train_and_evaluate(even_plan(profile(make()), (1, 1), "1f1b", 2), make)


def test_a_metric_that_is_no_number_is_an_error_that_names_it() -> None:
    make = functools.partial(evaluated_job, "conv", metrics={"wide": lambda output, target: output})
    with pytest.raises(JobError, match=r"Job\.metrics\['wide'\] made a tensor of shape"):
        train_and_evaluate(even_plan(profile_of("conv"), (1,), "1f1b", 2), make)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"evaluation": None}, "give Job.evaluation its data"),
        ({"evaluation": []}, r"Job\.evaluation is empty"),
        ({"evaluate_every": 0}, r"Job\.evaluate_every is 0"),
        ({"metrics": {"loss": accuracy}}, "choose another name"),
        ({"early_stop": EarlyStop(metric="recall")}, "watches 'recall'; evaluations have loss, accuracy, largest"),
    ],
)
def test_a_job_says_what_is_wrong_with_its_evaluation(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        evaluated_job("conv", **fields)


@pytest.mark.parametrize("fields", [{"mode": "up"}, {"patience": 0}])
def test_an_early_stop_that_means_nothing_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(JobError, match=r"EarlyStop\."):
        EarlyStop(**fields)


@given(st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=12), st.integers(1, 4))
def test_training_stops_after_as_many_evaluations_without_a_better_one_as_patience(
    values: list[int | None], patience: int
) -> None:
    stop = EarlyStop(patience=patience)
    ranked = [100 if value is None else value for value in values]
    best_before = min(ranked[:-patience], default=None)
    expected = best_before is not None and all(value >= best_before for value in ranked[-patience:])
    assert stop.stops(values) == expected
    turned = [None if value is None else -value for value in values]
    assert EarlyStop(mode="max", patience=patience).stops(turned) == expected
