"""The one form of a benchmark's answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    case: str
    metric: str
    value: float
    baseline: float | None
    ratio: float | None
    target: float | None
    met: bool | None


def at_least(case: str, metric: str, value: float, baseline: float, target: float | None = None) -> Row:
    """A row whose ratio to the baseline should not fall below ``target``."""
    ratio = value / baseline
    met = None if target is None else ratio >= target
    return Row(case=case, metric=metric, value=value, baseline=baseline, ratio=ratio, target=target, met=met)
