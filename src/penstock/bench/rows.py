"""The form of a benchmark's answer: rows that say how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(frozen=True)
class Column:
    title: str
    right: bool = False
    """where numbers stand"""


class BenchRow(Protocol):
    """A dataclass whose fields are the JSON answer; cells and footnote are what a reader of the table sees."""

    COLUMNS: ClassVar[tuple[Column, ...]]
    CAPTION: ClassVar[str]
    """what must be known to read the table"""

    @property
    def cells(self) -> tuple[str, ...]: ...

    @property
    def footnote(self) -> str:
        """A sentence below the table, or nothing."""


@dataclass(frozen=True)
class Findings:
    """What a benchmark found: rows all of one kind."""

    rows: Sequence[BenchRow]
    svg: str | None = None
    """the same drawn, where there is something to draw"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A number, beside another or not, and whether it is what it should be."""

    case: str
    metric: str
    value: float
    baseline: float | None
    ratio: float | None
    target: float | None
    met: bool | None

    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("case"),
        Column("metric"),
        *(Column(title, right=True) for title in ("value", "baseline", "ratio", "target")),
        Column("met"),
    )
    CAPTION: ClassVar[str] = ""

    @property
    def cells(self) -> tuple[str, ...]:
        numbers = ("-" if n is None else f"{n:.4g}" for n in (self.value, self.baseline, self.ratio, self.target))
        met = "-" if self.met is None else ("yes" if self.met else "NO")
        return self.case, self.metric, *numbers, met

    @property
    def footnote(self) -> str:
        return ""


def at_least(case: str, metric: str, value: float, baseline: float, target: float | None = None) -> Row:
    """A row whose ratio to the baseline should not fall below ``target``."""
    ratio = value / baseline
    met = None if target is None else ratio >= target
    return Row(case=case, metric=metric, value=value, baseline=baseline, ratio=ratio, target=target, met=met)


def at_most(case: str, metric: str, value: float, target: float | None = None) -> Row:
    """A row whose value should not exceed ``target``."""
    met = None if target is None else value <= target
    return Row(case=case, metric=metric, value=value, baseline=None, ratio=None, target=target, met=met)
