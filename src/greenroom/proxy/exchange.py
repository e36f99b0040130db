"""One request from its head to its end: asks for an admission, sends it to the engine, writes the answer.

Between two phases an exchange only waits to be called: by the scheduler's shell (Waiter), by an engine's
connection (Sink), by its client, or by the sweep.  `_end` runs exactly once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import IntEnum
from math import inf
from typing import TYPE_CHECKING, Final, cast

import msgspec

from . import bodies, errors, listing
from .admission import Far, FarTicket, Grant, ModelRoute, Refusal, Ticket, Wish
from .heads import (
    BODY_METHODS,
    CONTINUE,
    DROPPED,
    EVENTS,
    FROM_A_FRONT,
    KINDS,
    LAST_CHUNK,
    NAMES_A_MODEL,
    Headers,
    body_kind,
    far_lines,
    is_event_stream,
    request_head,
    response_head,
    safe_value,
    without_protocol_keys,
)
from .keys import ANYONE, NOBODY, STRIPPED, Holder, Load, is_script
from .limits import KIB, MIB
from .peers import HOPS_MAX, hops
from .record import Record, path_text, start_lines
from .request_body import RequestBody
from .targets import Kind, Route, with_model
from .tokens import SHORT_BYTES, Edges, count
from .tunnel import Tunnel
from .upstream import CHUNKED, LENGTH, NONE, UNTIL_CLOSE, Key, Upstream

if TYPE_CHECKING:
    from .client import Client

from greenroom.core.facts import Outcome

log = logging.getLogger(__name__)


class Phase(IntEnum):
    READ = 0  # its head is read; its body may still come
    ASKING = 1  # inside `Admissions.ask`
    WAITING = 2  # for an admission
    CONNECTING = 3  # admitted, no engine connection yet
    SENT = 4  # the engine has it
    TUNNEL = 5
    OVER = 6


KEYS_DROPPED: Final = DROPPED | STRIPPED
FAR_DROPPED: Final = (
    KEYS_DROPPED
    | FROM_A_FRONT
    | NAMES_A_MODEL
    | {b"cookie", b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"}
)
"""Not for peers: who asks, for what, and which page may, was settled here."""

FAR_BODY_DROPPED: Final = FAR_DROPPED | {b"content-type"}
"""How a body was read is said anew."""

HOPS_HEADER: Final = b"x-greenroom-hops"
_INFERENCE: Final = Kind.INFERENCE
_ASKING: Final = Phase.ASKING
_WAITING: Final = Phase.WAITING
_CONNECTING: Final = Phase.CONNECTING
_SENT: Final = Phase.SENT
_TUNNEL: Final = Phase.TUNNEL
_OVER: Final = Phase.OVER
_OK: Final = Outcome.OK
_SSE_HEAD: Final = (b"Content-Type: text/event-stream\r\n", b"Cache-Control: no-cache\r\n", b"X-Accel-Buffering: no\r\n")
_CHUNKED_LINE: Final = b"Transfer-Encoding: chunked\r\n"
_CLOSE_LINE: Final = b"Connection: close\r\n"


def _host_header(host: str, port: int) -> bytes:
    name = f"[{host}]" if ":" in host else host
    return b"%b:%d" % (name.encode("ascii" if name.isascii() else "idna"), port)


class Exchange(RequestBody):
    """A request and its answer.  Implements `admission.Waiter` and `upstream.Sink`."""

    __slots__ = (
        "admitted_at",
        "asked_at",
        "asked_name",
        "begun_at",
        "bytes_out",
        "collected",
        "collected_max",
        "comment_at",
        "counted",
        "deadline_s",
        "early",
        "ends",
        "first_byte_s",
        "framing",
        "grant",
        "headers",
        "heard",
        "heard_at",
        "holder",
        "http11",
        "is_event_stream",
        "keep",
        "key",
        "length",
        "load",
        "looked_at",
        "method",
        "model",
        "options",
        "origin",
        "pending",
        "phase",
        "refusal",
        "request",
        "retried",
        "status",
        "stream",
        "taken",
        "ticket",
        "told_tokens",
        "upgrade",
        "upstream",
        "written_for",
    )

    def __init__(self, client: Client, method: bytes, headers: Headers, route: Route | None, http11: bool) -> None:
        super().__init__(client, route)
        self.method = method
        self.headers = headers
        self.http11 = http11
        self.keep = False
        self.refusal: Refusal | None = None
        self.phase = Phase.READ
        self.origin = self.upgrade = self.stream = self.early = self.retried = self.is_event_stream = self.heard = False
        self.deadline_s: float | None = None
        self.options: list[bytes] | None = None  # header names that `Connection` limits to this hop
        self.holder: Holder = NOBODY
        self.load: Load | None = None  # where it counts
        self.model: ModelRoute | None = None
        self.ticket: Ticket | None = None
        self.request = 0
        self.grant: Grant | None = None
        self.key: Key | None = None
        self.upstream: Upstream | None = None
        self.status = self.bytes_out = 0
        self.taken = 0  # of its body, when that was last looked at
        self.framing = NONE
        self.length: int | None = None
        self.pending: bytes | None = None  # the answer's head, not yet written
        self.collected: bytearray | None = None  # an answer that is not relayed as it comes
        self.collected_max = 0
        self.looked_at = 0  # its body: an event stream, or JSON, which may tell its tokens
        self.ends: Edges | bytes | None = None  # what is kept of it; bytes: all
        self.counted = False
        self.told_tokens: int | None = None  # in the answer's head
        self.begun_at = client.loop.time()
        self.asked_at = self.admitted_at = self.heard_at = 0.0
        self.asked_name = ""
        self.written_for: Far | None = None  # whose body `outgoing` gives; None: this machine's
        self.first_byte_s: float | None = None
        self.comment_at = inf

    # ----------------------------------------------------------------------------------------------------------- starting

    def start(self) -> None:
        """Its turn has come and its body is complete."""
        self.client.server.stats.bytes_in += self.size
        if self.refusal is not None:
            self.refuse(self.refusal)
            return
        assert self.route is not None
        try:
            route = self.route
            if route.redirect is not None:
                self.redirect(route.redirect)
            elif route.kind is _INFERENCE:
                self._start_inference()
            else:
                _STARTS[route.kind](self)
        except bodies.BadBody as exc:
            self.refuse(exc.refusal)

    def _start_inference(self) -> None:
        route = self.route
        assert route is not None
        name = route.name
        if self.size or self.method == b"POST":
            peek = self.peek()
            if route.is_settled and peek.model is not None and peek.model != name:
                self.refuse(errors.two_models(name or "", peek.model))
                return
            name = peek.model or name
            self.stream = peek.stream
        self._ask(route, name)

    def _start_upstream(self) -> None:
        assert self.route is not None
        self._ask(self.route, self.route.name)

    def _ask(self, route: Route, name: str | None) -> None:
        plane = self.client.server.plane
        catalog = plane.catalog
        asked = name or catalog.default_model
        if asked is None:
            self.refuse(errors.no_model(was_form=self.was_form()))
            return
        model_id = catalog.names.get(asked)
        if model_id is None:
            self.refuse(errors.unknown_model(asked, errors.near_names(asked, catalog, self.holder.allowed(catalog))))
            return
        holder = self.holder
        if holder.models is not None and not holder.may_use(model_id, catalog):
            self.refuse(errors.key_not_allowed(asked))
            return
        model = self.model = catalog.models[model_id]
        if not route.may_start and not plane.admissions.is_ready(model_id):
            self.refuse(errors.not_ready(model_id))
            return
        if route.kind is _INFERENCE and self.size and not model.is_remote:
            self.rewrite(route, model, asked)
        if holder.limit is not None and not self._counts(holder.load, holder.limit):
            return
        self.asked_at = self.client.loop.time()
        if self.stream:
            self._comment_soon(route, model)
        self.phase = _ASKING
        path = path_text(route.path)
        client = holder.name or self.client.peer
        wish = Wish(model_id, asked, path, client, deadline_s=self.deadline_s, glance=not route.may_start)
        if model.may_travel:
            is_raw = route.kind is not _INFERENCE
            if is_raw and model.is_remote:  # it was not when the head was read
                self.refuse(errors.moved(model_id))
                return
            self.asked_name = name or ""  # "": the default, which a peer has to be told
            # What is asked of one engine raw (/upstream) is not for another server.
            wish.hops = HOPS_MAX if is_raw else hops([value for name, value in self.headers if name == HOPS_HEADER])
        self.ticket = plane.admissions.ask(wish, self)
        if self.phase is _ASKING:
            self.phase = _WAITING
        elif self.phase is _CONNECTING:
            self._connect()

    def _comment_soon(self, route: Route, model: ModelRoute) -> None:
        """A streaming client that has to wait is told for what."""
        if model.keepalive and self.http11 and route.kind is _INFERENCE and self.method == b"POST":
            self.comment_at = self.client.loop.time() + self.client.server.limits.keepalive_after_s

    def _counts(self, load: Load, limit: int) -> bool:
        """Count it among the requests of its key, unless there are too many."""
        if load.now >= limit:
            self.refuse(errors.key_busy(limit))
            return False
        load.now += 1
        self.load = load
        return True

    def _start_models(self) -> None:
        plane = self.client.server.plane
        catalog = plane.catalog
        only = self.holder.allowed(catalog)
        assert self.route is not None
        name = self.route.name
        if name is None:
            self._answer_json(200, listing.models_body(catalog, plane.admissions, only))
            return
        body = listing.model_body(catalog, plane.admissions, name)
        if body is None:
            self.refuse(errors.unknown_model(name, errors.near_names(name, catalog, only)))
        elif only is not None and catalog.names[name] not in only:
            self.refuse(errors.key_not_allowed(name))
        else:
            self._answer_json(200, body)

    def _start_health(self) -> None:
        self._answer_json(200, b'{"status":"ok"}')

    def _start_ready(self) -> None:
        if self.client.server.plane.ready() and not self.client.server.draining:
            self._answer_json(200, b'{"status":"ready"}')
        else:
            self._answer_json(503, b'{"status":"not ready"}')

    def _start_preflight(self) -> None:
        assert self.route is not None
        self._answer(204, self.client.server.plane.guards.preflight(self.headers, control=self.route.control))

    def _start_refused(self) -> None:
        assert self.route is not None
        error = self.route.error
        assert error is not None
        self.refuse(error)

    def _start_control(self) -> None:
        path = self.client.server.plane.control_socket
        if path is None:
            self.refuse(Refusal(503, "no_control", "The control plane is not running here; ask the operator for its address."))
            return
        self.key = Key(path, 0, 0)
        self.phase = _CONNECTING
        self._connect()

    # ----------------------------------------------------------------------------------------------- the scheduler's word

    def admitted(self, grant: Grant) -> None:
        """Waiter: send it there."""
        was = self.phase
        if was is _OVER:  # the client left while this word was under way
            assert self.ticket is not None
            self.ticket.finish(Outcome.CLIENT_GONE, 0, 0, None)
            return
        self.grant = grant
        if grant.wire is None:
            grant.wire = (Key(grant.host, grant.port, grant.generation), _host_header(grant.host, grant.port))
        self.key = grant.wire[0]
        self.admitted_at = self.heard_at = self.client.loop.time()
        self.comment_at = inf
        self.phase = _CONNECTING
        if was is not _ASKING:
            self._guarded(self._connect)

    def _write_for(self, far: Far | None) -> None:
        """The body as this one wants it, whatever was made of it for another; a peer reads every dialect itself."""
        self.source = self.plan = None
        self.written_for = far
        route, model = self.route, self.model
        if route is None or model is None or not self.size or route.kind is not _INFERENCE:
            return
        if far is not None:
            self.rewrite_far(far.route, self.asked_name)
        else:
            self.rewrite(route, model, self.asked_name or model.id)

    def refused(self, refusal: Refusal) -> None:
        """Waiter: not now, or never."""
        if self.phase is _OVER:
            return
        self.ticket = None
        self._guarded(lambda: self.refuse(refusal))

    def cut(self, code: str, message: str) -> None:
        """Waiter: end it with an error now."""
        if self.phase is _OVER:
            return
        if self.phase is _TUNNEL:
            tunnel = self.client.tunnel
            assert tunnel is not None
            tunnel.cut(message)
            return
        self.client.server.stats.cut += 1
        status = 410 if code == "cancelled" else 503  # by an operator: client libraries shall not ask again by themselves
        self._guarded(lambda: self._fail(Refusal(status, code, message), Outcome.CUT))

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a step that was called from outside; a fault of ours ends this exchange, and no other."""
        try:
            step()
        except bodies.BadBody as exc:
            self.refuse(exc.refusal)
        except Exception:
            log.exception("a request could not be relayed")
            self.failed()

    def failed(self) -> None:
        """A fault of ours: 500 when that can still be said."""
        if self.phase is not _OVER:
            refusal = Refusal(500, "internal", "Relaying failed for a reason that is greenroom's own fault; its log says more.")
            self._fail(refusal, Outcome.ENGINE_BROKE)

    # ------------------------------------------------------------------------------------------------------ to the engine

    def _connect(self) -> None:
        key, grant = self.key, self.grant
        assert key is not None
        if grant is not None and grant.far is not self.written_for:
            self._write_for(grant.far)
        pool = self.client.server.pool
        upstream = None if self.upgrade or self.retried else pool.take(key)
        if upstream is None:
            pool.dial(key, self)
        else:
            self._send(upstream)

    def _send(self, upstream: Upstream) -> None:
        self.phase = _SENT
        self.upstream = upstream
        grant = self.grant
        body, size = self.outgoing()
        control = grant is None
        assert self.key is not None
        assert self.route is not None
        extra = grant.secret_headers if grant is not None else self._who()
        dropped = KEYS_DROPPED if control or extra or self.client.server.plane.keys.required else DROPPED
        if grant is not None and grant.far is not None:
            dropped = FAR_BODY_DROPPED if self.size else FAR_DROPPED
            extra = [*extra, *self._for_peer(grant.far)]
        if self.options:
            dropped = dropped | frozenset(self.options)
        if self.plan is not None or self.early:
            dropped = dropped | {b"accept-encoding"}  # the answer has to be read, or is inside a stream that has begun
        path = self.plan.path if self.plan is not None else self.route.path
        if grant is not None and grant.far is not None:
            path = with_model(path, grant.far.route.use_model_name or grant.model, insert=not self.size)
        if grant is not None and grant.base_path:
            path = grant.base_path.encode("latin-1") + path
        host = self._client_host() if grant is None else grant.wire[1]
        length = size if size or self.method in BODY_METHODS else None
        headers = self.headers
        if self.upgrade and grant is not None and grant.far is not None:
            headers = without_protocol_keys(headers)
        head = request_head(self.method, path, host, headers, dropped, length, extra, self.upgrade)
        is_head = self.method == b"HEAD"
        upstream.begin(self, head, body, size, is_head=is_head, upgrade=self.upgrade, keeps_cors=control)

    def _for_peer(self, far: Far) -> Headers:
        told: Headers = [(HOPS_HEADER, b"%d" % far.hops)]
        if self.size:
            told.append((b"content-type", self.far_type()))
        if self.deadline_s is not None:
            left_s = self.deadline_s - (self.admitted_at - self.asked_at)
            told.append((b"x-greenroom-deadline-ms", b"%d" % max(1, round(left_s * 1000))))
        return told

    def _who(self) -> Headers:
        """For the control plane: who asks, as `keys` tells."""
        holder = self.holder
        assert self.route is not None
        if holder is NOBODY and self.route.needs and not self.client.server.plane.keys.required:
            holder = ANYONE
        return holder.told

    def _client_host(self) -> bytes:
        """For the control plane, which compares it with Origin."""
        return next((value for name, value in self.headers if name == b"host"), b"localhost")

    def connected(self, upstream: Upstream) -> None:
        """Sink: the connection asked for is open."""
        if self.phase is not _CONNECTING:
            upstream.abandon()
        elif upstream.closed:
            self.unreachable("it closed the connection at once")
        else:
            self._guarded(lambda: self._send(upstream))

    def unreachable(self, why: str) -> None:
        """Sink: no connection could be opened."""
        if self.phase is _CONNECTING:
            self._guarded(lambda: self._lost(why))

    def silent(self, upstream: Upstream, why: str) -> None:
        """Sink: the connection ended before one byte came.  The body is still held, so it can be sent again."""
        self.upstream = None
        if upstream.reused and not self.retried:
            self.retried = True
            self.client.server.stats.retried += 1
            self.phase = _CONNECTING
            self._guarded(self._connect)
        else:
            self._guarded(lambda: self._lost(why))

    def _lost(self, why: str) -> None:
        if self.ticket is None:
            self._fail(Refusal(502, "no_answer", f"The control plane does not answer: {why}."), Outcome.ENGINE_BROKE)
            return
        self.client.server.stats.returned += 1
        self.phase = _WAITING
        self.retried = True  # where it is admitted again it gets a fresh connection, and no further silent retry
        if self.stream and self.route is not None and self.model is not None:
            self._comment_soon(self.route, self.model)
        self.grant = self.key = None
        self.ticket.lost(why)

    # ---------------------------------------------------------------------------------------------------- from the engine

    def answered(self, upstream: Upstream) -> None:
        """Sink: the head of the answer.  It is written together with the first bytes of the body."""
        is_far = self.grant is not None and self.grant.far is not None
        if is_far and self._is_turned_down(upstream):
            return
        if self.grant is not None:
            self.first_byte_s = self.client.loop.time() - self.admitted_at
            if 200 <= upstream.status < 300 and not upstream.encoded:
                self.counted = True
                if upstream.told_tokens is not None:
                    self.told_tokens = upstream.told_tokens
        self.heard = True
        if upstream.sent and not (is_far and not self.early):  # another peer may need it, until the first byte
            self.forget_body()
        status = upstream.status
        if is_far:
            upstream.lines = far_lines(upstream.lines)
        if self.early:
            if status != 200 or not is_event_stream(upstream.content_type) or upstream.encoded:
                self._collect(self.client.server.limits.error_kib_max * KIB)
            self.length = upstream.length
            self.status = status
            return
        self.status = status
        if self.plan is not None:
            self._collect(self.client.server.limits.translate_mib_max * MIB)
            return
        kind = KINDS.get(upstream.content_type)
        if kind is None:
            kind = body_kind(upstream.content_type)
        self.looked_at = kind
        lines = upstream.lines
        if kind == EVENTS:
            self.is_event_stream = True
            if not upstream.accel:
                lines.append(b"X-Accel-Buffering: no\r\n")
            if not upstream.cache_control:
                lines.append(b"Cache-Control: no-cache\r\n")
        self.pending = response_head(status, lines, self._extra(), self._frame(upstream))

    def _is_turned_down(self, upstream: Upstream) -> bool:
        """Whether another peer is asked instead, or the answer is none that is relayed."""
        told = next((line for line in upstream.lines if line[:12].lower() == b"retry-after:"), b"")
        why = cast(FarTicket, self.ticket).answered(upstream.status, told[12:])
        if why:
            self._drop_upstream()
            self._guarded(lambda: self._lost(why))
        return bool(why)

    def _frame(self, upstream: Upstream) -> bytes:
        """Choose how the client is told the end; the lines for it."""
        framing = upstream.framing
        line = b""
        if framing == NONE:
            if upstream.length is not None and upstream.status != 204:
                line = b"Content-Length: %d\r\n" % upstream.length
        elif framing == LENGTH:
            line = b"Content-Length: %d\r\n" % (upstream.length or 0)
        elif self.http11:
            framing = CHUNKED
            line = _CHUNKED_LINE
        else:
            framing = UNTIL_CLOSE
            self.keep = False
        self.framing = framing
        self.length = upstream.length
        return line + self._connection_line()

    def _connection_line(self) -> bytes:
        if self.client.server.draining or self.upgrade:
            self.keep = False
        if not self.keep:
            return _CLOSE_LINE
        return b"" if self.http11 else b"Connection: keep-alive\r\n"

    def _extra(self) -> bytes:
        grant = self.grant
        if grant is None:
            return b""
        lines = start_lines(grant.model, grant.start) + b"X-Greenroom-Wait-Ms: %d\r\n" % grant.waited_ms
        if grant.far is not None:
            lines += b"X-Greenroom-Peer: %b\r\n" % grant.far.peer.encode("ascii")
        if self.origin:
            lines += b"".join(self.cors())
        return lines

    def cors(self) -> tuple[bytes, ...]:
        if not self.origin:
            return ()
        control = self.route is not None and self.route.control
        return self.client.server.plane.guards.cors(self.headers, control=control)

    def _collect(self, size_max: int) -> None:
        self.collected = bytearray()
        self.collected_max = size_max

    def push(self, pieces: list[bytes], done: bool) -> None:
        """Sink: body bytes of one read; one write to the client."""
        self.heard = True
        if self.collected is not None:
            self._push_collected(pieces, done)
            return
        pending = self.pending
        client = self.client
        if pending is None and len(pieces) == 1 and not done:  # nearly every chunk of a stream
            data = pieces[0]
            size = len(data)
            client.transport.write(b"%x\r\n%b\r\n" % (size, data) if self.framing == CHUNKED else data)
        else:
            out: list[bytes] = []
            if pending is not None:
                if self.grant is not None and self.grant.far is not None:
                    if not pieces and not done:
                        return  # a peer's head goes with its first byte: until then another may answer instead
                    if self.upstream is not None and self.upstream.sent:
                        self.forget_body()
                self.pending = None
                out.append(pending)
            size = sum(map(len, pieces))
            if self.framing == CHUNKED:
                if size:
                    out += (b"%x\r\n" % size, *pieces, b"\r\n")
                if done:
                    out.append(LAST_CHUNK)
            elif self.framing != NONE:
                out += pieces
            if out:
                client.transport.write(b"".join(out) if len(out) > 1 else out[0])
        self.bytes_out += size
        if self.looked_at and pieces:
            ends = self.ends
            if ends is None:
                if done and size <= SHORT_BYTES and len(pieces) == 1:
                    self.ends = pieces[0]  # as most answers come: nothing is copied
                else:
                    ends = self.ends = Edges()
                    ends.add(pieces)
            elif isinstance(ends, Edges):
                ends.add(pieces)
        if client.write_paused and not done and self.upstream is not None:
            self.upstream.hold()

    def _push_collected(self, pieces: list[bytes], done: bool) -> None:
        collected = self.collected
        assert collected is not None
        for piece in pieces:
            collected += piece
        if self.early:
            if done or len(collected) > self.collected_max:
                del collected[self.collected_max :]
                if not done:
                    self._drop_upstream()
                    self._guarded(self._tell_collected_error)
        elif len(collected) > self.collected_max:
            self._drop_upstream()
            limit = self.client.server.limits.translate_mib_max
            message = f"The engine's answer is larger than {limit} MiB, too large to be translated."
            self._fail(Refusal(502, "engine_broke", message), Outcome.ENGINE_BROKE)

    def _tell_collected_error(self) -> None:
        """The engine refused (or answered no event stream) after the client was told 200: an error event, then a cut."""
        status = self.status if self.status >= 400 else 502
        self._fail(Refusal(status, "engine_refused", _engine_message(self.status, bytes(self.collected or b""))), Outcome.ENGINE_BROKE)

    def completed(self) -> None:
        """Sink: the answer is complete."""
        if self.phase is _OVER:
            return
        self.upstream = None
        if self.collected is not None:
            self._guarded(self._tell_collected_error if self.early else self._translate)
            return
        self._end(_OK)

    def _translate(self) -> None:
        assert self.plan is not None
        other = self.plan.fallback(self.status)
        if other is not None:  # the engine speaks the other dialect
            self.plan = other
            self.source = other.body
            self.collected = None
            self.status = 0
            self.phase = _CONNECTING
            self._connect()
            return
        told = bytes(self.collected or b"")
        status, body = self.plan.answer(self.status, told)
        self.collected = None
        self.ends = Edges()
        self.ends.add([told])
        self._answer_json(status, body)

    def broke(self, why: str) -> None:
        """Sink: the answer broke off, or was no HTTP."""
        if self.phase is _OVER:
            return
        self.upstream = None
        if self._is_nothing_told():
            self._guarded(lambda: self._lost(why))
            return
        self.client.server.stats.engine_broke += 1
        who = f"The engine of {self.grant.model}" if self.grant is not None else "The control plane"
        if self.grant is not None and self.grant.far is not None:
            who = f"The peer {self.grant.far.peer}"
        refusal = Refusal(502, "engine_broke", f"{who} failed: {why}.")
        self._guarded(lambda: self._fail(refusal, Outcome.ENGINE_BROKE))

    def _is_nothing_told(self) -> bool:
        """Whether another peer may still answer: nothing of this one's answer has gone to the client, which is forgotten here."""
        if self.grant is None or self.grant.far is None or self.phase is not _SENT:
            return False
        if self.first_byte_s is not None and self.pending is None:
            return False
        self.first_byte_s = self.told_tokens = None
        self.counted = False
        if not self.early:
            self.pending = self.ends = self.length = None
            self.status = self.looked_at = 0
            self.is_event_stream, self.framing = False, NONE
        return True

    def switched(self, upstream: Upstream, early: bytes) -> None:
        """Sink: the engine accepted the upgrade; both connections become a tunnel."""
        self._guarded(lambda: self._open_tunnel(upstream, early))

    def _open_tunnel(self, upstream: Upstream, early: bytes) -> None:
        self.phase = _TUNNEL
        self.upstream = None
        self.status = 101
        self.first_byte_s = self.client.loop.time() - self.admitted_at
        framing = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
        self.client.transport.write(response_head(101, upstream.lines, self._extra(), framing))
        Tunnel(self.client, self, upstream, early)

    # ------------------------------------------------------------------------------------------------------------ waiting

    def tick(self, now: float) -> None:
        """Called by the sweep while this exchange is the client's active one."""
        upstream = self.upstream
        if upstream is not None and self.phase is _SENT:
            self._look_at(upstream, now)
        if self.heard:
            self.heard = False
            if self.ticket is not None and self.phase in (_SENT, _TUNNEL):
                self.ticket.alive()
        if now >= self.comment_at and self.phase is _WAITING:
            self._comment(now)

    def _look_at(self, upstream: Upstream, now: float) -> None:
        """Who takes the body is heard of, and who is held back is not silent."""
        taken = self.size if upstream.sent else upstream.offset
        if taken != self.taken:
            self.heard = self.heard or self.taken > 0  # what is sent at once says nothing: the kernel takes it
            self.taken = taken
        if upstream.held and self.ticket is not None:
            self.ticket.held()
        if self.grant is not None and self.grant.far is not None:
            self._watch_peer(self.grant.far, upstream, now)

    def _watch_peer(self, far: Far, upstream: Upstream, now: float) -> None:
        """It has so long for the head of its answer, and so long between two pieces of it."""
        if self.heard or upstream.held:
            self.heard_at = now
            return
        limit_s = far.stall_s if upstream.headed or not upstream.sent else far.response_s
        if limit_s is None or now - self.heard_at < limit_s:
            return
        why = cast(FarTicket, self.ticket).timed_out(limit_s)
        self._drop_upstream()
        if self._is_nothing_told():
            self._guarded(lambda: self._lost(why))
        else:
            self.client.server.stats.engine_broke += 1
            message = f"The peer {far.peer} fell silent within its answer for {limit_s:g} s (peers.{far.peer}.stall_timeout)."
            self._fail(Refusal(504, "peer_silent", message), Outcome.ENGINE_BROKE)

    def _comment(self, now: float) -> None:
        assert self.ticket is not None
        self.comment_at = now + self.client.server.limits.keepalive_every_s
        if self.client.write_paused:
            return
        head = b""
        if not self.early:
            self.early = self.is_event_stream = True
            self.looked_at = EVENTS
            self.ends = Edges()
            self.framing = CHUNKED
            self.keep = self.keep and not self.client.server.draining
            assert self.model is not None
            extra = b"X-Greenroom-Model: %b\r\n" % safe_value(self.model.id) + b"".join(self.cors())
            head = response_head(200, _SSE_HEAD, extra, _CHUNKED_LINE + (b"" if self.keep else _CLOSE_LINE))
            self.status = 200
        text = " ".join(self.ticket.progress().split())[:200] or "waiting"
        comment = b": %b\n\n" % text.encode("utf-8", "replace")
        assert isinstance(self.ends, Edges)
        self.ends.add([comment])
        self.bytes_out += len(comment)
        self.client.transport.write(head + b"%x\r\n%b\r\n" % (len(comment), comment))

    def probe(self) -> bytes | None:
        """Bytes that tell a half-closed client from one that left, and that a client does not see; None: not now."""
        if self.phase is _TUNNEL or not self.http11:
            return None
        if not self.early and (self.pending is not None or not self.status):
            return CONTINUE
        if not self.is_event_stream or self.framing != CHUNKED or not isinstance(self.ends, Edges):
            return None
        if self.ends.tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")):
            return b"3\r\n:\n\n\r\n"
        return None

    # ------------------------------------------------------------------------------------------------------------ endings

    def refuse(self, refusal: Refusal) -> None:
        """Answer with an error of ours, where no engine has it."""
        self.client.server.stats.refused += 1
        self._fail(refusal, None)

    def redirect(self, location: bytes) -> None:
        status = 301 if self.method in (b"GET", b"HEAD") else 308
        lines = (b"Location: %b\r\n" % location, b"Content-Length: 0\r\n")
        head = response_head(status, lines, b"".join(self.cors()), self._connection_line())
        self._answer(status, head)

    def _answer_json(self, status: int, body: bytes) -> None:
        framing = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body) + self._connection_line()
        extra = self._extra() if self.grant is not None else b"".join(self.cors())
        head = response_head(status, (), extra, framing)
        self.bytes_out += len(body)
        self._answer(status, head if self.method == b"HEAD" else head + body)

    def _answer(self, status: int, answer: bytes) -> None:
        """A complete answer of our own."""
        self.status = status
        self.client.transport.write(answer)
        self._end(_OK)

    def _fail(self, refusal: Refusal, outcome: Outcome | None) -> None:
        """Tell the client as well as its state allows; never a clean end once a head is out.  `outcome` None: refused."""
        if self.phase is _OVER:
            return
        client = self.client
        if self.early or (self.status and self.pending is None and self.collected is None):
            if self.is_event_stream:
                event = errors.event(refusal)
                self.bytes_out += len(event)
                client.transport.write(b"%x\r\n%b\r\n" % (len(event), event) if self.framing == CHUNKED else event)
            self.keep = False
            self._drop_upstream()
            client.cut_short(reset=self.framing == UNTIL_CLOSE)
        else:
            self.status = refusal.status
            self.keep = self.keep and not client.server.draining and not self.upgrade
            extra = self.cors()
            if self.route is not None and self.route.allow:
                extra = (*extra, b"Allow: %b\r\n" % self.route.allow)
            self.keep = self.keep and self.http11
            is_head, asks = self.method == b"HEAD", refusal.status != 401 or not is_script(self.headers)
            client.transport.write(errors.answer(refusal, head_only=is_head, keep_alive=self.keep, extra=extra, asks_browser=asks))
        self._end(outcome)

    def _drop_upstream(self) -> None:
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.abandon()

    def gone(self) -> None:
        """The client left."""
        if self.phase is _OVER:
            return
        self.client.server.stats.client_gone += 1
        self._end(Outcome.CLIENT_GONE)

    def tunnel_ended(self, outcome: Outcome, bytes_out: int) -> None:
        self.bytes_out = bytes_out
        self._end(outcome)

    def _end(self, outcome: Outcome | None) -> None:
        """The one end.  `outcome` None: refused, or left before an admission."""
        was, self.phase = self.phase, _OVER
        if self.upstream is not None:
            self._drop_upstream()
        if self.size:
            self.forget_body()
        client = self.client
        server = client.server
        server.stats.finished += 1
        server.stats.bytes_out += self.bytes_out
        self.comment_at = inf
        if self.load is not None:
            self.load.now -= 1
            self.load = None
        ticket = self.ticket
        if ticket is None:
            pass
        elif was in (_CONNECTING, _SENT, _TUNNEL):
            ticket.finish(outcome or _OK, self.status, self.bytes_out, self.first_byte_s)
        elif was is _WAITING:
            ticket.cancel()
        server.report(self, "ok" if outcome is _OK else "refused" if outcome is None else outcome.value)
        client.finished(self)

    def record(self, outcome: str, now: float) -> Record:
        grant, route = self.grant, self.route
        tokens_in = tokens_out = None
        if self.ends is not None and self.counted:
            tokens_in, tokens_out = count(self.ends, self.is_event_stream, outcome == "ok")
        if tokens_in is None:
            tokens_in = self.told_tokens
        return Record(
            self.model.id if self.model is not None else "",
            route.kind if route is not None else "",
            self.method.decode("ascii"),
            path_text(route.path) if route is not None else "",
            self.holder.name or self.client.peer,
            self.status,
            outcome,
            grant.start if grant is not None else "",
            self.size,
            self.bytes_out,
            grant.waited_ms if grant is not None else 0,
            self.first_byte_s,
            now - self.begun_at,
            tokens_in,
            tokens_out,
            self.request,
            grant.far.peer if grant is not None and grant.far is not None else "",
        )


_STARTS: Final = {
    Kind.INFERENCE: Exchange._start_inference,
    Kind.UPSTREAM: Exchange._start_upstream,
    Kind.MODELS: Exchange._start_models,
    Kind.HEALTH: Exchange._start_health,
    Kind.READY: Exchange._start_ready,
    Kind.CONTROL: Exchange._start_control,
    Kind.PREFLIGHT: Exchange._start_preflight,
    Kind.NOT_FOUND: Exchange._start_refused,
    Kind.METHOD_NOT_ALLOWED: Exchange._start_refused,
}


def _engine_message(status: int, body: bytes) -> str:
    """What an engine said, for people."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = None
    error = said.get("error") if isinstance(said, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    if not isinstance(text, str):
        text = body.decode("utf-8", "replace")
    return f"The engine answered {status}: {' '.join(text.split())[:2000] or 'nothing'}"
