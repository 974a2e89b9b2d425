"""The options of a run reach its workers as the user gave them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from builders import law
from penstock.cli.options import command_words, with_options
from penstock.cli.tasks import MeasureTask, Task, TrainTask, VerifyTask, command_of, parse_task
from penstock.errors import FormatError, JobError
from penstock.runtime.process.options import TrainOptions

names = st.binary(min_size=1, max_size=12).filter(lambda name: b"\0" not in name and b"/" not in name)
paths = names.map(lambda name: Path("dir", os.fsdecode(name)))
starts = st.sampled_from(["resume", "init", ""]).flatmap(
    lambda name: st.fixed_dictionaries({name: paths} if name else {})
)
options = st.builds(
    lambda start, **others: TrainOptions(**start, **others),
    starts,
    checkpoint_every=st.integers(1, 10**6),
    keep_checkpoints=st.integers(1, 10**6),
    tensorboard=st.none() | paths,
)
seconds = st.floats(0.001, 1e7)
tasks = (
    st.builds(TrainTask, job=paths, plan=paths, run=paths, options=options)
    | st.builds(VerifyTask, job=paths, plan=paths, gradients=paths, timeout_s=seconds)
    | st.builds(MeasureTask, output=paths, timeout_s=seconds, as_json=st.booleans())
)


@law
@given(tasks)
def test_a_worker_reads_the_task_that_the_launcher_wrote(task: Task) -> None:
    """Also with file names that are not Unicode."""
    python, module, *words = command_of(task)
    assert (python, module) == ("-m", "penstock.cli.worker")
    assert parse_task(words) == task


@law
@given(options)
def test_options_written_as_a_command_are_read_as_the_same_options(given_options: TrainOptions) -> None:
    read: list[TrainOptions] = []
    app = typer.Typer()

    @app.command()
    @with_options(TrainOptions)
    def train(*, options: TrainOptions) -> None:
        read.append(options)

    result = CliRunner().invoke(app, command_words(given_options))
    assert result.exit_code == 0, result.output
    assert read == [given_options]


def test_options_with_their_default_need_no_words() -> None:
    assert command_words(TrainOptions(timeout_s=7.0, quiet=True, job_name="job.py")) == []
    assert command_words(TrainOptions(checkpoint_every=7)) == ["--checkpoint-every", "7"]


def test_a_run_cannot_both_go_on_and_start_from_weights() -> None:
    with pytest.raises(JobError, match="--resume goes on with a run, --init starts one from given weights"):
        TrainOptions(resume=Path("a"), init=Path("b"))


def test_a_damaged_task_is_one_clear_line() -> None:
    with pytest.raises(FormatError, match=r"^the worker's task: timeout_s: missing"):
        parse_task(["measure", '{"output": "cluster.toml"}'])
    with pytest.raises(FormatError, match=r"^the worker's task: output: expected a path, found 1"):
        parse_task(["measure", '{"output": 1}'])
