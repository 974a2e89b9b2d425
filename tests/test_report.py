from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from browser import Page, chromium, needs_browser
from penstock.cluster import parse_cluster
from penstock.errors import FormatError
from penstock.graph import Layer, LayerGraph, Parameter, Value
from penstock.plan import Plan, Stage
from penstock.planner import Hints, make_plan
from penstock.profile import LayerSeconds, Profile
from penstock.record import Mark, Moment, Record, Start
from penstock.report import Outcome, content, curves, write_report
from penstock.report.content import report_content, steady_microbatch
from penstock.report.drawing import inline_svg
from penstock.report.drawing import style as drawing_style
from penstock.run import EdgeError, Evaluation, Result
from penstock.schedule import Action, Kind, Staleness
from penstock.simulate import Simulation, explain, play, simulate
from penstock.trace import Event, Trace

HOSTILE = "</script><img src=x onerror=alert(1)><!-- {{style}} &amp;"


def chain(layers: int = 12, model: str = "chain", layer_name: str = "layer") -> Profile:
    graph = LayerGraph(
        layers=tuple(
            Layer(id=i, name=f"{layer_name} {i}", kind="Linear", parameters=(f"w{i}",)) for i in range(layers)
        ),
        values=tuple(Value(name=f"v{i}", producer=i, consumers=(i + 1,), num_bytes=1000) for i in range(layers - 1)),
        parameters=tuple(Parameter(name=f"w{i}", num_bytes=1_000_000 + i) for i in range(layers)),
    )
    seconds = tuple(
        LayerSeconds(forward_s=0.001 * (1 + i % 3), backward_input_s=0.001, backward_weight_s=0.001, update_s=0.0001)
        for i in range(layers)
    )
    return Profile(
        model=model,
        front_end="export",
        batch_size=16,
        microbatch_size=16,
        graph=graph,
        seconds={"cpu": seconds},
    )


def measured_from(simulated: Trace) -> Trace:
    """As if the workers had taken up to a fifth longer than simulated, each time."""
    noise, free_s = random.Random(0), [0.0] * len(simulated.workers)
    events = []
    for event in simulated.events:
        start_s = max(free_s[event.worker], event.start_s * 1.1)
        free_s[event.worker] = start_s + (event.end_s - event.start_s) * noise.uniform(1.0, 1.2)
        events.append(replace(event, start_s=start_s, end_s=free_s[event.worker]))
    return replace(simulated, origin="measured", events=tuple(events))


def result_of(trace: Trace, losses: Sequence[float] | None = None) -> Result:
    return Result(
        samples=sum(trace.samples),
        seconds=trace.span_s,
        losses=tuple(1 / (1 + i) for i in range(60)) if losses is None else tuple(losses),
        checkpoint=None,
        device_kinds={str(worker): "cpu" for worker in range(len(trace.workers))},
    )


def record_of(plan: Plan, measured: Trace, moments: int = 8) -> Record:
    """As a run of this length would have written it down, with two marks."""
    workers, span_s = len(plan.devices), measured.span_s
    return Record(
        start=Start(
            model=plan.profile.model,
            schedule=plan.schedule,
            workers=plan.worker_names,
            samples=sum(measured.samples),
            minibatches=len(measured.samples),
            first_minibatch=0,
            began_unix_s=1.8e9,
            samples_per_s=1000.0,
            memory_bytes=(5_000_000,) * workers,
        ),
        moments=tuple(
            Moment(
                at_s=span_s * (i + 1) / moments,
                samples=sum(measured.samples) * (i + 1) // moments,
                loss=1 / (1 + i),
                busy=(0.5,) * workers,
                memory_bytes=(4_000_000 + i,) * workers,
                done=("0F0",) * workers,
                heard_s=(span_s * (i + 1) / moments,) * workers,
            )
            for i in range(moments)
        ),
        marks=(
            Mark(at_s=span_s / 4, kind="evaluation", text="evaluation after 5 minibatches: loss 0.5000", minibatch=5),
            Mark(at_s=span_s / 2, kind="checkpoint", text="checkpoint after 10 minibatches", minibatch=10),
        ),
        end="finished",
    )


def played_as(plan: Plan, simulated: Trace) -> Simulation:
    minibatches = len(simulated.samples) // plan.microbatches
    return Simulation(plan, plan.schedule_for([plan.microbatches] * minibatches), simulated, ())


