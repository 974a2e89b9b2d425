"""``penstock cluster measure``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import checks
from penstock.cli.options import Json, Timeout
from penstock.cli.tasks import MeasureTask
from penstock.errors import FormatError
from penstock.runtime.process.options import DEFAULT_TIMEOUT_S

verbs = typer.Typer(help="Describe a cluster.", no_args_is_help=True)


@verbs.command(
    epilog="Examples: penstock cluster measure --workers 4; on several hosts: "
    "torchrun --nnodes 2 --node-rank 0 --master-addr host0 --nproc-per-node 4 -m penstock cluster measure",
)
def measure(
    workers: Annotated[int, typer.Option(min=2, help="workers to start on this machine; torchrun starts its own")] = 2,
    output: Annotated[Path, typer.Option("--output", "-o", help="where to write the cluster file")] = Path(
        "cluster.toml"
    ),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an existing cluster file")] = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Time messages, all-reduces and a computation on a cluster's workers; write the cluster file to plan for."""
    if output.exists() and not overwrite:
        raise FormatError(f"{output}: is there already; name another with --output, or replace it with --overwrite")
    checks.check_can_write(output, "--output")
    from penstock.runtime.process.launch import is_worker

    task = MeasureTask(output=output, timeout_s=timeout, as_json=as_json)
    if is_worker():
        from penstock.cli import worker

        worker.measure(task)
    else:
        from penstock.cli.launcher import measure_cluster

        measure_cluster(workers, task)
