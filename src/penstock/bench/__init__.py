"""Benchmarks: rows of {case, metric, value, baseline, ratio, target, met}."""

from penstock.bench.registry import run_benchmark

__all__ = ["run_benchmark"]
