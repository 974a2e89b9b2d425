"""Benchmarks: measurements as rows of {case, metric, value, baseline, ratio, target, met}, and comparisons with what
others published as rows of their own form."""

from penstock.bench.registry import DRAWN, MODULES, run_benchmark

__all__ = ["DRAWN", "MODULES", "run_benchmark"]
