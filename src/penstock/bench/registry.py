"""Benchmarks by name."""

from __future__ import annotations

from penstock.bench.rows import Findings
from penstock.errors import JobError

NAMES = ("accuracy", "network", "planner", "profile", "runtime", "table1")
DRAWN = ("accuracy", "network", "planner")
"""Those whose findings have a drawing."""
EMULATED = "table1"
"""The one whose plans can be run on emulated devices."""


def run_benchmark(name: str, *, emulate: bool = False) -> Findings:
    """``emulate`` runs what is otherwise only planned, on emulated devices."""
    if emulate:
        if name != EMULATED:
            raise JobError(f"bench {name} has nothing to emulate; --emulate goes with bench {EMULATED}")
        from penstock.bench.emulated import run
    elif name == "accuracy":
        from penstock.bench.accuracy import run
    elif name == "network":
        from penstock.bench.network import run
    elif name == "planner":
        from penstock.bench.planner import run
    elif name == "profile":
        from penstock.bench.profile import run
    elif name == "runtime":
        from penstock.bench.runtime import run
    elif name == "table1":
        from penstock.bench.table1 import run
    else:
        raise JobError(f"benchmark {name!r} is unknown; choose one of {', '.join(NAMES)}")
    return run()
