"""What a new user meets: errors before torch is loaded, progress from the first second, messages with the remedy."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from builders import chain_profile, flat_cluster, plan_of
from penstock import EarlyStop, Job, codec
from penstock.cli import checks, show, simulations
from penstock.cli.app import app
from penstock.cli.steps import Steps
from penstock.cli.verbs import plan as plan_verb
from penstock.cli.verbs import simulate as simulate_verbs
from penstock.cluster import parse_cluster
from penstock.errors import CaptureError, FormatError, JobError
from penstock.planner import make_plan
from penstock.profile import Profile
from penstock.runtime.capture.capture import capture
from penstock.runtime.process.jobs import build_job, load_job
from penstock.simulate import play
from penstock.sweep import sweep
from penstock.units import shorten_middle, show_clock

WITHOUT_TORCH = """
import sys
from penstock.cli import main
sys.argv = ["penstock", *sys.argv[1:]]
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text("import torch\n")
    (tmp_path / "syntax.py").write_text("def job(:\n")
    profile = chain_profile([1e-3] * 6)
    codec.save(profile, tmp_path / "profile.json")
    codec.save(make_plan(profile, parse_cluster("local:2")), tmp_path / "plan.json")
    return tmp_path


EARLY = {
    "a job that is not there": (["train", "nowhere.py"], "nowhere.py: no such job file"),
    "a profile of no job": (["profile", "nowhere.py"], "nowhere.py: no such job file"),
    "a job with a syntax error": (["train", "syntax.py"], "syntax.py:1: "),
    "a bad cluster": (["train", "job.py", "--cluster", "lokal:2"], "neither a file nor a known form"),
    "a plan that is not there": (["train", "job.py", "nowhere.json"], "nowhere.json: no such file"),
    "nothing to verify": (["verify", "job.py", "nowhere.json"], "nowhere.json: no such file"),
    "a run directory that is a file": (
        ["train", "job.py", "--run-dir", "plan.json"],
        "plan.json: a file where a run directory is expected; choose another with --run-dir",
    ),
    "a run directory in a file": (
        ["train", "job.py", "--run-dir", "plan.json/run"],
        "plan.json is a file; choose another with --run-dir",
    ),
    "a run directory where nothing can be": (
        ["demo", "--run-dir", "/proc/penstock/run"],
        "/proc/penstock/run: cannot be written: ",
    ),
    "a profile where nothing can be": (
        ["profile", "job.py", "--output", "/proc/penstock/profile.json"],
        "choose another with --output",
    ),
    "a cluster file that is there": (
        ["cluster", "measure", "--output", "plan.json"],
        "plan.json: is there already; name another with --output, or replace it with --overwrite",
    ),
}


@pytest.mark.parametrize("name", EARLY)
def test_what_can_be_told_without_torch_is_told_before_it_is_loaded(name: str, files: Path) -> None:
    arguments, words = EARLY[name]
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], cwd=files, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert words in line


