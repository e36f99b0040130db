"""Sizes and durations: what is read, and what the refusals say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.config.units import UnitError, duration_s, limit_bytes, size_bytes, size_mib_down, size_mib_up


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (300, 300.0),
        ("300", 300.0),
        ("300s", 300.0),
        ("5m", 300.0),
        ("2h", 7200.0),
        ("1h30m", 5400.0),
        ("250ms", 0.25),
        (0.5, 0.5),
        ("1 d", 86_400.0),
    ],
)
def test_a_duration_is_seconds_or_a_number_with_a_unit(written: object, seconds: float) -> None:
    """All spellings of a duration give seconds."""
    assert duration_s(written) == seconds


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("5mins", '"5mins" is not a duration. Write 300, "300s" or "5m".'),
        (-5, '-5 is negative, and a duration cannot be. Write 300, "300s" or "5m".'),
        ("-5m", '"-5m" is negative, and a duration cannot be. Write 300, "300s" or "5m".'),
        (True, 'true is not a duration. Write 300, "300s" or "5m".'),
        (float("inf"), 'inf is not a duration. Write 300, "300s" or "5m".'),
        ("999999h", '"999999h" is longer than a year. Write 300, "300s" or "5m".'),
        ({}, 'a mapping is not a duration. Write 300, "300s" or "5m".'),
    ],
)
def test_a_wrong_duration_is_told_with_what_to_write(written: object, sentence: str) -> None:
    """The sentence shows the value and gives examples."""
    with pytest.raises(UnitError) as caught:
        duration_s(written)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("written", "bytes_"),
    [
        ("80GiB", 80 << 30),
        ("1500 MiB", 1500 << 20),
        ("24GB", 24 * 10**9),
        ("800mb", 800 * 10**6),
        ("1.5GiB", 3 << 29),
        ("1TiB", 1 << 40),
        (0, 0),
    ],
)
def test_a_size_has_a_unit(written: object, bytes_: int) -> None:
    """Binary units are powers of 1024, decimal ones of 1000."""
    assert size_bytes(written) == bytes_


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        (80, "80 has no unit. Write 80GiB or 80MiB."),
        ("80", "80 has no unit. Write 80GiB or 80MiB."),
        ("75%", '"75%" is a share, and a budget needs a size. Write the size itself, such as 60GiB.'),
        ("80G", '"80G" has no full unit. Write 80GiB (or 80GB for the decimal one).'),
        ("80Gi", '"80Gi" has no full unit. Write 80GiB (or 80GB for the decimal one).'),
        ("80 bananas", '"80 bananas" is not a size: "bananas" is no unit. Write 80GiB or 80MiB.'),
        ("lots", '"lots" is not a size. Write 80GiB or 1500MiB.'),
        (-1, "-1 is negative, and a size cannot be. Write 80GiB or 1500MiB."),
        ("-5GiB", '"-5GiB" is negative, and a size cannot be. Write 80GiB or 1500MiB.'),
        ("- 5", '"- 5" is not a size. Write 80GiB or 1500MiB.'),
        ("99999999TiB", '"99999999TiB" is more than any machine has. Write 80GiB or 1500MiB.'),
    ],
)
def test_a_wrong_size_is_told_with_what_to_write(written: object, sentence: str) -> None:
    """The sentence shows the value and gives examples."""
    with pytest.raises(UnitError) as caught:
        size_bytes(written)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("written", ["0", "0GiB", "0.2B", 0])
def test_a_limit_of_nothing_is_none(written: object) -> None:
    """It would refuse everything."""
    with pytest.raises(UnitError, match=r"is nothing at all\. Write 80GiB"):
        limit_bytes(written)
    assert limit_bytes("1B") == 1


def test_capacities_round_down_and_needs_round_up() -> None:
    """A budget never promises a MiB that is not there."""
    assert (size_mib_down("24GB"), size_mib_up("24GB")) == (22_888, 22_889)


@given(st.integers(0, 10_000), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_binary_sizes_are_exact(number: int, unit: str) -> None:
    """number x 1024^n, without rounding."""
    power = {"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}[unit]
    assert size_bytes(f"{number}{unit}") == number << power


@given(st.integers(0, 300), st.integers(0, 59), st.integers(0, 59))
def test_a_compound_duration_is_the_sum_of_its_parts(hours: int, minutes: int, seconds: int) -> None:
    """1h2m3s is 3723 seconds."""
    assert duration_s(f"{hours}h{minutes}m{seconds}s") == hours * 3600 + minutes * 60 + seconds


@given(st.one_of(st.text(max_size=20), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.integers(), max_size=2)))
def test_any_value_is_read_or_refused_in_one_line(value: object) -> None:
    """No other exception, and a message without line ends."""
    for read in (duration_s, size_bytes, limit_bytes):
        try:
            said = str(read(value))
        except UnitError as exc:
            said = str(exc)
        assert len(said.splitlines()) == 1
