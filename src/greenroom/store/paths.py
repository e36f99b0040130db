"""Names of files that others chose: which are safe to write below a folder of ours."""

from __future__ import annotations

import re
import unicodedata

from .facts import Refused

PATH_BYTES_MAX = 1024
NAME_BYTES_MAX = 255  # of one part: what file systems allow
PARTS_MAX = 16  # folders in folders
HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})  # move the cursor, hide or reorder text
DRIVE = re.compile(r"^[A-Za-z]:")


def safe_path(text: str, *, what: str = "the manifest") -> str:
    """`text` as a relative path with forward slashes, without `.` parts; raises Refused when it could lead out or mislead."""
    fault = _fault(text)
    if fault:
        raise Refused(f"{what} names a file {shown(text)}, which {fault}: nothing of it was written; do not trust where it comes from")
    return "/".join(part for part in text.split("/") if part not in ("", "."))


def _fault(text: str) -> str:
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if text.startswith("/") or DRIVE.match(text):
        return "is absolute"
    if not parts:
        return "is empty"
    if ".." in parts:
        return "leads out of its folder"
    if "\\" in text:
        return "holds a backslash"
    if any(unicodedata.category(char) in HIDDEN_CATEGORIES for char in text):
        return "holds control characters"
    if len(text.encode()) > PATH_BYTES_MAX or len(parts) > PARTS_MAX:
        return f"is longer than {PATH_BYTES_MAX} bytes or deeper than {PARTS_MAX} folders"
    if any(len(part.encode()) > NAME_BYTES_MAX for part in parts):
        return f"has a part longer than {NAME_BYTES_MAX} bytes"
    if any(part != part.strip() for part in parts):
        return "has blanks at the edge of a part"
    return ""


def shown(text: str, chars_max: int = 80) -> str:
    """A hostile text for a message: quoted, escaped, cut."""
    quoted = ascii(text[:chars_max])
    return f"{quoted}…" if len(text) > chars_max else quoted
