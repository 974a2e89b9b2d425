"""The real thing: worker processes over gloo, started by the command line and by torchrun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from in_threads import even_plan, profile, profile_of, recomputing, uneven_plan
from models import make_job
from penstock import codec
from penstock.cluster import load_cluster
from penstock.planner import make_plan
from penstock.run import RunDirectory
from penstock.runtime.checkpoint.checkpoint import read_index
from penstock.schedule import Kind

pytestmark = pytest.mark.processes
TESTS = Path(__file__).parent
JOB = """
import sys
sys.path.insert(0, {tests!r})
from models import make_job

def job():
    return make_job({name!r}, samples={samples}, batch_size=4, epochs={epochs})
"""


def write_job(directory: Path, name: str, samples: int = 23, epochs: int = 2) -> Path:
    path = directory / f"{name}.py"
    path.write_text(JOB.format(tests=str(TESTS), name=name, samples=samples, epochs=epochs))
    return path


def write_plan(directory: Path, name: str, replicas: tuple[int, ...], schedule: str, microbatches: int = 1) -> Path:
    path = directory / f"plan-{schedule}-{'-'.join(map(str, replicas))}.json"
    codec.save(even_plan(profile_of(name), replicas, schedule, microbatches), path)
    return path


def check_verify(job: Path, plan: Path) -> None:
    answer = json.loads(penstock("verify", job, plan, "--json").stdout)
    assert answer["passed"]
    assert answer["largest_difference"] < 1e-5
    assert answer["gradients"] > 0


def penstock(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert not check or result.returncode == 0, result.stderr
    return result


@pytest.mark.parametrize(
    ("name", "replicas", "schedule", "microbatches"),
    [
        ("tied", (1, 2), "1f1b", 3),
        ("tied", (2, 1), "gpipe", 3),
        ("branches", (2, 3), "1f1b", 4),
        ("conv", (1, 3), "pipedream", 1),
        ("conv", (3, 1), "pipedream", 1),
    ],
)
def test_verify_finds_the_gradients_of_one_process(
    name: str, replicas: tuple[int, ...], schedule: str, microbatches: int, tmp_path: Path
) -> None:
    check_verify(write_job(tmp_path, name), write_plan(tmp_path, name, replicas, schedule, microbatches))


def test_verify_finds_them_with_unequal_shares_and_recompute_too(tmp_path: Path) -> None:
    plan = uneven_plan(profile_of("conv"), ((2, 1), (1,)), "pipedream")
    codec.save(recomputing(plan), tmp_path / "plan.json")
    check_verify(write_job(tmp_path, "conv"), tmp_path / "plan.json")


def test_train_leaves_trace_result_checkpoint_and_report(tmp_path: Path) -> None:
    job, plan = write_job(tmp_path, "conv"), write_plan(tmp_path, "conv", (1, 2), "pipedream")
    run = RunDirectory(tmp_path / "run")
    shown = penstock("train", job, plan, "--run-dir", run.path, "--checkpoint-every", 4)
    assert "predicted against measured" in shown.stdout
    assert "stage 1: staleness" in shown.stdout
    assert run.report.exists()
    loaded, trace, result = run.load()
    # two epochs of 6 microbatches: in each, the first finds weights that nothing was in flight to
    assert [stage.microbatches for stage in result.staleness] == [(2, 2, 8), (12,)]
    assert result.samples == 46
    assert len(result.losses) == 12
    assert loaded.stages == even_plan(profile_of("conv"), (1, 2), "pipedream").stages
    forwards = [e.action for e in trace.events if e.action.kind is Kind.FORWARD]
    assert len(forwards) == len(set(forwards)) == 2 * 12  # every microbatch of both epochs, once at each stage
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [f"step-{steps:08d}" for steps in (4, 8, 12)]
    assert [clock.workers for clock in result.clocks] == [(0, 1, 2)]
    record = run.record()
    assert record.end == "finished"
    assert [mark.minibatch for mark in record.marks if mark.kind == "checkpoint"] == [4, 8, 12]
    assert record.start is not None
    assert (record.start.samples, record.start.minibatches) == (46, 12)
    assert record.moments[-1].samples == 46
    assert not run.beginning.exists()


def test_a_compressed_plan_is_verified_by_its_own_tolerance_and_a_run_says_what_was_lost(tmp_path: Path) -> None:
    job = write_job(tmp_path, "conv", epochs=1)
    plan = even_plan(profile_of("conv"), (1, 1), "pipedream")
    for sends in ("bf16", "int8"):
        stages = (replace(plan.stages[0], sends=sends), plan.stages[1])
        codec.save(replace(plan, stages=stages), tmp_path / f"{sends}.json")
    verified = penstock("verify", job, tmp_path / "bf16.json")
    assert "gradients are the same but for bf16 rounding" in verified.stdout
    assert "0.05, of the loss 0.01: what travels in bf16 is rounded" in verified.stdout
    run = RunDirectory(tmp_path / "run")
    shown = penstock("train", job, tmp_path / "int8.json", "--run-dir", run.path)
    errors = run.load()[2].compression
    assert [(each.source, each.target, each.sends, each.direction) for each in errors] == [
        (0, 1, "int8", "forward"),
        (0, 1, "int8", "backward"),
    ]
    assert all(each.error is not None and 1e-4 < each.error < 0.02 and each.looked_at == 1 for each in errors)
    assert "lost by compression" in shown.stdout
    assert f"{errors[1].error:.2e}" in shown.stdout
    assert "Lost by compression" in run.report.read_text(encoding="utf-8")


def test_a_checkpoint_of_one_plan_goes_on_under_another(tmp_path: Path) -> None:
    """Invariant 5: the same weights whether interrupted and re-planned or not."""
    job = write_job(tmp_path, "tied")
    plans = [write_plan(tmp_path, "tied", replicas, "1f1b", 2) for replicas in ((1, 1), (2, 1))]
    through, second = RunDirectory(tmp_path / "through"), RunDirectory(tmp_path / "second")
    penstock("train", job, plans[0], "--run-dir", through.path, "--checkpoint-every", 4)
    penstock("train", job, plans[1], "--run-dir", second.path, "--resume", through.checkpoints / "step-00000004")
    newest = [run.newest_checkpoint() for run in (through, second)]
    assert [path.name for path in newest if path] == ["step-00000012", "step-00000012"]
    again = penstock("train", job, plans[1], "--resume", newest[0], "--run-dir", tmp_path / "again", check=False)
    assert again.returncode == 2
    assert "nothing is left to train: the checkpoint has all 2 epochs" in again.stderr
    one, two = (tensors_of(path) for path in newest if path)
    assert set(one) == set(two)
    for key, tensor in one.items():
        torch.testing.assert_close(tensor, two[key], rtol=1e-4, atol=1e-5)


def test_training_that_recomputes_leaves_the_weights_of_training_that_does_not(tmp_path: Path) -> None:
    """Bit by bit, with dropout: each process draws its own random numbers, and the same in both runs."""
    job = write_job(tmp_path, "noisy", epochs=1)
    plan = even_plan(profile_of("noisy"), (1, 1), "pipedream")
    found = []
    for name, each in (("plain", plan), ("recomputing", recomputing(plan))):
        codec.save(each, tmp_path / f"{name}.json")
        run = RunDirectory(tmp_path / name)
        penstock("train", job, tmp_path / f"{name}.json", "--run-dir", run.path)
        checkpoint = run.newest_checkpoint()
        assert checkpoint is not None
        found.append((tensors_of(checkpoint), run.load()[2].losses))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


FULL = """
_plain = job

