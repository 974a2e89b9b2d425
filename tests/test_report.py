from __future__ import annotations

import html
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cluster import parse_cluster
from penstock.errors import FormatError
from penstock.graph import Layer, LayerGraph, Parameter, Value
from penstock.plan import Plan, Stage
from penstock.planner import make_plan
from penstock.profile import LayerSeconds, Profile
from penstock.report import content, write_report
from penstock.report.content import report_content
from penstock.report.drawing import inline_svg
from penstock.report.drawing import style as drawing_style
from penstock.run import EdgeError, Result
from penstock.schedule import Action, Kind, Staleness
from penstock.simulate import simulate
from penstock.trace import Event, Trace

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(NAMES)} is installed")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    *("--virtual-time-budget=3000", "--dump-dom"),
)
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


def report(
    path: Path,
    plan: Plan,
    simulated: Trace,
    losses: Sequence[float] | None = None,
    compression: tuple[EdgeError, ...] = (),
) -> tuple[str, Any]:
    """The written page, and the content read back from it as a browser would."""
    measured = measured_from(simulated)
    result = replace(result_of(measured, losses), compression=compression, staleness=plan.staleness)
    write_report(path, plan=plan, measured=measured, simulated=simulated, result=result)
    page = path.read_text(encoding="utf-8")
    blocks = re.findall(r'<script type="application/json" id="content">(.*?)</script>', page, re.DOTALL)
    assert len(blocks) == 1
    return page, json.loads(blocks[0])


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(chain(), parse_cluster("local:3"), schedule="pipedream")


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
    assert rate["predicted"] == simulated.samples_per_s
    assert rate["measured"] == measured.samples_per_s
    assert rate["ratio"] == pytest.approx(measured.samples_per_s / simulated.samples_per_s)
    assert len(data["comparison"]["workers"]) == len(plan.devices)
    for worker, row in enumerate(data["comparison"]["workers"]):
        assert row["utilisation"]["measured"] == measured.utilisation(worker)
        assert 1.0 <= row["seconds"]["F"]["ratio"] <= 1.2
    assert sum(stage["layers"] for stage in data["plan"]["stages"]) == len(data["plan"]["layers"]) == 12
    assert data["loss"]["final"] == pytest.approx(1 / 60)


def test_staleness_is_set_beside_what_the_schedule_makes_it(tmp_path: Path, plan: Plan, simulated: Trace) -> None:
    measured = measured_from(simulated)
    stages = len(plan.stages)
    found = tuple(Staleness.counted({0: 1, stages - 1 - i: 29}) for i in range(stages))
    result = replace(result_of(measured), staleness=found)
    write_report(tmp_path / "report.html", plan=plan, measured=measured, simulated=simulated, result=result)
    rows = report_content(plan=plan, measured=measured, simulated=simulated, result=result)["staleness"]
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
    assert data["comparison"]["samples_per_s"] == {"predicted": 0.0, "measured": 0.0, "ratio": None}


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
    assert data["traces"][1]["events"] == len(simulated.events)
    assert sum(len(row["gap_ns"]) for row in data["traces"][1]["workers"]) == data["traces"][1]["shown"] == 10
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


PROBE = """<script>
const [from, to] = penstock.visible();
penstock.zoom(2);
const zoomed = penstock.visible();
penstock.showAll();
document.body.dataset.probe = JSON.stringify({
  shrinks: (to - from) / (zoomed[1] - zoomed[0]),
  all: penstock.visible(),
  first: penstock.hit(1, 0, 1e-4),
  outside: [penstock.hit(1, 0, 1e9), penstock.hit(1, 99, 0), penstock.hit(7, 0, 0)],
  tiles: [...document.querySelectorAll(".tile .name")].map((tile) => tile.textContent),
  overflow: document.documentElement.scrollWidth - innerWidth,
  title: document.querySelector("h1").textContent,
  layers: document.querySelectorAll("#layers rect").length,
  drawn: document.querySelectorAll(".plan [data-layers]").length,
  lost: [...document.querySelectorAll("#compression-card:not([hidden]) tbody td")].map((cell) => cell.textContent),
  colour: getComputedStyle(document.querySelector(".plan .bar")).fill,
});
</script></body>"""


def in_browser(path: Path, width: int) -> Any:
    """What the probe found in the page once a browser has drawn it."""
    path.write_text(path.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={path.parent / 'chromium'}"]
    command += [f"--window-size={width},1200", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout
    error = re.search(r'<html[^>]* data-error="([^"]*)"', dom)
    assert error is None, f"the page reports {error and error[1]}"
    assert re.search(r'<html[^>]* data-ready="true"', dom)
    found = re.search(r'data-probe="([^"]*)"', dom)
    assert found is not None
    return json.loads(html.unescape(found[1]))


@needs_browser
def test_browser_draws_the_page_and_finds_actions(tmp_path: Path) -> None:
    plan = replicated(make_plan(chain(model=HOSTILE), parse_cluster("local:3")))
    simulated = simulate(plan, 30)
    errors = tuple(
        EdgeError(source=0, target=1, sends="int8", direction=direction, error=error, looked_at=3)
        for direction, error in (("forward", 0.00321), ("backward", None))
    )
    _, data = report(tmp_path / "report.html", plan, simulated, compression=errors)
    assert data["compression"][0]["error"] == 0.00321
    seen = in_browser(tmp_path / "report.html", width=1280)
    assert seen["lost"] == ["values", "int8", "0.00321", "3", "gradients", "int8", "\u2013", "3"]
    first = simulated.events[0]
    assert seen["first"] == (
        f"forward of microbatch 0 at stage 0, {(first.end_s - first.start_s) * 1e3:.1f} ms, starts at 0 s"
    )
    assert seen["outside"] == [None, None, None]
    assert seen["shrinks"] == pytest.approx(2)
    assert seen["all"] == [0, pytest.approx(measured_from(simulated).span_s, abs=1e-8)]
    assert len(seen["tiles"]) == 6
    assert seen["title"] == data["model"] == HOSTILE
    assert seen["layers"] == 12 + 1  # and a divider between the two stages
    assert seen["drawn"] == 12
    assert seen["colour"] == "rgb(119, 170, 221)"
    assert seen["overflow"] <= 0


@needs_browser
def test_browser_draws_an_empty_trace_when_narrow(tmp_path: Path, plan: Plan, simulated: Trace) -> None:
    report(tmp_path / "report.html", plan, replace(simulated, events=()), losses=[])
    seen = in_browser(tmp_path / "report.html", width=500)
    assert seen["drawn"] == 12
    assert seen["first"] is None
    assert seen["lost"] == []
    assert seen["overflow"] <= 0
