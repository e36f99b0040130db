"""Sizes with units to MiB, durations to seconds; errors are sentences that say what to write instead."""

from __future__ import annotations

import math
import re

from .errors import quoted

DURATION_S_MAX = 366 * 86_400.0
SIZE_BYTES_MAX = 1 << 60

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_BYTES = {
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_DURATION_HINT = 'Write 300, "300s" or "5m".'


class UnitError(ValueError):
    """A size or duration that cannot be read; the text is one sentence or two for people."""


def duration_s(value: object) -> float:
    """Seconds from 300, "300", "300s", "5m", "2h", "1h30m" or "250ms"; UnitError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise UnitError(f"{quoted(value)} is not a duration. {_DURATION_HINT}")
    seconds = _text_s(value) if isinstance(value, str) else float(value)
    if not math.isfinite(seconds):
        raise UnitError(f"{quoted(value)} is not a duration. {_DURATION_HINT}")
    if seconds < 0:
        raise UnitError(f"{quoted(value)} is negative, and a duration cannot be. {_DURATION_HINT}")
    if seconds > DURATION_S_MAX:
        raise UnitError(f"{quoted(value)} is longer than a year. {_DURATION_HINT}")
    return seconds


def _text_s(value: str) -> float:
    text = value.strip().replace(" ", "")
    if _NUMBER.fullmatch(text):
        return float(text)
    if text.startswith("-") and (_NUMBER.fullmatch(text[1:]) or _DURATION.fullmatch(text[1:])):
        return -1.0
    if not _DURATION.fullmatch(text):
        raise UnitError(f"{quoted(value)} is not a duration. {_DURATION_HINT}")
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


_HOST = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?")
_PLATFORM = re.compile(r"[a-z0-9]+/[a-z0-9_]+")
PORT_MAX = 65535


def size_bytes(value: object) -> int:
    """Bytes from "80GiB", "1500 MiB" or "24GB" (decimal); UnitError for numbers without a unit, shares, anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise UnitError(f"{quoted(value)} is not a size. Write 80GiB or 1500MiB.")
    if isinstance(value, (int, float)):
        return _unitless_bytes(getattr(value, "text", str(value)))
    text = value.strip()
    if text.endswith("%"):
        raise UnitError(f"{quoted(value)} is a share, and a budget needs a size. Write the size itself, such as 60GiB.")
    match = _SIZE.fullmatch(text)
    if match is None:
        why = "is negative, and a size cannot be" if text.startswith("-") and _SIZE.fullmatch(text[1:]) else "is not a size"
        raise UnitError(f"{quoted(value)} {why}. Write 80GiB or 1500MiB.")
    number, unit = match.groups()
    if not unit:
        return _unitless_bytes(number)
    factor = _BYTES.get(unit.lower())
    if factor is None:
        raise UnitError(_unit_hint(value, number, unit))
    bytes_ = float(number) * factor
    if bytes_ > SIZE_BYTES_MAX:
        raise UnitError(f"{quoted(value)} is more than any machine has. Write 80GiB or 1500MiB.")
    return round(bytes_)


def limit_bytes(value: object) -> int:
    """Bytes of what something may have at most: a size, and more than nothing."""
    bytes_ = size_bytes(value)
    if bytes_ <= 0:
        raise UnitError(f"{quoted(value)} is nothing at all. Write 80GiB or 1500MiB.")
    return bytes_


def _unitless_bytes(number: str) -> int:
    if number.startswith("-"):
        raise UnitError(f"{number} is negative, and a size cannot be. Write 80GiB or 1500MiB.")
    if number.strip("0.") == "":  # nothing is nothing in any unit
        return 0
    raise UnitError(f"{number} has no unit. Write {number}GiB or {number}MiB.")


def _unit_hint(value: str, number: str, unit: str) -> str:
    letter = unit[0].upper()
    if letter in "KMGT" and len(unit) <= 2:
        return f"{quoted(value)} has no full unit. Write {number}{letter}iB (or {number}{letter}B for the decimal one)."
    return f"{quoted(value)} is not a size: {quoted(unit)} is no unit. Write {number}GiB or {number}MiB."


def size_mib_down(value: object) -> int:
    """MiB rounded down: for capacities, so that a budget never promises what is not there."""
    return size_bytes(value) >> 20


def size_mib_up(value: object) -> int:
    """MiB rounded up: for needs."""
    return -(-size_bytes(value) >> 20)


def host_of(text: str) -> str:
    """HOST or HOST:PORT as it is; UnitError for anything else, also for an address with a scheme or a path."""
    match = _HOST.fullmatch(text)
    if match is None or (match[2] is not None and not 0 < int(match[2]) <= PORT_MAX):
        raise UnitError(f"{quoted(text)} is not a host. Write HOST or HOST:PORT, such as blobs.lan:9000.")
    return text


def platform_of(text: str) -> str:
    if _PLATFORM.fullmatch(text) is None:
        raise UnitError(f"{quoted(text)} is not a platform. Write OS/ARCH, such as linux/amd64.")
    return text
