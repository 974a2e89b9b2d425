"""Runs are kept apart: directories of their own, a lock, a link to the latest, and what they come from."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from builders import chain_profile, one_device_plan
from models import make_job
from penstock import Job, codec, places
from penstock.errors import FormatError, JobError, PenstockError, WorkerError
from penstock.plan import Plan
from penstock.profile import Profile
from penstock.provenance import GitState, Provenance, git_state, provenance_of
from penstock.run import RunDirectory
from penstock.runtime.checkpoint.checkpoint import Checkpoint, commit, directory_of, save_shard
from penstock.runtime.checkpoint.resume import check_run
from penstock.runtime.checkpoint.state import state_dict_names
from penstock.runtime.peers.threads import Board, ThreadPeers
from penstock.runtime.process import opening
from penstock.runtime.process.opening import open_together


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- directories


def test_runs_that_begin_in_the_same_second_get_directories_of_their_own(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places.time, "strftime", lambda form: "20261118-091327")
    with ThreadPoolExecutor(8) as pool:
        found = [run.path.name for run in pool.map(places.new_run, ["my job"] * 8)]
    assert sorted(found) == ["20261118-091327-my-job", *(f"20261118-091327-my-job-{n}" for n in range(2, 9))]


def test_a_directory_for_runs_that_cannot_be_written_is_named(here: Path) -> None:
    places.RUNS.write_text("a file")
    with pytest.raises(FormatError, match=r"penstock-runs: cannot be written: .*; give a directory .* with --run-dir"):
        places.new_run("train")
    with (
        pytest.raises(FormatError, match=r"penstock-runs/own: cannot be written: Not a directory"),
        places.open_run(places.RUNS / "own", "train"),
    ):
        pass


def test_a_run_that_never_began_leaves_no_directory(here: Path) -> None:
    with pytest.raises(JobError), places.open_run(None, "train") as run:
        raise JobError("no")
    assert not run.path.exists()
    with places.open_run(None, "train") as run:
        run.plan.write_text("{}")
    assert run.plan.exists()
    with places.open_run(here / "own", "train"):
        pass
    assert (here / "own").is_dir()


def test_latest_is_a_link_to_the_run_that_began_last(here: Path) -> None:
    for _ in range(2):
        run = places.new_run("train")
        places.make_latest(run)
        link = places.RUNS / places.LATEST
        assert link.readlink() == Path(run.path.name)
    places.make_latest(RunDirectory(here / "elsewhere"))
    places.make_latest(RunDirectory(link))
    assert link.readlink() == Path(run.path.name)
    assert len(list(places.RUNS.iterdir())) == 3


def test_there_is_a_latest_at_every_moment(here: Path) -> None:
    """Whoever looks while runs begin never finds none."""
    first, link, stop, missed = places.new_run("train"), places.RUNS / places.LATEST, threading.Event(), []
    places.make_latest(first)

    def look() -> None:
        while not stop.is_set():
            if not link.is_dir():
                missed.append(1)

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(200):
        places.make_latest(first)
    stop.set()
    looking.join()
    assert not missed


def test_a_directory_called_latest_of_an_earlier_version_is_set_aside_whole(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = RunDirectory(places.RUNS / places.LATEST)
    save_shard(directory_of(old.checkpoints, 5), {"model/w": torch.ones(2)}, None)
    commit(directory_of(old.checkpoints, 5), Checkpoint.at_start(make_job("conv"), {}))
    run = places.new_run("train")
    places.make_latest(run)
    assert old.path.readlink() == Path(run.path.name)
    (aside,) = places.RUNS.glob("*-earlier")
    assert [path.name for path in RunDirectory(aside).complete_checkpoints()] == ["step-00000005"]
    assert f"it is now {aside}" in caplog.text


def test_a_run_under_way_in_a_directory_called_latest_keeps_it(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    with places.open_run(places.RUNS / places.LATEST, "first") as first:
        first.plan.write_text("{}")
        places.make_latest(places.new_run("second"))
        assert first.plan.exists()
    assert "penstock-runs/latest does not lead to" in caplog.text
    assert "another run is under way here" in caplog.text


def test_a_run_that_was_started_through_latest_stays_where_it_is(here: Path) -> None:
    first, link = places.new_run("first"), places.RUNS / places.LATEST
    places.make_latest(first)
    with places.open_run(link, "again") as again:
        places.make_latest(places.new_run("second"))
        again.plan.write_text("{}")
    assert first.plan.exists()


# --- the lock


def test_a_second_run_in_the_same_directory_is_refused_by_name(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with places.in_use(run):
        with (
            pytest.raises(
                JobError,
                match=rf"run: another run is under way here \(process {os.getpid()} on .*\); give this one another",
            ),
            places.in_use(run),
        ):
            pass
        (tmp_path / "link").symlink_to(run.path)
        with pytest.raises(JobError, match="another run is under way"), places.in_use(RunDirectory(tmp_path / "link")):
            pass
    with places.in_use(run):
        pass


def test_a_directory_is_in_use_until_launcher_and_worker_0_have_ended(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with contextlib.ExitStack() as worker:
        with places.in_use(run):
            worker.enter_context(places.in_use(run, with_launcher=True))
        with pytest.raises(JobError), places.in_use(run):
            pass
    with places.in_use(run):
        pass


HOLDER = """
import sys
from pathlib import Path
from penstock import places
from penstock.run import RunDirectory
with places.in_use(RunDirectory(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_lock_goes_with_the_process_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(JobError, match=f"process {holder.pid} "), places.in_use(RunDirectory(tmp_path)):
            pass
        holder.kill()
        holder.wait()
        with places.in_use(RunDirectory(tmp_path)):
            pass


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(places.fcntl, "flock", flock)
    with places.in_use(RunDirectory(tmp_path)):
        assert "cannot be locked (Function not implemented)" in caplog.text


# --- whose checkpoints


def keep(run: RunDirectory, job: Job, steps: int, name: str = "train.py") -> Path:
    """A checkpoint of the job, as a run of it leaves."""
    assert isinstance(job.model, nn.Module)
    names, state, place = state_dict_names(job.model), job.model.state_dict(), directory_of(run.checkpoints, steps)
    save_shard(place, {f"model/{first}": state[key] for key, first in names.items()}, None)
    commit(place, replace(Checkpoint.at_start(job, names), steps=steps, job=name))
    return place


def test_a_directory_with_checkpoints_takes_only_a_run_that_goes_on_from_them(tmp_path: Path) -> None:
    run, job = RunDirectory(tmp_path / "run"), make_job("conv")
    check_run(run, job, None)
    newest = keep(run, job, 5)
    with pytest.raises(JobError, match=rf"has checkpoints of a run of job train.py, .*with --resume {newest}, or give"):
        check_run(run, job, None)
    elsewhere = keep(RunDirectory(tmp_path / "other"), job, 5)
    with pytest.raises(JobError, match=r"has checkpoints of a run of job train\.py"):
        check_run(run, job, elsewhere)
    check_run(run, job, newest)
    check_run(RunDirectory(tmp_path / "new"), job, elsewhere)


class Larger(nn.Module):
    """All that the job's model has, and more."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        self.head = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("branches", "is missing; this checkpoint is of another model, written by job theirs.py"),
        ("larger", r"the model has no 'head\.bias'; this checkpoint is of another model, written by job theirs.py"),
        ("wider", r"has shape .*; this checkpoint is of another model"),
        ("longer", "was written by job theirs.py with samples 45, now 16"),
    ],
)
def test_a_checkpoint_of_another_job_is_refused_by_name(other: str, words: str, tmp_path: Path) -> None:
    run, job = RunDirectory(tmp_path / "run"), make_job("conv", samples=16)
    assert isinstance(job.model, nn.Module)
    theirs = {
        "branches": make_job("branches", samples=16),
        "larger": replace(job, model=Larger(job.model)),
        "wider": replace(job, model=_wider(make_job("conv").model)),
        "longer": make_job("conv", samples=45),
    }[other]
    foreign = keep(run, theirs, 5, "theirs.py")
    with pytest.raises(PenstockError, match=rf"^{foreign}: .*{words}"):
        check_run(RunDirectory(tmp_path / "new"), job, foreign)
    own = keep(run, job, 10)
    with pytest.raises(PenstockError, match=rf"^{foreign}: .*{words}.*; a run in {run.path} would remove it"):
        check_run(run, job, own)
    assert len(run.complete_checkpoints()) == 2


def _wider(model: object) -> nn.Module:
    assert isinstance(model, nn.Module)
    name, weight = next(iter(model.named_parameters()))
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, nn.Parameter(torch.cat([weight, weight]).detach()))
    return model


# --- what it comes from


def git(directory: Path, *arguments: str) -> str:
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    done = subprocess.run(["git", *who, *arguments], cwd=directory, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_run_keeps_its_command_versions_git_state_profile_and_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", "train", "job.py", "--cluster", "local:2"])
    job, run, plan = tmp_path / "job.py", RunDirectory(tmp_path / "run"), one_device_plan(chain_profile([1.0]))
    job.write_text("")
    run.path.mkdir()
    run.result.write_text("{}")
    run.begin(plan, provenance_of(job))
    found = codec.load(Provenance, run.provenance)
    assert found.command == ("penstock", "train", "job.py", "--cluster", "local:2")
    assert found.job == str(job)
    assert found.versions["python"] == sys.version.split()[0]
    assert found.versions["torch"].startswith(torch.__version__.partition("+")[0])
    assert set(found.versions) == {"python", "penstock", "torch"}
    assert codec.load(Plan, run.plan) == plan
    assert codec.load(Profile, run.profile) == plan.profile
    assert not run.result.exists()  # of the run before


def test_the_git_state_of_a_job_file_is_its_commit_and_whether_anything_differs(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("one")
    assert git_state(job) is None
    git(tmp_path, "init", "--quiet")
    assert git_state(job) is None  # no commit yet
    (tmp_path / "other.py").write_text("one")
    git(tmp_path, "add", "other.py")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    assert git_state(job) == GitState(commit=git(tmp_path, "rev-parse", "HEAD"), dirty=True)  # not in it
    git(tmp_path, "add", "job.py")
    git(tmp_path, "commit", "--quiet", "--message", "two")
    assert git_state(job) == GitState(commit=git(tmp_path, "rev-parse", "HEAD"), dirty=False)
    (tmp_path / "note.txt").write_text("does not count")
    (tmp_path / "other.py").write_text("two")
    assert git_state(job) == GitState(commit=git(tmp_path, "rev-parse", "HEAD"), dirty=True)


def test_a_machine_without_git_has_no_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path / "job.py") is None


# --- workers agree


def agree(workers: int, open_run: Callable[[], RunDirectory]) -> list[Path | PenstockError]:
    """What every worker gets of it."""
    board = Board()

    def work(rank: int) -> Path | PenstockError:
        try:
            return open_together(ThreadPeers(board, rank, workers, timeout_s=20.0), open_run).path
        except PenstockError as error:
            return error

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, range(workers)))


def begun(run: RunDirectory) -> RunDirectory:
    run.begin(one_device_plan(chain_profile([1.0])), provenance_of(run.path / "job.py"))
    return run


def test_all_workers_agree_on_the_directory_that_worker_0_opens(here: Path) -> None:
    first, *others = agree(3, lambda: begun(places.new_run("train")))
    assert isinstance(first, Path)
    assert others == [here / first] * 2
    assert len(list(places.RUNS.iterdir())) == 1


def test_all_workers_say_why_worker_0_cannot_open_the_run(tmp_path: Path) -> None:
    with places.in_use(RunDirectory(tmp_path)):
        found = agree(3, lambda: places.in_use(RunDirectory(tmp_path)).__enter__())
    assert [type(each) for each in found] == [JobError] * 3
    assert len({str(each) for each in found}) == 1
    assert "another run is under way here" in str(found[0])


def test_a_worker_that_does_not_see_the_directory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "LOOKS", 1)
    monkeypatch.setattr(opening, "BETWEEN_LOOKS_S", 0.0)
    seen = {"path": str(tmp_path / "theirs"), "provenance": "of their host"}
    with pytest.raises(WorkerError, match=r"worker 3 on .* does not see .*theirs, .*a directory that all hosts share"):
        opening._as_told(seen, 3)
    (tmp_path / "theirs").mkdir()
    RunDirectory(tmp_path / "theirs").provenance.write_text("of an earlier run, on this host")
    with pytest.raises(WorkerError, match="does not see"):
        opening._as_told(seen, 3)
