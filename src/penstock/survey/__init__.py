"""What to time on a cluster, and what the times say about its links and devices. ``runtime.process.survey`` does the
timing."""

from penstock.survey.findings import LevelFindings, Survey, conclude
from penstock.survey.fit import Sample, fit_link
from penstock.survey.hosts import Host, WorkerFacts, group_hosts
from penstock.survey.trials import Pattern, Reach, Timing, Trial, make_trials

__all__ = [
    "Host",
    "LevelFindings",
    "Pattern",
    "Reach",
    "Sample",
    "Survey",
    "Timing",
    "Trial",
    "WorkerFacts",
    "conclude",
    "fit_link",
    "group_hosts",
    "make_trials",
]
