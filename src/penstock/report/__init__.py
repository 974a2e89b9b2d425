"""What is shown of a run: an HTML page that needs nothing beside it."""

from penstock.report.outcome import Outcome, outcome_of
from penstock.report.report import write_report

__all__ = ["Outcome", "outcome_of", "write_report"]
