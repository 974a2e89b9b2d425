from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import law
from penstock.errors import FormatError
from penstock.units import (
    parse_bytes,
    parse_bytes_per_s,
    parse_seconds,
    show_bits_per_s,
    show_bytes,
    show_numbers,
    show_seconds,
    write_bytes,
    write_bytes_per_s,
    write_seconds,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("16GB", 16 * 10**9),
        ("16 GiB", 16 * 2**30),
        (" 1.5kb ", 1500),
        ("1e3", 1000),
        (".5MB", 500_000),
        ("512", 512),
        ("8bit", 1),
        (4096, 4096),
        (1.5e9, 1_500_000_000),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | float, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(("text", "rate"), [("1.25GB/s", 1.25e9), ("10Gbit/s", 1.25e9), ("100 MB", 1e8), (3.0, 3.0)])
def test_rates_are_read_with_or_without_their_per_second(text: str | float, rate: float) -> None:
    assert parse_bytes_per_s(text) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("text", "seconds"), [("10us", 1e-5), ("1.5 ms", 1.5e-3), ("2s", 2.0), ("2", 2.0), ("7ns", 7e-9), (1e-7, 1e-7)]
)
def test_durations_are_read_as_people_write_them(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "sixteen", "16 apples", "1.2.3GB", "1e999GB", math.nan, math.inf, -1, True]
)
@pytest.mark.parametrize(
    ("parse", "example"), [(parse_bytes, "16GB"), (parse_bytes_per_s, "1.25GB/s"), (parse_seconds, "10us")]
)
def test_text_that_is_no_quantity_is_refused_with_an_example(
    parse: Callable[[str | float], float], example: str, text: str | float
) -> None:
    with pytest.raises(FormatError, match=f"expected a .* such as {example}") as caught:
        parse(text)
    assert str(caught.value).startswith(repr(text))


def test_a_rate_in_text_must_name_its_unit() -> None:
    with pytest.raises(FormatError, match=r"'12': expected a rate such as 1\.25GB/s"):
        parse_bytes_per_s("12")


def test_a_unit_of_another_quantity_is_refused() -> None:
    with pytest.raises(FormatError, match="a duration"):
        parse_seconds("1GB")
    with pytest.raises(FormatError, match="a size"):
        parse_bytes("1us")


@law
@given(st.integers(0, 10**13))
def test_a_size_shown_reads_back_as_the_same_to_three_digits(num_bytes: int) -> None:
    assert parse_bytes(show_bytes(num_bytes)) == pytest.approx(num_bytes, rel=5.1e-3)


@law
@given(st.floats(1e-9, 1e5))
def test_a_duration_shown_reads_back_as_the_same_to_three_digits(seconds: float) -> None:
    assert parse_seconds(show_seconds(seconds)) == pytest.approx(seconds, rel=5.1e-3, abs=0.51e-9)


def test_what_rounds_to_a_thousand_is_shown_as_one_of_the_next_unit() -> None:
    assert [show_seconds(0.9996), show_seconds(0.9994), show_seconds(999.7e-6)] == ["1 s", "999 ms", "1 ms"]
    assert [show_bytes(999.6e6), show_bytes(999.4e6)] == ["1 GB", "999 MB"]


@pytest.mark.parametrize(("numbers", "text"), [([3], "3"), ([2, 0, 1], "0-2"), ([8, 0, 1, 5, 6], "0-1, 5-6, 8")])
def test_numbers_are_shown_in_runs(numbers: list[int], text: str) -> None:
    assert show_numbers(numbers) == text


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (write_bytes(24 * 2**30), "24GiB"),
        (write_bytes(24 * 2**30 - 1), "23.99GiB"),
        (write_bytes(4096), "4KiB"),
        (write_bytes(1000), "1000B"),
        (write_bytes_per_s(1.1e9), "1.1GB/s"),
        (write_bytes_per_s(999.9e6), "1GB/s"),
        (write_bytes_per_s(12.5e6), "12.5MB/s"),
        (write_bytes_per_s(3.0), "3B/s"),
        (write_seconds(110e-6), "110us"),
        (write_seconds(0.9999e-3), "1ms"),
        (write_seconds(0.0), "0ns"),
        (write_seconds(2.0), "2s"),
    ],
)
def test_quantities_are_written_into_files_as_people_write_them(written: str, expected: str) -> None:
    assert written == expected


@law
@given(st.integers(1, 10**15))
def test_a_size_written_is_never_more_than_it_was_and_writes_again_as_the_same(num_bytes: int) -> None:
    written = write_bytes(num_bytes)
    assert 0.99 * num_bytes <= parse_bytes(written) <= num_bytes + 1
    assert write_bytes(parse_bytes(written)) == written


@law
@given(st.floats(1e-9, 1e5), st.floats(1.0, 1e13))
def test_durations_and_rates_written_read_back_to_three_digits(seconds: float, bytes_per_s: float) -> None:
    assert parse_seconds(write_seconds(seconds)) == pytest.approx(seconds, rel=5.1e-3)
    assert parse_bytes_per_s(write_bytes_per_s(bytes_per_s)) == pytest.approx(bytes_per_s, rel=5.1e-3)


def test_networks_are_shown_as_they_are_sold() -> None:
    assert [show_bits_per_s(rate) for rate in (12.5e6, 25.4e6, 125e6, 1.7e9)] == [
        *("100 Mbit/s", "203 Mbit/s", "1 Gbit/s", "13.6 Gbit/s"),
    ]
