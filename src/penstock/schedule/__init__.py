"""Schedules: who does what, in which order, and what each action waits for."""

from penstock.schedule.action import Action, Kind
from penstock.schedule.builders import (
    FAMILIES,
    Family,
    build_schedule,
    check_layout,
    default_depth,
    depths_with_slack,
    family,
    planned_depth,
    replica_depth,
    shallow_depths,
    usual_depth,
)
from penstock.schedule.cuts import Cuts, cuts_of, due
from penstock.schedule.pipeline import Pipeline, dependencies, participants
from penstock.schedule.schedule import Moment, Schedule, check, execution_order
from penstock.schedule.staleness import Staleness, staleness_of, steady_staleness

__all__ = [
    "FAMILIES",
    "Action",
    "Cuts",
    "Family",
    "Kind",
    "Moment",
    "Pipeline",
    "Schedule",
    "Staleness",
    "build_schedule",
    "check",
    "check_layout",
    "cuts_of",
    "default_depth",
    "dependencies",
    "depths_with_slack",
    "due",
    "execution_order",
    "family",
    "participants",
    "planned_depth",
    "replica_depth",
    "shallow_depths",
    "staleness_of",
    "steady_staleness",
    "usual_depth",
]
