"""The HTML report of a run: one file that needs nothing beside it."""

from penstock.report.report import write_report

__all__ = ["write_report"]
