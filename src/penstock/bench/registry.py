"""Benchmarks by name."""

from __future__ import annotations

from importlib import import_module

from penstock.bench.rows import Findings
from penstock.errors import JobError

MODULES = {
    "accuracy": "accuracy",
    "models": "models",
    "network": "network",
    "planner": "planner",
    "profile": "profile",
    "runtime": "runtime",
    "simulator": "simulator",
    "simulator-scale": "scale",
    "table1": "table1",
    "trace": "trace",
}
"""Each has a function ``run``; they are imported when asked for, as some need torch."""
DRAWN = ("accuracy", "network", "planner", "simulator-scale")
"""Those whose findings have a drawing."""
EMULATED = "table1"
"""The one whose plans can be run on emulated devices."""


def run_benchmark(name: str, *, emulate: bool = False) -> Findings:
    """``emulate`` runs what is otherwise only planned, on emulated devices."""
    if name not in MODULES:
        raise JobError(f"benchmark {name!r} is unknown; choose one of {', '.join(MODULES)}")
    if emulate and name != EMULATED:
        raise JobError(f"bench {name} has nothing to emulate; --emulate goes with bench {EMULATED}")
    found: Findings = import_module(f"penstock.bench.{'emulated' if emulate else MODULES[name]}").run()
    return found