def test_a_directory_that_can_be_made_is_not_made_by_looking(tmp_path: Path) -> None:
    checks.check_run_directory(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_steps_are_told_from_the_first_on_and_how_long_the_rest_takes() -> None:
    out, now_s = io.StringIO(), 0.0
    with Steps(out=out, clock=lambda: now_s) as steps:
        steps.begin("loading torch")
        steps.begin("profiling")
        for done in range(1, 11):
            now_s += 0.5
            steps.part(done, 20, "parts")
    assert out.getvalue().splitlines() == [
        "loading torch",
        "profiling",
        "profiling: 4 of 20 parts, about 0:08 left",
        "profiling: 8 of 20 parts, about 0:06 left",
    ]


def test_quiet_steps_say_nothing() -> None:
    out = io.StringIO()
    with Steps(out=out, quiet=True) as steps:
        steps.begin("loading torch")
        steps.part(1, 2)
    assert out.getvalue() == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_steps_have_a_bar_and_no_unknown_total() -> None:
    out = Terminal()
    with Steps(out=out) as steps:
        steps.begin("loading torch")
        steps.begin("profiling")
        steps.part(3, 12, "parts")
    assert "3 of 12 parts" in out.getvalue()
    assert "None" not in out.getvalue()
    assert "left" not in out.getvalue()  # nothing is known of it yet


@pytest.mark.parametrize(("seconds", "words"), [(7, "0:07"), (187, "3:07"), (3765, "1:02:45")])
def test_times_left_read_as_a_clock(seconds: float, words: str) -> None:
    assert show_clock(seconds) == words


def test_a_misspelt_field_of_a_job_is_named_with_the_one_that_was_meant() -> None:
    with pytest.raises(JobError, match=r"job\.py: Job has no 'epoch'; did you mean epochs\?"):
        build_job(lambda: Job(epoch=3), "job.py")  # type: ignore[call-arg]
    with pytest.raises(JobError, match="EarlyStop has no 'wait'; it has metric, mode, patience"):
        build_job(lambda: EarlyStop(wait=3), "job.py")  # type: ignore[call-arg]
    with pytest.raises(JobError, match=r"job\.py: Job missing 1 required keyword-only argument: 'batch_size'; Job has"):
        build_job(lambda: Job(model=nn.ReLU(), data=[1], loss=max, optimizer=max), "job.py")  # type: ignore


def test_another_type_error_of_a_job_keeps_its_traceback() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        build_job(lambda: 1 + "1", "job.py")  # type: ignore[operator]


def test_a_job_file_may_import_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_the_job.py").write_text("BATCH_SIZE = 7\n")
    (tmp_path / "train.py").write_text(
        "import torch\nfrom beside_the_job import BATCH_SIZE\nfrom penstock import Job\n"
        "def job():\n    return Job(model=torch.nn.ReLU(), data=[1], loss=max, optimizer=max, batch_size=BATCH_SIZE)\n"
    )
    assert load_job(tmp_path / "train.py").batch_size == 7


def test_a_model_whose_forward_fails_is_reported_once_with_the_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(9, 2)))
    with pytest.raises(CaptureError) as caught:
        capture(model, torch.randn(3, 4))
    words = str(caught.value)
    assert words.startswith("the forward of Sequential fails in layer '1.1' (Linear) on inputs of [3, 4] float32: ")
    assert words.count("mat1 and mat2 shapes cannot be multiplied (3x8 and 9x2)") == 1
    assert words.endswith("correct the model, or the inputs in Job.data")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_every_verb_has_short_help_and_output(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    for verb in ([], ["plan"], ["cluster"], ["cluster", "measure"]):
        assert CliRunner().invoke(app, [*verb, "-h"]).exit_code == 0
    short = CliRunner().invoke(app, ["plan", "profile.json", "--cluster", "local:2", "-o", "short.json"])
    assert short.exit_code == 0, short.output
    assert (files / "short.json").exists()


def test_the_examples_in_the_help_of_simulate_work(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    registered = simulate_verbs.verbs.registered_commands
    (command,) = [each for each in registered if each.callback is simulate_verbs.simulate]
    assert isinstance(command.epilog, str)
    examples = re.findall(r"penstock (simulate [^;]+)", command.epilog)
    assert len(examples) == 3
    for example in examples:
        result = CliRunner().invoke(app, example.split())
        assert result.exit_code == 0, (example, result.output, result.exception)


def test_a_verb_that_is_stopped_says_what_was_kept(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(path: Path) -> Profile:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_verb, "read_profile", stopped)
    result = CliRunner().invoke(app, ["plan", str(files / "profile.json"), "--cluster", "local:2"])
    assert result.exit_code == 130
    assert "penstock: stopped; nothing was written" in result.stderr


# Tables


def long_named() -> Profile:
    """Six layers with names and kinds that no terminal has room for."""
    profile = chain_profile([1e-3] * 6)
    name = "encoder.transformer.blocks.11.attention.self_attention.query_projection"
    layers = tuple(replace(layer, name=f"{name}{layer.id}", kind="LowRankLinear" * 2) for layer in profile.graph.layers)
    return replace(profile, graph=replace(profile.graph, layers=layers))


def printed(table: object) -> list[str]:
    console = Console(file=io.StringIO(), width=80, markup=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("table", ["profile", "plan", "replicated", "trace", "simulation", "sweep"])
def test_a_table_fits_80_columns_with_a_line_for_each_row(table: str) -> None:
    profile = long_named()
    plan = plan_of(profile, flat_cluster(4), [[0, 1, 2], [3, 4, 5]], [1, 3], schedule="pipedream")
    played = play(plan, 8)
    path = "a-directory/with-a-name/that-is-long/profile.json"
    clusters = [parse_cluster("local:2"), parse_cluster("4@12GB/s,4@1.25GB/s")]
    made = {
        "profile": lambda: show.profile_table(profile),
        "plan": lambda: show.plan_table(plan_of(profile, flat_cluster(2), [[0, 1, 2], [3, 4, 5]])),
        "replicated": lambda: show.plan_table(plan),
        "trace": lambda: show.trace_table(played.trace),
        "simulation": lambda: simulations.simulation_table(played, [("speed@device:1=x0.5,schedule=1f1b", played)]),
        "sweep": lambda: simulations.sweep_table(
            sweep({path: profile, "b": profile}, clusters, ["pipedream", "1f1b"], minibatches=4)
        ),
    }
    lines = printed(made[table]())
    assert max(map(len, lines)) <= 80
    rows = {"profile": 6, "plan": 2, "replicated": 2, "trace": 4, "simulation": 4, "sweep": 8}[table]
    begins = {"trace": "stage", "simulation": r"stage \d\S* on", "sweep": "(a-di|b )", "profile": "enc"}.get(
        table, r"\d "
    )
    assert len([line for line in lines if re.match(rf" *{begins}", line) and "/s" not in line[-4:]]) == rows
    words = {word for line in lines for word in line.split()}
    assert (
        words
        >= {
            "profile": {"layer", "kind", "forward", "weights"},
            "plan": {"stage", "layers", "devices", "time", "memory"},
            "replicated": {"stage", "layers", "devices", "staleness", "time", "memory", "(3)"},
            "trace": {"worker", "busy", "SYNC", "STEP"},
            "simulation": {"worker", "computing", "averaging", "change", "samples/s", "bottleneck"},
            "sweep": {"source", "cluster", "schedule", "replicas", "samples/s", "bottleneck"},
        }[table]
    )


def test_a_name_that_is_too_long_loses_its_middle() -> None:
    assert shorten_middle("encoder.block.11.query", 11) == "encod…query"
    assert shorten_middle("encoder", 7) == "encoder"
    assert [shorten_middle("encoder", width) for width in (0, 1, 2)] == ["", "…", "e…"]


def test_the_letters_of_actions_are_explained_where_they_appear() -> None:
    plan = plan_of(chain_profile([1e-3] * 2), flat_cluster(3), [[0], [1]], [1, 2], schedule="pipedream")
    words = " ".join(" ".join(printed(show.trace_table(play(plan, 6).trace))).split())
    for each in ("F forward; B backward; SYNC averaging", "STEP update of the weights"):
        assert each in words
    assert "I backward for inputs" not in words


def test_a_png_is_a_file_or_a_directory_as_it_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from mutations import write_good_files

    write_good_files(tmp_path)
    run = str(tmp_path / "run")
    for name in ("new/figure.png", "figures"):
        result = CliRunner().invoke(app, ["report", run, "--png", str(tmp_path / name)])
        assert result.exit_code == 0, (result.output, result.exception)
    assert (tmp_path / "new" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert {"timeline.png", "loss.png"} <= {path.name for path in (tmp_path / "figures").iterdir()}


def test_figures_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from mutations import write_good_files

    write_good_files(tmp_path)
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--png", str(tmp_path / "file" / "figures")])
    assert isinstance(result.exception, FormatError)