def outcome(
    plan: Plan, simulated: Trace, losses: Sequence[float] | None = None, record: Record | None = None, **result: Any
) -> Outcome:
    measured = measured_from(simulated)
    fields = {"staleness": plan.staleness, **result}
    return Outcome(
        measured=measured,
        played=played_as(plan, simulated),
        result=replace(result_of(measured, losses), **fields),
        record=record or Record(),
    )


def report(path: Path, *arguments: Any, **more: Any) -> tuple[str, Any]:
    """The written page of such an outcome, and the content read back from it as a browser would."""
    write_report(path, outcome(*arguments, **more))
    page = path.read_text(encoding="utf-8")
    blocks = re.findall(r'<script type="application/json" id="content">(.*?)</script>', page, re.DOTALL)
    assert len(blocks) == 1
    return page, json.loads(blocks[0])


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(chain(), parse_cluster("local:3"), schedule="pipedream", hints=Hints(straight=True))


@pytest.fixture(scope="module")
def simulated(plan: Plan) -> Trace:
    return simulate(plan, 30)


def replicated(plan: Plan) -> Plan:
    order = plan.profile.graph.order
    stages = (Stage(layers=order[:9], devices=(0, 1), in_flight=2), Stage(layers=order[9:], devices=(2,)))
    return replace(plan, stages=stages)


def test_page_loads_nothing_from_elsewhere(tmp_path: Path, plan: Plan, simulated: Trace) -> None:
    page, _ = report(tmp_path / "new" / "report.html", plan, simulated)
    assert not re.search(r"https?://|\bsrc=|\bhref=|@import|url\(|\bimport\b.*from|fetch\(", page)
    assert not re.search(r"\{\{\w+\}\}", page)
    assert "default-src 'none'" in page
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["report.html"]


def test_content_holds_the_numbers_of_both_traces(tmp_path: Path, plan: Plan, simulated: Trace) -> None:
    measured = measured_from(simulated)
    _, data = report(tmp_path / "report.html", plan, simulated)
    rate = data["comparison"]["samples_per_s"]
    assert rate["predicted"] == plan.predicted_samples_per_s
    assert rate["measured"] == measured.samples_per_s
    assert rate["ratio"] == pytest.approx(measured.samples_per_s / rate["predicted"])
    assert data["comparison"]["explanation"] == explain(plan, measured, simulated).text
    assert len(data["comparison"]["workers"]) == len(plan.devices)
    for worker, row in enumerate(data["comparison"]["workers"]):
        assert row["utilisation"]["measured"] == measured.utilisation(worker)
        assert 1.0 <= row["seconds"]["F"]["ratio"] <= 1.2
    assert sum(stage["layers"] for stage in data["plan"]["stages"]) == len(data["plan"]["layers"]) == 12
    assert data["loss"]["final"] == pytest.approx(1 / 60)


def test_staleness_is_set_beside_what_the_schedule_makes_it(plan: Plan, simulated: Trace) -> None:
    stages = len(plan.stages)
    found = tuple(Staleness.counted({0: 1, stages - 1 - i: 29}) for i in range(stages))
    rows = report_content(outcome(plan, simulated, staleness=found))["staleness"]
    assert [row["predicted"] for row in rows] == [stage.mean for stage in plan.staleness]
    assert [row["most"] for row in rows] == list(range(stages - 1, -1, -1))
    assert rows[-1] == {"predicted": 0.0, "measured": 0.0, "most": 0, "microbatches": (29,)}


def test_packed_events_are_those_of_the_trace(tmp_path: Path, plan: Plan, simulated: Trace) -> None:
    _, data = report(tmp_path / "report.html", plan, simulated)
    for worker, row in enumerate(data["traces"][1]["workers"]):
        expected = [event for event in simulated.events if event.worker == worker]
        assert row["actions"].split() == [str(event.action) for event in expected]
        now_ns = 0
        for event, gap_ns, length_ns in zip(expected, row["gap_ns"], row["length_ns"], strict=True):
            assert (now_ns + gap_ns) / 1e9 == pytest.approx(event.start_s, abs=1e-9)
            now_ns += gap_ns + length_ns
            assert now_ns / 1e9 == pytest.approx(event.end_s, abs=1e-9)


