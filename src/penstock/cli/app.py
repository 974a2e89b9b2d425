"""The verbs. Each reads files, calls one function of the library, writes a file and shows a table or JSON.

torch is imported only by the verbs that need it, so planning and reading stay quick.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock import __version__, codec
from penstock.cli import show as shown
from penstock.cluster import parse_cluster
from penstock.errors import FormatError, PenstockError, PlanError, WorkerError
from penstock.formats import plan_text, read_profile
from penstock.plan import Plan
from penstock.planner.pipedream import PipeDreamOptions, pipedream_plan
from penstock.profile import Profile
from penstock.run import RunDirectory
from penstock.trace import Trace

app = typer.Typer(
    name="penstock",
    help="Train any PyTorch model over many devices with the best mix of pipeline and data parallelism.",
    epilog="Start with: penstock demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Python file with `def job() -> penstock.Job`")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="plan file, from `penstock plan`")]
Json = Annotated[bool, typer.Option("--json", help="print the answer as JSON")]
ClusterText = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="local:4, levels such as 4@12GB/s,4@1.25GB/s (devices@bandwidth, inner first), or a TOML file",
    ),
]
ScheduleName = Annotated[str, typer.Option(help="pipedream (asynchronous), 1f1b or gpipe (synchronous)")]
Microbatches = Annotated[
    int | None, typer.Option(help="per minibatch, for synchronous schedules; by default four per device")
]
Timeout = Annotated[float, typer.Option(help="seconds after which a worker gives up waiting for another")]


def main() -> None:
    """Run the command line; wrong input is one clear line and exit code 2, a worker that fails exit code 1."""
    if "RANK" in os.environ:  # a worker: Ctrl-C ends it at once, and the launcher says what there is to say
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        app()
    except PenstockError as error:
        sys.stderr.write(f"penstock: {error}\n")
        sys.exit(1 if isinstance(error, WorkerError) else 2)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command(epilog="Example: penstock profile train.py --output profile.json")
def profile(
    job: JobFile,
    output: Annotated[Path, typer.Option(help="where to write the profile")] = Path("profile.json"),
    microbatch_size: Annotated[
        int | None, typer.Option(help="samples to measure with; the job's batch_size if not given")
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads that each worker will have")] = 1,
    as_json: Json = False,
) -> None:
    """Measure every layer of a job's model: seconds, bytes, what autograd keeps."""
    made = _profile(job, microbatch_size, threads)
    codec.save(made, output)
    _answer(made, as_json, lambda: shown.profile_table(made), f"profile written to {output}")


@app.command(epilog="Example: penstock plan profile.json --cluster local:2 --output plan.json")
def plan(
    profile: Annotated[
        Path, typer.Argument(metavar="PROFILE", help="profile file, or one that `penstock import` reads")
    ],
    cluster: ClusterText,
    schedule: ScheduleName = "pipedream",
    microbatches: Microbatches = None,
    straight: Annotated[bool, typer.Option("--straight", help="one replica per stage")] = False,
    cost: Annotated[
        str, typer.Option(help="default, or pipedream: that system's own formulas, for comparison")
    ] = "default",
    output: Annotated[Path, typer.Option(help="where to write the plan")] = Path("plan.json"),
    as_json: Json = False,
) -> None:
    """Find the best stages, replicas and placement for a profile on a cluster."""
    read = read_profile(profile)
    if cost == "default":
        made = _plan(read, cluster, schedule, microbatches, straight)
    elif cost == "pipedream" and schedule == "pipedream" and microbatches is None:
        made = pipedream_plan(read, parse_cluster(cluster), PipeDreamOptions(straight=straight))
    else:
        raise PlanError(f"--cost {cost} with --schedule {schedule}: choose default, or pipedream with its own schedule")
    codec.save(made, output)
    _answer(shown.plan_answer(made), as_json, lambda: shown.plan_table(made), f"plan written to {output}")


