"""Long answers: server-sent events and followed logs, to readers who may be slow, gone, or never read at all.

Each reader has its own bounded backlog: the newest messages stay, the oldest are dropped and counted, and
the count is told in the stream itself.  Nothing is logged per dropped message: a log that feeds a stream
that feeds the log grows for ever.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

log = logging.getLogger(__name__)

T = TypeVar("T")

# Outer proxies must not hold a stream back, and nobody may keep it.
SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
TEXT_HEADERS = {
    "Content-Type": "text/plain; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
}
HEARTBEAT = b": still here\n\n"


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What one reader may cost."""

    readers_max: int = 64
    backlog_len_max: int = 1024
    backlog_bytes_max: int = 1 << 20
    heartbeat_s: float = 15.0
    look_s: float = 1.0  # how often a silent stream looks whether its reader is still there
    stall_s_max: float = 30.0  # a reader that takes no byte this long is cut; what lies between takes them by 100 kB and more
    retry_ms: int = 2000  # how soon a browser comes back
    changes_s: float = 0.25  # changes of the state are told at most so often


class Backlog:
    """Messages on their way to one reader, as bytes; bounded in number and in size."""

    def __init__(self, limits: StreamLimits, sources: int, dropped_note: Callable[[int], bytes], renewed: Callable[[], bytes]) -> None:
        self._limits = limits
        self._sources = sources
        self._note, self._renewed = dropped_note, renewed
        self._messages: deque[bytes] = deque()
        self._bytes = 0
        self._dropped = 0
        self._stirred = asyncio.Event()
        self.is_closed = False
        self.failed = False

    def put(self, message: bytes) -> None:
        self._messages.append(message)
        self._bytes += len(message)
        while len(self._messages) > self._limits.backlog_len_max or (
            self._bytes > self._limits.backlog_bytes_max and len(self._messages) > 1
        ):
            self._bytes -= len(self._messages.popleft())
            self._dropped += 1
        self._stirred.set()

    def close(self, failed: bool = False) -> None:
        """No more messages come; what waits is still delivered."""
        self.is_closed = True
        self.failed = self.failed or failed
        self._stirred.set()

    def source_ended(self) -> None:
        self._sources -= 1
        if self._sources == 0:
            self.close()

    async def take(self, wait_s: float) -> bytes | None:
        """All that waits, as one piece; b"" after `wait_s` in silence; None at the end."""
        if not self._messages and not self.is_closed:
            await self._wait_stirred(wait_s)
        if not self._messages:
            return None if self.is_closed else b""
        piece = b"".join(self._messages)
        if self._dropped:
            piece = self._note(self._dropped) + piece + self._renewed()
        self._messages.clear()
        self._bytes = self._dropped = 0
        return piece

    async def _wait_stirred(self, wait_s: float) -> None:
        self._stirred.clear()
        try:
            await asyncio.wait_for(self._stirred.wait(), wait_s)
        except TimeoutError:
            pass


