"""One HTTP request to an engine of ours: sleep, wake, the question whether it sleeps, a canary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from greenroom.engines.base import Call

BODY_BYTES_MAX = 4 * 1024 * 1024  # of an answer; an embedding is some 100 KiB


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def json(self) -> Any:
        """The body as a JSON value; None when it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def text(self, chars_max: int = 300) -> str:
        return " ".join(self.body[: 4 * chars_max].decode("utf-8", "replace").split())[:chars_max]


class Unanswered(Exception):
    """No answer came; one clause: what, why."""


class Line:
    """Where one engine listens, and what it wants to be told with each request."""

    def __init__(self, host: str, port: int, base_path: str = "", headers: Sequence[tuple[str, str]] = ()) -> None:
        name = f"[{host}]" if ":" in host else host
        self._base = f"http://{name}:{port}{base_path}"
        self._headers = dict(headers)

    async def ask(self, call: Call, limit_s: float) -> Reply:
        """Its whole answer, read up to BODY_BYTES_MAX.  Raises Unanswered: no connection, a broken one, or `limit_s` over."""
        headers = {**self._headers, "Content-Type": "application/json"} if call.body else self._headers
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.request(
                    call.method, self._base + call.path, data=call.body or None, headers=headers, allow_redirects=False
                ) as answer,
            ):
                body = bytearray()
                async for chunk in answer.content.iter_chunked(65536):
                    body += chunk
                    if len(body) > BODY_BYTES_MAX:
                        raise Unanswered(f"{call.method} {call.path} answered more than {BODY_BYTES_MAX} bytes")
                return Reply(answer.status, bytes(body))
        except TimeoutError:
            raise Unanswered(f"{call.method} {call.path} was not answered in {limit_s:.3g} s") from None
        except (aiohttp.ClientError, OSError) as exc:
            raise Unanswered(f"{call.method} {call.path} broke off: {str(exc) or type(exc).__name__}") from None


def pick(value: Any, path: str) -> Any:
    """What a dotted path finds in a JSON value (`*`: all items of a list); None where it leads nowhere."""
    if not path:
        return value
    head, _, rest = path.partition(".")
    if head == "*":
        return [pick(item, rest) for item in value] if isinstance(value, list) else None
    if isinstance(value, list):
        return pick(value[int(head)], rest) if head.isdigit() and int(head) < len(value) else None
    return pick(value[head], rest) if isinstance(value, dict) and head in value else None