@app.command("import", epilog="Example: penstock import graph.txt --output profile.json")
def import_profile(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="PipeDream graph.txt, SparsePipe server file, dnn-partitioning JSON or a profile"
        ),
    ],
    output: Annotated[Path, typer.Option(help="where to write the profile")] = Path("profile.json"),
    as_json: Json = False,
) -> None:
    """Turn another system's profile into one of Penstock's."""
    made = read_profile(file)
    codec.save(made, output)
    _answer(made, as_json, lambda: shown.profile_table(made), f"profile written to {output}")


@app.command("export", epilog="Example: penstock export plan.json --format graph --output graph.txt")
def export_plan(
    plan: PlanFile,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="graph (graph.txt with stages), hybrid, dp or mp (PipeDream's conf.json), dynpipe (partition)",
        ),
    ],
    output: Annotated[Path, typer.Option(help="where to write it")],
) -> None:
    """Write a plan as another system's file."""
    codec.write_text(plan_text(codec.load(Plan, plan), form), output)
    typer.echo(f"{form} written to {output}")


@app.command(epilog="Example: penstock show plan.json")
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a profile, plan or trace")],
    as_json: Json = False,
) -> None:
    """Print what a file holds."""
    kinds: dict[str, tuple[Any, Any, Any]] = {
        Profile.FORMAT: (Profile, shown.profile_table, codec.encode),
        Plan.FORMAT: (Plan, shown.plan_table, shown.plan_answer),
        Trace.FORMAT: (Trace, shown.trace_table, shown.trace_answer),
    }
    text = codec.read_text(file)
    try:
        tag = json.loads(text).get("format")
    except (json.JSONDecodeError, AttributeError):
        tag = None
    if tag not in kinds:
        raise FormatError(f"{file}: format is {tag!r}; expected one of {', '.join(kinds)}")
    cls, table, answer = kinds[tag]
    value = codec.loads(cls, text, str(file))
    _answer(answer(value), as_json, lambda: table(value))


@app.command(epilog="Example: penstock simulate plan.json --minibatches 100")
def simulate(
    plan: PlanFile,
    minibatches: Annotated[int, typer.Option(min=1, help="how many to play")] = 50,
    output: Annotated[Path | None, typer.Option(help="where to write the trace, if anywhere")] = None,
    as_json: Json = False,
) -> None:
    """Play a plan's actions with the profile's costs: throughput and how busy each worker is."""
    from penstock.simulate import simulate as play

    trace = play(codec.load(Plan, plan), minibatches)
    if output is not None:
        codec.save(trace, output)
    note = f"trace written to {output}" if output else ""
    _answer(shown.trace_answer(trace), as_json, lambda: shown.trace_table(trace), note)


@app.command(
    epilog="Examples: penstock train train.py plan.json; penstock train train.py --cluster local:2; on several hosts: "
    "torchrun --nnodes 2 --node-rank 0 --master-addr host0 --nproc-per-node 4 "
    "-m penstock train train.py plan.json"
)
def train(
    job: JobFile,
    plan: Annotated[
        Path | None,
        typer.Argument(metavar="[PLAN]", help="plan file; without it the job is profiled and planned"),
    ] = None,
    cluster: Annotated[str, typer.Option(help="to plan for, where no PLAN is given")] = "local:2",
    run: Annotated[Path, typer.Option("--run-dir", help="directory for checkpoints, trace and report")] = Path(
        "penstock-runs/latest"
    ),
    resume: Annotated[Path | None, typer.Option(help="checkpoint directory to go on from, written by any plan")] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="minibatches between checkpoints")] = 500,
    timeout: Timeout = 300.0,
    as_json: Json = False,
) -> None:
    """Train a job under a plan. One process per worker: started here, or by torchrun."""
    from penstock.cli import workers

    directory = RunDirectory(run)
    options = workers.Options(
        run=directory, resume=resume, timeout_s=timeout, checkpoint_every=checkpoint_every, quiet=as_json
    )
    if workers.is_worker():
        if plan is None:
            raise FormatError("torchrun needs a PLAN: profile and plan once, then give the same file on every host")
        workers.train_here(job, plan, options)
        return
    if plan is None:
        made = _plan(_profile(job, None, 1), cluster)
        if not as_json:
            shown.print_table(shown.plan_table(made))
        codec.save(made, directory.plan)
        plan = directory.plan
    workers.train(job, plan, options)
    _, trace, result = directory.load()
    comparison = write_report_of(directory)
    _answer(
        result,
        as_json,
        lambda: shown.comparison_table(trace, comparison),
        f"checkpoint {directory.path / (result.checkpoint or '')}\nreport {directory.report}",
    )


