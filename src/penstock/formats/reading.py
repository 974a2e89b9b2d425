"""What all readers share: numbered lines, strict numbers, JSON with named fields in errors, cycles."""

from __future__ import annotations

import graphlib
import re
from collections.abc import Collection, Mapping
from typing import TypeVar

from penstock import codec
from penstock.errors import FormatError
from penstock.limits import is_size
from penstock.profile import LayerSeconds

T = TypeVar("T")

MILLI = -3
"""Decimal places between a file's milliseconds and seconds."""

_NUMBER = re.compile(r"([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:[eE]([-+]?[0-9]{1,4}))?")
_SHOWN = 60


def numbered_lines(text: str, source: str) -> list[tuple[int, str]]:
    """The non-empty lines with their numbers, from 1, without trailing blanks."""
    lines = [(number, line.rstrip()) for number, line in enumerate(text.split("\n"), start=1)]
    found = [(number, line) for number, line in lines if line]
    if not found:
        raise FormatError(f"{source}: empty; nothing to read")
    return found


def parse_amount(text: str, where: str, places: int = 0) -> float:
    """A number of 0 or more; ``places`` shifts its decimal point, exactly, so 18.335 ms is the float 0.018335."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise FormatError(f"{where}: expected a number such as 10.814, found {shorten(text)!r}")
    number = float(f"{match[1]}e{int(match[2] or 0) + places}") + 0.0  # no negative zero
    return checked_amount(number, where)


def checked_amount(number: float, where: str) -> float:
    if not is_size(number):
        raise FormatError(f"{where}: {number} is no time or size; expected a finite number of 0 or more")
    return number


def parse_count(text: str, where: str, most: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise FormatError(f"{where}: expected a whole number from 1 to {most}, found {shorten(text)!r}")
    return int(text)


def decode_json(cls: type[T], text: str, source: str) -> T:
    """A dataclass with the keys of the file as its fields."""
    return codec.decode_from(source, cls, codec.parse_json(text, source))


def layer_seconds(forward_s: float, backward_s: float, has_parameters: bool) -> LayerSeconds:
    """The original systems time a backward as a whole. Half of it is for the weights, if there are any."""
    weight_s = backward_s / 2 if has_parameters else 0.0
    return LayerSeconds(forward_s=forward_s, backward_input_s=backward_s - weight_s, backward_weight_s=weight_s)


def find_cycle(successors: Mapping[T, Collection[T]]) -> tuple[T, ...]:
    """The nodes of one cycle in the direction of the edges, with the first node repeated at the end; empty if there is
    none."""
    # graphlib expects predecessors; with successors it finds the same cycles in reverse.
    try:
        graphlib.TopologicalSorter(successors).prepare()
    except graphlib.CycleError as error:
        return tuple(reversed(error.args[1]))
    return ()


def shorten(text: str) -> str:
    """Text for an error message, which must stay one line whatever the file contains."""
    shown = "".join(letter if letter.isprintable() or letter == "\t" else "?" for letter in text)
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."
