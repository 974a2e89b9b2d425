"""Checkpoints: taken while the pipeline runs, by the model's names, whole or not there; any plan goes on from any."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.api import CheckpointException

from in_threads import (
    Together,
    even_plan,
    looped_plan,
    only_stage,
    profile,
    profile_of,
    run_in_threads,
    train_keeping,
    uneven_plan,
)
from models import make_job
from penstock import Job, codec
from penstock.errors import FormatError, JobError, WorkerError
from penstock.plan import Plan
from penstock.run import RunDirectory
from penstock.runtime.checkpoint import checkpoint
from penstock.runtime.checkpoint import keeper as keeper_module
from penstock.runtime.checkpoint.checkpoint import (
    Checkpoint,
    Tensors,
    clean,
    commit,
    directory_of,
    read_index,
    save_shard,
)
from penstock.runtime.checkpoint.keeper import Keeper, Save
from penstock.runtime.checkpoint.portable import export_weights
from penstock.runtime.checkpoint.state import WorkerState
from penstock.runtime.worker.assemble import Assembly, make_epoch
from penstock.schedule import Action, Kind
from test_worker import Recording, check_same_weights, single_process

ASYNCHRONOUS = ("pipedream", "vertical", "2bw")


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def plan_for(name: str, schedule: str, replicas: tuple[int, ...]) -> Plan:
    return even_plan(profile_of(name), replicas, schedule, {"1f1b": 3, "gpipe": 2, "2bw": 3}.get(schedule, 1))


def maker(name: str, samples: int = 45, **fields: Any) -> Callable[[], Job]:
    return lambda: replace(make_job(name, samples=samples, batch_size=4, epochs=2), **fields)


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    found = Tensors(checkpoint)
    return found.load(list(found.forms))


# --- the cut


@pytest.mark.parametrize("replicas", [(1,), (1, 1), (1, 1, 1), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", *ASYNCHRONOUS])
def test_a_checkpoint_is_the_state_after_just_the_minibatches_before_it(
    schedule: str, replicas: tuple[int, ...], tmp_path: Path
) -> None:
    """To the last bit what a run has that ends there, though this one goes on. But for the statistics of batch norm:
    they have seen what an asynchronous schedule has begun already."""
    plan, make, run = plan_for("conv", schedule, replicas), maker("conv", optimizer=adam), RunDirectory(tmp_path)
    train_keeping(plan, make, run, every=6)

    def stop(assembly: Assembly) -> None:
        epoch = replace(make_epoch(assembly.job, plan, 0), last_minibatch=6)
        assembly.worker.run(assembly.segment(epoch))

    saved = tensors_of(directory_of(run.checkpoints, 6))
    seen = set()
    for assembly in run_in_threads(plan, make, work=stop):
        weights = only_stage(assembly).weights
        for name, parameter in weights.parameters.items():
            assert torch.equal(saved[f"model/{name}"], parameter), name
            state = weights.optimizers.state_of(parameter)
            assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
            for key, value in state.items():
                assert torch.equal(saved[f"optimizer/{name}/{key}"], value), (name, key)
            seen.add(name)
        is_first = assembly.worker.rank == plan.pipeline.workers[only_stage(assembly).index][0]
        for name, buffer in only_stage(assembly).module.section.buffers.items():
            if schedule not in ASYNCHRONOUS and is_first:
                assert torch.equal(saved[f"model/{name}"], buffer), name
    assert seen == set(dict(make().model.named_parameters()))


def test_the_pipeline_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """Nothing is written before every worker is two minibatches further on."""
    plan, run = plan_for("conv", "1f1b", (1, 1)), RunDirectory(tmp_path)
    together, ahead = Together(2), [threading.Event(), threading.Event()]

    def save(directory: Path, tensors: Mapping[str, Tensor]) -> None:
        if directory.name == "step-00000004":
            assert all(event.wait(20.0) for event in ahead)
        together.save(directory, tensors)

    def note(assembly: Assembly, action: Action) -> None:
        if action.kind is Kind.STEP and action.index == 5:
            ahead[assembly.worker.rank].set()

    train_keeping(plan, maker("conv"), run, every=4, save=save, on_action=note)
    assert directory_of(run.checkpoints, 4).exists()


def test_a_checkpoint_begins_when_the_one_before_it_is_written(tmp_path: Path) -> None:
    plan, run = plan_for("conv", "pipedream", (1, 1)), RunDirectory(tmp_path)
    together, writing, most = Together(2), Counter[int](), 0

    def save(directory: Path, tensors: Mapping[str, Tensor]) -> None:
        nonlocal most
        rank = int("model/0.weight" not in tensors)
        writing[rank] += 1
        most = max(most, *writing.values())
        time.sleep(0.01)
        together.save(directory, tensors)
        writing[rank] -= 1

    train_keeping(plan, maker("conv"), run, every=1, save=save)
    assert most == 1
    assert len(run.complete_checkpoints()) == 24


# --- going on


PLANS = {
    "one worker": ("1f1b", (1,)),
    "1f1b": ("1f1b", (1, 1)),
    "gpipe, replicated": ("gpipe", (2, 1)),
    "three stages": ("gpipe", (1, 1, 1)),
    "pipedream": ("pipedream", (1, 2)),
    "2bw": ("2bw", (1, 1)),
}


@pytest.mark.parametrize("after", ["one worker", "1f1b", "gpipe, replicated", "three stages"])
@pytest.mark.parametrize("before", ["one worker", "1f1b", "gpipe, replicated"])
def test_a_run_that_goes_on_under_another_plan_is_that_of_one_process(before: str, after: str, tmp_path: Path) -> None:
    make, run = maker("tied", optimizer=adam), RunDirectory(tmp_path)
    first, second = (plan_for("tied", *PLANS[name]) for name in (before, after))
    train_keeping(first, make, run, every=6)
    saved = directory_of(run.checkpoints, 18)  # in the middle of the second epoch
    check_same_weights(train_keeping(second, make, run, resume=saved), single_process(make(), first))


@pytest.mark.parametrize("after", ["1f1b", "gpipe, replicated"])
@pytest.mark.parametrize("before", ["pipedream", "2bw"])
def test_a_synchronous_plan_goes_on_from_an_asynchronous_one_as_one_worker_does(
    before: str, after: str, tmp_path: Path
) -> None:
    make, run = maker("conv", optimizer=adam), RunDirectory(tmp_path)
    train_keeping(plan_for("conv", *PLANS[before]), make, run, every=6)
    saved, found = directory_of(run.checkpoints, 6), {}
    for name in ("one worker", after):
        replicas = PLANS[name][1]
        plan = even_plan(profile_of("conv"), replicas, "1f1b", microbatches=2)
        found[name] = {
            key: parameter.detach().clone()
            for assembly in train_keeping(plan, make, RunDirectory(tmp_path / name), resume=saved)
            for key, parameter in only_stage(assembly).weights.parameters.items()
        }
    torch.testing.assert_close(found[after], found["one worker"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("before", "after"), [("zb-v", "1f1b"), ("1f1b", "interleaved"), ("interleaved", "zb-v")])
def test_a_run_goes_on_with_several_stages_on_a_worker_and_without(before: str, after: str, tmp_path: Path) -> None:
    """A weight that two stages of one worker share is written once, and read by both."""
    make, run = functools.partial(make_job, "tied", samples=24, batch_size=4, epochs=2), RunDirectory(tmp_path)
    plans = {name: looped_plan(profile_of("tied"), 2, 1 if name == "1f1b" else 2, name, 2) for name in (before, after)}
    train_keeping(plans[before], make, run, every=5)
    assemblies = train_keeping(plans[after], make, run, resume=directory_of(run.checkpoints, 5))
    check_same_weights(assemblies, single_process(make(), plans[before]))


@pytest.mark.parametrize("after", PLANS)
@pytest.mark.parametrize("before", ["1f1b", "pipedream", "2bw"])
def test_every_sample_exactly_once_per_epoch_also_over_a_restart(before: str, after: str, tmp_path: Path) -> None:
    """Of the minibatches before the cut, and of those that are done after it."""
    run = RunDirectory(tmp_path)

    def make() -> Job:
        job = make_job("conv", samples=45, batch_size=4, epochs=1)
        return replace(job, data=Recording(job.data))

    train_keeping(plan_for("conv", *PLANS[before]), make, run, every=5)
    (saved,) = [path for path in run.complete_checkpoints() if 5 <= read_index(path).steps < 10]
    plan = plan_for("conv", *PLANS[after])
    asked: Counter[int] = Counter()

    def forget_capture(assembly: Assembly, action: Action) -> None:
        if action.stage == 0 and action.kind is Kind.FORWARD:
            epoch = replace(make_epoch(assembly.job, plan, 0), first_minibatch=read_index(saved).minibatches)
            asked.update(epoch.indices(action.index))

    train_keeping(plan, make, run, resume=saved, on_action=forget_capture)
    whole = make_epoch(make(), plan, 0)
    done = replace(whole, last_minibatch=read_index(saved).minibatches)
    asked.update(index for microbatch in range(len(done.samples)) for index in done.indices(microbatch))
    assert asked == dict.fromkeys(range(45), 1)


def test_a_run_that_goes_on_under_the_same_plan_has_the_same_bits(tmp_path: Path) -> None:
    """With replicas whose turns no minibatch divides: a cut waits until they have had them."""
    plan = uneven_plan(profile_of("conv"), ((2, 1), (1,)), "1f1b", microbatches=2)
    make = maker("conv", optimizer=adam)
    whole, again = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "again")
    train_keeping(plan, make, whole, every=4)
    saved = whole.complete_checkpoints()[0]
    assert read_index(saved).steps == 6
    train_keeping(plan, make, again, resume=saved)
    newest = [run.newest_checkpoint() for run in (whole, again)]
    one, two = (tensors_of(path) for path in newest if path)
    assert set(one) == set(two)
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_numbers_in_an_optimizers_state_come_back_as_numbers(tmp_path: Path) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["count"], state["share"] = state.get("count", 0) + 1, 0.1
            return super().step(closure)

    make, run = maker("tied", optimizer=lambda named: Counting(named, lr=0.1)), RunDirectory(tmp_path)
    plan = plan_for("tied", "1f1b", (1, 1))
    train_keeping(plan, make, run, every=6)
    for assembly in train_keeping(plan, make, run, resume=directory_of(run.checkpoints, 6)):
        weights = only_stage(assembly).weights
        for parameter in weights.parameters.values():
            state = weights.optimizers.state_of(parameter)
            assert (state["count"], state["share"]) == (24, 0.1)
            assert type(state["count"]) is int


# --- which are there


def test_the_newest_are_kept_by_when_they_were_written(tmp_path: Path) -> None:
    plan, make, run = plan_for("conv", "1f1b", (1, 1)), maker("conv"), RunDirectory(tmp_path)
    train_keeping(plan, make, run, every=6, keep=3)
    assert [path.name for path in run.complete_checkpoints()] == [f"step-{n:08d}" for n in (12, 18, 24)]
    train_keeping(plan, make, run, every=7, keep=3, resume=directory_of(run.checkpoints, 12))
    assert [path.name for path in run.complete_checkpoints()] == [f"step-{n:08d}" for n in (14, 21, 24)]
    assert {path.name for path in run.checkpoints.iterdir()} == {path.name for path in run.complete_checkpoints()}


def test_what_a_crash_leaves_is_no_checkpoint_and_is_removed_at_the_next_start(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    place = directory_of(run.checkpoints, 6)
    save_shard(place, {"model/w": torch.ones(2)}, None)
    assert run.newest_checkpoint() is None
    with pytest.raises(FormatError, match="no such checkpoint directory"):
        read_index(place)
    start = Checkpoint.at_start(make_job("conv"), {})
    codec.save(start, run.checkpoints / "step-00000006.partial" / "checkpoint.json")
    assert run.newest_checkpoint() is None
    clean(run.checkpoints)
    assert list(run.checkpoints.iterdir()) == []
    for value in (1.0, 2.0):  # a second one takes the place of the first
        save_shard(place, {"model/w": torch.full((2,), value)}, None)
        commit(place, start)
    assert float(tensors_of(place)["model/w"][0]) == 2.0
    assert [path.name for path in run.checkpoints.iterdir()] == [place.name]


@pytest.mark.parametrize("at", ["before the new one has appeared", "before the old one is gone"])
def test_a_kill_while_a_checkpoint_is_replaced_leaves_a_whole_one(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, start = RunDirectory(tmp_path), Checkpoint.at_start(make_job("conv"), {})
    place, moves, move = directory_of(run.checkpoints, 6), 0, Path.replace
    save_shard(place, {"model/w": torch.full((2,), 1.0)}, None)
    commit(place, start)
    save_shard(place, {"model/w": torch.full((2,), 2.0)}, None)

    class Killed(BaseException):
        pass

    def dies(moved: Path, target: Path) -> Path:
        nonlocal moves
        moves += 1
        if moves == 2 and at == "before the new one has appeared":
            raise Killed
        move(moved, target)
        if moves == 2:
            raise Killed
        return target

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", dies)
        with pytest.raises(Killed):
            commit(place, start)
    if not place.exists():
        with pytest.raises(FormatError, match=r"ended while it replaced it: rename step-00000006\.old\.partial to it"):
            read_index(place)
    clean(run.checkpoints)
    assert [path.name for path in run.checkpoints.iterdir()] == [place.name]
    assert run.newest_checkpoint() == place
    assert float(tensors_of(place)["model/w"][0]) == (1.0 if at == "before the new one has appeared" else 2.0)


def test_a_checkpoint_that_is_half_removed_is_not_brought_back(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    place = directory_of(run.checkpoints, 6)
    save_shard(place, {"model/w": torch.ones(2)}, None)
    commit(place, Checkpoint.at_start(make_job("conv"), {}))
    replaced = place.replace(place.with_name("step-00000006.old.partial"))
    (replaced / "checkpoint.json").unlink()
    clean(run.checkpoints)
    assert list(run.checkpoints.iterdir()) == []


@pytest.mark.parametrize("every", [4, 1000])
def test_a_disk_that_fails_ends_the_run_and_says_so(every: int, tmp_path: Path) -> None:
    """In the middle of the run, or when only the last checkpoint is left to wait for."""

    def save(directory: Path, tensors: Mapping[str, Tensor]) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(WorkerError, match=r"checkpoint .*step-.* by worker \d: Input/output error; see to that"):
        train_keeping(
            plan_for("conv", "pipedream", (1, 1)), maker("conv"), RunDirectory(tmp_path), every=every, save=save
        )


def no_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["a worker's tensors", "the index"])
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every worker's tensors, or only the index, which worker 0 alone writes; of the 2nd and 3rd of 6 checkpoints."""
    run, together, full = RunDirectory(tmp_path), Together(2), ("step-00000008", "step-00000012")
    written = Path.write_text

    def save(directory: Path, tensors: Mapping[str, Tensor]) -> None:
        together.save(directory, tensors)
        if directory.name in full and where == "a worker's tensors":
            failures: dict[int, Any] = {1: (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None)}
            raise CheckpointException("write", failures)

    def write(path: Path, *arguments: Any, **options: Any) -> int:
        if where == "the index" and path.parent.name.removesuffix(".partial") in full:
            no_room()
        return written(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", write)
    plan = plan_for("conv", "pipedream", (1, 1))
    train_keeping(plan, maker("conv"), run, every=4, save=save)
    assert [read_index(path).steps for path in run.complete_checkpoints()] == [4, 16, 20, 24]
    assert {path.suffix for path in run.checkpoints.iterdir()} == {""}  # room is given back
    who = 1 if where == "a worker's tensors" else 0
    for name in full:
        words = f"{name} could not be written by worker {who}: No space left on device; training goes on"
        assert caplog.text.count(words) == 1


def test_a_last_checkpoint_that_finds_no_room_is_an_error(tmp_path: Path) -> None:
    """The weights that were trained would be lost in silence."""
    run, together, seen = RunDirectory(tmp_path), Together(2), list[Action]()

    def save(directory: Path, tensors: Mapping[str, Tensor]) -> None:
        together.save(directory, tensors)
        if directory.name == "step-00000024":
            no_room()

    with pytest.raises(WorkerError, match=r"step-00000024 .* by worker \d: No space left on device; see to that, then"):
        train_keeping(
            plan_for("conv", "1f1b", (1, 1)),
            maker("conv"),
            run,
            every=6,
            save=save,
            on_action=lambda who, act: seen.append(act),
        )
    assert [read_index(path).steps for path in run.complete_checkpoints()] == [6, 12, 18]


def test_what_is_more_than_want_of_room_ends_the_run(tmp_path: Path) -> None:
    failures: dict[int, Any] = {0: (OSError(errno.ENOSPC, "full"), None), 1: (OSError(errno.EIO, "broken"), None)}

    def save(directory: Path, tensors: Mapping[str, Tensor]) -> None:
        raise CheckpointException("write", failures)

    with pytest.raises(WorkerError, match="by worker 1: broken; see to that"):
        train_keeping(plan_for("conv", "1f1b", (1, 1)), maker("conv"), RunDirectory(tmp_path), every=4, save=save)


def test_safetensors_that_finds_no_room_is_known_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointException) as caught:
        save_shard(tmp_path / "step-00000006", {"model/w": torch.ones(2)}, None)
    ((error, _),) = caught.value.failures.values()
    assert checkpoint.lacks_room(error)


