"""The command line: its options are frozen, its answers stable, and wrong input is one clear line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from builders import chain_profile, flat_cluster, plan_of
from penstock import codec
from penstock.cli.app import app
from penstock.cluster import parse_cluster
from penstock.errors import FormatError
from penstock.formats import PLAN_FORMATS, plan_text, read_profile
from penstock.plan import Plan
from penstock.planner import make_plan
from penstock.planner.compare import COSTS, plan_by
from penstock.profile import Profile
from penstock.report import outcome_of
from penstock.report.drawing import svg_file
from penstock.run import Result, RunDirectory
from penstock.simulate import simulate

OPTIONS = {
    "profile": ["JOB", "--output", "--microbatch-size", "--threads", "--json"],
    "plan": [
        *("PROFILE", "--cluster", "--schedule", "--microbatches", "--samples-per-s"),
        *("--straight", "--replicas", "--most-stages", "--pin", "--no-cut", "--recompute"),
        *("--compress", "--cost", "--output", "--json"),
    ],
    "import": ["FILE", "--output", "--json"],
    "export": ["SOURCE", "--format", "--output"],
    "show": ["FILE", "--svg", "--json"],
    "simulate": ["PLAN", "--cluster", "--what-if", "--minibatches", "--output", "--json"],
    "emulate": ["PLAN", "--minibatches", "--dilation", "--run-dir", "--timeout", "--json"],
    "sweep": ["FILE...", "--cluster", "--schedule", "--minibatches", "--svg", "--json"],
    "train": [
        *("JOB", "PLAN", "--cluster", "--run-dir", "--resume", "--init"),
        *("--checkpoint-every", "--keep-checkpoints", "--tensorboard", "--timeout", "--json"),
    ],
    "verify": ["JOB", "PLAN", "--timeout", "--json"],
    "report": ["RUN...", "--output", "--perfetto", "--png", "--json"],
    "watch": ["RUN", "--json"],
    "bench": ["NAME", "--svg", "--emulate", "--json"],
    "demo": ["--run-dir"],
    "cluster measure": ["--workers", "--output", "--overwrite", "--timeout", "--json"],
}
JOB = """
import torch
from penstock import Job

def job():
    data = [(torch.randn(4), torch.tensor(0)) for _ in range(8)]
    return Job(model=torch.nn.Linear(4, 2), data=data, loss=torch.nn.functional.cross_entropy,
               optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=4)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "penstock", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e300"])
@pytest.mark.parametrize("verb", ["train", "verify"])
def test_a_timeout_that_is_none_is_refused(verb: str, seconds: str) -> None:
    result = CliRunner().invoke(app, [verb, "job.py", "plan.json", "--timeout", seconds])
    assert isinstance(result.exception, FormatError)
    assert str(result.exception).startswith(f"--timeout is {float(seconds):g}; it must be above 0 and at most ")


