"""Models given as the function that builds them: no process has all of it, and all of them have the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
from in_threads import CPU, check_same_gradients, even_plan, only_stage, profile, run_in_threads
from models import make_job
from penstock import Job, codec
from penstock.errors import JobError
from penstock.profile import Profile
from penstock.run import RunDirectory
from penstock.runtime.capture.blueprint import blueprint_of
from penstock.runtime.capture.build_replay import record_build
from penstock.runtime.worker.assemble import Assembly
from test_processes import TESTS, penstock
from test_shapes import Average, Recurrent, ragged_job

BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "conv": models.convolutional,
    "tied": models.Tied,
    "branches": models.Branches,
    "noisy": models.noisy,
    "undecided": models.undecided,
}


def built(name: str, **fields: Any) -> Job:
    return replace(make_job(name), model=BUILDERS[name], **fields)


# --- what the workers have


@pytest.mark.parametrize("name", BUILDERS)
def test_gradients_are_those_of_one_process(name: str) -> None:
    """Also where layers are whole modules, as fx leaves them."""
    check_same_gradients(even_plan(profile(built(name)), (1, 1), "1f1b", microbatches=2), lambda: built(name))


@pytest.mark.parametrize("model", [Average, Recurrent])
def test_sequences_may_be_of_any_length(model: type[nn.Module]) -> None:
    """Export unrolls what is recurrent to the length it sees, which must show without values too."""

    def make() -> Job:
        return replace(ragged_job(model), model=model)

    check_same_gradients(even_plan(profile(make()), (1, 1), "1f1b", microbatches=2), make)


def values_at_start(replicas: tuple[int, ...], job: Job) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = []

    def note(assembly: Assembly) -> None:
        stage = only_stage(assembly).module
        tensors = {**stage.weights.parameters, **stage.section.buffers}
        found.append({name: tensor.detach().clone() for name, tensor in tensors.items()})

    run_in_threads(even_plan(profile(job), replicas, "1f1b"), lambda: job, work=note)
    return found


@pytest.mark.parametrize("name", ["tied", "conv"])
def test_initial_values_do_not_depend_on_the_plan(name: str) -> None:
    (whole,) = values_at_start((1,), built(name))
    parts = values_at_start((1, 1, 2, 1), built(name))
    assert {key for part in parts for key in part} == set(whole)
    for key, value in whole.items():
        assert all(torch.equal(part[key], value) for part in parts if key in part), key
    if name == "tied":
        assert sum("embed.weight" in part for part in parts) == 2


def test_initial_values_are_those_of_the_seed() -> None:
    one, again, other = (values_at_start((1,), built("tied", seed=seed))[0] for seed in (1, 1, 2))
    assert torch.equal(one["first.weight"], again["first.weight"])
    assert not torch.equal(one["first.weight"], other["first.weight"])
    assert not torch.equal(one["first.weight"], one["second.weight"])


def test_a_worker_is_given_its_own_part_alone() -> None:
    parts = values_at_start((1, 1), built("conv"))
    assert not set(parts[0]) & set(parts[1])
    blueprint = blueprint_of(built("conv"), CPU)
    assert all(tensor.is_meta for tensor in (*blueprint.model.parameters(), *blueprint.model.buffers()))


# --- what a constructor may do


class Elaborate(nn.Module):
    """Numbers from Python, views written to, memory exchanged, values asked for, generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        ends = [float(x) for x in torch.linspace(0, 1, 3)] + torch.linspace(0, 3, 3).tolist()
        self.first = nn.Parameter(torch.tensor([[1.0, 2.0], [ends[2], ends[5]]]))
        self.second = nn.Parameter(torch.ones(2, 2))
        with torch.no_grad():
            self.second[0].mul_(5).add_(self.first[1])
        self.third = nn.Linear(2, 2)
        self.third.weight.data = torch.arange(4.0).view(2, 2).t()
        nn.init.constant_(self.third.bias, 0.25)
        self.again = self.third
        self.alone = self.third.bias
        self.register_buffer("mask", torch.tril(torch.ones(3, 3, dtype=torch.bool)))
        self.register_buffer("table", torch.tensor([1, 2, 3]))
        self.plain = torch.full((2,), 7.0)
        self.random = nn.Parameter(torch.randn(50, 50, generator=torch.Generator().manual_seed(0)))
        nn.init.trunc_normal_(self.random, std=0.02)
        self.square = nn.Parameter(nn.init.orthogonal_(torch.empty(6, 6)))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.third(x @ self.first + self.second[0]) * self.plain + self.table[:2] * torch.tensor([1.0, 2.0])
        return self.again(mixed) + torch.arange(2) * self.random.sum() + self.square.mean() + self.mask.sum()


