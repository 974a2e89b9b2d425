"""What `penstock verify` finds and what it lets pass; and losses that are not finite in training."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from in_threads import check_same_gradients, even_plan, profile, run_in_threads
from models import Tied, sgd
from penstock import Job
from penstock.errors import JobError
from penstock.plan import Plan
from penstock.runtime.process.loss_file import LossLog
from penstock.runtime.process.verify import Verification, compare, reference, save_gradients, verification_epoch
from penstock.runtime.stage.losses import Term
from test_weighted_loss import mean_over_tokens, padded_job, profile_of, tokens_in


def verified(plan: Plan, make: Callable[[], Job], directory: Path) -> Verification:
    run_in_threads(plan, make, work=lambda assembly: save_gradients(assembly, directory))
    return compare(make(), plan, directory)


@pytest.mark.parametrize("form", ["pair", "weigh"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "pipedream"])
def test_verify_compares_with_the_loss_of_the_whole_minibatch(form: str, schedule: str) -> None:
    tied = schedule != "pipedream"
    plan = even_plan(profile_of(form, tied), (1, 2), schedule, microbatches=3 if tied else 1)
    check_same_gradients(plan, functools.partial(padded_job, form, tied=tied), tolerance=1e-12)


def test_verify_finds_a_mean_over_tokens_without_weights_and_says_what_to_do(tmp_path: Path) -> None:
    plan = even_plan(profile_of("plain"), (1, 2), "1f1b", microbatches=3)
    found = verified(plan, functools.partial(padded_job, "plain", samples=8), tmp_path)
    assert not found.passed
    assert found.largest_difference > 0.01
    assert "must return (sum, weight), or Job.weigh must say what it divides by" in found.reason


def test_verify_says_where_it_could_not_join_outputs(tmp_path: Path) -> None:
    class WithItsLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Tied().double()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            output = self.inner(x)
            return output, output.square().mean()

    def make() -> Job:
        job = padded_job()
        return replace(
            job,
            model=WithItsLoss(),
            loss=lambda output, target: mean_over_tokens(output[0], target) + output[1],
            weigh=tokens_in,
        )

    found = verified(even_plan(profile(make()), (1, 1), "1f1b", 2), make, tmp_path)
    assert found.passed
    assert found.apart_because == "a tensor of shape [] has not a row for each of 4 samples"


def test_verify_is_not_blind_to_small_gradients(tmp_path: Path) -> None:
    """One that is a ten-thousandth of the largest and wrong by a tenth."""

    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loud, self.quiet = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.loud(x) + 1e-4 * self.quiet(x)

    def make() -> Job:
        torch.manual_seed(0)
        rows = torch.randn(8, 4)
        return Job(model=Quiet(), data=list(zip(rows, rows, strict=True)), loss=F.mse_loss, optimizer=sgd, batch_size=8)

    plan = even_plan(profile(make()), (1, 1), "1f1b", 2)

    assert verified(plan, make, tmp_path).passed
    spoil_files(tmp_path, "quiet.weight", lambda gradient: gradient * 1.1)
    found = compare(make(), plan, tmp_path)
    assert not found.passed
    assert found.worst_parameter == "quiet.weight"


class Attention(nn.Module):
    """A bias of keys shifts all scores of a query alike, so its gradient is 0 but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query, self.key = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head((self.query(h) @ self.key(h).transpose(1, 2)).softmax(-1) @ h)


def test_verify_passes_a_gradient_that_is_nothing_but_rounding(tmp_path: Path) -> None:
    def make() -> Job:
        job = padded_job("weigh", samples=7, batch_size=7)
        return replace(job, model=Attention())

    plan = even_plan(profile(make()), (1, 2), "1f1b", 3)
    found = verified(plan, make, tmp_path)
    assert found.passed, found
    rounding = reference(make(), plan, verification_epoch(make(), plan)).gradients
    assert rounding["key.bias"].abs().max() < 1e-5 * rounding["key.weight"].abs().max()


def spoil_files(directory: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    changed = 0
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        for key in [key for key in tensors if key.partition("/")[2] == name]:
            tensors[key] = change(tensors[key])
            changed += 1
        save_file(tensors, path)
    assert changed


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_verify_fails_where_a_gradient_is_not_finite_and_names_it(value: float, tmp_path: Path) -> None:
    make, plan = functools.partial(padded_job, samples=8), even_plan(profile_of("pair"), (1, 1), "1f1b", 2)
    assert verified(plan, make, tmp_path).passed
    name = plan.profile.graph.parameters[-1].name
    spoil_files(tmp_path, name, lambda gradient: gradient.index_fill(0, torch.tensor([0]), value))
    found = compare(make(), plan, tmp_path)
    assert not found.passed
    assert (found.largest_difference, found.worst_parameter) == (math.inf, name)
    assert found.reason == f"gradients that are infinite or not a number: 1, first {name}"


def test_verify_fails_where_both_sides_are_not_a_number(tmp_path: Path) -> None:
    def make() -> Job:
        job = padded_job(samples=8)
        return replace(job, loss=lambda y, t: (torch.sqrt(-1 - y.square()).sum(), 1.0))

    plan = even_plan(profile(make()), (1, 1), "1f1b", 2)
    found = verified(plan, make, tmp_path)
    assert not found.passed
    assert found.largest_difference == found.loss_difference == math.inf


# --- losses that are not finite, in training


def test_a_run_warns_once_of_a_loss_that_is_not_finite(caplog: pytest.LogCaptureFixture) -> None:
    losses = LossLog()
    for microbatch, value in enumerate([1.0, math.nan, 2.0, math.inf]):
        losses.add(microbatch, Term(value, 2.0), microbatch // 2)
    (record,) = caplog.records
    assert "the loss of minibatch 1 is not a number; training goes on" in record.getMessage()
    assert losses.recent() is None


def test_a_run_stops_at_such_a_loss_if_the_job_says_so() -> None:
    losses = LossLog("stop")
    losses.add(0, Term(1.0, 2.0), 0)
    with pytest.raises(JobError, match=r"minibatch 8 is infinite.* says to stop; lower the"):
        losses.add(1, Term(-math.inf, 2.0), 7)
    with pytest.raises(JobError, match=r"Job\.on_nonfinite_loss is 'ignore'; choose 'warn' or 'stop'"):
        padded_job(on_nonfinite_loss="ignore")