def invoke(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    codec.save(make_plan(chain_profile([1e-3] * 6), parse_cluster("local:2")), path)
    return path


def verbs(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, f"{name} ")
        else:
            yield before + name, command


def test_options_are_few_and_frozen() -> None:
    """Whoever changes an option changes this test, the docs and the changelog with it."""
    found = {}
    for name, command in verbs(typer.main.get_command(app)):
        names = [p.opts[0] if p.opts[0].startswith("-") else p.metavar.strip("[]") for p in command.params]
        found[name] = [option for option in names if option != "--help"]
    assert found == OPTIONS


@pytest.mark.parametrize("verb", OPTIONS)
def test_help_shows_an_example(verb: str) -> None:
    assert "Example" in invoke(*verb.split(), "--help").output


def test_plan_answers_with_stable_keys(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    codec.save(chain_profile([1e-3] * 6), profile)
    result = invoke("plan", str(profile), "--cluster", "local:2", "--output", str(tmp_path / "plan.json"), "--json")
    answer = json.loads(result.stdout)
    assert set(answer) == {
        "model", "cluster", "schedule", "microbatches", "seconds_per_minibatch", "samples_per_s", "lower_bound", "gap",
        "latency_s", "speedup_over_data_parallel", "bottleneck", "notes", "stages",
    }  # fmt: skip
    assert set(answer["stages"][0]) == {
        "layers", "first_layer", "last_layer", "devices", "shares", "recompute", "sends", "in_flight",
        "forward_s", "backward_s", "update_s",
        "microbatch_s", "input_bytes", "output_bytes", "parameter_bytes", "memory_bytes", "memory_share",
        "staleness",
    }  # fmt: skip
    assert (tmp_path / "plan.json").exists()


def test_show_and_simulate_answer_in_json(plan_file: Path) -> None:
    assert json.loads(invoke("show", str(plan_file), "--json").stdout)["cluster"] == "local:2"
    trace = plan_file.with_name("trace.json")
    answer = json.loads(invoke("simulate", str(plan_file), "--output", str(trace), "--json").stdout)
    stages = codec.load(Plan, plan_file).staleness
    assert answer["staleness"] == [{"mean": stage.mean, "most": stage.most} for stage in stages]
    shown = json.loads(invoke("show", str(trace), "--json").stdout)
    assert set(shown) == {"origin", "seconds", "samples_per_s", "workers"}
    assert set(answer) == {*shown, "staleness", "bottleneck", "links", "what_if"}
    for played, worker in zip(answer["workers"], shown["workers"], strict=True):
        assert played.items() >= worker.items()
        assert {*played} - {*worker} == {"averaging", "bubble", "peak_memory_bytes", "device_memory_bytes"}


def test_a_plan_has_one_prediction_wherever_it_is_shown(plan_file: Path) -> None:
    """Also of a run without losses, as an emulated one is, and beside a simulation of any length."""
    predicted = codec.load(Plan, plan_file).predicted_samples_per_s
    assert predicted is not None
    words, directory = f"{predicted:.1f}", plan_file.parent / "run"
    assert f"predicted {words} samples/s" in invoke("show", str(plan_file)).stdout
    assert f"the plan predicts {words}" in invoke("simulate", str(plan_file), "--minibatches", "1").stdout
    assert "the plan predicts" not in invoke("simulate", str(plan_file), "--cluster", "8@1GB/s").stdout
    emulated = invoke("emulate", str(plan_file), "--minibatches", "8", "--run-dir", str(directory)).stdout
    (rate,) = [line for line in emulated.splitlines() if line.strip().startswith("samples/s")]
    assert rate.split()[1] == words
    report = json.loads(invoke("report", str(directory), "--json").stdout)
    assert report["predicted_samples_per_s"] == predicted
    assert f"{words} predicted" in report["explanation"]
    assert report["explanation"][:40] in " ".join(emulated.split())


def test_a_run_is_compared_with_a_simulation_as_long_as_it_was(tmp_path: Path, plan_file: Path) -> None:
    """An emulated run has no losses to count minibatches by."""
    plan, run = codec.load(Plan, plan_file), RunDirectory(tmp_path / "run")
    measured = simulate(plan, 12)
    codec.save(plan, run.plan)
    codec.save(measured, run.trace)
    codec.save(Result(samples=96, seconds=1.0, losses=(), checkpoint=None, device_kinds={}), run.result)
    assert plan.profile.batch_size == 8
    assert outcome_of(run).simulated == measured


def test_staleness_is_shown_of_asynchronous_plans_alone(tmp_path: Path) -> None:
    profile = chain_profile([1e-3, 2e-3, 5e-3])
    plan = plan_of(profile, flat_cluster(3), [[0], [1], [2]], [1, 1, 1], schedule="pipedream")
    shown = table_of(plan, tmp_path / "plan.json")
    assert "staleness of the stages: 2, 1, 0 updates" in shown
    assert [row[3] for row in cells(shown)] == ["3", "2", "1"]
    played = invoke("simulate", str(tmp_path / "plan.json")).output
    assert "stage 0: 2, stage 1: 1, stage 2: 0" in " ".join(played.split())
    assert "staleness" not in table_of(replace(plan, schedule="1f1b", microbatches=2), tmp_path / "plan.json")


def cells(output: str) -> list[list[str]]:
    """The cells of a table's rows, which stand at least two spaces apart."""
    return [re.split(r"\s{2,}", line.strip()) for line in output.splitlines() if re.match(r"\d", line)]


def table_of(plan: Plan, path: Path) -> str:
    codec.save(plan, path)
    return str(invoke("show", str(path)).output)


def test_the_table_of_a_plan_says_what_each_stage_takes_moves_and_holds(tmp_path: Path) -> None:
    profile = chain_profile([1e-3, 2e-3, 5e-3], value_bytes=1000, parameter_bytes=10**8)
    plan = plan_of(profile, flat_cluster(4, memory_bytes=10**9), [[0, 1], [2]], [1, 3])
    shown = table_of(plan, tmp_path / "plan.json")
    first, second = cells(shown)
    assert first == ["0", "layer0 .. layer1 (2)", "0", "4", "72 ms", "0 B", "8 KB", "400 MB (40%)"]
    assert second[:4] == ["1 *", "layer2 (1)", "1-3", "1"]
    assert second[5:] == ["8 KB", "0 B", "200 MB (20%)"]
    assert "* bottleneck\n" in re.sub(" +\n", "\n", shown)


def test_a_slow_link_is_marked_where_it_leaves_and_no_limit_means_no_share(tmp_path: Path) -> None:
    plan = plan_of(chain_profile([1e-3] * 2, value_bytes=10**9, parameter_bytes=1), flat_cluster(2), [[0], [1]])
    shown = table_of(plan, tmp_path / "plan.json")
    assert [row[0] for row in cells(shown)] == ["0 *", "1"]
    assert [row[-1] for row in cells(shown)] == ["32 GB", "16 GB"]  # buffers for it both ways, and two in flight
    assert "* bottleneck: link to 1" in shown


def test_show_draws_a_plan(plan_file: Path) -> None:
    svg = plan_file.with_name("new") / "plan.svg"
    assert f"drawing written to {svg}" in invoke("show", str(plan_file), "--svg", str(svg)).output.replace("\n", "")
    assert svg.read_text() == svg_file(codec.load(Plan, plan_file))


def test_tables_fit_a_terminal_of_80_columns(plan_file: Path) -> None:
    for line in invoke("show", str(plan_file)).output.splitlines():
        assert len(line) <= 80


GRAPH = """node1 -- In[/b]:x: -- forward_compute_time=0, backward_compute_time=0, activation_size=8, parameter_size=0
node2 -- Linear(2, 2) -- forward_compute_time=2.5, backward_compute_time=5.0, activation_size=8.0, parameter_size=24.0
\tnode1 -- node2
"""


def test_import_writes_a_profile_and_shows_it(tmp_path: Path) -> None:
    graph, output = tmp_path / "graph.txt", tmp_path / "profile.json"
    graph.write_text(GRAPH)
    shown = invoke("import", str(graph), "--output", str(output)).output
    assert "In[/b]:x:" in shown
    assert codec.load(Profile, output) == read_profile(graph)
    answer = json.loads(invoke("import", str(graph), "--output", str(output), "--json").stdout)
    assert answer == json.loads(output.read_text())


def test_plan_takes_the_profile_of_another_system(tmp_path: Path) -> None:
    graph, output = tmp_path / "graph.txt", tmp_path / "plan.json"
    graph.write_text(GRAPH)
    invoke("plan", str(graph), "--cluster", "local:2", "--output", str(output))
    assert codec.load(Plan, output).profile.front_end == "pipedream"


def test_a_profile_without_any_time_can_be_planned_and_shown(tmp_path: Path) -> None:
    graph, output = tmp_path / "graph.txt", tmp_path / "plan.json"
    graph.write_text(GRAPH.replace("2.5", "0").replace("5.0", "0").replace("=24.0", "=0").replace("=8", "=0"))
    result = invoke("plan", str(graph), "--cluster", "1@1GB/s", "--output", str(output))
    assert "no time at all" in result.output


def test_what_is_sent_compressed_is_asked_for_and_shown(tmp_path: Path) -> None:
    profile, output = tmp_path / "profile.json", tmp_path / "plan.json"
    codec.save(chain_profile([1.0] * 4, batch_size=1, value_bytes=8000, parameter_bytes=10**8), profile)
    asked = ("plan", str(profile), "--cluster", "2@350B/s", "--output", str(output))
    assert cells(invoke(*asked, "--compress", "int8").output)[0][-2] == "2.03 KB int8"
    assert [stage.sends for stage in codec.load(Plan, output).stages] == ["int8", "exact"]
    assert "sends 2.03 KB per microbatch to stage 1 in int8" in svg_file(codec.load(Plan, output))
    plain = json.loads(invoke(*asked, "--json").stdout)
    assert {stage["sends"] for stage in plain["stages"]} == {"exact"}


@pytest.mark.parametrize("cost", COSTS)
def test_plans_by_the_objectives_of_other_systems_can_be_made_and_shown(cost: str, tmp_path: Path) -> None:
    servers, output = tmp_path / "servers.txt", tmp_path / "plan.json"
    (tmp_path / "graph.txt").write_text(GRAPH)
    servers.write_text("Server0\n  Fast 1 graph.txt\n  Slow 1 graph.txt\n")
    invoke("plan", str(servers), "--cluster", f"{servers}@1GB/s", "--cost", cost, "--output", str(output))
    plan = codec.load(Plan, output)
    assert [device.kind for device in plan.cluster.devices] == ["Fast", "Slow"]
    assert plan == plan_by(cost, plan.profile, plan.cluster)


@pytest.mark.parametrize("form", PLAN_FORMATS)
def test_export_writes_what_the_library_writes(form: str, plan_file: Path) -> None:
    output = plan_file.with_name("exported") / form
    assert str(output) in invoke("export", str(plan_file), "--format", form, "--output", str(output)).output
    assert output.read_text() == plan_text(codec.load(Plan, plan_file), form)


def test_an_export_to_where_nothing_can_be_written_says_so(plan_file: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(plan_file), "--format", "dp", "--output", str(plan_file / "x")])
    assert "x: cannot be written" in str(result.exception)


WRONG = {
    "no such file": (["show", "nowhere.json"], "nowhere.json: no such file"),
    "a drawing of a profile": (["show", "profile.json", "--svg", "x.svg"], "--svg draws plans, and this is a profile"),
    "no such job": (["profile", "nowhere.py"], "nowhere.py: no such job file"),
    "a job without job": (["profile", "empty.py"], "has no function `job`"),
    "a job that returns something else": (["profile", "none.py"], "returned NoneType, not penstock.Job"),
    "a job with a syntax error": (["profile", "syntax.py"], "syntax.py:1:"),
    "a plan where a profile is expected": (["plan", "plan.json", "--cluster", "local:2"], "another kind of file"),
    "a profile of no known format": (["plan", "job.py", "--cluster", "local:2"], "tried a Penstock profile"),
    "a graph with a bad number": (
        ["import", "bad-graph.txt"],
        "bad-graph.txt:2: backward_compute_time: expected a number",
    ),
    "an unknown export": (["export", "plan.json", "--format", "x", "--output", "y"], "format 'x' is unknown"),
    "an unknown schedule": (
        ["plan", "profile.json", "--cluster", "local:2", "--schedule", "x"],
        "schedule 'x' is unknown",
    ),
    "a cluster that is none": (["plan", "profile.json", "--cluster", "x"], "neither a file nor a known form"),
    "a bandwidth without a unit": (["plan", "profile.json", "--cluster", "4@12"], "a rate such as 1.25GB/s"),
    "no such run": (["report", "nowhere"], "no such run directory"),
    "an unknown compression": (
        ["plan", "profile.json", "--cluster", "local:2", "--compress", "int4"],
        "compression 'int4' is unknown; choose one of exact, bf16, int8",
    ),
    "compression by another's objective": (
        ["plan", "profile.json", "--cluster", "local:2", "--cost", "pipedream", "--compress", "int8"],
        "no --compress",
    ),
    "an unknown cost model": (["plan", "profile.json", "--cluster", "local:2", "--cost", "x"], "--cost x"),
    "no such benchmark": (["bench", "x"], "benchmark 'x' is unknown"),
    "a benchmark without plans to emulate": (["bench", "runtime", "--emulate"], "bench runtime has nothing to emulate"),
    "a benchmark without a drawing": (["bench", "runtime", "--svg", "x.svg"], "bench runtime has no drawing"),
    "a plan for another model": (["verify", "job.py", "plan.json"], "the plan is for minibatches of 8 samples"),
    "training on a plan for inference": (
        ["train", "job.py", "inference.json"],
        "schedule inference has no backwards: nothing would be trained, no gradients made; "
        "plan with --schedule gpipe or 1f1b or pipedream",
    ),
    "gradients of a plan for inference": (
        ["verify", "job.py", "inference.json"],
        "schedule inference has no backwards",
    ),
    "no such checkpoint": (["train", "job.py", "job-plan.json", "--resume", "nowhere"], "no such checkpoint directory"),
    "weights to start from beside a checkpoint": (
        ["train", "job.py", "job-plan.json", "--resume", "nowhere", "--init", "model.pt"],
        "--resume goes on with a run, --init starts one from given weights; give one of them",
    ),
    "a directory that is no checkpoint": (
        ["export", ".", "--format", "safetensors", "--output", "x"],
        "holds no complete checkpoint (checkpoint.json is missing)",
    ),
    "more workers than devices": (["simulate", "crowded.json"], "3 workers but local:2 has 2 devices"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    (directory / "empty.py").write_text("")
    (directory / "none.py").write_text("def job():\n    pass\n")
    (directory / "syntax.py").write_text("def job(:\n")
    (directory / "job.py").write_text(JOB)
    (directory / "bad-graph.txt").write_text(GRAPH.replace("5.0", "five"))
    profile = chain_profile([1e-3] * 6)
    codec.save(profile, directory / "profile.json")
    plan = make_plan(profile, parse_cluster("local:2"))
    codec.save(plan, directory / "plan.json")
    text = codec.dumps(plan)
    (directory / "job-plan.json").write_text(text.replace('"batch_size":8', '"batch_size":4'))
    (directory / "inference.json").write_text(text.replace('"schedule":"pipedream"', '"schedule":"inference"'))
    crowded = json.loads(text)
    crowded["stages"][0] |= {"devices": [0, 1, 2], "shares": [1, 1, 1]}
    crowded["stages"] = [crowded["stages"][0] | {"layers": list(range(6))}]
    (directory / "crowded.json").write_text(json.dumps(crowded))
    return directory


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_clear_line_and_exit_code_2(name: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, expected = WRONG[name]
    monkeypatch.chdir(files)
    result = run(*arguments)
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("penstock: ")]
    assert expected in line
    assert result.stderr.splitlines()[-1] == line
    assert all(line.startswith("loading ") for line in result.stderr.splitlines()[:-1])
    assert result.stdout == ""


def test_version() -> None:
    from penstock import __version__

    assert invoke("--version").stdout.strip() == __version__
