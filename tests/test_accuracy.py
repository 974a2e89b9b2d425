"""Time to accuracy: what is compared is what the workers do."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from in_threads import Losses, even_plan, profile, run_in_threads
from penstock import Remedy
from penstock.bench import accuracy
from penstock.bench.accuracy import STASHING, SYNCHRONOUS, Method, Task, accuracy_rows, curve, stage_of, task_job, train
from penstock.cli.app import app
from penstock.plan import Plan, Stage

TINY = Task(minibatches=40, batch_size=2, width=8, length=8)


def plan_like(task: Task, method: Method, stages: int) -> Plan:
    """The benchmark's cut, of the captured model."""
    measured = profile(task_job(task, method))
    layers = {layer.id: layer.name for layer in measured.graph.layers}
    first = next(i for i, name in layers.items() if name.startswith("blocks"))
    cut = [
        [i for i, name in layers.items() if (0 if i < first else stage_of(name, stages)) == s] for s in range(stages)
    ]
    plan = even_plan(measured, (1,) * stages, method.schedule)
    made = [Stage(layers=tuple(own), devices=(s,), in_flight=stages - s) for s, own in enumerate(cut)]
    return replace(plan, stages=tuple(made))


@pytest.mark.parametrize("method", [STASHING, Method("look-ahead", remedy=Remedy(rate_steps=10, look_ahead=0.9))])
def test_the_losses_are_those_of_the_workers(method: Method) -> None:
    plan = plan_like(TINY, method, 4)
    run_in_threads(plan, functools.partial(task_job, TINY, method), prepare=(found := Losses()))
    torch.testing.assert_close([found[m] for m in sorted(found)], train(TINY, method, 4), rtol=1e-4, atol=1e-4)


def test_only_what_is_stale_differs() -> None:
    """One stage is synchronous training, stashed or not; with four, not to stash makes a difference."""
    expected = train(TINY, SYNCHRONOUS, 1)
    unstashed = Method("no stashing", stashes=False)
    assert train(TINY, STASHING, 1) == expected
    assert train(TINY, unstashed, 1) == expected
    assert train(TINY, unstashed, 4) != train(TINY, STASHING, 4) != expected


def test_rows_say_how_many_times_the_samples_it_takes() -> None:
    task = Task(minibatches=100, batch_size=1)
    falling = [1 - step / 100 for step in range(100)]
    slower = [1 - step / 110 for step in range(100)]
    never = [1.0] * 50 + [float("nan")]
    curves = {SYNCHRONOUS: falling, STASHING: slower, Method("no stashing", stashes=False): never}
    rows = accuracy_rows("x", {method: curve(losses, task) for method, losses in curves.items()}, task)
    samples = [row for row in rows if "samples" in row.metric]
    assert samples[1].ratio == pytest.approx(1.1, abs=0.02)
    assert (samples[2].ratio, samples[2].value) == (None, 100)
    assert samples[2].metric.endswith("more than")


def test_bench_accuracy_draws_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "Task", lambda: TINY)
    drawing = tmp_path / "accuracy.svg"
    result = CliRunner().invoke(app, ["bench", "accuracy", "--svg", str(drawing), "--json"])
    rows = json.loads(result.stdout)
    assert [row["target"] for row in rows if row["target"]] == [1.1, 1.1]
    names = [text.text for text in ElementTree.fromstring(drawing.read_bytes()).iter() if text.get("class") == "name"]
    assert names[:2] == ["synchronous", "stashing"]
    assert len(names) == 12
