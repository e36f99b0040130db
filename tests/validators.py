"""Programs that judge what greenroom writes: found on PATH or where `make tools` puts them, else the test is skipped with the reason."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

FETCHED = Path(__file__).resolve().parent.parent / ".cache" / "tools" / "bin"


def tool(name: str) -> Path:
    """The program of this name.  It is never left out silently: without it the test is skipped, and says what fetches it."""
    fetched = FETCHED / name
    if fetched.is_file():
        return fetched
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: `make tools` fetches it, or says how")
    return Path(found)
