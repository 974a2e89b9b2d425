"""``penstock profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock import codec
from penstock.cli import checks, show
from penstock.cli.answers import print_answer
from penstock.cli.options import JobFile, Json
from penstock.cli.steps import loading_torch
from penstock.job import check_job_file

verbs = typer.Typer()


@verbs.command(epilog="Example: penstock profile train.py --output profile.json")
def profile(
    job: JobFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="where to write the profile")] = Path("profile.json"),
    microbatch_size: Annotated[
        int | None,
        typer.Option(
            help="largest microbatch to measure; a half, an eighth and a 32nd of it are measured too; "
            "the job's batch_size if not given"
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads that each worker will have")] = 1,
    as_json: Json = False,
) -> None:
    """Measure every layer of a job's model at several microbatch sizes: seconds, bytes, memory kept for backward."""
    check_job_file(job)
    checks.check_can_write(output, "--output")
    with loading_torch(as_json) as steps:
        from penstock.cli import profiling

        made = profiling.profile(job, steps, microbatch_size=microbatch_size, threads=threads)
    codec.save(made, output)
    print_answer(made, as_json, lambda: show.profile_table(made), f"profile written to {output}")
