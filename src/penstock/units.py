"""Sizes, rates and durations as people write them: ``1.25GB/s``, ``16GiB``, ``10us``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from penstock.errors import FormatError
from penstock.limits import is_usable

_BYTES = {
    "": 1.0, "B": 1.0,
    "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40,
    "BIT": 1 / 8, "KBIT": 1e3 / 8, "MBIT": 1e6 / 8, "GBIT": 1e9 / 8,
}  # fmt: skip
_SECONDS = {"": 1.0, "S": 1.0, "MS": 1e-3, "US": 1e-6, "NS": 1e-9}
_ROUNDS_UP = 0.9995
"""Rounded to three digits, this share of the next unit is 1 of it, which reads better than 1e+03 of the smaller
unit."""
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | float) -> int:
    return round(_parse(text, _BYTES, "a size such as 16GB"))


def parse_bytes_per_s(text: str | float) -> float:
    """A plain number is bytes per second. A text must have a unit, since nobody means 12 bytes per second by 12."""
    rates = {unit: size for unit, size in _BYTES.items() if unit or not isinstance(text, str)}
    return _parse(text.strip().removesuffix("/s") if isinstance(text, str) else text, rates, "a rate such as 1.25GB/s")


def parse_seconds(text: str | float) -> float:
    return _parse(text, _SECONDS, "a duration such as 10us")


def show_bytes(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if num_bytes >= _ROUNDS_UP * size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def show_bits_per_s(bytes_per_s: float) -> str:
    """A rate in bits, the unit in which networks are sold: 25e6 bytes/s is "200 Mbit/s"."""
    unit, size = ("Gbit/s", 1e9) if 8 * bytes_per_s >= _ROUNDS_UP * 1e9 else ("Mbit/s", 1e6)
    return f"{8 * bytes_per_s / size:.3g} {unit}"


def show_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= _ROUNDS_UP * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.0f} ns"


def show_clock(seconds: float) -> str:
    """3:07, or 1:02:45."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def shorten_middle(text: str, width: int) -> str:
    """A name without its middle, since its ends say most."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}" if width > 1 else "…"[:width]


def show_numbers(numbers: Iterable[int]) -> str:
    """Numbers in ranges, such as 0-3, 8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def write_bytes(num_bytes: float) -> str:
    """``11.76GiB``, for files: to a hundredth of its unit, rounded down so as not to promise more than there is."""
    for unit, size in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if num_bytes >= size:
            return f"{math.floor((num_bytes + 0.5) / size * 100) / 100:g}{unit}"  # half a byte: reading rounds
    return f"{num_bytes:.0f}B"


def write_bytes_per_s(bytes_per_s: float) -> str:
    """``1.1GB/s``, for files: to three digits."""
    return _write(bytes_per_s, (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("KB/s", 1e3), ("B/s", 1.0)))


def write_seconds(seconds: float) -> str:
    """``110us``, for files: to three digits."""
    return _write(seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)))


def _write(number: float, units: Sequence[tuple[str, float]]) -> str:
    rounded = float(f"{number:.3g}")  # rounded before the unit is chosen, or 999.9 KB would be 1e+03 of them
    unit, size = next((each for each in units if rounded >= each[1]), units[-1])
    return f"{rounded / size:.3g}{unit}"


def _parse(text: str | float, units: dict[str, float], expected: str) -> float:
    match = _NUMBER.fullmatch(str(text))
    number = float(match[1]) * units.get(match[2].upper(), math.inf) if match else math.inf
    if not is_usable(number):
        raise FormatError(f"{text!r}: expected {expected}")
    return number