def test_names_cannot_break_out_of_the_script(tmp_path: Path) -> None:
    plan = make_plan(chain(model=HOSTILE, layer_name=HOSTILE), parse_cluster("local:2"))
    page, data = report(tmp_path / "report.html", plan, simulate(plan, 4))
    assert data["model"] == HOSTILE
    assert data["plan"]["layers"][0]["name"] == f"{HOSTILE} 0"
    assert page.count("</script>") == 2
    assert "<img" not in page


def test_the_page_has_the_drawing_that_show_writes(tmp_path: Path, plan: Plan, simulated: Trace) -> None:
    page, _ = report(tmp_path / "report.html", plan, simulated)
    assert inline_svg(plan) in page
    assert drawing_style() in page


def test_replicas_synchronise_and_the_slowest_stage_is_marked(tmp_path: Path, plan: Plan) -> None:
    plan = replicated(plan)
    _, data = report(tmp_path / "report.html", plan, simulate(plan, 8))
    assert data["comparison"]["kinds"] == ["F", "B", "SYNC", "STEP"]
    assert set(data["comparison"]["workers"][2]["seconds"]["SYNC"].values()) == {None}
    assert [stage["bottleneck"] for stage in data["plan"]["stages"]] == ["bottleneck", ""]
    assert [stage["devices"] for stage in data["plan"]["stages"]] == ["0-1", "2"]
    assert [stage["input_bytes"] for stage in data["plan"]["stages"]] == [0, 1000]


def test_one_worker_and_one_microbatch_are_enough(tmp_path: Path) -> None:
    plan = make_plan(chain(layers=1), parse_cluster("local:1"))
    _, data = report(tmp_path / "report.html", plan, simulate(plan, 1), losses=[2.5])
    assert [stage["bottleneck"] for stage in data["plan"]["stages"]] == [""]
    assert data["traces"][0]["workers"][0]["actions"] == "0F0 0B0 0STEP0"


def test_trace_without_updates_or_losses(tmp_path: Path, plan: Plan, simulated: Trace) -> None:
    compute = tuple(event for event in simulated.events if event.action.kind is not Kind.STEP)
    _, data = report(tmp_path / "report.html", plan, replace(simulated, events=compute), losses=[])
    assert data["comparison"]["kinds"] == ["F", "B"]
    assert data["loss"] == {"minibatches": 0, "every": 1, "points": [], "first": None, "final": None}


def test_empty_trace_gives_a_page(tmp_path: Path, plan: Plan, simulated: Trace) -> None:
    _, data = report(tmp_path / "report.html", plan, replace(simulated, events=()))
    assert data["comparison"]["samples_per_s"] == {
        "predicted": plan.predicted_samples_per_s,
        "measured": 0.0,
        "ratio": 0.0,
    }


def test_timeline_counts_from_the_first_start(tmp_path: Path, plan: Plan) -> None:
    late = Event(worker=0, action=Action(0, Kind.FORWARD, 0), start_s=1e6, end_s=1e6 + 0.5)
    trace = Trace(origin="simulated", workers=plan.worker_names, samples=(16,), events=(late,))
    _, data = report(tmp_path / "report.html", plan, trace)
    assert data["traces"][1]["workers"][0]["gap_ns"] == [0]


def test_long_runs_are_cut_to_what_can_be_drawn(
    tmp_path: Path, plan: Plan, simulated: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "MAX_EVENTS", 10)
    losses = [float(i) for i in range(5_001)]
    _, data = report(tmp_path / "report.html", plan, simulated, losses)
    trace = data["traces"][1]
    assert sum(len(row["gap_ns"]) for row in trace["workers"]) == 10
    assert trace["gap_s"] == [max(e.end_s for e in simulated.events[:5]), simulated.events[-5].start_s]
    last = [row["actions"].split()[-1] for row in trace["workers"] if row["actions"]]
    assert str(simulated.events[-1].action) in last
    assert len(data["loss"]["points"]) == 1_667
    assert data["loss"]["points"][0] == 1.0
    assert data["loss"]["final"] == 5_000


def test_diverged_loss_is_a_gap_and_not_broken_json(tmp_path: Path, plan: Plan, simulated: Trace) -> None:
    _, data = report(tmp_path / "report.html", plan, simulated, losses=[1.0, None, None])
    assert data["loss"]["points"] == [1.0, None, None]
    assert data["loss"]["final"] is None