def test_a_lost_peer_is_left_to_the_pipeline_which_knows_its_name(tmp_path: Path) -> None:
    """The run goes on to its end here, where nobody is lost, and then says what became of the checkpoint."""
    seen: list[Action] = []

    def save(directory: Path, tensors: Mapping[str, Tensor]) -> None:
        raise WorkerError("worker 0 waited for worker 1: Connection reset by peer")

    plan = plan_for("conv", "pipedream", (1, 1))
    with pytest.raises(WorkerError, match="Connection reset by peer"):
        train_keeping(
            plan, maker("conv"), RunDirectory(tmp_path), every=1, save=save, on_action=lambda who, act: seen.append(act)
        )
    whole: list[Action] = []
    train_keeping(plan, maker("conv"), RunDirectory(tmp_path / "whole"), on_action=lambda who, act: whole.append(act))
    assert sorted(seen) == sorted(whole)


class OneTensor:
    """The state of a worker with one stage."""

    stages = (0,)

    def snapshot(self, stage: int) -> dict[str, Tensor]:
        return {"model/w": torch.ones(2)}

    def snapshot_of_unused(self) -> dict[str, Tensor]:
        return {}


def keeper_of(run: RunDirectory, save: Save, announced: list[int]) -> Keeper:
    return Keeper(
        cast("WorkerState", OneTensor()),
        run,
        rank=0,
        save=save,
        every=1,
        keep=3,
        timeout_s=0.1,
        announce=lambda done: announced.append(done.steps),
    )


