"""What is shown of a run: a self-contained HTML page, figures, a trace for Perfetto. And of several: a comparison."""

from penstock.report.compare import comparison_answer, figure_rows, names_of
from penstock.report.figures import write_figures
from penstock.report.outcome import Outcome, outcome_of
from penstock.report.perfetto import perfetto_trace
from penstock.report.report import write_comparison, write_report

__all__ = [
    "Outcome",
    "comparison_answer",
    "figure_rows",
    "names_of",
    "outcome_of",
    "perfetto_trace",
    "write_comparison",
    "write_figures",
    "write_report",
]