def job():
    from dataclasses import replace
    from torch.optim import lr_scheduler
    cosine = lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 12)
    return replace(_plain(), scheduler=cosine, clip_norm=0.5)
"""


def write_full_job(directory: Path, name: str, **numbers: int) -> Path:
    path = write_job(directory, name, **numbers)
    path.write_text(path.read_text() + FULL)
    return path


def test_a_run_repeated_has_the_same_losses_and_weights_bit_for_bit(tmp_path: Path) -> None:
    """With dropout, a scheduler and clipping."""
    job, plan = write_full_job(tmp_path, "noisy"), write_plan(tmp_path, "noisy", (1, 1), "1f1b", 2)
    first, second = (trained(job, plan, tmp_path / name) for name in ("first", "second"))
    assert len(first[1]) == 12
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_scheduler_and_clipping_go_on_from_a_checkpoint_under_another_plan(tmp_path: Path) -> None:
    job = write_full_job(tmp_path, "tied")
    plans = [write_plan(tmp_path, "tied", replicas, "1f1b", 2) for replicas in ((1, 1), (2, 1))]
    through = trained(job, plans[0], tmp_path / "through", "--checkpoint-every", 4)
    saved = RunDirectory(tmp_path / "through").checkpoints / "step-00000004"
    resumed = trained(job, plans[1], tmp_path / "resumed", "--resume", saved)
    torch.testing.assert_close(resumed[0], through[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(resumed[1], through[1][4:], rtol=1e-4, atol=1e-5)


def trained(job: Path, plan: Path, directory: Path, *options: object) -> tuple[dict[str, torch.Tensor], list[float]]:
    run = RunDirectory(directory)
    penstock("train", job, plan, "--run-dir", run.path, *options)
    newest = run.newest_checkpoint()
    assert newest is not None
    return tensors_of(newest), [loss for loss in run.load()[2].losses if loss is not None]


def test_a_run_that_is_killed_goes_on_from_its_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    """With dropout, batch norm, a scheduler and clipping; killed without notice in the middle of the second epoch."""
    job, plan = write_full_job(tmp_path, "noisy", samples=203), write_plan(tmp_path, "noisy", (1, 1), "1f1b", 2)
    through = trained(job, plan, tmp_path / "through", "--checkpoint-every", 30)
    run = RunDirectory(tmp_path / "killed")
    killed = write_slow_job(job)
    command = ["train", str(killed), str(plan), "--run-dir", str(run.path), "--checkpoint-every", "15"]
    process = subprocess.Popen([sys.executable, "-m", "penstock", *command], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while not (run.checkpoints / "step-00000060").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in (*children_of(process.pid), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    (run.checkpoints / "step-00000075.partial").mkdir(exist_ok=True)  # as if it had been writing
    saved = run.newest_checkpoint()
    assert saved is not None
    assert saved.name < "step-00000102"
    resumed = trained(job, plan, run.path, "--resume", saved, "--checkpoint-every", 15)
    torch.testing.assert_close(resumed[0], through[0], rtol=0, atol=0)
    torch.testing.assert_close(resumed[1], through[1][-len(resumed[1]) :], rtol=0, atol=0)
    left = sorted(path.name for path in run.checkpoints.iterdir())
    assert left == ["step-00000075", "step-00000090", "step-00000102"]


def write_slow_job(job: Path) -> Path:
    """So that there is time to kill it."""
    path = job.with_name("slow.py")
    slow = "\n_quick = job\n\ndef job():\n    from dataclasses import replace\n    made = _quick()\n"
    slow += "    return replace(made, loss=lambda o, t: [time.sleep(0.02), made.loss(o, t)][1])\n"
    path.write_text("import time\n" + job.read_text() + slow)
    return path


def test_a_disk_that_fails_ends_the_run_and_says_so(tmp_path: Path) -> None:
    job, plan = write_job(tmp_path, "conv", **ENDLESS), write_plan(tmp_path, "conv", (1, 1), "pipedream")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file where a directory should be")
    result = penstock("train", job, plan, "--run-dir", tmp_path / "run", "--checkpoint-every", 5, check=False)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    error = result.stderr.strip().splitlines()[-2]
    assert "step-00000005 could not be written by worker" in error, result.stderr
    assert "Not a directory" in error


def test_exported_weights_start_another_run(tmp_path: Path) -> None:
    job, plan = write_job(tmp_path, "tied", epochs=1), write_plan(tmp_path, "tied", (1, 1), "1f1b", 2)
    weights, first = trained(job, plan, tmp_path / "run")
    newest, model = RunDirectory(tmp_path / "run").newest_checkpoint(), tmp_path / "model.safetensors"
    penstock("export", newest, "--format", "safetensors", "--output", model)
    _, more = trained(job, plan, tmp_path / "more", "--init", model)
    assert more[0] < first[0]
    assert {key.partition("/")[0] for key in weights} == {"model", "optimizer"}


WATCHED = """
_plain = job

