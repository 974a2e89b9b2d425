"""Changes to a plan's circumstances, the verdict on what limits it, and sweeps over combinations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from builders import chain_profile, flat_cluster, one_layer_per_stage, plan_of
from penstock import codec
from penstock.cli.app import app
from penstock.cluster import Cluster, Device, Level, parse_cluster
from penstock.errors import PenstockError, PlanError
from penstock.plan import Plan
from penstock.simulate import CALM, Conditions, Episode, play, simulate, verdict_of, what_if
from penstock.sweep import sweep

LEVELS = (Level(size=2, bytes_per_s=100.0, latency_s=0.5), Level(size=2, bytes_per_s=10.0, latency_s=1.0))


def two_hosts(schedule: str = "1f1b", microbatches: int = 2) -> Plan:
    devices = (Device(kind="cpu", memory_bytes=1000),) * 3 + (Device(speed=0.5, memory_bytes=1000),)
    cluster = Cluster(name="two hosts", devices=devices, levels=LEVELS)
    profile = chain_profile([1.0, 1.0], batch_size=8, value_bytes=10)
    return plan_of(profile, cluster, [[0], [1]], [2, 2], schedule=schedule, microbatches=microbatches)


def test_links_and_devices_change_by_factor_or_to_a_value_all_or_some() -> None:
    def changed(text: str) -> Cluster:
        return what_if(text, two_hosts())[0].cluster

    assert [level.bytes_per_s for level in changed("bandwidth=x10").levels] == [1000.0, 100.0]
    assert [level.bytes_per_s for level in changed("bandwidth@level:1=1KB/s").levels] == [100.0, 1000.0]
    latencies_s = [level.latency_s for level in changed("latency=10us,latency@level:0=x2").levels]
    assert latencies_s == pytest.approx([2e-5, 1e-5])
    assert [device.speed for device in changed("speed@device:1=x2").devices] == [1.0, 2.0, 1.0, 0.5]
    assert [device.speed for device in changed("speed@host:1=x2").devices] == [1.0, 1.0, 2.0, 1.0]
    assert [device.speed for device in changed("speed@kind:any=3").devices] == [1.0, 1.0, 1.0, 3.0]
    assert {device.memory_bytes for device in changed("memory=4KB").devices} == {4000}


def test_another_schedule_or_number_of_microbatches_takes_its_usual_depths() -> None:
    plan, _ = what_if("schedule=gpipe,microbatches=x4", two_hosts())
    assert (plan.schedule, plan.microbatches, [stage.in_flight for stage in plan.stages]) == ("gpipe", 8, [4, 4])
    plan, _ = what_if("schedule=pipedream", two_hosts())
    assert (plan.schedule, plan.microbatches, [stage.in_flight for stage in plan.stages]) == ("pipedream", 1, [2, 1])
    plan, _ = what_if("compress=bf16", two_hosts())
    assert [stage.sends for stage in plan.stages] == ["bf16", "exact"]


def test_conditions_come_from_whoever_reads_files() -> None:
    slow = Conditions(episodes=(Episode(device=0, times=2.0),))
    plan, conditions = what_if("conditions=slow.toml", two_hosts(), CALM, {"slow.toml": slow}.__getitem__)
    assert (plan, conditions) == (two_hosts(), slow)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bandwidth", "not a change; write bandwidth"),
        ("colour=red", "'colour' is unknown; write bandwidth"),
        ("bandwidth=xx", "expected xFACTOR"),
        ("bandwidth=12", "expected a rate such as"),
        ("bandwidth@level:2=x2", "@level:N with N from 0, the innermost, to 1"),
        ("speed@host:7=x2", "@host:N up to 1, or @kind:NAME among cpu, any"),
        ("speed=fast", "expected a number such as 0.5"),
        ("microbatches=9", "9 microbatches from a minibatch of 8 samples; take 1 to 8"),
        ("schedule=fast", "schedule 'fast' is unknown"),
        ("schedule=interleaved,speed@device=x2", "not a change"),
        ("compress=int4", "compression 'int4' is unknown"),
    ],
)
def test_a_change_that_cannot_be_says_what_can(text: str, words: str) -> None:
    with pytest.raises(PenstockError) as raised:
        what_if(text, two_hosts())
    assert words in str(raised.value)


def test_memory_without_a_limit_cannot_be_multiplied() -> None:
    with pytest.raises(PlanError, match="there is no limit to multiply; give a size such as 16GB"):
        what_if("memory=x2", one_layer_per_stage([1.0], schedule="1f1b"))


def test_the_verdict_names_the_slow_stage_the_full_link_the_averaging_or_the_waiting() -> None:
    slow = play(one_layer_per_stage([1.0, 3.0], schedule="pipedream"), 50)
    assert verdict_of(slow).limit == "computing"
    assert verdict_of(slow).text.startswith("Stage 1 on device 1 sets the pace, computing 9")

    profile = chain_profile([1.0, 1.0], value_bytes=1000, batch_size=1)
    narrow = play(plan_of(profile, flat_cluster(2, bytes_per_s=100.0), [[0], [1]], schedule="pipedream"), 50)
    assert verdict_of(narrow).limit == "link"
    assert "(level 0, 100B/s) sets the pace, full 76% of the time" in verdict_of(narrow).text

    heavy = chain_profile([1.0], parameter_bytes=1000, batch_size=1)
    averaging = play(plan_of(heavy, flat_cluster(2, bytes_per_s=100.0), [[0]], [2], schedule="pipedream"), 50)
    assert verdict_of(averaging).limit == "averaging"
    assert "fewer replicas" in verdict_of(averaging).text

    drained = play(one_layer_per_stage([1.0] * 4, schedule="1f1b", microbatches=1), 5)
    assert verdict_of(drained).limit == "waiting"
    assert "wait for each other 75% of it" in verdict_of(drained).text
    assert "more microbatches to a minibatch" in verdict_of(drained).text


def test_a_sweep_ranks_every_combination_and_says_why_some_cannot_be() -> None:
    profile = chain_profile([1e-3] * 4, batch_size=8)
    plan = plan_of(profile, flat_cluster(2), [[0, 1], [2, 3]], schedule="pipedream")
    heard = []
    outcomes = sweep(
        {"profile": profile, "plan": plan},
        [parse_cluster("local:1"), parse_cluster("local:2")],
        ["pipedream", "1f1b", "interleaved"],
        minibatches=20,
        tell=lambda at, total, case: heard.append((at, total, str(case))),
    )
    assert heard[0] == (0, 12, "profile, pipedream on local:1")
    assert len(outcomes) == len(heard) == 12
    rates = [outcome.samples_per_s for outcome in outcomes if outcome.possible]
    assert rates == sorted(rates, reverse=True)
    best = outcomes[0]
    assert (best.case.schedule, best.case.cluster) == ("pipedream", "local:2")
    assert best.samples_per_s == pytest.approx(simulate(plan, 20).samples_per_s, rel=0.05)
    reasons = {str(outcome.case): outcome.text for outcome in outcomes if not outcome.possible}
    assert "2 workers but local:1 has 1 devices" in reasons["plan, pipedream on local:1"]
    assert set(reasons) >= {f"plan, {schedule} on local:1" for schedule in ("pipedream", "1f1b", "interleaved")}


def test_the_sweep_verb_answers_with_a_table_json_and_a_drawing(tmp_path: Path) -> None:
    profile = chain_profile([1e-3] * 4, batch_size=8)
    files = [tmp_path / "profile.json", tmp_path / "plan.json"]
    codec.save(profile, files[0])
    codec.save(replace(plan_of(profile, flat_cluster(2), [[0, 1], [2, 3]], schedule="pipedream")), files[1])
    drawing = tmp_path / "sweep.svg"
    options = ["--cluster", "local:1", "--cluster", "local:2", "--svg", str(drawing)]
    shown = CliRunner().invoke(app, ["sweep", *map(str, files), *options])
    assert shown.exit_code == 1, shown.output  # since one cannot be
    assert "fastest first" in shown.stdout
    assert "2 workers but local:1 has 1 devices" in " ".join(shown.stdout.split())
    assert "4 of 4" in shown.stderr
    assert len(ElementTree.fromstring(drawing.read_bytes()).findall(".//{*}rect[@class='bar']")) == 4
    answer = json.loads(CliRunner().invoke(app, ["sweep", *map(str, files), *options, "--json"]).stdout)
    assert [row["possible"] for row in answer] == [True, True, True, False]
    assert set(answer[0]) == {
        "case", "replicas", "microbatches", "samples_per_s", "bubble", "peak_memory_bytes", "limit", "text", "possible",
    }  # fmt: skip
    alone = CliRunner().invoke(app, ["sweep", str(files[1]), "--json"])
    assert alone.exit_code == 0
    assert json.loads(alone.stdout)[0]["case"]["cluster"] == "flat"


def test_the_simulate_verb_compares_what_ifs_and_clusters(tmp_path: Path) -> None:
    plan, slow = tmp_path / "plan.json", tmp_path / "slow.toml"
    codec.save(two_hosts(), plan)
    slow.write_text("[[episodes]]\ndevice = 0\ntimes = 10.0\n")
    changes = ["bandwidth=x10", f"conditions={slow}", "memory=1B"]
    options = [part for change in changes for part in ("--what-if", change)]
    answer = json.loads(CliRunner().invoke(app, ["simulate", str(plan), *options, "--json"]).stdout)
    faster, slower, small = answer["what_if"]
    assert faster["ratio"] > 1 > slower["ratio"]
    assert (faster["fits"], small["fits"]) == (True, False)
    assert answer["workers"][0]["device_memory_bytes"] == 1000
    shown = CliRunner().invoke(app, ["simulate", str(plan), *options])
    assert "as it is" in shown.stdout
    assert "sets the pace" in shown.stdout
    elsewhere = CliRunner().invoke(app, ["simulate", str(plan), "--cluster", "local:4", "--json"])
    assert json.loads(elsewhere.stdout)["samples_per_s"] > answer["samples_per_s"]
