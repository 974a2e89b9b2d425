"""Runs side by side: their figures, what differs between their plans, on the terminal, as JSON and as a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from browser import Page, chromium, needs_browser
from penstock import codec
from penstock.cli.app import app
from penstock.cluster import parse_cluster
from penstock.errors import FormatError
from penstock.planner import Hints, make_plan
from penstock.report import Outcome, comparison_answer, names_of, write_comparison
from penstock.report.compare import figure_rows, plan_differences
from penstock.run import RunDirectory
from penstock.simulate import simulate
from test_report import HOSTILE, chain, measured_from, outcome, record_of, texts


def run_of(schedule: str, model: str = "chain") -> Outcome:
    microbatches = None if schedule == "pipedream" else 4
    plan = make_plan(
        chain(model=model),
        parse_cluster("local:2"),
        schedule=schedule,
        microbatches=microbatches,
        hints=Hints(straight=True),
    )
    simulated = simulate(plan, 30)
    return outcome(plan, simulated, record=record_of(plan, measured_from(simulated)))


@pytest.fixture(scope="module")
def runs() -> dict[str, Outcome]:
    return {"first": run_of("pipedream"), "second": run_of("1f1b")}


def save(outcome: Outcome, path: Path) -> Path:
    """What a report reads, without the record."""
    run = RunDirectory(path)
    codec.save(outcome.plan, run.plan)
    codec.save(outcome.measured, run.trace)
    codec.save(outcome.result, run.result)
    return path


def test_only_what_differs_between_plans_is_listed(runs: dict[str, Outcome]) -> None:
    plans = [outcome.plan for outcome in runs.values()]
    rows = {row["what"]: row["values"] for row in plan_differences(plans)}
    assert rows["schedule"] == ["pipedream", "1f1b"]
    assert rows["microbatches"] == ["1", "4"]
    assert not rows.keys() & {"model", "cluster", "minibatch", "stages"}
    assert plan_differences([plans[0], plans[0]]) == []
    one = replace(plans[0], cluster=replace(plans[0].cluster, name="elsewhere"))
    assert plan_differences([plans[0], one]) == [{"what": "cluster", "values": ["local:2", "elsewhere"]}]


def test_figures_are_those_of_each_run(runs: dict[str, Outcome]) -> None:
    answer = comparison_answer(runs)
    first, second = answer["runs"]
    assert (first["name"], second["name"]) == ("first", "second")
    assert first["samples_per_s"] == runs["first"].measured.samples_per_s
    assert 0 < first["idle"] < second["idle"] < 1  # a synchronous pipeline drains
    assert first["final_loss"] == pytest.approx(sum(1 / (1 + i) for i in range(40, 60)) / 20)
    rows = dict(figure_rows(answer))
    assert rows["samples/s"][1].endswith(f"({second['samples_per_s'] / first['samples_per_s']:.2f}x)")
    assert rows["peak memory"] == ["4 MB", "4 MB"]
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer


def test_runs_are_called_by_their_directories_and_not_given_twice(tmp_path: Path) -> None:
    assert names_of([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert names_of([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == [f"{tmp_path}/a/run", f"{tmp_path}/b/run"]
    with pytest.raises(FormatError, match="the same run twice"):
        names_of([tmp_path / "a", tmp_path / "a"])


def test_the_command_writes_a_page_a_table_and_json(
    tmp_path: Path, runs: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [str(save(outcome, tmp_path / name)) for name, outcome in runs.items()]
    shown = CliRunner().invoke(app, ["report", *paths])
    assert shown.exit_code == 0, shown.output
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())
    for words in ("samples/s", "final loss", "schedule", "pipedream", "1f1b", "second: Stage", "comparison.html"):
        assert words in shown.stdout
    page = (tmp_path / "comparison.html").read_text()
    assert "Penstock comparison" in page
    answer = json.loads(CliRunner().invoke(app, ["report", *paths, "--output", "other.html", "--json"]).stdout)
    assert set(answer) == {"comparison", "runs", "differences"}
    assert set(answer["runs"][0]) == {
        "name", "samples_per_s", "predicted_samples_per_s", "seconds", "samples", "final_loss", "evaluation", "idle",
        "predicted_idle", "peak_memory_bytes", "predicted_memory_bytes", "verdict",
    }  # fmt: skip
    assert Path("other.html").exists()
    assert not (tmp_path / "first" / "report.html").exists()
    refused = CliRunner().invoke(app, ["report", *paths, "--png", "figures"])
    assert isinstance(refused.exception, FormatError)
    one = CliRunner().invoke(app, ["report", paths[0], "--output", "one.html"])
    assert one.exit_code == 0
    assert "Penstock report" in Path("one.html").read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("browser")) as made:
        yield made


@needs_browser
def test_browser_shows_runs_side_by_side_wide_and_narrow(tmp_path: Path, page: Page, runs: dict[str, Outcome]) -> None:
    write_comparison(tmp_path / "comparison.html", {**runs, HOSTILE: run_of("gpipe")})
    for width in (1280, 360):
        page.open(tmp_path / "comparison.html", width=width, dark=width == 360)
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        assert texts(page, "#verdicts strong") == ["first", "second", HOSTILE]
        assert page.run("[...document.querySelectorAll('#sections > .card')].map((card) => card.id)") == [
            *("figures", "differences", "loss", "loss-over-time", "throughput", "memory"),
        ]
        assert len(texts(page, "#loss path.line")) == 3
        colours = "[...document.querySelectorAll('#loss path.line')].map((line) => getComputedStyle(line).stroke)"
        assert len(set(page.run(colours))) == 3
        assert "schedule" in texts(page, "#differences tbody th")
        wide = "[...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth).length"
        assert page.run(wide) == 0
    assert page.errors == []
