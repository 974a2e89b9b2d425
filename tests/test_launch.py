"""The launcher, with workers that are a few lines of Python."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from penstock.cli.resuming import Checkpoints, command_to_go_on
from penstock.errors import PlanError, WorkerError
from penstock.run import INDEX, RunDirectory
from penstock.runtime.machine.out_of_memory import kills_so_far
from penstock.runtime.peers.store import StorePeers, leave
from penstock.runtime.process import launch
from penstock.runtime.process.launch import Interrupted, launch_workers
from penstock.runtime.transport.process_group import TorchTransport
from penstock.schedule import Kind

WORKER = """
import json, os, signal, sys, time
from pathlib import Path

rank = int(os.environ["RANK"])
Path({place!r}, str(rank)).write_text(str(os.getpid()))

def report(words):
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({{"message": {{"message": words}}}}))

def others_are_there():
    while len(list(Path({place!r}).iterdir())) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)

"""
Run = Callable[[str], None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs three workers; whatever comes of it, none is left."""
    place = tmp_path / "pids"
    place.mkdir()

    def run(body: str) -> None:
        script = tmp_path / "worker.py"
        script.write_text(WORKER.format(place=str(place)) + body)
        try:
            launch_workers([str(script)], 3, threads=1, timeout_s=0.5)
        finally:
            pids = [int(file.read_text()) for file in place.iterdir()]
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    return run


def test_workers_know_their_places_and_end(run: Run) -> None:
    run("assert os.environ['LOCAL_RANK'] == str(rank)\nassert os.environ['WORLD_SIZE'] == '3'")


def test_an_error_is_told_as_what_it_was(run: Run) -> None:
    body = (
        "if rank == 1:\n    others_are_there()\n    report('PlanError: no such stage')\n    sys.exit(2)\ntime.sleep(60)"
    )
    with pytest.raises(PlanError, match=r"^worker 1 failed: no such stage; the others were stopped$"):
        run(body)


def test_the_error_that_came_first_is_told(run: Run) -> None:
    """Also where the worker that had it is slow to end, and another has ended because of it."""
    body = "others_are_there()\nif rank == 2:\n    report('ValueError: mine')\n    time.sleep(60)\n"
    body += "time.sleep(0.3)\nreport('WorkerError: lost worker 2')\nsys.exit(2)"
    with pytest.raises(WorkerError, match=r"worker 2 failed: ValueError: mine; the others"):
        run(body)


def test_a_worker_that_does_not_end_when_it_is_told_to_is_killed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.3)
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nothers_are_there()\n"
    body += "if rank == 0:\n    sys.exit(3)\ntime.sleep(60)"
    with pytest.raises(WorkerError, match="worker 0 failed: it ended with exit code 3; the others were stopped"):
        run(body)


def test_one_that_reports_an_error_and_then_hangs_does_not_hold_up_the_end(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LAST_WORDS_S", 0.2)
    with pytest.raises(WorkerError, match="worker 0 failed: broken"):
        run("others_are_there()\nif rank == 0:\n    report('WorkerError: broken')\ntime.sleep(60)")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_signal_that_kills_a_worker_is_named(number: signal.Signals, run: Run) -> None:
    with pytest.raises(WorkerError, match=rf"worker 1 was killed by signal {number.value} \({number.name}\)"):
        run(f"others_are_there()\nif rank == 1:\n    os.kill(os.getpid(), {number.value})\ntime.sleep(60)")


def test_an_out_of_memory_kill_is_called_that(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter([4, 5])
    monkeypatch.setattr(launch, "kills_so_far", lambda: next(kills))
    with pytest.raises(
        WorkerError, match=r"worker 1 was killed by the kernel, which had no memory left; .* less memory"
    ):
        run("others_are_there()\nif rank == 1:\n    os.kill(os.getpid(), 9)\ntime.sleep(60)")


def test_a_worker_that_hangs_while_the_others_have_ended_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.3)
    body = "others_are_there()\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    said = r"worker 1 did not end within 0.5 s of the others; worker 1 was suspended \(by SIGSTOP"
    with pytest.raises(WorkerError, match=said):
        run(body)


def test_a_signal_to_the_launcher_ends_the_workers_and_later_ones_do_nothing(run: Run) -> None:
    before = signal.getsignal(signal.SIGTERM)
    body = "others_are_there()\nif rank == 0:\n    os.kill(os.getppid(), signal.SIGTERM)\n"
    body += "    os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)"
    try:
        with pytest.raises(Interrupted) as interrupted:
            run(body)
        assert interrupted.value.exit_code == 128 + signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else before)


# --- out of memory


def test_kills_are_counted_in_the_control_group_or_on_the_machine(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert kills_so_far(tmp_path) == 0
    write("proc/vmstat", "nr_free_pages 12\noom_kill 7\n")
    assert kills_so_far(tmp_path) == 7
    write("proc/self/cgroup", "4:memory,hugetlb:/job\n1:cpu:/\n0::/\n")
    assert kills_so_far(tmp_path) == 7
    write("sys/fs/cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert kills_so_far(tmp_path) == 2
    write("proc/self/cgroup", "0::/user.slice/job.scope\n")
    write("sys/fs/cgroup/memory.events", "low 0\noom 3\noom_kill 3\n")
    assert kills_so_far(tmp_path) == 3
    write("sys/fs/cgroup/user.slice/job.scope/memory.events", "oom 1\noom_kill 1\noom_group_kill 0\n")
    assert kills_so_far(tmp_path) == 1


# --- leaving


def test_a_goodbye_that_nobody_answers_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    over = threading.Event()
    monkeypatch.setattr(dist, "destroy_process_group", over.wait)
    leave(StorePeers(dist.HashStore(), 3, 4, timeout_s=0.05))
    over.set()
    assert "worker 3 left without the others, who did not answer within 0.05 s" in caplog.text


def test_every_group_of_a_transport_has_the_timeout() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        transport = TorchTransport([(0,)], timeout_s=7.0)
        groups = [*transport._directions.values(), *transport._groups.values()]
        assert set(transport._directions) == {Kind.FORWARD, Kind.BACKWARD}
        limits = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
        assert limits == [7.0] * 3
    finally:
        dist.destroy_process_group()


# --- how to go on


def complete(run: RunDirectory, steps: int) -> Path:
    path = run.checkpoints / f"step-{steps:08d}"
    path.mkdir(parents=True, exist_ok=True)
    (path / INDEX).write_text("{}")
    return path


def test_only_checkpoints_of_the_run_itself_are_offered(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    foreign = complete(run, 900)
    assert "start it again" in Checkpoints(run, None).how_to_go_on(str)
    resumed = Checkpoints(run, tmp_path / "elsewhere")
    assert resumed.how_to_go_on(str).endswith(f"yet; go on with: {tmp_path / 'elsewhere'}")
    time.sleep(0.01)
    newest = complete(run, 50)
    assert resumed.how_to_go_on(str) == f"checkpoint {newest} is complete; go on with: {newest}"
    assert foreign.exists()


def test_the_command_to_go_on_is_the_one_given_with_another_start() -> None:
    job, plan, newest = Path("a job.py"), Path("runs/plan.json"), Path("runs/step-5")
    given = ["train", "a job.py", "runs/plan.json", "--timeout", "9", "--resume", "old", "--init=x"]
    expected = "penstock train 'a job.py' runs/plan.json --timeout 9 --resume runs/step-5"
    assert command_to_go_on(given, job, plan, newest) == expected
    unplanned = ["train", "--cluster", "local:4", "a job.py", "--timeout", "9"]
    assert command_to_go_on(unplanned, job, plan, newest) == expected
