"""What is shown of a run: an HTML page that needs nothing beside it, figures, a trace for Perfetto."""

from penstock.report.figures import write_figures
from penstock.report.outcome import Outcome, outcome_of
from penstock.report.perfetto import perfetto_trace
from penstock.report.report import write_report

__all__ = ["Outcome", "outcome_of", "perfetto_trace", "write_figures", "write_report"]
