"""Connections to engines: one protocol class that parses answers, and the pool that keeps idle ones.

Never two requests at once on a connection, and none is used again unless its last exchange left no doubt.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, cast

import httptools

from .heads import SEEN, Headers, Mark, connection_options, keep_alive_s, known_name
from .limits import KIB, Limits, Stats
from .spool import Patched, SpoolFile
from .tokens import header_count

log = logging.getLogger(__name__)

WRITE_LOW: Final = 64 * KIB  # uvloop's own low mark is 16 bytes: every pause would last until all is sent
WRITE_HIGH: Final = 256 * KIB
PIECE: Final = 128 * KIB  # of a large body, at a time
JOINED_MAX: Final = 64 * KIB  # a body up to this size travels in one write with its head

Body = bytes | bytearray | SpoolFile | Patched

# How the end of an answer is told.
NONE, LENGTH, CHUNKED, UNTIL_CLOSE = range(4)

_CONTENT_LENGTH: Final = int(Mark.CONTENT_LENGTH)


class Line:
    """How a peer is reached: with TLS or without, how long that may take, how long an idle connection is kept."""

    __slots__ = ("connect_s", "idle_s", "tls")

    def __init__(self, tls: ssl.SSLContext | None, connect_s: float, idle_s: float) -> None:
        self.tls = tls
        self.connect_s = connect_s
        self.idle_s = idle_s


class Key(NamedTuple):
    """What makes two connections interchangeable.  `port` 0: `host` is the path of a Unix socket."""

    host: str
    port: int
    generation: int
    line: Line | None = None  # to a peer; None: to an engine of this machine


class Sink(Protocol):
    """The request an engine connection works for; every request sees exactly one ending of each connection."""

    def connected(self, upstream: Upstream) -> None: ...

    def unreachable(self, why: str) -> None: ...

    def answered(self, upstream: Upstream) -> None:
        """The head of the answer is complete."""

    def push(self, pieces: list[bytes], done: bool) -> None:
        """Body bytes of one read, and whether they are the last."""

    def completed(self) -> None:
        """The answer is complete; the connection is no longer ours."""

    def silent(self, upstream: Upstream, why: str) -> None:
        """The connection ended before one byte came."""

    def broke(self, why: str) -> None:
        """The answer broke off, or was no HTTP."""

    def switched(self, upstream: Upstream, early: bytes) -> None:
        """101: from now on the connection carries another protocol."""


class _Fault(Exception):
    """Stops the parser; the reason is in `Upstream.fault`, because a parser callback's exception may lose its context."""


