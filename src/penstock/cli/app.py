"""The verbs. Each reads files, calls one function of the library, writes a file and shows a table or JSON.

torch is imported only by the verbs that need it, so planning and reading stay quick.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import reprlib
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock import __version__, codec
from penstock.bench import DRAWN, MODULES, run_benchmark
from penstock.cli import checks
from penstock.cli import show as shown
from penstock.cli.steps import Steps
from penstock.cluster import Cluster
from penstock.errors import FormatError, PenstockError, PlanError, WorkerError
from penstock.formats import plan_text, read_cluster, read_profile
from penstock.job import check_job_file
from penstock.places import new_run
from penstock.plan import NO_PREDICTION, Plan
from penstock.planner.compare import COSTS, plan_by
from penstock.profile import Profile
from penstock.report import (
    Outcome,
    comparison_answer,
    names_of,
    outcome_of,
    perfetto_trace,
    write_comparison,
    write_figures,
    write_report,
)
from penstock.report.drawing import svg_file
from penstock.run import RunDirectory
from penstock.schedule import FAMILIES
from penstock.survey import Survey
from penstock.trace import Trace


class Verbs(typer.core.TyperGroup):
    """Says what was kept where the user ends a verb that has not said so itself."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.stderr.write("\npenstock: stopped; nothing was written\n")
            raise typer.Exit(130) from None


app = typer.Typer(
    name="penstock",
    help="Train any PyTorch model over many devices with the best mix of pipeline and data parallelism.",
    epilog="Start with: penstock demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
)

cluster_app = typer.Typer(help="Describe a cluster.", no_args_is_help=True, rich_markup_mode="markdown")
app.add_typer(cluster_app, name="cluster")

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Python file with `def job() -> penstock.Job`")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="plan file, from `penstock plan`")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="run directory, from `penstock train`")]
Json = Annotated[bool, typer.Option("--json", help="print the answer as JSON")]
ClusterText = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="local:4, levels such as 4@12GB/s,4@1.25GB/s (devices@bandwidth, inner first), a TOML file, "
        "a SparsePipe server file with its bandwidth (servers.txt@12GB/s) or a dnn-partitioning file",
    ),
]
Microbatches = Annotated[int | None, typer.Option(help="per minibatch, for synchronous schedules; chosen by default")]
LONGEST_TIMEOUT_S = 1e7


def _check_timeout(seconds: float) -> float:
    if not 0 < seconds <= LONGEST_TIMEOUT_S:
        raise FormatError(f"--timeout is {seconds:g}; it must be above 0 and at most {LONGEST_TIMEOUT_S:g} seconds")
    return seconds


Timeout = Annotated[
    float,
    typer.Option(callback=_check_timeout, help="seconds after which a worker gives up waiting for another; above 0"),
]


def main() -> None:
    """Run the command line; wrong input is one clear line and exit code 2, a worker that fails exit code 1."""
    if "RANK" in os.environ:  # a worker: Ctrl-C ends it at once, and the launcher says what there is to say
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # Where a deadline passes the error says who was waited for; torch's own warnings of its sockets add nothing.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        app()
    except PenstockError as error:
        sys.stderr.write("\n".join([f"penstock: {error}", *getattr(error, "__notes__", ())]) + "\n")
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
    """Measure every layer of a job's model at several microbatch sizes: seconds, bytes, what autograd keeps."""
    check_job_file(job)
    checks.check_can_write(output, "--output")
    with _loading_torch(as_json) as steps:
        from penstock.cli import workers

        made = workers.profile(job, microbatch_size, threads, steps)
    codec.save(made, output)
    _answer(made, as_json, lambda: shown.profile_table(made), f"profile written to {output}")