def test_only_checkpoints_that_are_complete_are_announced(tmp_path: Path) -> None:
    run, announced, room = RunDirectory(tmp_path), list[int](), [True]
    start = Checkpoint.at_start(make_job("conv"), {})

    def save(directory: Path, tensors: Mapping[str, Tensor]) -> None:
        assert announced == ([] if room[0] else [5])
        if not room[0]:
            raise OSError(28, "No space left on device")
        save_shard(directory, tensors, None)

    keeper = keeper_of(run, save, announced)
    keeper.take(replace(start, steps=5))
    keeper.finish()
    assert announced == [5]
    room[0] = False
    keeper.take(replace(start, steps=6))
    with pytest.raises(WorkerError, match="No space left"):
        keeper.finish()
    assert announced == [5]


def test_the_thread_that_writes_a_checkpoint_has_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From when it began, however late somebody comes to wait for it."""
    monkeypatch.setattr(keeper_module, "GRACE_S", 0.0)
    over, joined = threading.Event(), list[float]()
    keeper = keeper_of(RunDirectory(tmp_path), lambda directory, tensors: over.wait() and None, [])
    keeper.take(replace(Checkpoint.at_start(make_job("conv"), {}), steps=5))
    time.sleep(0.15)
    assert keeper._writing is not None
    monkeypatch.setattr(keeper._writing, "join", joined.append)
    with pytest.raises(WorkerError, match=r"step-00000005 to be written by all workers \(at most 0.1 s\)"):
        keeper.finish()
    over.set()
    assert joined == [0.0]


# --- reading


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = RunDirectory(tmp_path_factory.mktemp("run"))
    train_keeping(plan_for("tied", "1f1b", (1, 1)), maker("tied"), run)
    newest = run.newest_checkpoint()
    assert newest is not None
    return newest


def test_torchs_own_reader_loads_a_checkpoint(saved: Path) -> None:
    found = tensors_of(saved)
    state = {
        key: torch.empty_like(found[key]) for key in ("model/embed.weight", "optimizer/first.bias/momentum_buffer")
    }
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(saved)), no_dist=True)
    assert all(torch.equal(tensor, found[key]) for key, tensor in state.items())
    assert {path.suffix for path in saved.iterdir()} == {".safetensors", ".json"}  # nothing pickled


def test_torchs_own_tool_makes_one_file_of_the_shards(saved: Path, tmp_path: Path) -> None:
    found = tensors_of(saved)
    consolidate_safetensors_files(str(saved), str(tmp_path), dict.fromkeys(found, 1))
    (file,) = tmp_path.glob("*.safetensors")
    torch.testing.assert_close(load_file(file), found, rtol=0, atol=0)


@pytest.mark.parametrize("harm", ["cut short", "gone", "another model"])
def test_a_damaged_checkpoint_is_refused(harm: str, saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / saved.name
    shutil.copytree(saved, copy)
    (file,) = copy.glob("*.safetensors")
    if harm == "cut short":
        file.write_bytes(file.read_bytes()[:-100])
    elif harm == "gone":
        file.unlink()
    name = "branches" if harm == "another model" else "tied"
    words = "damaged or missing" if harm == "cut short" else "is missing; this checkpoint is of another model"
    with pytest.raises(FormatError, match=words):
        train_keeping(plan_for(name, "1f1b", (1, 1)), maker(name), RunDirectory(tmp_path), resume=copy)


def test_a_job_with_other_data_cannot_go_on(saved: Path) -> None:
    with pytest.raises(JobError, match="samples 45, now 44: its place in the epoch would be another"):
        read_index(saved).check_job(maker("tied", samples=44)(), saved)
    with pytest.raises(JobError, match="seed 0, now 1:"):
        read_index(saved).check_job(maker("tied", seed=1)(), saved)


# --- weights to and from the rest of the world


class Peculiar(nn.Module):
    """A tied weight, a parameter that nothing uses, a buffer that is not in the state_dict, batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.out = nn.Linear(6, 4)
        self.idle = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.rand(6), persistent=False)
        self.register_buffer("remark", torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.norm(self.first(x)) * self.scale))