def test_trace_of_another_plan_is_refused(tmp_path: Path, plan: Plan, simulated: Trace) -> None:
    fewer = make_plan(chain(), parse_cluster("local:1"))
    with pytest.raises(FormatError, match="3 workers but the plan has 1"):
        report(tmp_path / "report.html", fewer, simulated)
    assert not list(tmp_path.iterdir())


def test_report_needs_no_torch() -> None:
    code = "import sys, penstock.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_course_of_a_run_is_thinned_and_keeps_pace_and_peaks(plan: Plan, simulated: Trace) -> None:
    workers = len(plan.devices)
    moments = tuple(
        Moment(
            at_s=0.5 * (i + 1),
            samples=8 * (i + 1),
            loss=None,
            busy=(0.75,) * workers,
            memory_bytes=(9_000_000 if i == 777 else 1_000_000, *(None,) * (workers - 1)),
            done=("",) * workers,
            heard_s=(0.0,) * workers,
        )
        for i in range(1000)
    )
    record = replace(record_of(plan, simulated), moments=moments)
    data = report_content(outcome(plan, simulated, record=record))["course"]
    assert len(data["at_s"]) == len(data["samples_per_s"]) == 334 <= curves.MAX_POINTS
    assert data["at_s"][-1] == 500
    assert data["samples_per_s"] == pytest.approx([16.0] * 334)
    assert data["busy"][0] == pytest.approx([0.75] * 334)
    assert max(data["memory_bytes"][0]) == 9_000_000
    assert set(data["memory_bytes"][1]) == {None}
    assert report_content(outcome(plan, simulated, record=replace(record, moments=())))["course"] is None


def test_the_verdict_stands_on_top(tmp_path: Path, plan: Plan, simulated: Trace) -> None:
    found = outcome(plan, simulated)
    assert report(tmp_path / "report.html", plan, simulated)[1]["headline"] == found.headline
    assert re.match(
        r"Stage \d bounds the pipeline; workers were idle \d+% of the time; the machine was", found.headline
    )


def test_the_steady_state_begins_with_a_microbatch_of_both_traces() -> None:
    assert steady_microbatch(range(100), range(40), 1) == 10
    assert steady_microbatch(range(100), range(40), 4) == 8  # the first of its minibatch
    assert steady_microbatch(range(12, 100), range(40), 1) == 19
    assert steady_microbatch(range(50, 100), range(40), 1) is None


def test_both_timelines_have_the_moment_at_which_the_same_microbatch_begins(plan: Plan, simulated: Trace) -> None:
    found = outcome(plan, simulated)
    traces = report_content(found)["traces"]
    assert [trace["steady"]["microbatch"] for trace in traces] == [7, 7]
    for trace, events in zip(traces, (found.measured.events, simulated.events), strict=True):
        (begin,) = [event for event in events if str(event.action) == "0F7"]
        assert trace["steady"]["at_s"] == begin.start_s - events[0].start_s
    nothing = report_content(outcome(plan, replace(simulated, events=())))["traces"]
    assert [trace["steady"] for trace in nothing] == [None, None]


def test_simulated_memory_has_the_same_minibatch_at_the_same_place(plan: Plan) -> None:
    """Of a run as long as the simulation, and of one ten times as long and twice as slow."""
    played = play(plan, 40)
    for minibatches, minibatch_s in ((40, 0.01), (400, 0.02)):
        end_s = minibatches * minibatch_s
        at_s = [end_s * (i + 1) / 100 for i in range(100)]
        curves_of = curves.simulated_memory(played, at_s, minibatches)
        for worker, curve in enumerate(curves_of):
            assert len(curve) == len(at_s)
            assert max(curve) == curve[50] == round(played.peak_bytes[worker])
            assert all(held > 0 for held in curve)
    filling = curves.simulated_memory(played, [1e-6, 0.4], 40)
    assert filling[0][0] < filling[0][1]
    assert curves.simulated_memory(replace(played, trace=replace(played.trace, events=())), [1.0], 40) == []


# --- in a browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("browser")) as made:
        yield made