@app.command(
    epilog="Examples: penstock plan profile.json --cluster local:2 --output plan.json; "
    "penstock plan graph.txt --cluster 4@12GB/s,4@1.25GB/s --replicas 15-1; "
    "penstock plan profile.json --cluster local:4 --schedule inference --samples-per-s 200"
)
def plan(
    profile: Annotated[
        Path, typer.Argument(metavar="PROFILE", help="profile file, or one that `penstock import` reads")
    ],
    cluster: ClusterText,
    schedule: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="asynchronous: pipedream, vertical, 2bw; synchronous: 1f1b, gpipe, interleaved, zb-h1, zb-v; "
            "inference; or a text or CSV file of actions, a line for each worker",
        ),
    ] = "pipedream",
    microbatches: Microbatches = None,
    samples_per_s: Annotated[
        float | None, typer.Option(help="for inference: at least this throughput, at the lowest latency")
    ] = None,
    straight: Annotated[bool, typer.Option("--straight", help="one replica per stage")] = False,
    replicas: Annotated[str | None, typer.Option(help="a fixed number for each stage, such as 0:3,1:1 or 3-1")] = None,
    most_stages: Annotated[int | None, typer.Option(help="no more stages than this")] = None,
    pin: Annotated[
        list[str] | None, typer.Option(metavar="LAYER=STAGE", help="a layer that must be in that stage; repeatable")
    ] = None,
    no_cut: Annotated[
        list[str] | None, typer.Option(metavar="LAYER=LAYER", help="two layers that must share a stage; repeatable")
    ] = None,
    recompute: Annotated[
        bool, typer.Option(help="whether stages that do not fit may compute their forward twice to save memory")
    ] = True,
    compress: Annotated[
        str,
        typer.Option(
            help="exact; or bf16, int8: what may be rounded to on its way between workers, where that saves time"
        ),
    ] = "exact",
    cost: Annotated[
        str, typer.Option(help="default; or pipedream, sparsepipe, max-load: other systems' objectives, to compare")
    ] = "default",
    output: Annotated[Path, typer.Option("--output", "-o", help="where to write the plan")] = Path("plan.json"),
    as_json: Json = False,
) -> None:
    """Find the best stages, replicas and placement for a profile on a cluster."""
    from penstock.planner import Hints, make_plan
    from penstock.planner.hints import parse_no_cut, parse_pin, parse_replicas

    read, devices = read_profile(profile), read_cluster(cluster)
    hints = Hints(
        replicas=parse_replicas(replicas) if replicas else (),
        pins=tuple(map(parse_pin, pin or ())),
        together=tuple(map(parse_no_cut, no_cut or ())),
        straight=straight,
        most_stages=most_stages,
    )
    schedule, custom = _named_or_read(schedule)
    if cost == "default":
        made = make_plan(
            read,
            devices,
            custom=custom,
            schedule=schedule,
            microbatches=microbatches,
            hints=hints,
            recompute=recompute,
            samples_per_s=samples_per_s,
            compress=compress,
        )
    elif (
        cost in COSTS
        and (schedule, microbatches, compress) == ("pipedream", None, "exact")
        and hints == Hints(straight=straight)
    ):
        made = plan_by(cost, read, devices, straight=straight)
    else:
        known = f"default, or {', '.join(COSTS)} with --schedule pipedream, no --compress and no hint but --straight"
        raise PlanError(f"--cost {cost} with --schedule {schedule} and these options: choose {known}")
    codec.save(made, output)
    _answer(shown.plan_answer(made), as_json, lambda: shown.plan_table(made), f"plan written to {output}")


def _named_or_read(schedule: str) -> tuple[str, tuple[str, ...]]:
    """What --schedule names, as (name, lines). A known name has no lines; a file is "custom" and has its lines."""
    if schedule in FAMILIES or not Path(schedule).is_file():
        return schedule, ()
    return "custom", tuple(codec.read_text(Path(schedule)).splitlines())


@app.command("import", epilog="Example: penstock import graph.txt --output profile.json")
def import_profile(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="PipeDream graph.txt, SparsePipe server file, dnn-partitioning JSON or a profile"
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="where to write the profile")] = Path("profile.json"),
    as_json: Json = False,
) -> None:
    """Turn another system's profile into one of Penstock's."""
    made = read_profile(file)
    codec.save(made, output)
    _answer(made, as_json, lambda: shown.profile_table(made), f"profile written to {output}")


@app.command(
    "export",
    epilog="Examples: penstock export plan.json --format graph --output graph.txt; "
    "penstock export penstock-runs/latest/checkpoints/step-00000500 --format safetensors --output model.safetensors",
)
def export(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="plan file, or a checkpoint directory from `penstock train`")
    ],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="of a plan: graph (graph.txt with stages), hybrid, dp or mp (PipeDream's conf.json), dynpipe "
            "(partition); of a checkpoint's weights: safetensors, or state-dict (as torch.save writes it)",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="where to write it")],
) -> None:
    """Write a plan as another system's file, or a checkpoint's weights as one file for any program."""
    if source.is_dir():
        from penstock.runtime.checkpoint.portable import export_weights

        export_weights(source, form, output)
    else:
        codec.write_text(plan_text(codec.load(Plan, source), form), output)
    typer.echo(f"{form} written to {output}")