def peculiar_job() -> Job:
    torch.manual_seed(0)
    job = make_job("undecided", samples=24, batch_size=4)
    torch.manual_seed(1)
    return replace(job, model=Peculiar())


@functools.cache
def peculiar_plan() -> Plan:
    return even_plan(profile(peculiar_job()), (1, 1), "1f1b", 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint, and the state_dict that the model should have."""
    run = RunDirectory(tmp_path_factory.mktemp("peculiar"))
    assemblies = train_keeping(peculiar_plan(), peculiar_job, run)
    model = peculiar_job().model
    state = dict(model.state_dict())
    for assembly in assemblies:
        section = only_stage(assembly).module.section
        found = {name: p.detach().clone() for name, p in (*section.parameters.items(), *section.buffers.items())}
        state |= {name: tensor for name, tensor in found.items() if name in state}
    state["second.weight"] = state["first.weight"]
    newest = run.newest_checkpoint()
    assert newest is not None
    return newest, state


@pytest.mark.parametrize("form", ["safetensors", "state-dict"])
def test_exported_weights_load_into_the_model_and_start_training(
    form: str, trained: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    checkpoint, expected = trained
    output = tmp_path / "out" / ("model.safetensors" if form == "safetensors" else "model.pt")
    export_weights(checkpoint, form, output)
    found = load_file(output) if form == "safetensors" else torch.load(output, weights_only=True)
    model = peculiar_job().model
    model.load_state_dict(found)  # strictly: no key is missing, none unexpected
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[key]), key
    assert not torch.equal(model.first.weight, peculiar_job().model.first.weight)  # type: ignore[union-attr,arg-type]

    def nothing(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    def make() -> Job:
        return replace(peculiar_job(), optimizer=nothing)

    run = RunDirectory(tmp_path)
    train_keeping(peculiar_plan(), make, run, init=output)
    newest = run.newest_checkpoint()
    assert newest is not None
    for key, tensor in tensors_of(newest).items():
        name = key.removeprefix("model/")
        if "norm.running" not in name and "norm.num" not in name and name in expected:
            assert torch.equal(tensor, expected[name]), name


def test_one_name_of_a_tied_weight_is_enough(trained: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    _, state = trained
    del (one := dict(state))["first.weight"]
    save_file({key: tensor.clone() for key, tensor in one.items()}, tmp_path / "w.safetensors")
    begun_with: dict[str, Tensor] = {}

    def note(assembly: Assembly, action: Action) -> None:
        for name, parameter in only_stage(assembly).weights.parameters.items():
            begun_with.setdefault(name, parameter.detach().clone())

    train_keeping(
        peculiar_plan(), peculiar_job, RunDirectory(tmp_path), init=tmp_path / "w.safetensors", on_action=note
    )
    assert torch.equal(begun_with["first.weight"], state["second.weight"])


WRONG_WEIGHTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "one is missing": (lambda s: {k: v for k, v in s.items() if k != "out.bias"}, "lacks out.bias; give this model's"),
    "one too many": (lambda s: s | {"extra": torch.ones(1)}, "has, where the model has not, extra; give"),
    "another shape": (lambda s: s | {"out.bias": torch.ones(5)}, r"'out.bias' has shape \[5\], not \[4\]"),
    "not by itself": (lambda s: {"model": s, "epoch": 3}, "holds more than a state_dict"),
    "no tensors": (lambda s: make_job, "not a state_dict that torch.save wrote"),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_weights_of_another_model_are_refused(
    name: str, trained: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    change, words = WRONG_WEIGHTS[name]
    torch.save(change(trained[1]), tmp_path / "w.pt")
    with pytest.raises(FormatError, match=words):
        train_keeping(peculiar_plan(), peculiar_job, RunDirectory(tmp_path), init=tmp_path / "w.pt")


def test_a_file_that_is_none_is_refused(saved: Path, tmp_path: Path) -> None:
    for name, words in (("w.safetensors", "not a complete safetensors file"), ("w.pt", "not a state_dict")):
        (tmp_path / name).write_bytes(b"not what it should be")
        with pytest.raises(FormatError, match=words):
            train_keeping(peculiar_plan(), peculiar_job, RunDirectory(tmp_path), init=tmp_path / name)
    with pytest.raises(FormatError, match="no such file"):
        train_keeping(peculiar_plan(), peculiar_job, RunDirectory(tmp_path), init=tmp_path / "nowhere.pt")
    with pytest.raises(FormatError, match="written as safetensors or state-dict, not 'graph'"):
        export_weights(saved, "graph", tmp_path / "x")
