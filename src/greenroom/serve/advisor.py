"""Advice of the planner for the page: worked out in a process of its own, remembered, never waited for.

`python -m greenroom.serve.advisor LEDGER SECONDS` is that process: commands and contexts come as JSON on its input, the advice goes
to its output.  It reads the ledger only, at the lowest priority, and is ended when it takes too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger("greenroom")

LOOK_BACK_S = 6 * 3600.0
AGAIN_S = 60.0  # advice is not worked out anew before, while somebody asks for it ...
AGAIN_UNASKED_S = 600.0  # ... and for the headline alone
AGAIN_FACTOR = 20.0  # nor before so many times what the last one took
TAKES_S_MAX = 120.0
BYTES_MAX = 4 << 20
SECRET = re.compile(r"(--?[\w-]*(?:api[-_]?key|token|secret|password)[\w-]*[ =])([^\s\"\\]+)", re.IGNORECASE)

EMPTY: Mapping[str, Any] = {"headline": None, "count": 0, "thrash": [], "ttl": [], "outgrown": None}


class Advisor:
    def __init__(
        self,
        ledger: Path | None,
        commands: Callable[[], Mapping[str, Sequence[str]]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        *,
        contexts: Callable[[], Mapping[str, Sequence[tuple[int, int]]]] = dict,
        secrets: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._ledger, self._commands, self._spawn, self._secrets = ledger, commands, spawn, secrets
        self._contexts = contexts
        self._told: dict[str, Any] | None = None
        self._told_at = 0.0
        self._why = ""
        self._at = -1e9
        self._took_s = 0.0
        self._running = False

    def plain(self) -> dict[str, Any]:
        """What is known, and when it was found; asks for something newer, and does not wait for it."""
        self.refresh(AGAIN_S)
        state = {"at": round(self._told_at, 3) if self._told is not None else None, "is_computing": self._running, "why_not": self._why}
        return {**EMPTY, "seen": None, **(self._told or {}), **state}

    def headline(self, requests: int) -> dict[str, Any] | None:
        """The one worst thing; looked for now and then where there were requests enough to say anything."""
        if requests >= 20:
            self.refresh(AGAIN_UNASKED_S)
        return None if self._told is None else self._told.get("headline")

    def count(self) -> int:
        """How many things there are to change, by the last advice."""
        return 0 if self._told is None else int(self._told.get("count", 0))

    def refresh(self, again_s: float) -> None:
        now = time.monotonic()
        rest_s = again_s if self._told is not None else AGAIN_S / 4
        if self._running or self._ledger is None or now - self._at < max(rest_s, AGAIN_FACTOR * self._took_s):
            return
        self._at, self._running = now, True
        self._spawn(self._work())

    async def _work(self) -> None:
        began = time.monotonic()
        try:
            said = await self._asked()
            if "why_not" in said:
                self._why = str(said["why_not"])
            else:
                self._told, self._told_at, self._why = said, time.time(), ""
        except (OSError, ValueError, TimeoutError) as fault:
            self._why = "working it out took too long" if isinstance(fault, TimeoutError) else f"it could not be worked out: {fault}"
            log.warning("advice: %s", self._why)
        finally:
            self._took_s, self._running = time.monotonic() - began, False

    async def _asked(self) -> dict[str, Any]:
        contexts = await asyncio.to_thread(self._contexts)  # it may look into the models' files
        commands = {model: list(argv) for model, argv in self._commands().items()}
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "greenroom.serve.advisor", str(self._ledger), str(LOOK_BACK_S),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(TAKES_S_MAX):
                out, _ = await child.communicate(json.dumps({"commands": commands, "contexts": dict(contexts)}).encode())
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
        if child.returncode or len(out) > BYTES_MAX:
            raise ValueError(f"it ended with {child.returncode}")
        said: dict[str, Any] = json.loads(out)
        for one in said.get("thrash", ()):
            for fix in one["fixes"]:
                fix["diff"] = [cleaned(line, self._secrets()) for line in fix["diff"]]
        return said


def cleaned(line: str, secrets: Sequence[str]) -> str:
    """Changed lines hold command lines, and those may hold keys; whole words only: a key may be as short as a number."""
    for secret in sorted(secrets, key=len, reverse=True):
        line = re.sub(rf"(?<![\w-]){re.escape(secret)}(?![\w-])", "***", line) if secret else line
    return SECRET.sub(lambda found: found.group(1) + "***", line)


def main(path: str, seconds: str) -> None:
    from greenroom.planner.advice import advice
    from greenroom.planner.faults import CannotReplay
    from greenroom.planner.past import Past

    with contextlib.suppress(OSError):
        os.nice(10)
    told = json.loads(sys.stdin.buffer.read() or b"{}")
    try:
        seen = Past.at(Path(path)).stretch(float(seconds), time.time())
        said = advice(seen.setup, seen.requests, seen.transitions, seen.samples, within=seen.within, **told)
    except CannotReplay as fault:
        said = {"why_not": str(fault)}
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:3])