@app.command(epilog="Examples: penstock show plan.json; penstock show plan.json --svg plan.svg")
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a profile, plan or trace")],
    svg: Annotated[Path | None, typer.Option(help="where to draw a plan's layer graph, coloured by stage")] = None,
    as_json: Json = False,
) -> None:
    """Print what a file holds."""
    kinds: dict[str, tuple[Any, Any, Any]] = {
        Profile.FORMAT: (Profile, shown.profile_table, codec.encode),
        Plan.FORMAT: (Plan, shown.plan_table, shown.plan_answer),
        Trace.FORMAT: (Trace, shown.trace_table, shown.trace_answer),
    }
    text = codec.read_text(file)
    data = codec.parse_json(text, str(file))
    tag = data.get("format") if isinstance(data, dict) else None
    if not isinstance(tag, str) or tag not in kinds:
        raise FormatError(f"{file}: format is {reprlib.repr(tag)}; expected one of {', '.join(kinds)}")
    cls, table, answer = kinds[tag]
    value = codec.decode_from(str(file), cls, data)
    if svg is not None:
        if not isinstance(value, Plan):
            raise FormatError(f"{file}: --svg draws plans, and this is a {cls.__name__.lower()}")
        codec.write_text(svg_file(value), svg)
    _answer(answer(value), as_json, lambda: table(value), f"drawing written to {svg}" if svg else "")


@app.command(
    epilog="Examples: penstock simulate plan.json --minibatches 100; "
    "penstock simulate plan.json --what-if bandwidth=x10 --what-if speed@device:1=x0.5,schedule=1f1b; "
    "penstock simulate plan.json --cluster 4@12GB/s,4@1.25GB/s"
)
def simulate(
    plan: PlanFile,
    cluster: Annotated[str | None, typer.Option(help="to play the plan on, instead of the one it was made for")] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHANGE[,CHANGE]",
            help="to compare with: bandwidth, latency, speed, memory, microbatches, schedule, compress or conditions "
            "(a file of slowdowns), =VALUE or =xFACTOR, of a part such as bandwidth@level:1, speed@device:3, "
            "speed@host:1, speed@kind:V100; repeatable",
        ),
    ] = None,
    minibatches: Annotated[int, typer.Option(min=1, help="how many to play")] = 50,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="where to write the trace, if anywhere")] = None,
    as_json: Json = False,
) -> None:
    """Play a plan's actions with the profile's costs: throughput, what each worker waits and holds, the bottleneck."""
    from dataclasses import replace

    from penstock.cli import simulations
    from penstock.simulate import CALM, Conditions, parse_conditions, play
    from penstock.simulate import what_if as changed

    loaded = codec.load(Plan, plan)
    if cluster is not None:
        loaded = replace(loaded, cluster=read_cluster(cluster), prediction=NO_PREDICTION)
    base = play(loaded, minibatches)

    def read(file: str) -> Conditions:
        return parse_conditions(codec.read_text(Path(file)), file)

    others = []
    for text in what_if or ():
        other, conditions = changed(text, loaded, CALM, read)
        others.append((text, play(other, minibatches, conditions)))
    if output is not None:
        codec.save(base.trace, output)
    note = f"trace written to {output}" if output else ""
    answer = simulations.simulation_answer(base, others)
    _answer(answer, as_json, partial(simulations.simulation_table, base, others), note)


