"""Every row of PipeDream's Table 1 planned anew, from PipeDream's own profiles.

Beside the published configuration and its measured speed-up over data parallelism: what Penstock's model predicts for
the same configuration, what PipeDream's formulas choose, what Penstock chooses, and a sentence on why they differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from penstock.bench.published import PROFILES, TABLE_1, Measured, Published
from penstock.bench.reference import VARIABLE, pipedream_reference
from penstock.bench.rows import Column, Findings
from penstock.bench.why import Compared, config_of, why
from penstock.errors import JobError
from penstock.formats import read_profile
from penstock.plan import Plan
from penstock.planner import Hints, make_plan
from penstock.planner.hints import parse_replicas
from penstock.planner.pipedream import solve
from penstock.profile import LayerSeconds, Profile


@dataclass(frozen=True)
class Choice:
    config: str
    speedup: float
    """over data parallelism"""

    def __str__(self) -> str:
        return f"{self.config}\n{self.speedup:.2f}"


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    case: str
    published: Choice
    published_by_penstock: Choice | None
    """the published configuration, cut and predicted by Penstock; None where there is no profile"""
    pipedream_formulas: Choice | None
    """what PipeDream's formulas choose and predict"""
    penstock: Choice | None
    data_parallel_s: float | None
    """per minibatch, by Penstock's model"""
    all_reduce_share: float | None
    """of that"""
    why: str

    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("case"),
        Column("published"),
        Column("published, by\nour model"),
        Column("PipeDream's\nformulas"),
        Column("Penstock"),
    )
    CAPTION: ClassVar[str] = (
        "replicas of each stage, and speed-up over data parallelism: measured where published, elsewhere predicted for "
        "A = 4@12GB/s in hosts at 1.25GB/s, B = 8@25GB/s in hosts at 3.125GB/s, no limit of memory"
    )

    @property
    def cells(self) -> tuple[str, ...]:
        choices = (self.published, self.published_by_penstock, self.pipedream_formulas, self.penstock)
        model, _, cluster = self.case.partition(" ")
        return f"{model}\n{cluster}", *("-" if choice is None else str(choice) for choice in choices)

    @property
    def footnote(self) -> str:
        return f"{self.case}: {self.why}" if self.why else ""


def run() -> Findings:
    return Findings(list(_rows(profiles_directory())))


def profiles_directory() -> Path:
    reference = pipedream_reference()
    if reference is None:
        raise JobError(
            f"{VARIABLE} names no directory with pipedream/profiles; Table 1 is planned from PipeDream's own profiles: "
            f"set it to a directory with pipedream/profiles/vgg16/graph.txt and so on"
        )
    return reference / "profiles"


def _rows(profiles: Path) -> Iterator[ComparedRow]:
    for published in TABLE_1:
        compared = compare(published, profiles)
        yield _absent(published, compared) if isinstance(compared, str) else _row(compared)


def compare(published: Published, profiles: Path) -> Compared | str:
    """The plans of a row; or why there are none."""
    measured = PROFILES.get(published.model)
    if measured is None:
        return "not planned: PipeDream's repository has no profile of it."
    path = profiles / measured.profile / "graph.txt"
    if not path.is_file():
        return f"not planned: no profile {measured.profile} at hand."
    return compare_with(published, measured, read_profile(path))


def compare_with(published: Published, measured: Measured, profile: Profile) -> Compared:
    cluster, scaled = published.on, as_run(profile, measured.scale())
    data_parallel, as_published = _published_plans(published, scaled)
    other_length = None
    if measured.other_tokens:
        other_length = _published_plans(published, as_run(profile, measured.scale(measured.other_tokens)))
    return Compared(
        published=published,
        measured=measured,
        data_parallel=data_parallel,
        as_published=as_published,
        chosen=make_plan(scaled, cluster),
        by_formulas=solve(scaled, cluster),
        other_length=other_length,
    )


def _published_plans(published: Published, profile: Profile) -> tuple[Plan, Plan]:
    """Data parallelism, and the published configuration with the cuts that suit it best."""
    cluster = published.on
    straight = published.config == "straight"
    fixed = Hints(straight=True) if straight else Hints(replicas=parse_replicas(published.config))
    everywhere = Hints(replicas=(len(cluster.devices),))
    return make_plan(profile, cluster, hints=everywhere), make_plan(profile, cluster, hints=fixed)


def as_run(profile: Profile, scale: float) -> Profile:
    """For a minibatch ``scale`` times as large, in proportion."""
    seconds = {kind: tuple(_scaled(row, scale) for row in rows) for kind, rows in profile.seconds.items()}
    values = tuple(replace(value, num_bytes=round(value.num_bytes * scale)) for value in profile.graph.values)
    return replace(profile, graph=replace(profile.graph, values=values), seconds=seconds)


def _scaled(row: LayerSeconds, scale: float) -> LayerSeconds:
    return replace(
        row,
        forward_s=row.forward_s * scale,
        backward_input_s=row.backward_input_s * scale,
        backward_weight_s=row.backward_weight_s * scale,
    )


def _row(compared: Compared) -> ComparedRow:
    formulas = compared.by_formulas
    return ComparedRow(
        case=compared.published.case,
        published=Choice(compared.published.config, compared.published.speedup),
        published_by_penstock=_choice(compared, compared.as_published),
        pipedream_formulas=Choice(formulas.config, formulas.data_parallel_s / formulas.seconds_per_minibatch),
        penstock=_choice(compared, compared.chosen),
        data_parallel_s=compared.data_parallel_s,
        all_reduce_share=compared.all_reduce_share,
        why=why(compared),
    )


def _choice(compared: Compared, plan: Plan) -> Choice:
    return Choice(config_of(plan), compared.speedup(plan))


def _absent(published: Published, reason: str) -> ComparedRow:
    return ComparedRow(
        case=published.case,
        published=Choice(published.config, published.speedup),
        published_by_penstock=None,
        pipedream_formulas=None,
        penstock=None,
        data_parallel_s=None,
        all_reduce_share=None,
        why=reason,
    )