def texts(page: Page, selector: str) -> list[str]:
    found = page.run(f"[...document.querySelectorAll({selector!r})].map((each) => each.textContent)")
    assert isinstance(found, list)
    return found


def span(page: Page) -> float:
    """Seconds that the timeline shows."""
    start, end = page.run("penstock.visible()")
    return float(end - start)


@needs_browser
def test_browser_shows_a_section_for_everything_that_the_run_has(tmp_path: Path, page: Page) -> None:
    plan = replicated(make_plan(chain(model=HOSTILE), parse_cluster("local:3")))
    simulated = simulate(plan, 30)
    errors = tuple(
        EdgeError(source=0, target=1, sends="int8", direction=direction, error=error, looked_at=3)
        for direction, error in (("forward", 0.00321), ("backward", None))
    )
    evaluations = tuple(Evaluation(epoch=0, steps=10 * i, values={"loss": 1 / i, "accuracy": None}) for i in (1, 2, 3))
    record = record_of(plan, measured_from(simulated))
    report(tmp_path / "report.html", plan, simulated, record=record, compression=errors, evaluations=evaluations)
    page.open(tmp_path / "report.html", width=1280)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.run("document.querySelector('h1').textContent") == HOSTILE
    assert len(texts(page, ".tile .name")) == 6
    assert page.run("[...document.querySelectorAll('#sections > .card')].map((card) => card.id)") == [
        *("uses", "comparison", "throughput", "loss", "evaluations", "memory"),
        *("plan", "graph", "staleness", "compression", "marks"),
    ]
    assert texts(page, "#compression tbody td") == [
        "values",
        "int8",
        "0.00321",
        "3",
        "gradients",
        "int8",
        "\u2013",
        "3",
    ]
    assert texts(page, "#evaluations figcaption") == ["loss", "accuracy"]
    assert texts(page, "#memory tbody tr:first-child td") == ["", "5.00 MB", "4.00 MB", "0.80"]
    assert texts(page, "#marks tbody td:last-child")[1] == "checkpoint after 10 minibatches"
    assert page.run("document.querySelector('#loss svg').ariaLabel").startswith("Loss: loss 1.000 at first")
    used = page.run("document.querySelector('#uses .uses').ariaLabel")
    assert re.fullmatch(r"Computing [\d.]+ %, Syncing [\d.]+ %, Bubble [\d.]+ %", used)
    assert len(texts(page, "#plan .layers rect")) == 12 + 1  # and a divider between the two stages
    assert len(texts(page, "#graph [data-layers]")) == 12
    assert page.run("getComputedStyle(document.querySelector('#graph .bar')).fill") == "rgb(119, 170, 221)"
    unnamed = "[...document.querySelectorAll('svg[role=img], canvas, button, [role=region]')]"
    assert page.run(f"{unnamed}.filter((each) => !each.ariaLabel && !each.textContent).length") == 0
    assert page.errors == []