def test_whatever_a_constructor_does_is_done() -> None:
    eager = Elaborate()
    job = replace(built("tied"), model=Elaborate)
    model = blueprint_of(job, CPU).whole(CPU)
    assert model.alone is model.third.bias
    assert torch.equal(model.plain, eager.plain)
    for (name, value), (expected_name, expected) in zip(
        model.state_dict().items(), eager.state_dict().items(), strict=True
    ):
        assert (name, value.dtype, value.stride()) == (expected_name, expected.dtype, expected.stride())
        if name not in ("random", "square"):
            assert torch.equal(value, expected), name
    assert 0.015 < float(model.random.detach().std()) < 0.025
    torch.testing.assert_close(model.square @ model.square.T, torch.eye(6))


def test_what_a_forward_makes_of_its_own_is_made_where_it_runs() -> None:
    data = [(x, x) for x in torch.randn(6, 2)]
    job = replace(built("tied"), model=Elaborate, data=data, loss=nn.functional.mse_loss)
    check_same_gradients(even_plan(profile(job), (1, 1), "1f1b", microbatches=2), lambda: job)


def test_recording_takes_no_memory_and_only_what_is_asked_for_is_made() -> None:
    """A terabyte of layers, one of which is wanted."""
    layers, replay = record_build(lambda: [nn.Linear(2**14, 2**14) for _ in range(1000)] + [nn.Linear(3, 3)], seed=0)
    assert replay.value(layers[-1].weight).abs().max() <= 3**-0.5


# --- what cannot be done is said


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = torch.rand(3).nonzero()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(4, 4, device="meta"), r"on the meta device \('weight' and 1 others\).*Job\(model=lambda: Model"),
        (lambda: "a model", r"Job.model\(\) built a str, not an nn.Module"),
        ("a model", "Job.model is a str; give an nn.Module, or a function"),
        (Counting, "have shapes and no values: .*nonzero.*take what depends on values from Python or numpy instead"),
    ],
)
def test_a_model_that_cannot_be_built_so_is_a_clear_error(model: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        blueprint_of(replace(built("tied"), model=model), CPU)


# --- the commands


JOB = """
import sys
sys.path.insert(0, {tests!r})
from test_blueprint import built

def job():
    return built("tied", epochs=2)
"""


@pytest.mark.processes
def test_profile_plan_verify_train_and_resume_take_a_function(tmp_path: Path) -> None:
    job, profiled, planned, other = (tmp_path / name for name in ("job.py", "profile.json", "plan.json", "other.json"))
    job.write_text(JOB.format(tests=str(TESTS)))
    penstock("profile", job, "--output", profiled)
    penstock("plan", profiled, "--cluster", "local:2", "--schedule", "1f1b", "--replicas", "1-1", "--output", planned)
    codec.save(even_plan(codec.load(Profile, profiled), (1, 1, 1), "1f1b"), other)
    assert json.loads(penstock("verify", job, other, "--json").stdout)["passed"]
    through, resumed = RunDirectory(tmp_path / "through"), RunDirectory(tmp_path / "resumed")
    made = built("tied")
    half = -(-len(made.data) // made.batch_size)
    penstock("train", job, planned, "--run-dir", through.path, "--checkpoint-every", half)
    middle = min(through.checkpoints.iterdir())
    penstock("train", job, other, "--run-dir", resumed.path, "--resume", middle)
    found, expected = resumed.load()[2].losses, through.load()[2].losses
    torch.testing.assert_close(found, expected[-len(found) :], rtol=1e-4, atol=1e-5)
    assert len(found) == len(expected) // 2


def start(role: str, *arguments: Path, workers: int) -> subprocess.CompletedProcess[str]:
    """Processes that may not take as much memory as the model has."""
    script = [str(TESTS / "too_large.py"), role, *map(str, arguments)]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)] if workers else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, *script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=150)


@pytest.mark.processes
def test_a_model_larger_than_any_worker_may_hold_trains(tmp_path: Path) -> None:
    file, losses = tmp_path / "profile.json", tmp_path / "losses.json"
    profiled = start("profile", file, workers=0)
    assert profiled.returncode == 0, profiled.stderr
    made = codec.load(Profile, file)
    for name, replicas in (("one", (1,)), ("four", (1, 1, 1, 1))):
        codec.save(even_plan(made, replicas, "1f1b"), tmp_path / f"{name}.json")

    trained = start("train", tmp_path / "four.json", losses, workers=4)
    assert trained.returncode == 0, trained.stderr
    found = json.loads(losses.read_text())
    assert len(found) == 3
    assert found[0] > found[1] > found[2]

    alone = start("train", tmp_path / "one.json", losses, workers=1)
    assert alone.returncode != 0
    assert re.search("can't allocate memory", alone.stderr)
