"""What the documents show is run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from builders import chain_profile
from models import save_tiny_gpt2
from penstock import codec
from penstock.cli.app import app
from penstock.cluster import load_cluster, parse_cluster
from penstock.planner import make_plan
from penstock.schedule import FAMILIES, check
from penstock.simulate import parse_conditions
from test_layers import RUNTIME

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.processes
def test_the_readmes_job_and_commands_and_those_of_reports_work(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks(README, "python")[0])
    reports = (ROOT / "docs" / "reports.md").read_text()
    commands, others = (
        re.findall(r"^\$ (penstock .*?)(?:\s+#.*)?$", "\n".join(blocks(text, "console")), flags=re.MULTILINE)
        for text in (README, reports)
    )
    assert (len(commands), len(others)) == (7, 5)
    for command in [*commands, *others]:
        if "other-run" in command:
            shutil.copytree(tmp_path / "penstock-runs" / "latest", tmp_path / "other-run")
        arguments = command.split()[1:]
        result = subprocess.run(
            [sys.executable, "-m", "penstock", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert result.returncode == 0, (command, result.stderr)
    assert (tmp_path / "penstock-runs" / "latest" / "report.html").exists()
    assert (tmp_path / "run.pftrace").exists()
    assert (tmp_path / "comparison.html").exists()
    assert (tmp_path / "figures" / "timeline.png").exists()


def test_the_cluster_file_of_the_docs_and_the_example_load(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(blocks((ROOT / "docs" / "clusters.md").read_text(), "toml")[0])
    for file in (path, ROOT / "examples" / "two-hosts.toml"):
        cluster = load_cluster(file)
        assert len(cluster.devices) == 8
        assert cluster.link(0, 3).bytes_per_s == 12e9
        assert cluster.link(3, 4).bytes_per_s == 1.25e9


def test_the_cluster_texts_of_the_docs_parse() -> None:
    assert len(parse_cluster("4@12GB/s,2@1.25GB/s").devices) == 8
    assert len(parse_cluster("local:4").devices) == 4


def test_the_schedule_file_of_the_docs_is_planned_and_checked() -> None:
    (text,) = blocks((ROOT / "docs" / "schedules.md").read_text(), "csv")
    profile = chain_profile([1.0] * 4, batch_size=3)
    plan = make_plan(profile, parse_cluster("local:2"), schedule="custom", custom=text.splitlines())
    assert [len(stage.layers) for stage in plan.stages] == [2, 2]
    assert plan.microbatches == 3
    check(plan.schedule_for([3, 3, 2]))


def test_the_commands_and_the_conditions_of_the_simulators_page_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "simulator.md").read_text()
    profile = chain_profile([1e-3] * 4)
    codec.save(profile, tmp_path / "profile.json")
    codec.save(make_plan(profile, parse_cluster("local:2")), tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\$ penstock (.*)$", "\n".join(blocks(page, "console")), flags=re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        result = CliRunner().invoke(app, command.split())
        assert result.exit_code == 0, (command, result.output)
    (conditions,) = blocks(page, "toml")
    parse_conditions(conditions, "slow.toml").check(parse_cluster("local:2"))


def test_the_figures_of_the_schedules_page_are_those_measured_for_the_simulator() -> None:
    measured = (ROOT / "docs" / "simulator.md").read_text()
    places = [("vgg", "loopback"), ("transformer", "loopback"), ("vgg", "200 Mbit/s"), ("transformer", "200 Mbit/s")]
    page = (ROOT / "docs" / "schedules.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|((?: [\d.]+ \|){4})$", page, flags=re.MULTILINE)
    assert [name for name, _ in rows] == ["pipedream", "1f1b", "gpipe", "zb-h1"]
    for schedule, figures in rows:
        for (model, network), figure in zip(places, figures.replace("|", "").split(), strict=True):
            assert f"| {model} | {network} | 1-1 | {schedule} | {figure} |" in measured


def test_every_schedule_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "schedules.md").read_text()
    for name in FAMILIES:
        assert f"`{name}`" in page or name == "custom"


def test_every_link_between_documents_leads_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
            if not target.startswith("http"):
                name, _, anchor = target.partition("#")
                page = document.parent / name if name else document
                assert page.exists(), f"{document.name}: {target}"
                assert not anchor or anchor in anchors(page.read_text()), f"{document.name}: {target}"


def anchors(page: str) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_source_file_that_the_documents_name_exists() -> None:
    files = [path.as_posix() for folder in ("src", "tests", "examples") for path in (ROOT / folder).rglob("*.*")]
    for document in DOCUMENTS:
        for name in re.findall(r"`([\w/-]+\.(?:py|js|css))`", document.read_text()):
            assert any(file.endswith(f"/{name}") for file in files), f"{document.name}: {name}"


def test_the_table_of_the_runtimes_folders_has_their_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)/` \|", page, flags=re.MULTILINE)) == RUNTIME


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_job_is_one(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if example.stem == "hugging_face":
        save_tiny_gpt2(tmp_path / "checkpoint")
        monkeypatch.chdir(tmp_path)
    from penstock.runtime.capture.blueprint import blueprint_of
    from penstock.runtime.capture.build_replay import CPU
    from penstock.runtime.process.jobs import load_job

    job = load_job(example)
    assert job.batch_size >= 8
    large = any(parameter.is_meta for parameter in blueprint_of(job, CPU).model.parameters())
    assert large == (example.stem == "large_model")


def test_torch_is_a_range_for_users_and_exact_for_development() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(re.fullmatch(r"torch>=[\d.]+,<\d+", entry) for entry in project["dependencies"])
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()
