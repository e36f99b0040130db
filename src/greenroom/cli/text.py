"""Words for people: sizes, durations, bars, tables, and text that is safe to show in a terminal."""

from __future__ import annotations

import re
import sys
import time
import unicodedata
from collections.abc import Sequence

GIB_MIB = 1024
NAMES_SHOWN_MAX = 5

# Colours of an engine's log are dropped; every other escape sequence is shown, not obeyed.
SGR = re.compile(r"\x1b\[[0-9;:]*m")
HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def safe(text: str) -> str:
    """`text` on one line, with everything that could move the cursor, hide or reorder text shown as an escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(escaped(char) if unicodedata.category(char) in HIDDEN_CATEGORIES else char for char in text)


def escaped(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}.get(char, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def safe_line(line: str) -> str:
    """A log line: tabs stay, colours go, the rest as in `safe`."""
    return "\t".join(safe(part) for part in SGR.sub("", line.rstrip("\r\n")).split("\t"))


def cells(text: str) -> int:
    """Columns that `text` takes in a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def cut(text: str, cells_max: int) -> str:
    """`text` in at most `cells_max` columns, with … where something is missing."""
    if cells(text) <= cells_max:
        return text
    kept, used = [], 1
    for char in text:
        used += cells(char)
        if used > cells_max:
            break
        kept.append(char)
    return "".join(kept) + "…"


def wrapped(text: str, cells_max: int, lines_max: int) -> list[str]:
    """`text` in lines of at most `cells_max` columns, broken between words; what is too much ends in …"""
    lines: list[str] = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cells(joined) <= cells_max or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(word)
    if len(lines) > lines_max:
        lines = [*lines[: lines_max - 1], " ".join(lines[lines_max - 1 :])]
    return [cut(line, cells_max) for line in lines]


def size(mib: float | None) -> str:
    """`512 MiB`, `4.3 GiB`, `120 KiB` for what would be 0 MiB; `-` when it is not known."""
    if mib is None:
        return "-"
    if 0 < abs(mib) < 0.5:
        return f"{mib * 1024:.0f} KiB"
    if abs(mib) < GIB_MIB:
        return f"{mib:.0f} MiB"
    gib = mib / GIB_MIB
    return f"{gib:.1f} GiB" if gib < 100 else f"{gib:,.0f} GiB"


def duration(seconds: float) -> str:
    """`0.4 s`, `42 s`, `4 min 10 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s" if seconds >= 0.05 else "0 s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return two_units(whole, 60, "min", 1, "s")
    if whole < 86400:
        return two_units(whole, 3600, "h", 60, "min")
    return two_units(whole, 86400, "d", 3600, "h")


def two_units(whole: int, big_s: int, big: str, small_s: int, small: str) -> str:
    rest = whole % big_s // small_s
    return f"{whole // big_s} {big}" + (f" {rest} {small}" if rest else "")


def about(seconds: float) -> str:
    """A duration that is only an estimate: `about 3 s`, `about 4 min`."""
    if seconds < 0.95:
        return "less than 1 s"
    return f"about {brief(seconds)}"


def brief(seconds: float | None) -> str:
    """One unit, for columns: `3 s`, `4 min`, `2 h`, `3 d`; `-` for None."""
    if seconds is None:
        return "-"
    for limit, unit_s, name in ((59.5, 1, "s"), (3570, 60, "min"), (84600, 3600, "h")):
        if seconds < limit:
            return f"{round(seconds / unit_s)} {name}"
    return f"{round(seconds / 86400)} d"


def bar(fraction: float, width: int = 20, *, ascii: bool = False) -> str:
    """`[████░░]`; never full before it is."""
    full, empty = ("#", ".") if ascii else ("█", "░")
    inside = min(1.0, max(0.0, fraction))
    filled = int(inside * width + 0.5) if inside >= 1 else min(width - 1, int(inside * width + 0.5))
    return f"[{full * filled}{empty * (width - filled)}]"


def loading(since_s: float, expected_s: float | None, width: int = 20, *, ascii: bool = False) -> str:
    """`[████░░] 62 % about 3 s` from the time gone and the time still expected; without an estimate only the time gone."""
    if expected_s is None:
        return f"since {duration(since_s)}"
    if expected_s <= 0:
        return f"{bar(0.99, width, ascii=ascii)} 99 % any moment"
    fraction = min(0.99, since_s / (since_s + expected_s))
    return f"{bar(fraction, width, ascii=ascii)} {fraction * 100:.0f} % {about(expected_s)}"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> list[str]:
    """Lines of columns two spaces apart; columns in `right` are aligned to the right."""
    widths = [max(cells(row[column]) for row in [headers, *rows]) for column in range(len(headers))]
    return [line(row, widths, right) for row in [headers, *rows]]


def line(row: Sequence[str], widths: Sequence[int], right: frozenset[int]) -> str:
    padded = [
        " " * (width - cells(text)) + text if column in right else text + " " * (width - cells(text))
        for column, (text, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()


def clock(unix_s: float, now_unix_s: float) -> str:
    """Local time of day; with the date when that is not today."""
    then, now = time.localtime(unix_s), time.localtime(now_unix_s)
    return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%Y-%m-%d %H:%M:%S", then)


def state(name: str, level: int = 0) -> str:
    """`going to sleep (1)`: a state, with the sleep level where it has to do with sleep."""
    words = safe(name).replace("_", " ")
    return f"{words} ({level})" if level and name in ("going_to_sleep", "asleep", "waking") else words


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shortened(names: Sequence[str]) -> str:
    """`a, b, c`; of a long list the first few and how many more there are."""
    if len(names) <= NAMES_SHOWN_MAX + 1:
        return ", ".join(names)
    return f"{', '.join(names[:NAMES_SHOWN_MAX])} and {len(names) - NAMES_SHOWN_MAX} more"


def is_ascii_terminal() -> bool:
    """Whether block characters cannot be printed here."""
    try:
        "█░…".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False
