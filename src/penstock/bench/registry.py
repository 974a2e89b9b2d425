"""Benchmarks by name."""

from __future__ import annotations

from typing import Any

from penstock import codec
from penstock.errors import JobError

NAMES = ("planner", "profile", "runtime")


def run_benchmark(name: str) -> list[dict[str, Any]]:
    """Run a benchmark and return its rows as plain data."""
    if name == "planner":
        from penstock.bench.planner import run
    elif name == "profile":
        from penstock.bench.profile import run
    elif name == "runtime":
        from penstock.bench.runtime import run
    else:
        raise JobError(f"benchmark {name!r} is unknown; choose one of {', '.join(NAMES)}")
    return [codec.encode(row) for row in run()]
