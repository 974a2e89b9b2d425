"""Runs side by side and on a full disk, as processes started by the command line and by torchrun."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock import codec
from penstock.plan import Plan
from penstock.provenance import Provenance
from penstock.run import RunDirectory
from penstock.runtime.checkpoint.checkpoint import Tensors, read_index
from test_processes import ENDLESS, penstock, write_job, write_plan

pytestmark = pytest.mark.processes


def start(directory: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock", *map(str, arguments)]
    return subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], object], *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while not condition() and time.monotonic() < deadline:
        for process in processes:
            assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)


def interrupted(process: subprocess.Popen[str]) -> str:
    """What it says at Ctrl-C."""
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, shown
    return shown


def test_two_runs_at_once_harm_nothing_of_each_other_and_latest_leads_to_the_second(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "conv", (1,), "1f1b")
    job = write_job(tmp_path, "conv", **ENDLESS)
    runs = tmp_path / "penstock-runs"
    old = runs / "latest" / "note.txt"  # as an earlier version has left it
    old.parent.mkdir(parents=True)
    old.write_text("of an earlier run")

    def begun() -> list[RunDirectory]:
        return [RunDirectory(path) for path in sorted(runs.glob("*-conv*"))]

    processes = []
    for number in (1, 2):
        processes.append(start(tmp_path, "train", job, plan, "--checkpoint-every", 20))
        wait_for(lambda count=number: len([r for r in begun() if r.newest_checkpoint()]) == count, *processes)
    first, second = begun()
    assert (runs / "latest").resolve() == second.path
    assert [path.read_text() for path in runs.glob("*-earlier/note.txt")] == ["of an earlier run"]
    refused = penstock("train", job, plan, "--run-dir", first.path, check=False)
    assert refused.returncode == 2
    assert f"{first.path}: another run is under way here (process {processes[0].pid} on" in refused.stderr
    for process, own in zip(processes, (first, second), strict=True):
        newest = f"checkpoint penstock-runs/{own.path.name}/checkpoints/step-"
        assert newest in interrupted(process)
    kept = codec.load(Provenance, first.provenance)
    assert kept.command == ("penstock", "train", str(job), str(plan), "--checkpoint-every", "20")
    assert codec.load(Plan, first.plan) == codec.load(Plan, plan)
    assert read_index(first.complete_checkpoints()[-1]).job == "conv.py"


def test_a_run_goes_on_through_latest_in_a_directory_of_its_own(tmp_path: Path) -> None:
    """By torchrun, whose workers agree on it; the link leads elsewhere when they read the checkpoint."""
    plan = write_plan(tmp_path, "conv", (1, 1), "1f1b", 2)
    job, runs = write_job(tmp_path, "conv"), tmp_path / "penstock-runs"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "penstock", "train"]
    through = "penstock-runs/latest/checkpoints/step-00000004"
    for options in (["--checkpoint-every", "4"], ["--resume", through]):
        done = subprocess.run(
            [*command, str(job), str(plan), *options],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    first, second = sorted(path for path in runs.iterdir() if path.name != "latest")
    assert (runs / "latest").resolve() == second
    left = [[path.name for path in RunDirectory(run).complete_checkpoints()] for run in (first, second)]
    assert left == [["step-00000004", "step-00000008", "step-00000012"], ["step-00000012"]]
    foreign = penstock(
        "train",
        write_job(tmp_path, "tied"),
        write_plan(tmp_path, "tied", (1,), "1f1b"),
        "--resume",
        first / "checkpoints" / "step-00000004",
        "--run-dir",
        tmp_path / "own",
        check=False,
    )
    assert foreign.returncode == 2
    assert "is missing; this checkpoint is of another model, written by job conv.py" in foreign.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path) -> Path:
    """With one file, to the last byte."""
    file = disk / "filler"
    with file.open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"x" * 4096)
        except OSError:
            return file


def test_a_run_goes_on_while_its_disk_is_full_and_ctrl_c_still_names_the_checkpoint(
    small_disk: Path, tmp_path: Path
) -> None:
    job, plan = write_job(tmp_path, "conv", **ENDLESS), write_plan(tmp_path, "conv", (1, 1), "pipedream")
    run, said = RunDirectory(small_disk / "run"), tmp_path / "said"
    command = ["train", str(job), str(plan), "--run-dir", str(run.path), "--checkpoint-every", "50"]
    with said.open("w") as errors:
        process = subprocess.Popen([sys.executable, "-m", "penstock", *command], stderr=errors, stdout=errors)
    try:
        for is_last in (False, True):
            seen, before = said.read_text().count("training goes on"), run.newest_checkpoint()
            wait_for(lambda last=before: run.newest_checkpoint() != last)
            filler = fill(small_disk)
            wait_for(lambda count=seen: said.read_text().count("; training goes on") > count + 1)
            assert process.poll() is None, said.read_text()
            if not is_last:
                filler.unlink()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.wait()
    newest = run.newest_checkpoint()
    assert newest is not None
    assert f"stopped, all workers ended; checkpoint {newest}" in said.read_text()
    assert f"--resume {newest}" in said.read_text()
    assert "No space left on device; training goes on" in said.read_text()
    assert "Traceback" not in said.read_text()
    found = Tensors(newest)
    assert found.load(list(found.forms))
    assert run.record().start is not None