class Upstream(asyncio.Protocol):
    """One connection to an engine."""

    __slots__ = (
        "accel",
        "bad_framing",
        "body",
        "cache_control",
        "closed",
        "content_type",
        "done",
        "encoded",
        "fault",
        "fed_bytes",
        "framing",
        "headed",
        "heard",
        "held",
        "idle_s",
        "idle_until",
        "interim",
        "interims",
        "is_head",
        "is_large",
        "keep",
        "keeps_cors",
        "key",
        "length",
        "lines",
        "loop",
        "offset",
        "options",
        "out",
        "parser",
        "pool",
        "raw",
        "reused",
        "sent",
        "sink",
        "size",
        "status",
        "surplus",
        "told_tokens",
        "transport",
        "upgrade",
        "write_paused",
    )

    transport: asyncio.Transport

    def __init__(self, pool: Pool, key: Key) -> None:
        self.pool = pool
        self.key = key
        self.parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self.sink: Sink | None = None
        self.reused = self.closed = self.held = self.write_paused = False
        self.idle_until = 0.0
        self.idle_s = pool.limits.pool_idle_s_max if key.line is None else key.line.idle_s
        self._reset()

    def _reset(self) -> None:
        self.done = self.headed = self.heard = self.surplus = self.interim = self.keep = False
        self.bad_framing = self.encoded = self.accel = self.cache_control = False
        self.fault = ""
        self.status = self.fed_bytes = self.interims = 0
        self.length: int | None = None
        self.told_tokens: int | None = None
        self.framing = UNTIL_CLOSE
        self.content_type = b""
        self.options: list[bytes] | None = None
        self.raw: Headers = []
        self.lines: list[bytes] = []
        self.out: list[bytes] = []

    # ------------------------------------------------------------------------------------------------------- sending

    def begin(self, sink: Sink, head: bytes, body: Body, size: int, *, is_head: bool, upgrade: bool, keeps_cors: bool) -> None:
        """Send one request; `head` is complete, `body` has `size` bytes and is kept by the caller until the end."""
        if self.heard:
            self._reset()
        self.sink = sink
        self.is_head = is_head
        self.upgrade = upgrade
        self.keeps_cors = keeps_cors  # False: who may read an answer is our decision, the engine's headers about it are dropped
        self.size = size
        if size <= JOINED_MAX and isinstance(body, (bytes, bytearray)):
            self.sent = True
            self.body: Body = b""
            self.transport.write(head + body if size else head)
        else:
            self.sent = False
            self.body = body
            self.offset = 0
            self.transport.write(head)
            self._pump()

    def _pump(self) -> None:
        body = self.body
        while not self.sent and not self.write_paused and not self.closed:
            offset = self.offset
            if isinstance(body, (bytes, bytearray)):
                piece = bytes(memoryview(body)[offset : offset + PIECE])
            else:
                piece = body.read(offset, min(PIECE, self.size - offset))
            assert piece, "a body shorter than announced"
            self.offset += len(piece)
            self.sent = self.offset >= self.size
            self.transport.write(piece)
        if self.sent:
            self.body = b""

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        if self.sink is not None and not self.sent:
            self._pump()

    def hold(self) -> None:
        """Read no more until `release`: the client is slow."""
        if not self.held and not self.closed:
            self.held = True
            self.transport.pause_reading()

    def release(self) -> None:
        if self.held and not self.closed:
            self.held = False
            self.transport.resume_reading()

    # ----------------------------------------------------------------------------------------------------- receiving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.loop = self.pool.loop
        self.transport.set_write_buffer_limits(high=WRITE_HIGH, low=WRITE_LOW)
        self.pool.opened(self)

    def data_received(self, data: bytes) -> None:
        sink = self.sink
        if sink is None:  # nobody asked: these bytes would be taken for the next answer
            self.abandon()
            return
        self.heard = True
        assert self.parser is not None
        self.is_large = self.fed_bytes + len(data) > self.pool.head_bytes_max
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as switch:
            self._switch(sink, data[switch.args[0] :])
            return
        except httptools.HttpParserError as exc:
            if self.sink is not sink:
                return
            if not self.done:
                self._broken(sink, self.fault or f"its answer is not valid HTTP ({exc})")
                return
            self.surplus = True  # an error after the end is not the client's problem
        if self.sink is not sink:  # given up as soon as its head was read
            return
        if not self.headed:
            self.fed_bytes += len(data)
            if self.fed_bytes > self.pool.head_bytes_max:
                self._broken(sink, f"the head of its answer is larger than {self.pool.limits.head_kib_max} KiB")
            return
        out = self.out
        if out:
            self.out = []
        sink.push(out, self.done)
        if self.done:
            self._finish(sink)

    def on_message_begin(self) -> None:
        if self.done:
            self.surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.headed:  # else a trailer, or a second answer
            self.raw.append((name, value))

    def _read_headers(self) -> None:
        raw = self.raw
        limits = self.pool.limits
        if len(raw) > limits.headers_max or (self.is_large and sum(len(n) + len(v) for n, v in raw) > self.pool.head_bytes_max):
            raise self._faulty("the head of its answer is too large")
        lines = self.lines
        for name, value in raw:
            mark = (SEEN.get(name) or known_name(name))[1]
            if mark:
                value = value.strip(b" \t")
                if mark == _CONTENT_LENGTH:
                    self.length = int(value)
                    continue
                if not self._marked(mark, value):
                    continue
            lines.append(b"%b: %b\r\n" % (name, value))

    def _marked(self, mark: int, value: bytes) -> bool:
        """Note a header that means something here; whether it also passes."""
        match mark:
            case Mark.TRANSFER_ENCODING:
                self.bad_framing = self.framing == CHUNKED or value.lower() != b"chunked"
                self.framing = CHUNKED
                return False
            case Mark.CONTENT_TYPE:
                self.content_type = value
            case Mark.CONTENT_ENCODING:
                self.encoded = value.lower() != b"identity"
            case Mark.TOKENS:
                self.told_tokens = header_count(value)
            case Mark.CORS:
                return self.keeps_cors
            case Mark.CACHE_CONTROL:
                self.cache_control = True
            case Mark.ACCEL:
                self.accel = True
            case Mark.CONNECTION:
                named = connection_options(value)
                if named:
                    self.options = (self.options or []) + named
                return False
            case Mark.KEEP_ALIVE:
                told_s = keep_alive_s(value)
                if told_s is not None:
                    self.idle_s = min(self.idle_s, told_s - 1.0)
                return False
            case Mark.HOP | Mark.UPGRADE | Mark.DEADLINE:
                return False
        return True

    def on_headers_complete(self) -> None:
        if self.done:
            return
        assert self.parser is not None
        status = self.parser.get_status_code()
        self._read_headers()
        if status < 200:
            self._interim(status)
            return
        if status > 599:
            raise self._faulty(f"its answer has the status {status}")
        if self.bad_framing:
            raise self._faulty("its answer has a transfer coding other than chunked")
        if self.is_head or status in (204, 304):
            self.framing = NONE
        elif self.framing != CHUNKED and self.length is not None:
            self.framing = LENGTH
        if self.options:
            self._drop_options()
        self.status = status
        self.headed = True
        assert self.sink is not None
        self.sink.answered(self)
        if self.is_head:  # the parser does not know that no body follows, so this connection ends here
            self.done = True

    def _drop_options(self) -> None:
        named = self.options or ()
        self.lines = [line for line in self.lines if line.partition(b":")[0].lower() not in named]

    def _interim(self, status: int) -> None:
        assert self.parser is not None
        self.interims += 1
        if status < 100 or self.interims > self.pool.limits.interim_max:
            raise self._faulty(f"it answered with the status {status}")
        if status == 101:
            if not self.upgrade or not self.parser.should_upgrade():
                raise self._faulty("it switched protocols without being asked")
        elif self.length is not None or self.framing == CHUNKED:
            raise self._faulty(f"its interim answer {status} has a body")
        self.status = status
        self.interim = True

    def on_body(self, data: bytes) -> None:
        if not self.done:
            self.out.append(data)

    def on_message_complete(self) -> None:
        if self.done:
            return
        if self.interim:
            self.interim = False
            if self.status != 101:
                self.status = 0
                self.raw.clear()
                self.lines.clear()
                self.options = None
                self.content_type = b""
                self.encoded = self.accel = self.cache_control = False
                self.told_tokens = None
            return
        assert self.parser is not None
        self.done = True
        self.keep = self.parser.should_keep_alive()  # only true in here: the parser forgets it afterwards

    # -------------------------------------------------------------------------------------------------------- endings

    def _faulty(self, why: str) -> _Fault:
        self.fault = why
        return _Fault(why)

    def _finish(self, sink: Sink) -> None:
        self.sink = None
        sent_all = self.sent and not self.transport.get_write_buffer_size()
        if self.keep and sent_all and not self.surplus and not self.is_head and not self.closed and self.idle_s > 0:
            self.release()
            self.pool.put(self)
        else:
            self.abandon()
        sink.completed()

    def _broken(self, sink: Sink, why: str) -> None:
        self.sink = None
        out, self.out = self.out, []
        self.abandon()
        if out and self.headed:
            sink.push(out, False)
        sink.broke(why)

    def _switch(self, sink: Sink, early: bytes) -> None:
        if not self.upgrade or self.status != 101:
            self._broken(sink, "it switched protocols without being asked")
            return
        self.sink = None
        sink.switched(self, early)

    def abandon(self) -> None:
        """Close at once; what was in flight is told to nobody."""
        self.sink = None
        self.body = b""
        if not self.closed:
            self.transport.abort()

    def detach(self) -> None:
        """The transport now belongs to another protocol."""
        self.sink = None
        self.parser = None
        if not self.closed:
            self.closed = True
            self.pool.lost(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.closed:
            return
        self.closed = True
        self.pool.lost(self)
        self.parser = None  # it holds our methods: without this only the garbage collector could free us
        self.body = b""
        sink, self.sink = self.sink, None
        if sink is None:
            return
        how = "closed the connection" if exc is None else f"broke the connection ({exc})"
        if not self.heard:
            sink.silent(self, f"it {how} without answering")
        elif self.headed and self.framing == UNTIL_CLOSE and exc is None:
            sink.push([], True)
            sink.completed()
        else:
            sink.broke(f"it {how} in the middle of its answer")


class Pool:
    """Idle engine connections, newest first, by address and generation; and the making of new ones."""

    def __init__(self, limits: Limits, stats: Stats, loop: asyncio.AbstractEventLoop) -> None:
        self.limits = limits
        self.stats = stats
        self.loop = loop
        self.head_bytes_max = limits.head_kib_max * KIB
        self._idle: dict[Key, list[Upstream]] = {}
        self._dialing: set[asyncio.Future[None]] = set()
        self._open: set[Upstream] = set()

    def take(self, key: Key) -> Upstream | None:
        """The connection used last, if there is one."""
        idle = self._idle.get(key)
        while idle:
            upstream = idle.pop()
            if not upstream.closed and not upstream.transport.is_closing():
                upstream.reused = True
                self.stats.reused += 1
                return upstream
        return None

    def put(self, upstream: Upstream) -> None:
        idle = self._idle.get(upstream.key)
        if idle is None:
            idle = self._idle[upstream.key] = []
        if len(idle) >= self.limits.pool_per_engine_max:
            idle.pop(0).abandon()
        upstream.idle_until = self.loop.time() + upstream.idle_s
        idle.append(upstream)

    def dial(self, key: Key, sink: Sink) -> None:
        """Open a connection; ends in exactly one of `sink.connected` and `sink.unreachable`.

        The one task of the data plane: opening a connection is a coroutine in asyncio.
        """
        task = asyncio.ensure_future(self._dial(key, sink))
        self._dialing.add(task)
        task.add_done_callback(self._dialing.discard)

    async def _dial(self, key: Key, sink: Sink) -> None:
        make: Callable[[], Upstream] = lambda: Upstream(self, key)  # noqa: E731
        line = key.line
        connect_s = self.limits.connect_s_max if line is None else line.connect_s
        try:
            async with asyncio.timeout(connect_s):
                if key.port == 0:
                    _, upstream = await self.loop.create_unix_connection(make, key.host)
                elif line is not None and line.tls is not None:
                    _, upstream = await self.loop.create_connection(make, key.host, key.port, ssl=line.tls, server_hostname=key.host)
                else:
                    _, upstream = await self.loop.create_connection(make, key.host, key.port)
        except TimeoutError:
            sink.unreachable(f"it took no connection within {connect_s:g} s")
        except ssl.SSLCertVerificationError as exc:
            sink.unreachable(f"its certificate cannot be trusted: {exc.verify_message}")
        except (OSError, UnicodeError) as exc:
            # Clients are told; the addresses of a peer, which some errors hold, are not their business.
            why = str(exc) if line is None else getattr(exc, "strerror", None) or "none of its addresses answers"
            sink.unreachable(f"it takes no connection ({why})")
        else:
            sink.connected(upstream)

    def opened(self, upstream: Upstream) -> None:
        self._open.add(upstream)
        self.stats.engine_connections += 1
        self.stats.engine_connections_now += 1

    def lost(self, upstream: Upstream) -> None:
        self._open.discard(upstream)
        self.stats.engine_connections_now -= 1
        idle = self._idle.get(upstream.key)
        if idle and upstream in idle:
            idle.remove(upstream)

    def sweep(self, now: float) -> None:
        """Close what was idle for too long."""
        old = [upstream for idle in self._idle.values() for upstream in idle if now >= upstream.idle_until]
        for upstream in old:
            upstream.abandon()
        for key in [key for key, idle in self._idle.items() if not idle]:
            del self._idle[key]

    def idle_count(self) -> int:
        return sum(map(len, self._idle.values()))

    def close(self) -> None:
        for task in tuple(self._dialing):
            task.cancel()
        for upstream in tuple(self._open):
            upstream.abandon()
