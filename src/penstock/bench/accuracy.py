"""How many samples a language model of characters takes to learn as much as under a synchronous schedule.

One process trains the whole model, every stage on the version of its weights that the schedule says, as the workers do;
tests hold both to the same weights. The text is the language reference that comes with Python. A run sees every sample
once, in the same order whatever the schedule; samples are windows of the text that overlap.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from penstock.bench.rows import Findings, Row, at_most
from penstock.job import Job
from penstock.remedy import Remedy
from penstock.report.chart import Line, Panel, chart_svg
from penstock.runtime.capture.blueprint import blueprint_of
from penstock.runtime.machine.machine import share_of_machine
from penstock.runtime.stage.weights import Version, Weights
from penstock.runtime.worker.data import load_microbatch
from penstock.sampling import Epoch
from penstock.schedule import Pipeline, Schedule, build_schedule
from penstock.workloads.models import CharacterModel
from penstock.workloads.text import PythonReference

BLOCKS = 4
MORE_SAMPLES = 1.10
"""How many times the synchronous samples stashing may take to the same loss."""
GOAL_AT = 0.7
"""The loss to reach is the synchronous one at this part of a run: it leaves the others time for more."""


@dataclass(frozen=True, kw_only=True)
class Task:
    minibatches: int = 3000
    batch_size: int = 16
    width: int = 32
    length: int = 32
    learning_rate: float = 2e-3
    """after a linear warm-up, a tenth of the run long"""


@dataclass(frozen=True)
class Method:
    """A method of training."""

    name: str
    schedule: str = "pipedream"
    remedy: Remedy | None = None
    stashes: bool = True


DEPTHS = (2, 4)
"""Of the pipelines, in stages: all but the last have stale gradients."""
SYNCHRONOUS, STASHING = Method("synchronous", schedule="1f1b"), Method("stashing")


def asynchronous_methods(task: Task) -> list[Method]:
    return [
        STASHING,
        Method("no stashing", stashes=False),
        Method("lowered rates", remedy=Remedy(rate_steps=task.minibatches // 5)),
        Method("prediction", remedy=Remedy(look_ahead=1.0)),
        Method("look-ahead", remedy=Remedy(look_ahead=0.9)),
    ]


def run() -> Findings:
    return compare(Task())


def compare(task: Task) -> Findings:
    rows: list[Row] = []
    panels: list[Panel] = []
    with share_of_machine(threads=1):
        synchronous = _timed_curve(task, SYNCHRONOUS, 1)  # the same mathematics for any number of stages
        for stages in DEPTHS:
            curves = {SYNCHRONOUS: synchronous}
            curves |= {method: _timed_curve(task, method, stages) for method in asynchronous_methods(task)}
            rows += accuracy_rows(f"{stages} stages", curves, task)
            panels.append(_panel(f"{stages} stages", curves))
    return Findings(rows, chart_svg(panels, about="loss against samples, for every way to train"))


Curve = list[tuple[int, float]]
"""(samples, the mean loss of the last of them)"""


def _timed_curve(task: Task, method: Method, stages: int) -> Curve:
    start_s = time.monotonic()
    found = curve(train(task, method, stages), task)
    sys.stderr.write(f"bench accuracy: {method.name}, stages {stages}: {time.monotonic() - start_s:.0f} s\n")
    return found


def curve(losses: Sequence[float], task: Task) -> Curve:
    """A moving mean, as far as there is a loss."""
    window = max(1, task.minibatches // 20)
    ends = range(window, len(losses) + 1)
    means = [(end * task.batch_size, statistics.fmean(losses[end - window : end])) for end in ends]
    return list(itertools.takewhile(lambda point: math.isfinite(point[1]), means))


def samples_to(goal: float, of: Curve) -> int | None:
    return next((samples for samples, loss in of if loss <= goal), None)


def accuracy_rows(name: str, curves: Mapping[Method, Curve], task: Task) -> list[Row]:
    synchronous = curves[SYNCHRONOUS]
    goal = synchronous[int(len(synchronous) * GOAL_AT)][1]
    baseline = samples_to(goal, synchronous)
    rows = []
    for method, found in curves.items():
        samples, target = samples_to(goal, found), MORE_SAMPLES if method == STASHING else None
        ratio = samples / baseline if samples and baseline else None
        rows.append(
            Row(
                case=f"{name}, {method.name}",
                metric=f"samples to loss {goal:.3f}" + ("" if samples else ": more than"),
                value=samples or task.minibatches * task.batch_size,
                baseline=baseline,
                ratio=ratio,
                target=target,
                met=None if target is None else ratio is not None and ratio <= target,
            )
        )
        if found:
            rows.append(at_most(f"{name}, {method.name}", "loss at the end", found[-1][1]))
    return rows


def _panel(name: str, curves: Mapping[Method, Curve]) -> Panel:
    """Without the first fall, which would leave the rest no room."""
    highest = statistics.median(loss for _, loss in curves[SYNCHRONOUS]) * 1.25
    lines = []
    for method, found in curves.items():
        shown = [point for point in found if point[1] <= highest]
        if shown:
            lines.append(Line(method.name, tuple(shown[:: -max(1, len(shown) // 80)][::-1])))
    return Panel(x_label=f"samples, {name}", y_label="loss", lines=tuple(lines), even=True)


def task_job(task: Task, method: Method) -> Job:
    text = PythonReference(length=task.length, samples=task.minibatches * task.batch_size)
    torch.manual_seed(0)
    return Job(
        model=CharacterModel(len(text.alphabet), task.width, blocks=BLOCKS, length=task.length),
        data=text,
        loss=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
        optimizer=lambda named: torch.optim.AdamW(named, lr=task.learning_rate),
        batch_size=task.batch_size,
        scheduler=lambda optimizer: LinearLR(optimizer, 0.01, total_iters=max(1, task.minibatches // 10)),
        remedy=method.remedy,
    )


def train(task: Task, method: Method, num_stages: int) -> list[float]:
    """The loss of every minibatch; it ends early where that is no number any more."""
    job = task_job(task, method)
    model = blueprint_of(job, torch.device("cpu")).model
    named = dict(model.named_parameters())
    stages = [Weights(own, job.optimizer, job.scheduler, job.remedy) for own in _by_stage(named, num_stages)]
    schedule = _schedule(method.schedule, num_stages, task.minibatches)
    epoch = Epoch(num_samples=len(job.data), batch_size=job.batch_size, microbatches=1, seed=job.seed)
    losses: list[float] = []
    for microbatch in range(task.minibatches):
        inputs, target = load_microbatch(job, epoch, microbatch)
        ages = [schedule.staleness(stage, microbatch) for stage in range(num_stages)]
        held = [weights.acquire(weights.version - age, age) for weights, age in zip(stages, ages, strict=True)]
        used = held if method.stashes else [Version(each.number, _copies(each.leaves)) for each in held]
        leaves = {name: leaf for version in used for name, leaf in version.leaves.items()}
        loss = job.loss(torch.func.functional_call(model, leaves, (inputs,)), target)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            break
        if not method.stashes:
            overwrite(leaves, named)
        torch.autograd.backward(loss)
        for weights, version, own, age in zip(stages, held, used, ages, strict=True):
            weights.gradients.update(_taken_gradients(own.leaves))
            weights.finish(version)
            weights.step(microbatch, keep=True, rate=method.remedy.rate(age, microbatch) if method.remedy else 1.0)
    return losses


def overwrite(leaves: Mapping[str, Tensor], newest: Mapping[str, Tensor]) -> None:
    """Naive asynchrony: a backward computes with the weights that there are by then, silently."""
    for name, leaf in leaves.items():
        leaf.data.copy_(newest[name].data)


def _copies(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}


def _taken_gradients(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for leaf in leaves.values():
        leaf.grad = None
    return found


def _schedule(name: str, stages: int, microbatches: int) -> Schedule:
    pipeline = Pipeline(
        workers=tuple((stage,) for stage in range(stages)),
        reads=tuple((stage - 1,) if stage else () for stage in range(stages)),
    )
    return build_schedule(name, pipeline, [1] * microbatches)


def _by_stage(named: Mapping[str, nn.Parameter], stages: int) -> list[dict[str, nn.Parameter]]:
    found: list[dict[str, nn.Parameter]] = [{} for _ in range(stages)]
    for name, parameter in named.items():
        found[stage_of(name, stages)][name] = parameter
    return found


def stage_of(name: str, stages: int) -> int:
    """As many blocks to each; what comes before the first goes with it, and what comes after the last with that."""
    top, block, *_ = [*name.split("."), ""]
    place = int(block) if top == "blocks" else 0 if top in ("embed", "position") else BLOCKS - 1
    return place * stages // BLOCKS
