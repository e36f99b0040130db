"""Memory and times in sentences."""

from __future__ import annotations


def gib(mib: int) -> str:
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib} MiB"


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times in a row"


def misconfigured(model: str, why: str) -> str:
    return f"{model} is misconfigured: {why}"


def requests_wait(count: int) -> str:
    return "1 request waits" if count == 1 else f"{count} requests wait"


def span(seconds: float) -> str:
    if seconds < 0.95:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