@app.command(epilog="Example: penstock verify train.py plan.json")
def verify(job: JobFile, plan: PlanFile, timeout: Timeout = 300.0, as_json: Json = False) -> None:
    """Compare loss and every gradient of a plan's workers with the single-process model."""
    from penstock.cli import workers

    if workers.is_worker():
        workers.verify_here(job, plan, timeout)
        return
    found = workers.verify(job, plan, timeout)
    _answer(shown.verification_answer(found), as_json, lambda: shown.verification_table(found))
    if not found.passed:
        raise typer.Exit(1)


@app.command(epilog="Example: penstock report penstock-runs/latest")
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="run directory, from `penstock train`")],
    as_json: Json = False,
) -> None:
    """Write the HTML report of a run: timeline, predicted against measured, plan, loss."""
    directory = RunDirectory(run)
    _, trace, _ = directory.load()
    comparison = write_report_of(directory)
    answer = {"report": str(directory.report), **shown.trace_answer(trace)}
    _answer(answer, as_json, lambda: shown.comparison_table(trace, comparison), f"report {directory.report}")


@app.command(epilog="Examples: penstock bench profile; penstock bench runtime --json")
def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="planner, profile or runtime")],
    as_json: Json = False,
) -> None:
    """Measure Penstock on this machine, beside its peers."""
    from penstock.bench import run_benchmark

    rows = run_benchmark(name)
    _answer(rows, as_json, lambda: shown.bench_table(name, rows))


@app.command(epilog="Example: penstock demo --run-dir /tmp/demo")
def demo(
    run: Annotated[Path, typer.Option("--run-dir", help="directory for everything the demo makes")] = Path(
        "penstock-runs/demo"
    ),
) -> None:
    """Profile, plan, train and report a small language model on two workers of this machine."""
    from penstock.cli.demo import run_demo

    run_demo(run)


def _profile(job: Path, microbatch_size: int | None, threads: int) -> Profile:
    from penstock.cli import workers

    return workers.profile(job, microbatch_size, threads)


def _plan(
    profile: Profile,
    cluster: str,
    schedule: str = "pipedream",
    microbatches: int | None = None,
    straight: bool = False,
) -> Plan:
    from penstock.planner import Hints, make_plan

    return make_plan(
        profile, parse_cluster(cluster), schedule=schedule, microbatches=microbatches, hints=Hints(straight=straight)
    )


def write_report_of(directory: RunDirectory) -> Trace:
    """Write the report and return the simulated trace that it sets beside the measured one."""
    from penstock.report import write_report
    from penstock.simulate import simulate as play

    plan, trace, result = directory.load()
    minibatches = min(200, max(1, len(result.losses)))
    simulated = play(plan, minibatches)
    write_report(directory.report, plan=plan, measured=trace, simulated=simulated, result=result)
    return simulated


def _answer(value: Any, as_json: bool, table: Any, note: str = "") -> None:
    if as_json:
        typer.echo(json.dumps(codec.encode(value), allow_nan=False))
        return
    shown.print_table(table())
    if note:
        typer.echo(note)
