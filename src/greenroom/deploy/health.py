"""How a container is asked whether it is well: one GET that wakes nobody, by a program its image holds."""

from __future__ import annotations

from greenroom.deploy.intent import Probe

TIMEOUT_S = 5
RETRIES = 6  # a busy engine may answer late, and ending it costs everybody a load


def command(probe: Probe) -> tuple[str, ...]:
    """Fails unless the path answers 2xx; without a path any answer will do."""
    fail = ("--fail",) if probe.path else ()
    url = f"http://127.0.0.1:{probe.port}{probe.path or '/'}"
    return ("curl", "--silent", "--show-error", "--globoff", *fail, "--output", "/dev/null", "--max-time", str(TIMEOUT_S), url)
