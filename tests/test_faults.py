"""Workers that fail at a given action of the training loop: the others end, and the run goes on from a checkpoint."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import pytest
import torch

from in_threads import Vanished, even_plan, fail_at, profile_of, train_keeping
from models import make_job
from penstock.errors import WorkerError
from penstock.plan import Plan
from penstock.run import RunDirectory
from penstock.runtime.checkpoint.checkpoint import Tensors, read_index

MAKE = functools.partial(make_job, "conv", samples=24, batch_size=4, epochs=2)
PLANS: dict[str, tuple[str, tuple[int, ...], int]] = {
    "1f1b": ("1f1b", (1, 1), 2),
    "three stages": ("gpipe", (1, 1, 1), 2),
    "replicas": ("1f1b", (1, 2), 2),
    "pipedream": ("pipedream", (1, 1), 1),
}


def plan_of(name: str) -> Plan:
    schedule, replicas, microbatches = PLANS[name]
    return even_plan(profile_of("conv"), replicas, schedule, microbatches)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("worker", "action"), [(0, "0F0"), (1, "1F2"), (1, "1B2"), (0, "0STEP3"), (1, "1STEP5")])
def test_a_worker_that_fails_ends_all_others_which_name_it(plan: str, worker: int, action: str, tmp_path: Path) -> None:
    errors: dict[int, BaseException] = {}
    start_s = time.monotonic()
    with pytest.raises(ValueError, match=f"injected at {action}"):
        train_keeping(plan_of(plan), MAKE, RunDirectory(tmp_path), on_action=fail_at(worker, action), errors=errors)
    assert time.monotonic() - start_s < 20.0, "before the deadline of 30 s"
    assert errors.keys() == set(range(len(plan_of(plan).devices)))
    for rank, error in errors.items():
        if rank != worker:
            assert isinstance(error, WorkerError)
            assert f"worker {worker}: injected at {action}" in str(error)


@pytest.mark.parametrize(("worker", "action"), [(1, "1F2"), (1, "1B2"), (0, "0STEP3"), (1, "1STEP5")])
def test_a_worker_that_vanishes_is_named_when_the_deadline_has_passed(worker: int, action: str, tmp_path: Path) -> None:
    """Also where the other has done all its actions and waits for the end of the part."""
    errors: dict[int, BaseException] = {}
    vanishes = fail_at(worker, action, Vanished())
    with pytest.raises(Vanished):
        train_keeping(plan_of("1f1b"), MAKE, RunDirectory(tmp_path), on_action=vanishes, timeout_s=2.0, errors=errors)
    error = errors[1 - worker]
    assert isinstance(error, WorkerError)
    assert f"worker {worker} " in str(error).partition("waited for")[2]
    assert "(at most 2 s)" in str(error)


@pytest.mark.parametrize(("worker", "action"), [(0, "0F10"), (1, "1B8"), (1, "1STEP5")])
@pytest.mark.parametrize("plan", ["1f1b", "three stages", "replicas"])
def test_a_run_resumed_after_a_failure_has_the_weights_of_an_undisturbed_one(
    plan: str, worker: int, action: str, tmp_path: Path
) -> None:
    whole, broken, resumed = (RunDirectory(tmp_path / name) for name in ("whole", "broken", "resumed"))
    train_keeping(plan_of(plan), MAKE, whole, every=2)
    with pytest.raises(ValueError, match="injected"):
        train_keeping(plan_of(plan), MAKE, broken, every=2, on_action=fail_at(worker, action))
    newest = broken.newest_checkpoint()
    assert newest is not None
    assert 0 < read_index(newest).steps < 12
    train_keeping(plan_of(plan), MAKE, resumed, resume=newest)
    expected, found = (Tensors(path) for run in (whole, resumed) if (path := run.newest_checkpoint()) is not None)
    assert set(expected.forms) == set(found.forms)
    torch.testing.assert_close(found.load(list(found.forms)), expected.load(list(found.forms)), rtol=0, atol=0)