@app.command(
    epilog="Examples: penstock sweep profile.json --cluster local:2 --cluster local:4 --schedule pipedream "
    "--schedule 1f1b; penstock sweep plan.json other-plan.json --svg sweep.svg"
)
def sweep(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="profiles to plan for each combination, or plans to take as they are"),
    ],
    cluster: Annotated[list[str] | None, typer.Option(help="as for `penstock plan`; repeatable")] = None,
    schedule: Annotated[
        list[str] | None, typer.Option(help="by name, as for `penstock plan`; a plan's own, or pipedream; repeatable")
    ] = None,
    minibatches: Annotated[int, typer.Option(min=1, help="how many to play of each")] = 50,
    svg: Annotated[Path | None, typer.Option(help="where to draw what was found")] = None,
    as_json: Json = False,
) -> None:
    """Compare schedules, plans and clusters by simulation: plan and play every combination, rank them."""
    from penstock.cli import simulations
    from penstock.sweep import Case
    from penstock.sweep import sweep as compare

    read = {str(file): read_profile_or_plan(file) for file in sources}
    if not cluster and any(isinstance(each, Profile) for each in read.values()):
        raise FormatError("a profile is planned for a cluster: give one or more with --cluster")

    def tell(at: int, total: int, case: Case) -> None:
        if not as_json:
            typer.echo(f"{at + 1} of {total}: {case}", err=True)

    found = compare(
        read, [read_cluster(text) for text in cluster or ()], schedule or (), minibatches=minibatches, tell=tell
    )
    if svg is not None:
        codec.write_text(simulations.sweep_svg(found), svg)
    _answer(found, as_json, partial(simulations.sweep_table, found), f"drawing written to {svg}" if svg else "")
    if not all(each.possible for each in found):
        raise typer.Exit(1)


def read_profile_or_plan(file: Path) -> Profile | Plan:
    text = codec.read_text(file)
    return codec.loads(Plan, text, str(file)) if f'"{Plan.FORMAT}"' in text[:100] else read_profile(file)


@app.command(epilog="Examples: penstock emulate plan.json; penstock emulate plan.json --minibatches 200 --dilation 5")
def emulate(
    plan: PlanFile,
    minibatches: Annotated[int, typer.Option(min=1, help="how many to run")] = 50,
    dilation: Annotated[
        float | None, typer.Option(help="real seconds for each emulated one; chosen by default, for accuracy")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run-dir", help="directory for trace and report; if not given, a new one in penstock-runs"),
    ] = None,
    timeout: Timeout = 300.0,
    as_json: Json = False,
) -> None:
    """Run a plan on devices that are not here: its workers exchange real messages, computing is a timed wait."""
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
    _answer(found.result, as_json, partial(shown.run_table, compared), note)


@app.command(
    epilog="Examples: penstock train train.py plan.json; penstock train train.py --cluster local:2; "
    "penstock train train.py other-plan.json --resume penstock-runs/latest/checkpoints/step-00000500; "
    "penstock train train.py plan.json --init model.safetensors; on several hosts: "
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
    run: Annotated[
        Path | None,
        typer.Option(
            "--run-dir", help="directory for checkpoints, trace and report; if not given, a new one in penstock-runs"
        ),
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="checkpoint directory to go on from, written by any plan")] = None,
    init: Annotated[
        Path | None, typer.Option(help="weights to start from: a .safetensors file, or a state_dict from torch.save")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="minibatches between checkpoints")] = 500,
    keep_checkpoints: Annotated[int, typer.Option(min=1, help="how many checkpoints stay, the newest")] = 3,
    tensorboard: Annotated[
        Path | None, typer.Option(help="directory for TensorBoard to follow the run in; needs the tensorboard package")
    ] = None,
    timeout: Timeout = 300.0,
    as_json: Json = False,
) -> None:
    """Train a job under a plan. One process per worker: started here, or by torchrun."""
    check_job_file(job)
    devices = read_cluster(cluster)
    checks.check_run_directory(run)
    if plan is not None:
        checks.check_plan_file(plan)
    with _loading_torch(as_json or "RANK" in os.environ):
        from penstock.cli import workers

    options = workers.Options(
        job_name=job.name,
        resume=resume and resume.resolve(),  # penstock-runs/latest is about to point elsewhere
        init=init and init.resolve(),
        timeout_s=timeout,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        quiet=as_json,
        tensorboard=tensorboard,
    )
    if workers.is_worker():
        if plan is None:
            raise FormatError("torchrun needs a PLAN: profile and plan once, then give the same file on every host")
        directory = workers.train_here(job, plan, run, options)
        if not workers.is_launched():
            _end_on_this_host(directory, as_json)
        return
    with workers.open_run(job, plan, run, resume) as directory:
        planned = codec.load(Plan, plan) if plan is not None else _planned(job, devices, as_json)
        try:
            workers.train(job, planned, directory, options, plan)
        except KeyboardInterrupt:
            kept = f"the plan is kept: {directory.plan}" if directory.plan.exists() else "nothing is kept"
            sys.stderr.write(f"\npenstock: stopped before training began; {kept}\n")
            raise typer.Exit(130) from None
        _show_run(directory, as_json)


