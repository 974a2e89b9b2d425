"""Files as the command line reads them, damaged at random, and what it does with each.

By hand, with many more than the tests have time for: ``python tests/mutations.py 20000 [FIRST_SEED] [FILE]``.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from typer.testing import CliRunner

from builders import affine_profile
from format_files import CONF, GRAPH, SERVERS, layer_costs, placement
from penstock import codec
from penstock.cli import watch
from penstock.cli.app import app
from penstock.cluster import cluster_toml, parse_cluster
from penstock.errors import PenstockError
from penstock.formats import parse_partition, parse_stage_map
from penstock.planner import make_plan
from penstock.record import Mark, Moment, Reader, Start, Writer
from penstock.run import Evaluation, Result, RunDirectory
from penstock.runtime.checkpoint.checkpoint import Checkpoint
from penstock.simulate import Conditions, Episode, Stragglers, simulate

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 10**6, 2**31, 2**53, 2**63 - 1, 2**63, 10**59, -(10**59)),
    *(0.0, -0.0, 0.5, -1.5, 1e-9, 5e-324, 1e-300, 1e16, 1e100, 1e308, -1e308, float("nan"), float("inf")),
    *("", "x", "0", "1e308", "0F0", "99999999999999999999F0", "1STEP1", "pipedream", "zb-v", "\x00\u2028", "x" * 3000),
    *([], {}, [[]], [0], [None], {"format": []}, {"x": {}}, [0] * 50, ["x"]),
]
SNIPPETS = [
    *("-", " -- ", "\t", "\n", "]", "[", "{", "}", '"', ",", ";", "=", "nan", "1e308", "1e-320", "-1", "0"),
    *(
        "null",
        "true",
        "9" * 30,
        "9" * 5000,
        "٣",
        "\x00",
        "\u2028",
        "é",
        "[" * 200_000,
        '{"a":' * 200_000,
        "a.b.c=1\n",
        "\ud800",
    ),
]


@dataclass(frozen=True)
class File:
    text: str
    commands: tuple[tuple[str, ...], ...] = ()
    """What the command line does with it; ``{}`` is its path."""
    read: Callable[[str], object] | None = None
    """Its reader, where no verb reads it."""


def write_good_files(directory: Path) -> dict[str, File]:
    """A small file of every kind, each valid, by its path in the directory."""
    profile = affine_profile(1e-3, 1e-4, layers=4)
    plan = make_plan(profile, parse_cluster("2@1GB/s,2@100MB/s"), schedule="pipedream")
    together = make_plan(profile, parse_cluster("local:2"), schedule="1f1b", microbatches=2)
    conditions = Conditions(
        episodes=(Episode(device=0, times=2.0, start_s=0.001, end_s=0.1),),
        stragglers=(Stragglers(times=3.0, every_s=0.01, lasting_s=0.01, devices=(1,)),),
    )
    run = RunDirectory(directory / "run")
    trace = replace(simulate(plan, 6), origin="measured")
    result = Result(
        samples=sum(trace.samples),
        seconds=trace.span_s,
        losses=(2.0, 1.5, None, 1.0),
        checkpoint=None,
        device_kinds={"0": "cpu"},
        evaluations=(Evaluation(epoch=0, steps=3, values={"loss": 0.5}),),
        staleness=plan.staleness,
    )
    for value, path in ((plan, run.plan), (trace, run.trace), (result, run.result), (profile, directory / "good.json")):
        codec.save(value, path)
    _write_progress(run, plan.worker_names)
    for kind in ("fast", "slow"):
        (directory / f"{kind}.txt").write_text(GRAPH)
    out = str(directory / "out")
    report = ("report", str(run.path), "--output", out, "--perfetto", out)
    side_by_side = ("report", str(run.path), str(run.path), "--output", out)
    checkpoint = Checkpoint(
        epoch=0, minibatches=3, steps=3, samples=48, batch_size=8, seed=2**64 - 1, names={"w": "w"},
        loss_scale=(2.0, 3), evaluations=result.evaluations,
    )  # fmt: skip
    shown = (("show", "{}"), ("show", "{}", "--json"))
    played = ("simulate", "{}", "--minibatches", "4")
    exports = tuple(
        ("export", "{}", "--format", form, "--output", out) for form in ("graph", "hybrid", "dp", "dynpipe")
    )
    planned = ("plan", "{}", "--cluster", "local:2", "--output", out)
    imported = (("import", "{}", "--output", out), planned)
    on_cluster = ("plan", str(directory / "good.json"), "--output", out, "--cluster")
    of_plan = (*shown, ("show", "{}", "--svg", out), played, *exports)
    slower = ("simulate", str(run.plan), "--minibatches", "4", "--what-if", "conditions={}")
    toml = "[[episodes]]\ndevice = 1\ntimes = 2.5\n\n[[stragglers]]\ntimes = 2\nevery_s = 1\nlasting_s = 1\n"
    return {
        "profile.json": File(codec.dumps(profile), (*shown, *imported)),
        "plan.json": File(codec.dumps(plan), of_plan),
        "together.json": File(codec.dumps(together), of_plan),
        "cluster.toml": File(cluster_toml(plan.cluster), ((*on_cluster, "{}"),)),
        "schedule.txt": File("0F0 0F1 0B0 0B1\n1F0 1B0,1F1 1B1\n", ((*on_cluster, "local:2", "--schedule", "{}"),)),
        "trace.json": File(codec.dumps(trace), shown),
        "conditions.json": File(codec.dumps(conditions), (slower,)),
        "conditions.toml": File(toml, (slower,)),
        "run/plan.json": File(run.plan.read_text(), (report,)),
        "run/trace.json": File(run.trace.read_text(), (report,)),
        "run/result.json": File(run.result.read_text(), (report, side_by_side)),
        "run/progress.jsonl": File(run.progress.read_text(), (report, ("watch", str(run.path), "--json"))),
        "graph.txt": File(GRAPH, imported),
        "servers.txt": File(SERVERS, (*imported, (*on_cluster, "{}@1GB/s"))),
        "placement.json": File(json.dumps(placement()), (*imported, (*on_cluster, "{}"))),
        "record.jsonl": File(run.progress.read_text(), read=partial(_watched, directory / "seen.jsonl")),
        "checkpoint.json": File(
            codec.dumps(checkpoint), read=lambda text: codec.loads(Checkpoint, text, "checkpoint.json")
        ),
        "conf.json": File(json.dumps(CONF), read=lambda text: parse_stage_map(text, "conf.json")),
        "partition.json": File(
            '{"partition": [2, 3], "recompute_ratio": [0, 0.5], "batch_size": [4, 4]}',
            read=lambda text: parse_partition(text, "partition.json"),
        ),
        "costs.txt": File("1.5\n2.5\n3e-1\n", read=lambda text: layer_costs(text, text, text)),
    }  # fmt: skip


def _watched(path: Path, text: str) -> str:
    """What ``penstock watch`` shows of a record; the verb itself would wait for its end."""
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    console = Console(file=io.StringIO(), width=80)
    console.print(watch.view(Reader(path).read(), 80, 0.0))
    return str(console.file)


def _write_progress(run: RunDirectory, workers: tuple[str, ...]) -> None:
    count = len(workers)
    start = Start(
        model="chain", schedule="pipedream", workers=workers, samples=48, minibatches=6, first_minibatch=0,
        began_unix_s=1.8e9, samples_per_s=1000.0, memory_bytes=(5_000_000,) * count,
    )  # fmt: skip
    writer = Writer(run.progress, start)
    for at in (1, 2):
        moment = Moment(
            at_s=0.01 * at, samples=24 * at, loss=1 / at, busy=(0.5,) * count, memory_bytes=(4_000_000,) * count,
            done=("0F0",) * count, heard_s=(0.01 * at,) * count,
        )  # fmt: skip
        writer.moment(moment)
    writer.mark(Mark(at_s=0.01, kind="evaluation", text="evaluation", minibatch=3, values={"loss": 0.5}))
    writer.end("finished")


def mutate(text: str, chance: random.Random) -> str:
    """One to three changes: of a value somewhere in the data where it is JSON, or of the text itself."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        if text.startswith("{") and chance.random() < 0.8:
            with contextlib.suppress(ValueError, RecursionError):
                lines = text.splitlines()  # a record has an object on each line
                at = chance.randrange(len(lines))
                lines[at] = json.dumps(_mutated(json.loads(lines[at]), chance))
                text = "\n".join(lines) + "\n"
                continue
        text = _mutated_text(text, chance)
    return text


def _mutated(data: Any, chance: random.Random) -> Any:
    data = copy.deepcopy(data)
    places = list(_places(data))
    if not places:
        return chance.choice(ODD)
    holder, key = chance.choice(places)
    kind = chance.random()
    if kind < 0.6:
        holder[key] = chance.choice(ODD)
    elif kind < 0.7:
        del holder[key]
    elif kind < 0.8 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif kind < 0.9:
        other, at = chance.choice(places)
        holder[key] = copy.deepcopy(other[at])
    elif isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = holder[key] * chance.choice((-1, 0, 10, 10**9, 10**15, 1e300, 1e-300))
    else:
        holder[key] = [holder[key]]
    return data


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every key of every object and every index of every list."""
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield data, key
        yield from _places(data[key])


def _mutated_text(text: str, chance: random.Random) -> str:
    start = chance.randrange(len(text) + 1)
    end = min(len(text), start + chance.randrange(12))
    lines = text.split("\n")
    line = chance.randrange(len(lines))
    numbers = list(re.finditer(r"[0-9.]+", text))
    if numbers and chance.random() < 0.4:
        number = chance.choice(numbers)
        start, end = number.span()
        return (
            text[:start]
            + chance.choice(["0", "-1", "1e308", "1e-320", "9" * 25, "x", "1.5", "100000", "[]"])
            + text[end:]
        )
    return chance.choice(
        [
            text[:start],
            text[:start] + text[end:],
            text[:start] + chance.choice(SNIPPETS) + text[end:],
            "\n".join(lines[:line] + lines[line + 1 :]),
            "\n".join([*lines, lines[line]]),
            "\n".join(chance.sample(lines, len(lines))),
        ]
    )


def use(name: str, file: File, text: str, directory: Path, chance: random.Random) -> str:
    """Let the command line read the file; what went wrong other than a PenstockError, or nothing."""
    path = directory / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    if file.read is not None:
        try:
            file.read(text)
        except PenstockError:
            pass
        except Exception as error:  # whatever it is, is to be shown
            return f"{type(error).__name__}: {str(error)[:200]}"
        return ""
    command = [part.replace("{}", str(path)) for part in chance.choice(file.commands)]
    result = CliRunner().invoke(app, command)
    error = result.exception
    if error is None:
        infinite = re.search(r"\b(inf|nan)\b", result.output.replace(str(directory), ""))
        return f"{command[0]} shows what is not finite: {result.output[:300]}" if infinite else ""
    if isinstance(error, PenstockError | SystemExit):
        return ""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{command[0]}: {type(error).__name__}: {str(error)[:200]} at {Path(where.filename).name}:{where.lineno}"


def fuzz(directory: Path, first: int, count: int, only: str = "") -> Iterator[tuple[int, str, str, str, float]]:
    """Seed, name, text, trouble and seconds of each mutation."""
    files = write_good_files(directory)
    names = [name for name in files if only in name]
    for seed in range(first, first + count):
        chance = random.Random(seed)
        name = names[seed % len(names)]
        text = mutate(files[name].text, chance)
        began_s = time.perf_counter()
        trouble = use(name, files[name], text, directory, chance)
        (directory / name).write_text(files[name].text)
        yield seed, name, text, trouble, time.perf_counter() - began_s


def main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    count, first, only = (*sys.argv[1:], *("1000", "0", "")[len(sys.argv) - 1 :])[:3]
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        for seed, name, text, trouble, seconds in fuzz(Path(directory), int(first), int(count), only):
            if seconds > 5:
                sys.stdout.write(f"seed {seed} {name}: {seconds:.1f} s: {text[:100]!r}\n")
            if trouble:
                seen[trouble.rpartition(" at ")[2]] += 1
                if seen[trouble.rpartition(" at ")[2]] <= 2:
                    sys.stdout.write(f"seed {seed} {name}: {trouble}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{count} mutations, {sum(seen.values())} troubles: {dict(seen)}\n")


if __name__ == "__main__":
    main()
