"""Client connections: their parsing, their requests one at a time, their time limits."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Final, cast

import httptools

from . import bodies, errors
from .admission import Refusal
from .exchange import Exchange
from .guards import Guards, is_preflight
from .heads import CONTINUE, METHODS, SEEN, Headers, Mark, connection_options, known_name
from .keys import Holder, Keys, words_of
from .limits import MIB
from .spool import SpoolError
from .targets import Kind, Route, route
from .tunnel import Tunnel
from .upstream import WRITE_HIGH, WRITE_LOW

if TYPE_CHECKING:
    from .server import Server

log = logging.getLogger(__name__)

TCP_CLOSED: Final = 7  # tcp_info.tcpi_state
DISCARDED_MAX: Final = 4 * MIB  # of input after the last request; then reading stops
DEADLINE_DIGITS_MAX: Final = 12

_INFERENCE: Final = Kind.INFERENCE
_HOST: Final = int(Mark.HOST)
_CONNECTION: Final = int(Mark.CONNECTION)
_TRANSFER_ENCODING: Final = int(Mark.TRANSFER_ENCODING)
_CONTENT_LENGTH: Final = int(Mark.CONTENT_LENGTH)
_CONTENT_TYPE: Final = int(Mark.CONTENT_TYPE)
_CONTENT_ENCODING: Final = int(Mark.CONTENT_ENCODING)
_UPGRADE: Final = int(Mark.UPGRADE)
_EXPECT: Final = int(Mark.EXPECT)
_ORIGIN: Final = int(Mark.ORIGIN)
_DEADLINE: Final = int(Mark.DEADLINE)
_CREDENTIAL: Final = int(Mark.CREDENTIAL)


class _Stop(Exception):
    """Stops the parser.  What is to be answered is already queued: an exception out of a callback may lose its context."""


class Client(asyncio.Protocol):
    """One client connection: parses, queues, answers one request at a time."""

    __slots__ = (
        "_advancing",
        "_ahead",
        "_ahead_bytes",
        "_body_bytes",
        "_closing",
        "_completed",
        "_content_length",
        "_current",
        "_discarded",
        "_fed",
        "_flags",
        "_head_done",
        "_host",
        "_host_judged",
        "_is_chunked",
        "_is_large",
        "_key_judged",
        "_later",
        "_muted",
        "_options",
        "_presented",
        "_probe_at",
        "_raw",
        "_reading_paused",
        "_requests",
        "_sealed",
        "_special",
        "_switching",
        "_target",
        "active",
        "deadline",
        "eof",
        "headers",
        "loop",
        "parser",
        "peer",
        "queue",
        "server",
        "sock",
        "stalled_size",
        "transport",
        "tunnel",
        "write_paused",
    )

    transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self.server = server
        self.loop = server.loop
        self.parser: httptools.HttpRequestParser | None = None
        self.active: Exchange | None = None  # being answered
        self.queue: deque[Exchange] | None = None  # complete, waiting for their turn
        self._current: Exchange | None = None  # its body is coming
        self.tunnel: Tunnel | None = None
        self.deadline = inf
        self.eof = self.write_paused = False
        self.stalled_size = 0
        self.peer = ""
        self.sock: socket.socket | None = None
        self._sealed = False  # no later request is read
        self._closing = False  # our side is closed
        self._switching = False  # an honoured upgrade: no more HTTP comes
        self._later = b""  # framing of a body that a refused upgrade hides from the parser
        self._muted = False  # a made-up head is being parsed
        self._advancing = self._reading_paused = False
        self._ahead: bytearray | None = None  # what follows an honoured upgrade
        self._ahead_bytes = self._discarded = self._requests = self._completed = 0
        self._body_bytes = 0
        self._probe_at = inf
        self._is_large = False  # this read may hold a head beyond its limit
        self._host_judged: tuple[Guards, bytes] | None = None
        self._key_judged: tuple[Keys, bytes, Holder] | None = None
        self.headers: Headers = []
        self._begin_head()

    def _begin_head(self) -> None:
        self._target = b""
        self._raw: Headers = []
        self._host = self._presented = b""
        self._special: dict[int, bytes] | None = None
        self._options: list[bytes] | None = None
        self._head_done = False
        self._is_chunked = False
        self._content_length = 0
        self._fed = 0  # bytes read for a head, or for a body, that is not complete

    # ------------------------------------------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        server = self.server
        server.clients.add(self)
        server.stats.clients += 1
        server.stats.clients_now += 1
        self.parser = httptools.HttpRequestParser(self)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH, low=WRITE_LOW)
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if isinstance(peer, tuple) else ""
        self.deadline = self.loop.time() + server.limits.head_s_max
        if len(server.clients) > server.limits.connections_max:
            message = f"There are already {server.limits.connections_max} connections (limits.connections_max); try again later."
            self._refuse(Refusal(503, "too_many_connections", message, retry_after_s=1.0), is_head=False)
            self._advance()

    def connection_lost(self, exc: Exception | None) -> None:
        server = self.server
        if self not in server.clients:
            return
        server.clients.discard(self)
        server.stats.clients_now -= 1
        self._closing = self._sealed = True
        self.parser = None  # it holds our methods: without this only the garbage collector could free us
        queued, self.queue = self.queue, None
        for exchange in (self._current, self.active, *(queued or ())):
            if exchange is not None:
                exchange.gone()
        self._current = self.active = None
        server.client_left()

    def eof_received(self) -> bool:
        """The client sends no more.  Whether it still reads is found out by probing."""
        self.eof = True
        if self._current is not None:  # will never be complete
            current, self._current = self._current, None
            current.gone()
        self._sealed = True
        if self._closing or (self.active is None and not self.queue):
            return False
        self._probe_at = self.loop.time()
        self._look_at_peer(self._probe_at)
        return True

    def pause_writing(self) -> None:
        self.write_paused = True
        self.stalled_size = 0
        self.deadline = self.loop.time() + self.server.limits.client_stall_s_max

    def resume_writing(self) -> None:
        self.write_paused = False
        if not self._closing:
            self.deadline = inf
            self._rearm()
        if self.active is not None and self.active.upstream is not None:
            self.active.upstream.release()

    # ------------------------------------------------------------------------------------------------------- parsing

    def data_received(self, data: bytes) -> None:
        if self._sealed:
            self._discard(data)
            return
        if self.active is not None:
            self._ahead_bytes += len(data)
        self._completed = 0
        self._is_large = self._fed + len(data) > self.server.head_bytes_max
        self._parse(data)
        if self.queue:
            self._advance()
        self._after_read(len(data))

    def _after_read(self, size: int) -> None:
        if self._sealed:
            return
        if self._current is not None or not self._head_done:
            self._check_unfinished(size)
        if self.active is None:
            if self._completed or self._current is not None or not self._head_done:  # blank lines buy no time
                self._rearm()
        elif self._ahead_bytes > self.server.ahead_bytes_max:
            self._pause_reading()

    def _parse(self, data: bytes) -> None:
        assert self.parser is not None
        try:
            self.parser.feed_data(data)
            return
        except httptools.HttpParserUpgrade as switch:
            rest = data[switch.args[0] :]
        except httptools.HttpParserError as exc:
            if not self._sealed:
                self._refuse_malformed(str(exc))
            return
        # Outside the handler: what is raised and caught below must not inherit its context.
        self._go_on_after_upgrade(rest)

    def _refuse_malformed(self, why: str) -> None:
        refusal = errors.bad_request("bad_http", f"This is not valid HTTP/1.1 ({why.lower()}); check the client.")
        current, self._current = self._current, None
        if current is not None:
            self._enqueue_refused(current, refusal)
        else:
            self._refuse(refusal, is_head=False)

    def _go_on_after_upgrade(self, rest: bytes) -> None:
        if self._sealed:
            return
        if self._switching:
            self._sealed = True
            self._ahead = bytearray()
            self._discard(rest)
            return
        # Not honoured: the parser skipped the body.  A new one reads it after a head of our own making.
        framing, self._later = self._later, b""
        self.parser = httptools.HttpRequestParser(self)
        self._muted = True
        self._parse(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
        if rest and not self._sealed:
            self._parse(rest)

    def on_url(self, part: bytes) -> None:
        if self._muted:
            return
        if self._head_done:
            self._begin_head()
        self._target += part
        if len(self._target) > self.server.target_bytes_max:
            limit = self.server.limits.target_kib_max
            message = f"The request target is longer than {limit} KiB (limits.target_kib_max); shorten it."
            self._stop(Refusal(414, "target_too_long", message))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_done:  # else a trailer
            self._raw.append((name, value))

    def _read_headers(self) -> int:
        """Sort the headers out; the number of Host headers."""
        raw = self._raw
        limits = self.server.limits
        if len(raw) > limits.headers_max or (self._is_large and sum(len(n) + len(v) for n, v in raw) > self.server.head_bytes_max):
            self._stop(self._head_too_large())
        hosts = 0
        headers: Headers = []
        for name, value in raw:
            lower, mark = SEEN.get(name) or known_name(name)
            if mark:
                value = value.strip(b" \t")
                if mark == _HOST:
                    hosts += 1
                    self._host = value
                elif mark == _CONTENT_LENGTH:
                    self._content_length = int(value)
                elif mark == _CREDENTIAL:
                    self._presented += lower + b" " + value + b"\n"
                else:
                    self._read_marked(mark, value)
            headers.append((lower, value))
        self.headers = headers
        return hosts

    def _read_marked(self, mark: int, value: bytes) -> None:
        if mark == _CONNECTION:
            named = connection_options(value)
            if named:
                self._options = (self._options or []) + named
        elif mark == _TRANSFER_ENCODING:
            if self._is_chunked or value.lower() != b"chunked":
                message = "Transfer-Encoding must be exactly `chunked`; send it so, or with a Content-Length."
                self._stop(errors.bad_request("bad_framing", message))
            self._is_chunked = True
        else:
            if self._special is None:
                self._special = {}
            self._special[mark] = value

    def _head_too_large(self) -> Refusal:
        limits = self.server.limits
        size = f"is larger than {limits.head_kib_max} KiB (limits.head_kib_max)"
        message = f"The request head {size} or has more than {limits.headers_max} headers (limits.headers_max); send less."
        return Refusal(431, "head_too_large", message)

    def on_headers_complete(self) -> None:
        if self._muted:
            self._muted = False
            return
        if self._sealed:
            raise _Stop
        self._head_done = True
        parser = self.parser
        assert parser is not None
        method = parser.get_method()
        version = parser.get_http_version()
        hosts = self._read_headers()
        refusal = self._refuse_head(method, version, hosts)
        if refusal is not None:
            self._stop(refusal, is_head=method == b"HEAD")
        self._requests += 1
        plane = self.server.plane
        self.server.stats.requests += 1
        found = route(method, self._target, plane.catalog)
        exchange = Exchange(self, method, self.headers, found, version == "1.1")
        exchange.options = self._options
        self._fed = self._body_bytes = 0
        special = self._special
        if special is not None:
            self._read_special(exchange, special)
            if _UPGRADE in special and parser.should_upgrade():
                self._choose_upgrade(exchange, special[_UPGRADE])
        has_body = self._is_chunked or self._content_length > 0
        refusal, closes = self._judge(exchange, found, has_body)
        if refusal is not None:
            if closes or has_body or exchange.upgrade or self._later:
                self._enqueue_refused(exchange, refusal)
                raise _Stop
            exchange.refusal = refusal
        self._current = exchange
        if special is not None and _EXPECT in special and has_body and exchange.http11 and self.active is None and not self.queue:
            self.transport.write(CONTINUE)

    def _refuse_head(self, method: bytes, version: str, hosts: int) -> Refusal | None:
        """What makes a head unacceptable, whoever sent it."""
        if method not in METHODS:
            return Refusal(501, "unknown_method", f"The method {errors.shown(method.decode('latin-1'))} is not supported here.")
        if version != "1.1":
            if version != "1.0":
                return Refusal(505, "bad_version", f"HTTP/{version} is not spoken here; use HTTP/1.1.")
            if self._is_chunked:
                return errors.bad_request("bad_framing", "HTTP/1.0 has no Transfer-Encoding; send a Content-Length.")
        if hosts != 1 and (version == "1.1" or hosts):
            return errors.bad_request("bad_host", f"A request needs exactly one Host header; this one has {hosts}.")
        if self._target[:1] != b"/" or b"#" in self._target:
            return errors.bad_request("bad_target", "The request target must be a path: it begins with `/` and has no `#`.")
        special = self._special
        if special is not None and _EXPECT in special and special[_EXPECT].lower() != b"100-continue":
            return Refusal(417, "bad_expectation", "Only `Expect: 100-continue` can be met; leave the header out.")
        return None

    def _read_special(self, exchange: Exchange, special: dict[int, bytes]) -> None:
        exchange.content_type = content_type = special.get(_CONTENT_TYPE, b"")
        exchange.origin = _ORIGIN in special
        if content_type != b"application/json":
            exchange.holds_form = bodies.is_form(content_type)
        told = special.get(_DEADLINE)
        if told is not None and told.isdigit() and len(told) <= DEADLINE_DIGITS_MAX:
            exchange.deadline_s = int(told) / 1000  # a longer number is a deadline that nobody lives to see: none

    def _choose_upgrade(self, exchange: Exchange, protocol: bytes) -> None:
        """Honour a WebSocket; otherwise see to it that the body is read as a body.

        Whether it is honoured is told from the bytes alone: only the first request of a connection may become a tunnel.
        """
        assert exchange.route is not None
        has_body = self._is_chunked or self._content_length > 0
        tunnels = exchange.route.kind in (Kind.UPSTREAM, Kind.INFERENCE)
        if exchange.method == b"GET" and protocol.lower() == b"websocket" and not has_body and exchange.http11 and tunnels:
            if self._requests > 1:
                self._stop(errors.bad_request("late_upgrade", "A WebSocket must be the first request of its connection; open a new one."))
            exchange.upgrade = self._switching = True
            return
        if self._is_chunked:
            self._later = b"Transfer-Encoding: chunked\r\n"
        else:
            self._later = b"Content-Length: %d\r\n" % self._content_length
        if any(name == b"connection" and b"close" in value.lower() for name, value in self.headers):
            self._later += b"Connection: close\r\n"

    def _judge(self, exchange: Exchange, found: Route, has_body: bool) -> tuple[Refusal | None, bool]:
        """(refusal by our rules or None, whether the connection closes even when nothing more was announced)."""
        plane = self.server.plane
        kind = found.kind
        refusal = self._judge_origin(plane.guards, exchange, found)
        if refusal is not None:
            return refusal, True
        if exchange.origin and kind is Kind.UPSTREAM and is_preflight(exchange.method, exchange.headers):
            exchange.route = found = Route(Kind.PREFLIGHT, found.path)
            kind = found.kind
        if found.needs and plane.keys.required:
            holder = self._judge_key(plane.keys, exchange)
            if holder is None:
                return errors.bad_key(), True
            exchange.holder = holder
            if not holder.scopes & found.needs:
                return errors.scope_missing(words_of(found.needs)), False
        if found.error is not None:
            return self._fit_for(exchange.holder, found), False
        if self._special is not None and _DEADLINE in self._special:
            told = self._special[_DEADLINE]
            if not told.isdigit() or not told.strip(b"0"):
                return errors.bad_deadline(told), False
        if has_body:
            if self._content_length > exchange.size_max():
                return errors.body_too_large(exchange.size_max(), exchange.size_limit()), True
            if kind is Kind.INFERENCE and self._special is not None and _CONTENT_ENCODING in self._special:
                return bodies.encoding_refusal(self._special[_CONTENT_ENCODING]), True
        return None, False

    def _judge_origin(self, guards: Guards, exchange: Exchange, found: Route) -> Refusal | None:
        """Without an Origin, and outside the control plane, only the host counts: the same one is judged once."""
        depends_on_host = not exchange.origin and found.kind is not Kind.CONTROL
        if depends_on_host:
            judged = self._host_judged
            if judged is not None and judged[0] is guards and judged[1] == self._host:
                return None
        refusal = guards.check(exchange.method, found.kind, exchange.headers, changes=found.changes)
        if refusal is None and depends_on_host:
            self._host_judged = (guards, self._host)
        return refusal

    def _judge_key(self, keys: Keys, exchange: Exchange) -> Holder | None:
        """Who holds the key.  A connection that presents what it presented before is not judged again."""
        judged = self._key_judged
        if judged is not None and judged[0] is keys and hmac.compare_digest(judged[1], self._presented):
            return judged[2]
        holder = keys.check(exchange.headers)
        if holder is not None:
            self._key_judged = (keys, self._presented, holder)
        return holder

    def _fit_for(self, holder: Holder, found: Route) -> Refusal:
        """A route's error; one that proposes models proposes none that the key may not use."""
        assert found.error is not None
        only = holder.allowed(self.server.plane.catalog)
        if only is None or found.error.code != "model_not_found" or found.name is None:
            return found.error
        return errors.unknown_model(found.name, errors.near_names(found.name, self.server.plane.catalog, only))

    def on_body(self, data: bytes) -> None:
        current = self._current
        if current is None or self._sealed:
            return
        self._body_bytes += len(data)
        if not current.size and len(data) <= self.server.spool_after_bytes:  # nearly always: the whole body
            current.body = data
            current.size = len(data)
            return
        try:
            refusal = current.take(data)
        except SpoolError as exc:
            refusal = exc.refusal
        except bodies.BadBody as exc:
            refusal = exc.refusal
        if refusal is not None:
            self._current = None
            self._enqueue_refused(current, refusal)
            raise _Stop

    def on_message_complete(self) -> None:
        if self._later:  # the parser's end of a message whose upgrade was not honoured: its body is still to come
            return
        current = self._current
        if current is None or self._sealed:
            return
        assert self.parser is not None
        self._current = None
        self._completed += 1
        if not current.upgrade:
            current.keep = self.parser.should_keep_alive()  # only true in here: the parser forgets it afterwards
            if not current.keep:
                self._sealed = True
        self._enqueue(current)

    # ------------------------------------------------------------------------------------------------------ refusing

    def _stop(self, refusal: Refusal, *, is_head: bool = False) -> None:
        """Refuse the head under way and everything behind it; raises to stop the parser."""
        self._refuse(refusal, is_head=is_head)
        raise _Stop

    def _refuse(self, refusal: Refusal, *, is_head: bool) -> None:
        exchange = Exchange(self, b"HEAD" if is_head else b"GET", [], None, True)
        self._enqueue_refused(exchange, refusal)

    def _enqueue_refused(self, exchange: Exchange, refusal: Refusal) -> None:
        exchange.refusal = refusal
        exchange.keep = False
        self._sealed = True
        self._enqueue(exchange)

    def _enqueue(self, exchange: Exchange) -> None:
        if self.queue is None:
            self.queue = deque()
        self.queue.append(exchange)

    def _check_unfinished(self, size: int) -> None:
        """Bound what is neither body nor a finished head."""
        if self._completed == 0:  # else most of this read belonged to finished requests
            self._fed += size
        if self._current is None:
            if self._fed > self.server.head_bytes_max:
                self._refuse(self._head_too_large(), is_head=False)
                self._advance()
        elif self._is_chunked and self._fed - self._body_bytes > self.server.overhead_bytes_max + 8 * self._body_bytes:
            current, self._current = self._current, None
            limit = self.server.limits.overhead_kib_max
            message = f"The body's chunks carry more than {limit} KiB of framing (limits.overhead_kib_max); send larger chunks."
            self._enqueue_refused(current, errors.bad_request("bad_framing", message))
            self._advance()

    # ------------------------------------------------------------------------------------------------- one at a time

    def _advance(self) -> None:
        """Start what is next; a loop, because an exchange may end before `start` returns."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self.active is None and self.queue and not self._closing:
                exchange = self.active = self.queue.popleft()
                if not self.write_paused:
                    self.deadline = inf
                try:
                    exchange.start()
                except Exception:
                    log.exception("a request could not be served")
                    exchange.failed()
        finally:
            self._advancing = False
        if self.active is None and not self._closing and not self.queue:
            self._rest()

    def finished(self, exchange: Exchange) -> None:
        """An exchange ended."""
        if exchange is not self.active:
            return
        self.active = None
        if self.tunnel is not None or self._closing:
            return
        if not exchange.keep:
            self.close_gently()
        elif self._advancing:
            return
        elif self.queue:
            self._advance()
        else:
            self._rest()

    def _rest(self) -> None:
        """Nothing to answer."""
        self._ahead_bytes = 0
        if self._sealed or self.server.draining:
            if self._current is None:
                self.close_gently()
            return
        self._resume_reading()
        self._rearm()

    def _rearm(self) -> None:
        """Set the deadline for what the client does next."""
        if self.active is not None or self._closing or self.write_paused:
            return
        limits = self.server.limits
        now = self.loop.time()
        if self._current is not None:
            self.deadline = now + limits.body_idle_s_max
        elif not self._head_done and (self._target or self._fed):
            self.deadline = min(self.deadline, now + limits.head_s_max)
        else:
            self.deadline = now + limits.idle_s_max

    def _discard(self, data: bytes) -> None:
        if self._switching and self._ahead is not None and not self._closing:
            self._ahead += data
            if len(self._ahead) > self.server.ahead_bytes_max:
                self._pause_reading()
            return
        self._discarded += len(data)
        if self._discarded > DISCARDED_MAX and not self._closing:
            self._pause_reading()

    def take_ahead(self) -> bytes:
        """What the client sent behind its upgrade."""
        ahead, self._ahead = self._ahead, None
        self._resume_reading()
        return bytes(ahead or b"")

    def _pause_reading(self) -> None:
        if not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()

    # -------------------------------------------------------------------------------------------------------- closing

    def close_gently(self) -> None:
        """Close our side, read on for a moment: a plain close could take the answer from a client that still sends."""
        if self._closing:
            return
        self._closing = self._sealed = True
        self.queue = None
        if self.transport.is_closing():
            return
        if self.eof:
            self.transport.close()
        else:
            self._resume_reading()
            self.transport.write_eof()
        self.stalled_size = self.transport.get_write_buffer_size()
        self._arm_linger()

    def _arm_linger(self) -> None:
        limits = self.server.limits
        self.deadline = self.loop.time() + (limits.client_stall_s_max if self.stalled_size else limits.linger_s_max)

    def cut_short(self, *, reset: bool) -> None:
        """End the connection so that the client notices that its answer is not whole."""
        if reset:
            self._closing = self._sealed = True
            if self.sock is None:
                self.sock = self.transport.get_extra_info("socket")
            if self.sock is not None and self.sock.family != socket.AF_UNIX:
                with contextlib.suppress(OSError):
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            self.transport.abort()
        else:
            self.close_gently()

    def sweep(self, now: float) -> None:
        """Called every `sweep_s`."""
        tunnel = self.tunnel
        if tunnel is not None:
            tunnel.tick(now)
        active = self.active
        if active is not None:
            active.tick(now)
            if self.eof and tunnel is None and self.active is active:
                self._look_at_peer(now)
        if now >= self.deadline:
            self._expired()

    def _expired(self) -> None:
        if self.write_paused or self._closing:
            size = self.transport.get_write_buffer_size()
            if size and size != self.stalled_size:  # it takes bytes, if slowly
                self.stalled_size = size
                self.deadline = self.loop.time() + self.server.limits.client_stall_s_max
            elif self._closing and not size and self.stalled_size:
                self.stalled_size = 0
                self._arm_linger()
            else:
                self.transport.abort()
            return
        self.deadline = inf
        current, self._current = self._current, None
        limits = self.server.limits
        if current is not None:
            message = f"No byte of the body came for {limits.body_idle_s_max:g} s (limits.body_idle_s_max); send it again."
            self._enqueue_refused(current, Refusal(408, "body_timeout", message))
        elif not self._head_done and self._target:
            message = f"The request head did not come whole within {limits.head_s_max:g} s (limits.head_s_max); send it again."
            self._refuse(Refusal(408, "head_timeout", message), is_head=False)
        else:
            self.close_gently()
            return
        self._advance()

    def _look_at_peer(self, now: float) -> None:
        """Tell a client that half-closed (served on) from one that left: after a probe the kernel knows."""
        if self.sock is None:
            self.sock = self.transport.get_extra_info("socket")
        sock = self.sock
        if sock is None or sock.family == socket.AF_UNIX:
            return
        try:
            state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except OSError:
            state = TCP_CLOSED
        if state == TCP_CLOSED:
            self.transport.abort()
            return
        if now >= self._probe_at and self.active is not None and not self.write_paused:
            probe = self.active.probe()
            if probe is not None:
                self._probe_at = now + self.server.limits.probe_every_s
                self.server.stats.probes += 1
                self.transport.write(probe)
