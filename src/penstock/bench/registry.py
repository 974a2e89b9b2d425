"""Benchmarks by name."""

from __future__ import annotations

from penstock.bench.rows import Findings
from penstock.errors import JobError

NAMES = ("accuracy", "planner", "profile", "runtime", "table1", "trace")
DRAWN = ("accuracy", "planner")
"""Those whose findings have a drawing."""


def run_benchmark(name: str) -> Findings:
    if name == "accuracy":
        from penstock.bench.accuracy import run
    elif name == "planner":
        from penstock.bench.planner import run
    elif name == "profile":
        from penstock.bench.profile import run
    elif name == "runtime":
        from penstock.bench.runtime import run
    elif name == "table1":
        from penstock.bench.table1 import run
    elif name == "trace":
        from penstock.bench.trace import run
    else:
        raise JobError(f"benchmark {name!r} is unknown; choose one of {', '.join(NAMES)}")
    return run()
