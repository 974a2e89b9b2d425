"""Cells of tables. In a narrow terminal names are shortened; numbers never are."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from penstock.schedule import Kind
from penstock.units import shorten_middle


class Names:
    """A cell with one name or ``first .. last``, followed by the text ``about``.

    In a column that is too narrow, names lose their middle. They are never wrapped."""

    BETWEEN = " .. "
    LEAST = 10
    """The least number of letters that a name asks for."""

    def __init__(self, names: Iterable[str], about: str = "") -> None:
        self.names, self.about = list(dict.fromkeys(names)), about

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self._text(options.max_width), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        most = len(self._text(sys.maxsize))
        return Measurement(min(most, most - sum(map(len, self.names)) + self.LEAST * len(self.names)), most)

    def _text(self, width: int) -> str:
        left = width - len(self.about) - len(self.BETWEEN) * (len(self.names) - 1)
        shown = []
        for at, name in enumerate(self.names):
            others = sum(min(len(other), left // 2) for other in self.names[at + 1 :])
            shown.append(shorten_middle(name, max(1, left - others)))
            left -= len(shown[-1])
        return self.BETWEEN.join(shown) + self.about


def name_cell(text: str) -> Names:
    return Names([text])


def add_numbers(table: Table, columns: Iterable[str]) -> None:
    """Add columns whose cells are never wrapped."""
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)


LETTERS = {
    Kind.FORWARD: "F forward",
    Kind.BACKWARD: "B backward",
    Kind.INPUT: "I backward for inputs",
    Kind.WEIGHT: "W backward for weights",
    Kind.SYNC: "SYNC averaging among replicas, with the wait for them",
    Kind.STEP: "STEP update of the weights",
}


def letters(kinds: Iterable[str]) -> str:
    """The legend of the kinds of action in a table."""
    there = set(kinds)
    return "; ".join(words for kind, words in LETTERS.items() if kind.value in there)