@needs_browser
def test_browser_zooms_by_wheel_drag_buttons_and_keys_and_names_actions(
    tmp_path: Path, page: Page, plan: Plan, simulated: Trace
) -> None:
    report(tmp_path / "report.html", plan, simulated, record=record_of(plan, measured_from(simulated)))
    page.open(tmp_path / "report.html", width=1280)
    left, top, width, _ = page.place("#timeline")
    x, y = left + width / 2, top + 40  # the first worker's row, as measured
    opened = span(page)
    page.run("document.querySelector('#start').click()")
    before = span(page)
    page.wheel(x, y, -300)
    assert span(page) == pytest.approx(before * 0.5488, rel=1e-3)  # exp(-0.6)
    start = page.run("penstock.visible()[0]")
    page.drag(x, y, x - 100)
    assert page.run("penstock.visible()[0]") > start
    for name, factor in (("#zoom-in", 1 / 1.6), ("#zoom-out", 1.6)):
        now = span(page)
        page.run(f"document.querySelector({name!r}).click()")
        assert span(page) == pytest.approx(now * factor)
    page.run("document.querySelector('#show-all').click()")
    page.settle()
    whole = pytest.approx(measured_from(simulated).span_s, abs=1e-8)
    assert page.run("penstock.visible()") == [0, whole]
    page.key("Home")  # the drag has brought it into focus
    assert span(page) == pytest.approx(opened)
    page.run("document.querySelector('#start').click()")
    page.settle()
    first = next(event for event in measured_from(simulated).events if event.worker == 0)
    words = f"forward of microbatch 0 at stage 0, {(first.end_s - first.start_s) * 1e3:.2f} ms, starts at 0 s"
    page.mouse("mouseMoved", page.run("timeline.left") + left + 4, y)
    page.settle()
    assert texts(page, "#tooltip") == [words + f"{plan.worker_names[0]}, measured"]
    page.click(page.run("timeline.left") + left + 4, y)
    assert texts(page, "#timeline-chosen") == [f"{plan.worker_names[0]}, measured: {words}"]
    page.key("ArrowRight", shift=True)
    assert "forward of microbatch 1 at stage 0" in texts(page, "#timeline-chosen")[0]
    page.key("ArrowDown")
    assert texts(page, "#timeline-chosen")[0].startswith(f"{plan.worker_names[1]}, measured: forward of microbatch 0")
    now = span(page)
    page.key("+")
    assert span(page) == pytest.approx(now / 1.5)
    page.key("Escape")
    assert page.run("document.querySelector('#timeline-chosen').hidden") is True
    page.run("document.querySelector('#show-all').click()")
    mark = page.run("timeline.xOf(timeline.marks[1].at_s)")
    page.mouse("mouseMoved", left + mark, y)
    assert texts(page, "#tooltip")[0].startswith("checkpoint after 10 minibatches")
    assert page.errors == []


@needs_browser
def test_browser_on_a_phone_pinches_taps_and_fits_in_the_dark(
    tmp_path: Path, page: Page, plan: Plan, simulated: Trace
) -> None:
    report(tmp_path / "report.html", plan, simulated, record=record_of(plan, measured_from(simulated)))
    page.open(tmp_path / "report.html", width=390, height=844, dark=True, touch=True)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 27)"
    left, top, width, _ = page.place("#timeline")
    y, middle, before = top + 40, left + width * 0.6, span(page)
    page.touch("touchStart", (middle - 30, y), (middle + 30, y))
    page.touch("touchMove", (middle - 60, y), (middle + 60, y))
    page.touch("touchEnd")
    assert span(page) == pytest.approx(before / 2, rel=0.02)
    page.run("document.querySelector('#start').click()")
    page.settle()
    page.touch("touchStart", (left + page.run("timeline.left") + 3, y))
    page.touch("touchEnd")
    assert "forward of microbatch 0 at stage 0" in texts(page, "#timeline-chosen")[0]
    assert page.errors == []


@needs_browser
def test_browser_draws_an_empty_trace_when_narrow(tmp_path: Path, page: Page, plan: Plan, simulated: Trace) -> None:
    report(tmp_path / "report.html", plan, replace(simulated, events=()), losses=[], staleness=())
    page.open(tmp_path / "report.html", width=500)
    assert page.run("[...document.querySelectorAll('#sections > .card')].map((card) => card.id)") == [
        *("uses", "comparison", "loss", "plan", "graph"),
    ]
    assert len(texts(page, "#graph [data-layers]")) == 12
    assert page.run("penstock.hit(1, 0, 1e-4)") is None
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.errors == []


@needs_browser
def test_browser_keeps_up_with_a_thousand_microbatches_on_sixteen_workers(tmp_path: Path, page: Page) -> None:
    """All 48,000 actions of each trace are there, drawn as shares of time until one zooms in."""
    plan = make_plan(chain(48), parse_cluster("4@12GB/s,4@1.25GB/s"), schedule="pipedream")
    simulated = simulate(plan, 1000)
    _, data = report(tmp_path / "report.html", plan, simulated)
    assert len(plan.devices) == 16
    assert [sum(len(row["gap_ns"]) for row in trace["workers"]) for trace in data["traces"]] == [48_000, 48_000]
    page.open(tmp_path / "report.html", width=1280)
    page.run("document.querySelector('#show-all').click()")
    page.settle()
    assert "zoom in for single actions" in texts(page, "#timeline-help")[0]
    left, top, width, _ = page.place("#timeline")
    for _ in range(12):
        page.wheel(left + width / 2, top + 40, -300)
    assert "zoom in for single actions" not in texts(page, "#timeline-help")[0]
    page.mouse("mouseMoved", left + width / 2, top + 40)
    page.settle()
    assert re.match(
        r"(forward|backward|update) of (microbatch|round) [45]\d\d at stage 0, ", texts(page, "#tooltip")[0]
    )
    assert page.errors == []


