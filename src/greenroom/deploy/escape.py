"""Words and values as systemd and quadlet read them back: quotes, backslashes, `%` and `$` come out as they went in."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable

_BARE = re.compile(r"[A-Za-z0-9_@%+=:,./-]+", re.ASCII)
_SHORT = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def word(text: str) -> str:
    """One word of a command line in a unit, where `%` begins a specifier and `$` a variable."""
    return value_word(text).replace("$", "$$")


def value_word(text: str) -> str:
    """One word where variables are not filled in (Environment=, paths): only `%` is special beside quotes."""
    if _BARE.fullmatch(text):
        return text.replace("%", "%%")
    return '"' + "".join(_char(char) for char in text).replace("%", "%%") + '"'


def words(items: Iterable[str]) -> str:
    return " ".join(map(word, items))


def line(text: str) -> str:
    """A value that is taken whole, such as Description=: one line, without specifiers."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split()).replace("%", "%%").replace("\\", "\\\\")


def fields(pairs: Iterable[tuple[str, str]]) -> str:
    """`type=bind,source=/a` as podman's --mount reads it: comma-separated values, those with commas or quotes in quotes."""
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(f"{name}={value}" for name, value in pairs)
    return out.getvalue()


def _char(char: str) -> str:
    if char in _SHORT:
        return _SHORT[char]
    return char if char.isprintable() or ord(char) > 0x9F else f"\\x{ord(char):02x}" if ord(char) < 0x80 else f"\\u{ord(char):04x}"
