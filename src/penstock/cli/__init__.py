"""The command line: ``penstock VERB``. Errors that say what to do are one line and exit code 2."""

from penstock.cli.app import main

__all__ = ["main"]