class Readers:
    """Every open stream of an application: counted, bounded, ended together at shutdown."""

    def __init__(self, limits: StreamLimits) -> None:
        self.limits = limits
        self._open: set[Backlog] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_full(self) -> bool:
        return self._closed or len(self._open) >= self.limits.readers_max

    def close_all(self) -> None:
        """End every stream, and take no more."""
        self._closed = True
        for backlog in self._open:
            backlog.close()

    async def stream(
        self,
        request: web.Request,
        sources: Sequence[AsyncIterator[T]],
        encode: Callable[[T], bytes],
        *,
        headers: dict[str, str],
        opening: Callable[[], bytes],
        dropped_note: Callable[[int], bytes],
        heartbeat: bytes = b"",
        renewed: Callable[[], bytes] = bytes,
    ) -> web.StreamResponse:
        """Send `opening` at once, then every message of `sources` until they end or the reader goes away.

        `renewed` follows what is left where messages were dropped: with it the reader knows everything again.

        `opening` is called after the sources are subscribed, so history and news have no gap between them.
        """
        response = web.StreamResponse(headers=headers)
        backlog = Backlog(self.limits, len(sources), dropped_note, renewed)
        self._open.add(backlog)
        try:
            try:
                await response.prepare(request)
            except ConnectionError:  # gone before the first byte: nothing to tell anybody
                return response
            async with asyncio.TaskGroup() as group:
                pumps = [group.create_task(pump(source, encode, backlog)) for source in sources]
                await asyncio.sleep(0)  # let the pumps subscribe
                await self._write(request, response, backlog, opening, heartbeat)
                for running in pumps:
                    running.cancel()
        finally:
            self._open.discard(backlog)
        return response

    async def _write(
        self, request: web.Request, response: web.StreamResponse, backlog: Backlog, opening: Callable[[], bytes], heartbeat: bytes
    ) -> None:
        """Never raises: a reader that left or stalls ends the stream, and the connection with it."""
        try:
            if first := opening():
                await self._send(request, response, first)
            await self._write_news(request, response, backlog, heartbeat)
        except (ConnectionError, TimeoutError):
            backlog.close(failed=True)
        except Exception:  # an edge: the head is out, so an error answer would land inside the stream
            log.exception("a stream failed; its reader is cut off")
            backlog.close(failed=True)
        if backlog.failed:
            abort(request)

    async def _write_news(self, request: web.Request, response: web.StreamResponse, backlog: Backlog, heartbeat: bytes) -> None:
        clock = asyncio.get_running_loop().time
        written_at = clock()
        while request.transport is not None and not request.transport.is_closing():
            piece = await backlog.take(min(self.limits.look_s, self.limits.heartbeat_s))
            if piece is None:
                return
            if not piece and clock() - written_at >= self.limits.heartbeat_s:
                piece = heartbeat
            if piece:
                await self._send(request, response, piece)
                written_at = clock()

    async def _send(self, request: web.Request, response: web.StreamResponse, piece: bytes) -> None:
        """However long it takes while the reader takes any of it; raises TimeoutError once it takes nothing."""
        writing = asyncio.ensure_future(response.write(piece))
        try:
            await asyncio.sleep(0)  # it hands over all it has before it waits
            left = unsent(request)
            while not (await asyncio.wait((writing,), timeout=self.limits.stall_s_max))[0]:
                before, left = left, unsent(request)
                if left == before:
                    raise TimeoutError
            await writing
        finally:
            writing.cancel()


async def pump(source: AsyncIterator[T], encode: Callable[[T], bytes], backlog: Backlog) -> None:
    try:
        async for message in source:
            backlog.put(encode(message))
    except Exception:  # an edge: the fault of one source must not look like the clean end of a stream
        log.exception("a source of events failed; its reader is cut off")
        backlog.close(failed=True)
    finally:
        if close := getattr(source, "aclose", None):
            await close()
        backlog.source_ended()


def unsent(request: web.Request) -> int:
    """Bytes that the kernel has not taken yet."""
    return request.transport.get_write_buffer_size() if request.transport is not None else 0


def abort(request: web.Request) -> None:
    """A broken stream ends in a reset, never as if it were complete."""
    if request.transport is not None:
        request.transport.abort()


def event(message: dict[str, Any]) -> bytes:
    """One server-sent event; JSON has no line ends inside, so one data line is enough."""
    head = f"id: {message['id']}\n" if isinstance(message.get("id"), int) else ""
    return f"{head}data: {json.dumps(message, separators=(',', ':'))}\n\n".encode()


def events_dropped(count: int) -> bytes:
    return event({"kind": "dropped", "count": count, "level": "warning", "text": f"{count} events were dropped: this reader is too slow"})


def log_event(line: str) -> bytes:
    return event({"line": line})


def log_events_dropped(count: int) -> bytes:
    return event({"line": lines_dropped_text(count), "dropped": count})


def log_text(line: str) -> bytes:
    return line.encode("utf-8", "replace") + b"\n"


def log_text_dropped(count: int) -> bytes:
    return log_text(lines_dropped_text(count))


def lines_dropped_text(count: int) -> str:
    return f"[greenroom: {count} lines dropped: this reader is too slow]"
