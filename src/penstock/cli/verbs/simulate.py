"""``penstock simulate``, ``sweep`` and ``emulate``: plans without their devices."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from penstock import codec
from penstock.cli import checks, simulations
from penstock.cli import show as tables
from penstock.cli.answers import print_answer, write_report_of
from penstock.cli.options import Json, PlanFile, Timeout
from penstock.errors import FormatError
from penstock.formats import read_cluster, read_profile
from penstock.places import new_run
from penstock.plan import NO_PREDICTION, Plan
from penstock.profile import Profile
from penstock.run import RunDirectory
from penstock.runtime.process.options import DEFAULT_TIMEOUT_S
from penstock.simulate import CALM, Conditions, parse_conditions, play
from penstock.simulate import what_if as changed_plan
from penstock.sweep import Case
from penstock.sweep import sweep as play_all

verbs = typer.Typer()

Changes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CHANGE[,CHANGE]",
        help="changes to compare with, each NAME=VALUE or NAME=xFACTOR. Names: bandwidth, latency, speed, memory, "
        "microbatches, schedule, compress, conditions (a file of slowdowns); of a part of the cluster: "
        "bandwidth@level:1, speed@device:3, speed@host:1, speed@kind:V100; repeatable",
    ),
]


@verbs.command(
    epilog="Examples: penstock simulate plan.json --minibatches 100; "
    "penstock simulate plan.json --what-if bandwidth=x10 --what-if speed@device:1=x0.5,schedule=1f1b; "
    "penstock simulate plan.json --cluster 4@12GB/s,4@1.25GB/s"
)
def simulate(
    plan: PlanFile,
    cluster: Annotated[
        str | None, typer.Option(help="cluster to simulate, instead of the one that the plan was made for")
    ] = None,
    what_if: Changes = None,
    minibatches: Annotated[int, typer.Option(min=1, help="minibatches to simulate")] = 50,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="where to write the trace; not written if not given")
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate a plan with the profile's costs: throughput, each worker's waiting time and memory, the bottleneck."""
    loaded = codec.load(Plan, plan)
    if cluster is not None:
        loaded = replace(loaded, cluster=read_cluster(cluster), prediction=NO_PREDICTION)
    base = play(loaded, minibatches)
    others = []
    for text in what_if or ():
        other, conditions = changed_plan(text, loaded, CALM, _read_conditions)
        others.append((text, play(other, minibatches, conditions)))
    if output is not None:
        codec.save(base.trace, output)
    note = f"trace written to {output}" if output else ""
    answer = simulations.simulation_answer(base, others)
    print_answer(answer, as_json, partial(simulations.simulation_table, base, others), note)


def _read_conditions(file: str) -> Conditions:
    return parse_conditions(codec.read_text(Path(file)), file)


@verbs.command(
    epilog="Examples: penstock sweep profile.json --cluster local:2 --cluster local:4 --schedule pipedream "
    "--schedule 1f1b; penstock sweep plan.json other-plan.json --svg sweep.svg"
)
def sweep(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="profiles, which are planned for each combination, or plans, which are simulated as they are",
        ),
    ],
    cluster: Annotated[list[str] | None, typer.Option(help="cluster, as for `penstock plan`; repeatable")] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            help="schedule name, as for `penstock plan`; if not given, a plan's own, or pipedream; repeatable"
        ),
    ] = None,
    minibatches: Annotated[int, typer.Option(min=1, help="minibatches to simulate of each combination")] = 50,
    svg: Annotated[Path | None, typer.Option(help="where to write a bar chart of the results")] = None,
    as_json: Json = False,
) -> None:
    """Compare schedules, plans and clusters by simulation: plan and simulate every combination, fastest first."""
    read = {str(file): _read_profile_or_plan(file) for file in sources}
    if not cluster and any(isinstance(each, Profile) for each in read.values()):
        raise FormatError("a profile is planned for a cluster: give one or more with --cluster")

    def tell(at: int, total: int, case: Case) -> None:
        if not as_json:
            typer.echo(f"{at + 1} of {total}: {case}", err=True)

    clusters = [read_cluster(text) for text in cluster or ()]
    found = play_all(read, clusters, schedule or (), minibatches=minibatches, tell=tell)
    if svg is not None:
        codec.write_text(simulations.sweep_svg(found), svg)
    note = f"drawing written to {svg}" if svg else ""
    print_answer(found, as_json, partial(simulations.sweep_table, found), note)
    if not all(each.possible for each in found):
        raise typer.Exit(1)


def _read_profile_or_plan(file: Path) -> Profile | Plan:
    text = codec.read_text(file)
    return codec.loads(Plan, text, str(file)) if f'"{Plan.FORMAT}"' in text[:100] else read_profile(file)


@verbs.command(epilog="Examples: penstock emulate plan.json; penstock emulate plan.json --minibatches 200 --dilation 5")
def emulate(
    plan: PlanFile,
    minibatches: Annotated[int, typer.Option(min=1, help="minibatches to run")] = 50,
    dilation: Annotated[
        float | None, typer.Option(help="real seconds per emulated second; chosen for accuracy if not given")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run-dir", help="directory for trace and report; if not given, a new one in penstock-runs"),
    ] = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Run a plan on emulated devices: its workers exchange real messages, and computing is a timed wait."""
    loaded = codec.load(Plan, plan)
    checks.check_run_directory(run)
    from penstock.runtime.emulate.emulate import emulate as run_emulated

    found = run_emulated(loaded, minibatches, dilation=dilation, timeout_s=timeout)
    directory = new_run(f"{plan.stem}-emulated") if run is None else RunDirectory(run)
    codec.save(loaded, directory.plan)
    codec.save(found.trace, directory.trace)
    codec.save(found.result, directory.result)
    compared = write_report_of(directory)
    note = (
        f"an emulated second took {found.dilation:.3g}, tensors were 1/{found.shrink:.3g} of their size\n"
        f"report {directory.report}"
    )
    print_answer(found.result, as_json, partial(tables.run_table, compared), note)
