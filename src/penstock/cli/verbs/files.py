"""``penstock import``, ``export`` and ``show``: files of Penstock and of other systems."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock import codec
from penstock.cli import show as tables
from penstock.cli.answers import print_answer
from penstock.cli.options import Json
from penstock.errors import FormatError
from penstock.formats import plan_text, read_profile
from penstock.plan import Plan
from penstock.profile import Profile
from penstock.report.drawing import svg_file
from penstock.trace import Trace

verbs = typer.Typer()


@verbs.command("import", epilog="Example: penstock import graph.txt --output profile.json")
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
    """Convert another system's profile to Penstock's format."""
    made = read_profile(file)
    codec.save(made, output)
    print_answer(made, as_json, lambda: tables.profile_table(made), f"profile written to {output}")


@verbs.command(
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
    output: Annotated[Path, typer.Option("--output", "-o", help="where to write the file")],
) -> None:
    """Write a plan as another system's file, or a checkpoint's weights as one file that other programs read."""
    if source.is_dir():
        from penstock.runtime.checkpoint.portable import export_weights

        export_weights(source, form, output)
    else:
        codec.write_text(plan_text(codec.load(Plan, source), form), output)
    typer.echo(f"{form} written to {output}")


@verbs.command(epilog="Examples: penstock show plan.json; penstock show plan.json --svg plan.svg")
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a profile, plan or trace")],
    svg: Annotated[
        Path | None, typer.Option(help="where to write a drawing of a plan's layer graph, coloured by stage")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what a file holds."""
    kinds: dict[str, tuple[Any, Any, Any]] = {
        Profile.FORMAT: (Profile, tables.profile_table, codec.encode),
        Plan.FORMAT: (Plan, tables.plan_table, tables.plan_answer),
        Trace.FORMAT: (Trace, tables.trace_table, tables.trace_answer),
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
    print_answer(answer(value), as_json, lambda: table(value), f"drawing written to {svg}" if svg else "")