def _end_on_this_host(directory: RunDirectory, as_json: bool) -> None:
    """What a worker under torchrun says at the end: worker 0 all there is to say, and of every other host the first."""
    if os.environ["RANK"] == "0":
        _show_run(directory, as_json)
    elif os.environ["LOCAL_RANK"] == "0" and not as_json:
        typer.echo(f"the workers of this host are done; worker 0 shows the result, and writes {directory.report}")


def _show_run(directory: RunDirectory, as_json: bool) -> None:
    found = write_report_of(directory)
    result = found.result
    _answer(
        result,
        as_json,
        partial(shown.run_table, found),
        "\n".join(
            [
                *(str(evaluation) for evaluation in result.evaluations[-1:]),
                *(["stopped early"] if result.stopped_early else []),
                f"checkpoint {directory.path / (result.checkpoint or '')}",
                f"report {directory.report}",
            ]
        ),
    )


@app.command(epilog="Example: penstock verify train.py plan.json")
def verify(job: JobFile, plan: PlanFile, timeout: Timeout = 300.0, as_json: Json = False) -> None:
    """Compare loss and every gradient of a plan's workers with the single-process model."""
    check_job_file(job)
    checks.check_plan_file(plan)
    with _loading_torch(as_json or "RANK" in os.environ) as steps:
        from penstock.cli import workers

        if workers.is_worker():
            workers.verify_here(job, plan, timeout)
            return
        found = workers.verify(job, plan, timeout, steps)
    _answer(shown.verification_answer(found), as_json, lambda: shown.verification_table(found))
    if not found.passed:
        raise typer.Exit(1)


@app.command(
    epilog="Examples: penstock report penstock-runs/latest; "
    "penstock report penstock-runs/latest --perfetto run.pftrace --png figures; "
    "penstock report penstock-runs/first penstock-runs/second --output comparison.html"
)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="run directory, from `penstock train`; several are set side by side"),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="where to write the page; report.html in RUN, or of several comparison.html here",
        ),
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="where to write a trace for ui.perfetto.dev, if anywhere")
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            help="where to write the figures: a directory for a PNG of each, or a name that ends in .png for one with "
            "all; needs matplotlib"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the HTML report of a run: timeline, predicted against measured, memory, throughput, loss, plan.

    Of several runs, one page that sets them side by side."""
    if len(runs) > 1:
        if perfetto is not None or png is not None:
            raise FormatError("--perfetto and --png are of one run; give one RUN with them")
        _compare(runs, output or Path("comparison.html"), as_json)
        return
    directory = RunDirectory(runs[0])
    page = output or directory.report
    found = write_report_of(directory, page)
    written = {"report": [page]}
    if perfetto is not None:
        codec.write_bytes(perfetto_trace(found), perfetto)
        written["perfetto"] = [perfetto]
    if png is not None:
        written["figures"] = write_figures(png, found)
    answer = {
        "report": str(page),
        "perfetto": str(perfetto) if perfetto else None,
        "figures": [str(path) for path in written.get("figures", ())],
        "predicted_samples_per_s": found.plan.predicted_samples_per_s,
        "verdict": found.headline,
        "explanation": found.explanation.text,
        **shown.trace_answer(found.measured),
    }
    table = partial(shown.run_table, found)
    note = "\n".join(f"{what} {' '.join(map(str, paths))}" for what, paths in written.items())
    _answer(answer, as_json, table, note)


def _compare(runs: list[Path], output: Path, as_json: bool) -> None:
    from penstock.cli.comparisons import comparison_table

    named = {name: outcome_of(RunDirectory(run)) for name, run in zip(names_of(runs), runs, strict=True)}
    write_comparison(output, named)
    answer = {"comparison": str(output), **comparison_answer(named)}
    _answer(answer, as_json, lambda: comparison_table(answer), f"comparison {output}")


@app.command(epilog="Examples: penstock watch penstock-runs/latest; penstock watch penstock-runs/latest --json")
def watch(run: RunArgument, as_json: Json = False) -> None:
    """Follow a run in the terminal until it ends: pace, loss, time left, and what every worker does and holds."""
    from penstock.cli import watch as watching

    directory = RunDirectory(run)
    if as_json:
        typer.echo(json.dumps(watching.answer(watching.read_run(directory).read()), allow_nan=False))
        return
    with contextlib.suppress(KeyboardInterrupt):
        watching.follow(directory, shown.plain_console())


@app.command(
    epilog="Examples: penstock bench runtime --json; penstock bench planner --svg growth.svg; "
    "penstock bench table1 --emulate"
)
def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"{', '.join(MODULES)}; table1 is PipeDream's")],
    svg: Annotated[Path | None, typer.Option(help=f"where to draw what was found, with {', '.join(DRAWN)}")] = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="with table1: run its plans for 16 GPUs on emulated devices")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure Penstock on this machine, beside its peers; or set its plans beside published ones."""

    if svg is not None and name not in DRAWN:
        raise FormatError(f"bench {name} has no drawing; --svg goes with bench {', '.join(DRAWN)}")
    found = run_benchmark(name, emulate=emulate)
    if svg is not None and found.svg is not None:
        codec.write_text(found.svg, svg)
    note = f"drawing written to {svg}" if svg else ""
    _answer(found.rows, as_json, lambda: shown.bench_table(name, found.rows), note)