@needs_browser
def test_browser_opens_in_the_steady_state_with_both_traces_aligned(
    tmp_path: Path, page: Page, plan: Plan, simulated: Trace
) -> None:
    _, data = report(tmp_path / "report.html", plan, simulated)
    steady_s = [trace["steady"]["at_s"] for trace in data["traces"]]
    for width, shown in ((1280, 12), (390, 4)):
        page.open(tmp_path / "report.html", width=width)
        start, end = page.run("penstock.visible()")
        assert 0 < start <= steady_s[0] < end
        assert page.run("penstock.shift()") == pytest.approx(steady_s[0] - steady_s[1])
        for trace in (0, 1):
            words = page.run(f"penstock.hit({trace}, 0, {steady_s[trace] + 1e-5})")
            assert words.startswith("forward of microbatch 7 at stage 0")
        last = max(
            e.end_s for e in measured_from(simulated).events if e.action.of_microbatch and e.action.index < 7 + shown
        )
        assert end == pytest.approx(last, rel=0.05)
    page.run("document.querySelector('#start').click()")
    assert page.run("[penstock.visible()[0], penstock.shift()]") == [0, 0]
    assert page.errors == []


@needs_browser
def test_browser_makes_an_image_of_the_timeline(tmp_path: Path, page: Page, plan: Plan, simulated: Trace) -> None:
    report(tmp_path / "report.html", plan, simulated)
    page.open(tmp_path / "report.html", width=1280)
    before = page.run("[timeline.canvas.width, timeline.canvas.height]")
    image = "timeline.picture('chain', 'words', [['Forward', 'F']])"
    assert page.run(f"{image}.toDataURL('image/png')").startswith("data:image/png;base64,")
    width, height = page.run(f"(({{width, height}}) => [width, height])({image})")
    assert (width, height) == (pytest.approx(2 * (before[0] + 36), abs=4), pytest.approx(2 * before[1] + 200, abs=120))
    assert page.run("[timeline.canvas.width, timeline.canvas.height]") == before
    for button, words in (("#copy-image", "Image "), ("#save-image", "Image saved")):
        page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        page.run("document.querySelector('#timeline-told').textContent = ''")
        left, top, wide, high = page.place(button)
        page.click(left + wide / 2, top + high / 2)
        told = "document.querySelector('#timeline-told').textContent"
        page.run(f"new Promise((done) => {{ const look = () => {told} ? done() : setTimeout(look, 20); look(); }})")
        assert page.run(told).startswith(words)
    until_s = time.monotonic() + 10
    while not (tmp_path / "penstock-timeline.png").exists() and time.monotonic() < until_s:
        time.sleep(0.05)
    assert (tmp_path / "penstock-timeline.png").read_bytes().startswith(b"\x89PNG")
    assert [error for error in page.errors if "blob:" not in error] == []
    page.errors.clear()


@needs_browser
def test_browser_on_a_phone_scrolls_no_table_sideways(tmp_path: Path, page: Page, plan: Plan) -> None:
    plan = replicated(plan)
    simulated = simulate(plan, 30)
    evaluations = tuple(Evaluation(epoch=0, steps=10 * i, values={"loss": 1 / i}) for i in (1, 2, 3))
    record = record_of(plan, measured_from(simulated))
    report(tmp_path / "report.html", plan, simulated, record=record, evaluations=evaluations)
    page.open(tmp_path / "report.html", width=360, height=780, touch=True)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    boxes = "[...document.querySelectorAll('.scroll')]"
    assert page.run(f"{boxes}.length") >= 5
    assert page.run(f"{boxes}.filter((box) => box.scrollWidth > box.clientWidth).map((box) => box.ariaLabel)") == []
    right = (
        "Math.max(...[...document.querySelectorAll('.scroll td')].map((cell) => cell.getBoundingClientRect().right))"
    )
    assert page.run(right) <= 360
    named = "getComputedStyle(document.querySelector('#plan tbody td'), '::before').content"
    assert page.run(named) == '"Layers"' or page.run(named) == "attr(data-column)"
    assert page.errors == []