def job():
    from dataclasses import replace
    from penstock import EarlyStop
    plain = _plain()
    metrics = {"accuracy": lambda output, target: (output.argmax(1) == target).float().mean(), "same": lambda *_: 1.0}
    stop = EarlyStop(metric="same", patience=3)
    evaluated = replace(plain, evaluation=plain.data[:9], metrics=metrics, evaluate_every=4, early_stop=stop)
    return replace(evaluated, precision="fp16")
"""


def test_a_run_is_evaluated_stops_early_and_goes_on_with_what_it_knew(tmp_path: Path) -> None:
    job = write_job(tmp_path, "conv", epochs=5)
    job.write_text(job.read_text() + WATCHED)
    low = replace(profile_of("conv"), precision="fp16")
    for name, replicas in (("one", (2, 1)), ("two", (1, 1))):
        codec.save(even_plan(low, replicas, "1f1b", 2), tmp_path / f"{name}.json")
    through, resumed = (RunDirectory(tmp_path / name) for name in ("through", "resumed"))
    shown = penstock("train", job, tmp_path / "one.json", "--run-dir", through.path, "--checkpoint-every", 6)
    assert "evaluation after 10 minibatches (epoch 2): loss " in shown.stderr
    assert "evaluation after 12 minibatches" in shown.stdout
    assert "stopped early" in shown.stdout
    result = through.load()[2]
    assert result.stopped_early
    assert [evaluation.steps for evaluation in result.evaluations] == [4, 6, 10, 12]
    assert result.evaluations[0].values.keys() == {"loss", "accuracy", "same"}
    saved = through.checkpoints / "step-00000006"
    penstock("train", job, tmp_path / "two.json", "--run-dir", resumed.path, "--resume", saved)
    before, after = (read_index(each).loss_scale for each in (saved, resumed.newest_checkpoint() or saved))
    assert before is not None
    assert after is not None
    assert after[0] <= before[0] < 2**16, "there were overflows, which a run that goes on remembers"
    again = resumed.load()[2]
    assert again.evaluations[0] == result.evaluations[0]
    # found again from the checkpoint, which has the batch-norm statistics of the first replica, not yet their mean
    loss = [run.evaluations[1].values["loss"] for run in (result, again)]
    assert loss[0] == pytest.approx(loss[1], rel=0.02)
    assert [evaluation.steps for evaluation in again.evaluations] == [4, 6, 10, 12]
    loss = [run.evaluations[-1].values["loss"] for run in (result, again)]
    assert loss[0] == pytest.approx(loss[1], rel=0.3)  # batch norm saw other microbatches per replica


def test_a_job_that_clips_is_planned_with_a_synchronous_schedule(tmp_path: Path) -> None:
    job = write_full_job(tmp_path, "conv", samples=16, epochs=1)
    penstock("train", job, "--run-dir", tmp_path / "run", "--json")
    assert RunDirectory(tmp_path / "run").load()[0].schedule == "1f1b"


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in checkpoint.glob("*.safetensors"):
        found |= load_file(path)
    return found


def test_train_without_a_plan_profiles_and_plans(tmp_path: Path) -> None:
    job = write_job(tmp_path, "conv", samples=16, epochs=1)
    answer = json.loads(penstock("train", job, "--run-dir", tmp_path / "run", "--json").stdout)
    assert answer["samples"] == 16


def test_torchrun_starts_the_same_workers(tmp_path: Path) -> None:
    job, plan = write_job(tmp_path, "conv", epochs=1), write_plan(tmp_path, "conv", (1, 1), "1f1b", 2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "penstock", "train", str(job), str(plan), "--run-dir", str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert result.returncode == 0, result.stderr
    run = RunDirectory(tmp_path / "run")
    assert run.load()[2].samples == 23
    assert "predicted against measured" in result.stdout
    assert result.stdout.endswith(f"report {run.report}\n")
    assert result.stdout.count("report ") == 1
    assert run.report.exists()


def test_every_host_says_at_its_end_that_it_is_done_and_where_the_report_is(tmp_path: Path) -> None:
    """Each process stands for a host."""
    job, plan = write_job(tmp_path, "conv", epochs=1), write_plan(tmp_path, "conv", (1, 1), "1f1b", 2)
    run = RunDirectory(tmp_path / "run")
    hosts = start_hosts(["train", str(job), str(plan), "--run-dir", str(run.path)])
    shown = [host.communicate(timeout=120) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], shown
    assert shown[0][0].endswith(f"report {run.report}\n")
    assert shown[1][0] == f"the workers of this host are done; worker 0 shows the result, and writes {run.report}\n"
    assert not run.workers.exists()


def start_hosts(command: list[str]) -> list[subprocess.Popen[str]]:
    """Two workers without a launcher."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    joined = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "penstock", *command],
            env=os.environ | joined | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def test_a_measured_cluster_can_be_planned_for(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    answer = json.loads(penstock("cluster", "measure", "--workers", 2, "--output", file, "--json").stdout)
    assert set(answer) == {"output", "cluster", "hosts", "levels", "remarks"}
    cluster = load_cluster(file)
    assert codec.encode(cluster) == answer["cluster"]
    assert [len(host["workers"]) for host in answer["hosts"]] == [2]
    assert [level["reach"] for level in answer["levels"]] == ["inside a host"]
    assert cluster.levels[0].size == 2
    assert make_plan(profile_of("conv"), cluster).cluster == cluster


def test_an_exception_in_a_job_is_shown_once_with_its_traceback(tmp_path: Path) -> None:
    job, plan = write_job(tmp_path, "conv"), write_plan(tmp_path, "conv", (1, 1), "1f1b", 2)
    broken = (
        "\n_make = job\n\ndef job():\n    from dataclasses import replace\n    return replace(_make(), loss=bad_loss)\n"
    )
    count = "\ncalls = 0\n\ndef bad_loss(output, target):\n    global calls\n    calls += 1\n    if calls > 5:\n"
    job.write_text(
        job.read_text() + broken + count + "        raise ValueError('my loss is broken')\n    return output.sum()\n"
    )
    result = penstock("train", job, plan, "--run-dir", tmp_path / "run", check=False)
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert "in bad_loss" in result.stderr
    assert result.stderr.strip().splitlines()[-2:] == [
        "penstock: worker 1 failed: ValueError: my loss is broken; the others were stopped",
        "no checkpoint of this run was complete yet; start it again",
    ]


ENDLESS = {"samples": 4000, "epochs": 1000}


def children_of(pid: int) -> list[int]:
    found = []
    for task in Path("/proc").iterdir():
        if task.name.isdigit():
            try:
                stat = (task / "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                found.append(int(task.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_workers_and_says_where_the_checkpoint_is(number: int, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    process = start_endless(tmp_path, run)
    workers = children_of(process.pid)
    for _ in range(4):  # as one who is impatient
        process.send_signal(number)
        time.sleep(0.03)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert len(workers) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert "Traceback" not in shown
    assert "stopped, all workers ended; checkpoint" in shown
    check_says_how_to_go_on(run, shown)


def check_says_how_to_go_on(run: RunDirectory, shown: str) -> None:
    """By the newest checkpoint, and those that were announced are complete."""
    newest = run.newest_checkpoint()
    assert newest is not None
    last = shown.strip().splitlines()[-1]
    assert f"checkpoint {newest} is complete; go on with: penstock train " in last, shown
    assert last.endswith(f" --resume {newest}")
    announced = [int(line.split()[2]) for line in shown.splitlines() if line.startswith("checkpoint after ")]
    assert announced
    assert newest.name >= f"step-{max(announced):08d}"


def start_endless(directory: Path, run: RunDirectory, *options: str) -> subprocess.Popen[str]:
    """A run that has completed a checkpoint."""
    job, plan = write_job(directory, "conv", **ENDLESS), write_plan(directory, "conv", (1, 1), "pipedream")
    command = ["train", str(job), str(plan), "--run-dir", str(run.path), "--checkpoint-every", "5", *options]
    process = subprocess.Popen([sys.executable, "-m", "penstock", *command], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while run.newest_checkpoint() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return process


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "penstock: worker 1 was killed by signal 9 (SIGKILL); the others were stopped"),
        (signal.SIGSTOP, "worker 1 was suspended (by SIGSTOP, or in a debugger)"),
    ],
)
def test_a_worker_that_is_killed_or_suspended_ends_the_run_soon(number: int, said: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    process = start_endless(tmp_path, run, "--timeout", "5")
    workers = sorted(children_of(process.pid))
    os.kill(workers[1], number)
    start_s = time.monotonic()
    _, shown = process.communicate(timeout=60)
    assert time.monotonic() - start_s < 20
    assert process.returncode == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert "Traceback" not in shown
    assert said in shown
    if number == signal.SIGSTOP:
        assert "penstock: worker 0 failed: worker 0 (stage 0) waited for " in shown
        assert "from worker 1 (at most 5 s)" in shown
    check_says_how_to_go_on(run, shown)
    record = run.record().end
    assert record is not None
    assert record.startswith("failed: worker ")


def test_when_the_launcher_is_killed_its_workers_end_and_nothing_is_committed_afterwards(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    process = start_endless(tmp_path, run)
    workers = children_of(process.pid)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(workers) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    left = sorted(path.name for path in run.checkpoints.iterdir())
    time.sleep(0.5)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == left


def test_a_worker_that_hangs_before_it_joins_is_named(tmp_path: Path) -> None:
    job, plan = write_job(tmp_path, "conv"), write_plan(tmp_path, "conv", (1, 1), "pipedream")
    hang = "import os, signal\nif os.environ.get('RANK') == '1':\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    job.write_text(hang + job.read_text())
    result = penstock("train", job, plan, "--run-dir", tmp_path / "run", "--timeout", 4, check=False)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    error, hint = result.stderr.strip().splitlines()[-2:]
    assert "worker 0 failed: worker 0 waited for worker 1 to join (at most 4 s)" in error
    assert "worker 1 was suspended" in error
    assert hint == "no checkpoint of this run was complete yet; start it again"


def test_peer_death_is_reported_within_the_deadline_and_names_the_peer(tmp_path: Path) -> None:
    """Invariant 8, without a launcher that would tell: each process stands for a host."""
    job, plan = write_job(tmp_path, "conv", **ENDLESS), write_plan(tmp_path, "conv", (1, 1), "pipedream")
    run = RunDirectory(tmp_path / "run")
    command = ["train", str(job), str(plan), "--run-dir", str(run.path), "--checkpoint-every", "5", "--timeout", "20"]
    workers = start_hosts(command)
    deadline = time.monotonic() + 90
    while run.newest_checkpoint() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    workers[1].kill()
    start_s = time.monotonic()
    _, shown = workers[0].communicate(timeout=60)
    workers[1].communicate()
    assert time.monotonic() - start_s < 25
    assert workers[0].returncode == 1
    error, hint = shown.strip().splitlines()[-2:]
    assert error.startswith("penstock: worker 0 (stage 0) waited for"), shown
    assert "worker 1" in error
    assert hint.endswith(f"go on with: the same command on all hosts, with --resume {run.newest_checkpoint()}")


def test_a_demo_sized_profile_is_what_the_command_writes(tmp_path: Path) -> None:
    job = write_job(tmp_path, "conv")
    penstock("profile", job, "--output", tmp_path / "profile.json")
    written = json.loads((tmp_path / "profile.json").read_text())
    made = profile(make_job("conv"))
    assert [layer["name"] for layer in written["graph"]["layers"]] == [layer.name for layer in made.graph.layers]


PADDED_JOB = """
import sys
from dataclasses import replace
sys.path.insert(0, {tests!r})
from test_weighted_loss import padded_job

def job():
    return padded_job({form!r}, epochs=2)
"""


@pytest.mark.parametrize("form", ["pair", "weigh"])
def test_a_weighted_loss_is_profiled_planned_verified_and_trained(form: str, tmp_path: Path) -> None:
    """Also that one without weights fails, and why is said."""
    job, profiled, plan = tmp_path / "job.py", tmp_path / "profile.json", tmp_path / "plan.json"
    job.write_text(PADDED_JOB.format(tests=str(TESTS), form=form))
    penstock("profile", job, "--output", profiled)
    asked = ("--schedule", "1f1b", "--microbatches", 4, "--replicas", "1-2")
    penstock("plan", profiled, "--cluster", "local:3", *asked, "--output", plan)
    check_verify(job, plan)
    run = RunDirectory(tmp_path / "run")
    penstock("train", job, plan, "--run-dir", run.path)
    losses = [loss for loss in run.load()[2].losses if loss is not None]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    if form == "weigh":
        job.write_text(PADDED_JOB.format(tests=str(TESTS), form="plain"))
        failed = penstock("verify", job, plan, check=False)
        assert failed.returncode == 1
        assert "GRADIENTS DIFFER" in failed.stdout
        assert "Job.weigh must say" in " ".join(failed.stdout.split())


DIVERGING_JOB = """
import sys
from dataclasses import replace
import torch
sys.path.insert(0, {tests!r})
from models import make_job

def job():
    job = make_job("conv", samples=23, batch_size=4)
    data = [(x * float("nan") if i == 11 else x, t) for i, (x, t) in enumerate(job.data)]
    return replace(job, data=data, on_nonfinite_loss={on_nonfinite_loss!r})
"""


def test_a_loss_that_is_not_a_number_is_warned_of_and_ends_the_run_if_the_job_says_so(tmp_path: Path) -> None:
    job, plan = tmp_path / "job.py", write_plan(tmp_path, "conv", (1, 1), "1f1b", 2)
    run = RunDirectory(tmp_path / "run")
    job.write_text(DIVERGING_JOB.format(tests=str(TESTS), on_nonfinite_loss="warn"))
    shown = penstock("train", job, plan, "--run-dir", run.path, "--json")
    first = run.load()[2].losses.index(None)
    assert f"the loss of minibatch {first + 1} is not a number; training goes on" in shown.stderr
    job.write_text(DIVERGING_JOB.format(tests=str(TESTS), on_nonfinite_loss="stop"))
    stopped = penstock("train", job, plan, "--run-dir", tmp_path / "stop", "--checkpoint-every", 1, check=False)
    assert stopped.returncode == 2
    assert f"worker 1 failed: the loss of minibatch {first + 1} is not a number" in stopped.stderr
    assert "Job.on_nonfinite_loss says to stop; " in stopped.stderr