@app.command(epilog="Example: penstock demo --run-dir /tmp/demo")
def demo(
    run: Annotated[
        Path | None,
        typer.Option(
            "--run-dir", help="directory for everything the demo makes; if not given, a new one in penstock-runs"
        ),
    ] = None,
) -> None:
    """Profile, plan, train and report a small language model on two workers of this machine."""
    checks.check_run_directory(run)
    with _loading_torch(quiet=False):
        from penstock.cli.demo import run_demo

    run_demo(run)


@cluster_app.command(
    "measure",
    epilog="Examples: penstock cluster measure --workers 4; on several hosts: "
    "torchrun --nnodes 2 --node-rank 0 --master-addr host0 --nproc-per-node 4 -m penstock cluster measure",
)
def measure_cluster(
    workers: Annotated[int, typer.Option(min=2, help="to start on this machine; torchrun starts its own")] = 2,
    output: Annotated[Path, typer.Option("--output", "-o", help="where to write the cluster file")] = Path(
        "cluster.toml"
    ),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the cluster file that is there")] = False,
    timeout: Timeout = 300.0,
    as_json: Json = False,
) -> None:
    """Time messages, all-reduces and a computation on the workers there are; write the cluster file to plan for."""
    if output.exists() and not overwrite:
        raise FormatError(f"{output}: is there already; name another with --output, or replace it with --overwrite")
    checks.check_can_write(output, "--output")
    from penstock.cli import workers as processes

    def tell(found: Survey) -> None:
        codec.write_text(found.toml, output)
        answer = shown.survey_answer(found, output)
        _answer(answer, as_json, lambda: shown.survey_table(found), f"cluster written to {output}")

    if processes.is_worker():
        processes.measure_cluster_here(timeout, as_json, tell)
    else:
        processes.measure_cluster(workers, output, timeout, as_json)


def _planned(job: Path, cluster: Cluster, as_json: bool) -> Plan:
    """The best plan of a job that comes without one."""
    from penstock.cli import workers

    with Steps(quiet=as_json) as steps:
        made = workers.profile_and_plan(job, cluster, steps)
    if not as_json:
        shown.print_table(shown.plan_table(made))
    workers.check_plan(job, made)
    return made


def _loading_torch(quiet: bool) -> Steps:
    """To be used around the import of what needs torch, which takes seconds."""
    steps = Steps(quiet=quiet)
    steps.begin("loading torch")
    return steps


def write_report_of(directory: RunDirectory, page: Path | None = None) -> Outcome:
    found = outcome_of(directory)
    write_report(page or directory.report, found)
    return found


def _answer(value: Any, as_json: bool, table: Any, note: str = "") -> None:
    if as_json:
        typer.echo(json.dumps(codec.encode(value), allow_nan=False))
        return
    shown.print_table(table())
    if note:
        typer.echo(note)
