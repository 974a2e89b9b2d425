"""``penstock plan``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from penstock import codec
from penstock.cli import show
from penstock.cli.answers import print_answer
from penstock.cli.options import Json
from penstock.errors import PlanError
from penstock.formats import read_cluster, read_profile
from penstock.planner import Hints, make_plan
from penstock.planner.compare import COSTS, plan_by
from penstock.planner.hints import parse_no_cut, parse_pin, parse_replicas
from penstock.schedule import FAMILIES

verbs = typer.Typer()

ProfileFile = Annotated[
    Path, typer.Argument(metavar="PROFILE", help="profile file, or one that `penstock import` reads")
]
ClusterText = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="local:4, levels such as 4@12GB/s,4@1.25GB/s (devices@bandwidth, inner first), a TOML file, "
        "a SparsePipe server file with its bandwidth (servers.txt@12GB/s) or a dnn-partitioning file",
    ),
]
Schedule = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help="asynchronous: pipedream, vertical, 2bw; synchronous: 1f1b, gpipe, interleaved, zb-h1, zb-v; "
        "inference; or a text or CSV file of actions, a line for each worker",
    ),
]
Microbatches = Annotated[
    int | None, typer.Option(help="microbatches per minibatch, for synchronous schedules; chosen if not given")
]
SamplesPerS = Annotated[
    float | None, typer.Option(help="for inference: the least throughput; the plan with the lowest latency is chosen")
]
Straight = Annotated[bool, typer.Option("--straight", help="one replica per stage")]
Replicas = Annotated[str | None, typer.Option(help="replicas of each stage, such as 0:3,1:1 or 3-1")]
MostStages = Annotated[int | None, typer.Option(help="largest number of stages")]
Pins = Annotated[
    list[str] | None, typer.Option(metavar="LAYER=STAGE", help="a layer and the stage that it must be in; repeatable")
]
NoCuts = Annotated[
    list[str] | None, typer.Option(metavar="LAYER=LAYER", help="two layers that must be in one stage; repeatable")
]
Recompute = Annotated[bool, typer.Option(help="whether stages that do not fit into memory may recompute their forward")]
Compress = Annotated[
    str,
    typer.Option(
        help="exact; or bf16, int8: the format that messages between workers may be rounded to, where that saves time"
    ),
]
Cost = Annotated[
    str,
    typer.Option(
        help="what to minimise: default; or pipedream, sparsepipe, max-load, other systems' objectives, for comparison"
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="where to write the plan")]


@verbs.command(
    epilog="Examples: penstock plan profile.json --cluster local:2 --output plan.json; "
    "penstock plan graph.txt --cluster 4@12GB/s,4@1.25GB/s --replicas 15-1; "
    "penstock plan profile.json --cluster local:4 --schedule inference --samples-per-s 200"
)
def plan(
    profile: ProfileFile,
    cluster: ClusterText,
    schedule: Schedule = "pipedream",
    microbatches: Microbatches = None,
    samples_per_s: SamplesPerS = None,
    straight: Straight = False,
    replicas: Replicas = None,
    most_stages: MostStages = None,
    pin: Pins = None,
    no_cut: NoCuts = None,
    recompute: Recompute = True,
    compress: Compress = "exact",
    cost: Cost = "default",
    output: Output = Path("plan.json"),
    as_json: Json = False,
) -> None:
    """Find the best stages, replicas and placement for a profile on a cluster."""
    read, devices = read_profile(profile), read_cluster(cluster)
    hints = _hints(straight, replicas, most_stages, pin or (), no_cut or ())
    name, actions = _read_schedule(schedule)
    if cost == "default":
        made = make_plan(
            read,
            devices,
            custom=actions,
            schedule=name,
            microbatches=microbatches,
            hints=hints,
            recompute=recompute,
            samples_per_s=samples_per_s,
            compress=compress,
        )
    else:
        plain = (name, microbatches, compress) == ("pipedream", None, "exact") and hints == Hints(straight=straight)
        _check_cost(cost, name, plain)
        made = plan_by(cost, read, devices, straight=straight)
    codec.save(made, output)
    print_answer(show.plan_answer(made), as_json, lambda: show.plan_table(made), f"plan written to {output}")


def _hints(
    straight: bool, replicas: str | None, most_stages: int | None, pins: Sequence[str], no_cuts: Sequence[str]
) -> Hints:
    return Hints(
        replicas=parse_replicas(replicas) if replicas else (),
        pins=tuple(map(parse_pin, pins)),
        together=tuple(map(parse_no_cut, no_cuts)),
        straight=straight,
        most_stages=most_stages,
    )


def _read_schedule(schedule: str) -> tuple[str, tuple[str, ...]]:
    """(name, lines of actions) of --schedule. A known name has no lines; a file is the schedule "custom"."""
    if schedule in FAMILIES or not Path(schedule).is_file():
        return schedule, ()
    return "custom", tuple(codec.read_text(Path(schedule)).splitlines())


def _check_cost(cost: str, schedule: str, plain: bool) -> None:
    """Objectives of other systems know few of the options; ``plain`` says that no other is given."""
    if cost not in COSTS or not plain:
        known = f"default, or {', '.join(COSTS)} with --schedule pipedream, no --compress and no hint but --straight"
        raise PlanError(f"--cost {cost} with --schedule {schedule} and these options: choose {known}")
