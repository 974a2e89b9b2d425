"""Models that people have: captured as layers, cut in two by the planner, compared with one process, and trained.

Each runs in a process of its own, one after another, with a time limit. Its two workers are threads of that process.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

import torch

from penstock.bench.rows import Column, Findings
from penstock.cluster import local_cluster
from penstock.errors import CaptureError, PenstockError, WorkerError
from penstock.job import Job
from penstock.plan import Plan
from penstock.planner import Hints, make_plan
from penstock.runtime.capture.capture import capture
from penstock.runtime.capture.split import Splitter
from penstock.runtime.measure.measure import profile_job
from penstock.runtime.process.verify import compare, save_gradients
from penstock.runtime.transport.threads import LocalExchange, LocalTransport
from penstock.runtime.worker.assemble import Assembly, assemble, make_epoch
from penstock.runtime.worker.data import load_batch
from penstock.workloads.torchvision import import_torchvision
from penstock.workloads.transformers import import_transformers
from penstock.workloads.zoo import ZOO, ZooModel

CPU = torch.device("cpu")
MICROBATCHES = 2
LIMIT_S = 300.0
"""For all that is done with one model."""
ANSWER_S = 60.0
"""How long a worker may wait for the other."""


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    model: str
    front_end: str = ""
    layers: int = 0
    """without the loss; 1 is a model captured whole"""
    random_operations: int = 0
    """Operations that may draw random numbers, such as dropout at a rate above 0."""
    capture_s: float = 0.0
    cut: str = ""
    """layers of each stage"""
    largest_difference: float | None = None
    """of any gradient from that of one process, relative to the largest element"""
    trained: int = 0
    """minibatches with a finite loss"""
    met: bool = False
    """cut in two, the same gradients, and trained"""
    reason: str = ""
    """why not"""

    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("model"),
        Column("captured by"),
        *(Column(title, right=True) for title in ("layers", "random", "capture s", "cut", "gradients", "trained")),
        Column("met"),
    )
    CAPTION: ClassVar[str] = (
        "random: operations that draw random numbers. cut: layers of the two stages. gradients: largest difference "
        "from one process, beside the largest element. trained: minibatches with a finite loss"
    )

    @property
    def cells(self) -> tuple[str, ...]:
        difference = "-" if self.largest_difference is None else f"{self.largest_difference:.0e}"
        captured = (
            self.front_end or "-",
            str(self.layers or "-"),
            str(self.random_operations),
            f"{self.capture_s:.1f}",
        )
        return self.model, *captured, self.cut or "-", difference, str(self.trained), "yes" if self.met else "NO"

    @property
    def footnote(self) -> str:
        return f"{self.model}: {self.reason}" if self.reason else ""


def run() -> Findings:
    rows = []
    import_torchvision()  # once, for all processes
    import_transformers()
    for model in ZOO:
        rows.append(row_within(model, LIMIT_S))
        sys.stderr.write(f"{' '.join(rows[-1].cells)} {rows[-1].reason}\n")
    return Findings(rows)


def row_within(model: ZooModel, limit_s: float) -> ModelRow:
    """The row of a model, from a process that is ended when its time is up."""
    context = multiprocessing.get_context("fork")  # what was imported for one model serves the next
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send_row, args=(model, sending))
    process.start()
    sending.close()
    try:
        if not receiving.poll(limit_s):
            return ModelRow(model=model.name, reason=f"not done after {limit_s:g} s")
        return receiving.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        return ModelRow(model=model.name, reason=f"its process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _send_row(model: ZooModel, connection: Connection) -> None:
    torch.set_num_threads(1)
    connection.send(row_of(model))


def row_of(model: ZooModel) -> ModelRow:
    """Captured, cut, compared and trained, as far as it goes; what stops it is the reason."""
    row = ModelRow(model=model.name)
    try:
        for known in _steps(row, model):
            row = known
    except PenstockError as error:
        return replace(row, reason=str(error))
    except Exception as error:  # the model's own: the others are tried all the same
        return replace(row, reason=f"{type(error).__name__}: {error}")
    return replace(row, met=True)


def _steps(row: ModelRow, model: ZooModel) -> Iterator[ModelRow]:
    """What is known after each step."""
    job = model.job()
    started_s = time.perf_counter()
    captured = capture(job.model, load_batch(job, range(job.batch_size), seed=0)[0])  # type: ignore[arg-type]
    seconds, layers = time.perf_counter() - started_s, len(captured.layers) - 1
    draws = len(Splitter(captured).draws)
    yield (row := replace(row, front_end=captured.front_end, layers=layers, random_operations=draws, capture_s=seconds))
    if layers == 1:
        raise CaptureError(f"captured whole, as torch.export cannot: {captured.reason}")
    profile = profile_job(
        job,
        clock=time.perf_counter,
        device=CPU,
        microbatch_size=job.batch_size,
        threads=1,
        repeats=1,
        progress=lambda done, total: None,
    )
    plan = make_plan(
        profile, local_cluster(2), schedule="1f1b", microbatches=MICROBATCHES, hints=Hints(replicas=(1, 1))
    )
    yield (row := replace(row, cut=" + ".join(str(len(stage.layers)) for stage in plan.stages)))
    with tempfile.TemporaryDirectory() as directory:
        run_in_threads(plan, model.job, lambda assembly: save_gradients(assembly, Path(directory)))
        found = compare(model.job(), plan, Path(directory))
    yield (row := replace(row, largest_difference=found.largest_difference))
    if not found.passed:
        raise WorkerError(
            f"other gradients than one process: {found.worst_parameter} is off by {found.largest_difference:.1e}, "
            f"the loss by {found.loss_difference:.1e}"
        )
    losses = run_in_threads(plan, model.job, _train)
    yield replace(row, trained=sum(map(math.isfinite, losses)) // MICROBATCHES)
    if not all(map(math.isfinite, losses)):
        raise WorkerError("a loss is not finite")


def _train(assembly: Assembly) -> None:
    assembly.worker.run(assembly.segment(make_epoch(assembly.job, assembly.plan, 0)))


def run_in_threads(plan: Plan, make: Callable[[], Job], work: Callable[[Assembly], None]) -> list[float]:
    """Every worker of a plan as a thread, with a job of its own; the losses of all microbatches."""
    exchange = LocalExchange()
    errors: list[Exception] = []
    assemblies = [
        assemble(
            make(),
            plan,
            transport=LocalTransport(rank, exchange),
            clock=time.perf_counter,
            device=CPU,
            timeout_s=ANSWER_S,
        )
        for rank in range(len(plan.devices))
    ]

    def run_worker(assembly: Assembly) -> None:
        try:
            work(assembly)
        except Exception as error:
            errors.append(error)
            exchange.fail(f"worker {assembly.worker.rank}: {error}")

    threads = [threading.Thread(target=run_worker, args=(assembly,)) for assembly in assemblies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise WorkerError(str(errors[0])) from errors[0]
    modules = [stage.module for assembly in assemblies for stage in assembly.worker.stages.values()]
    return [loss for module in modules for loss in module.losses.values()]
