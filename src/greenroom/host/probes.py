"""Seeing that an engine can serve: the right engine, as soon as it can, and no sooner.

Plain sockets instead of an HTTP client: a poll is one connection and one status line, about 0.2 ms, every 10 ms at first.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from greenroom.core.facts import Cause
from greenroom.engines.base import Readiness
from greenroom.host import ports
from greenroom.host.processes import Process

POLL_S_MIN = 0.01
POLL_SHARE = 0.01  # of the time waited so far: a slow start is polled less often
POLL_S_MAX = 0.1
EAGER_S = 1.0  # after a telling log line it is polled every POLL_S_MIN for so long
PROBE_S_MAX = 5.0  # one poll; an engine that accepts and says nothing is asked again
START_S_MAX = 6 * 3600.0  # even when progress keeps moving the deadline
NO_ROUTE_S = 1.0  # all paths answer 404 for so long: it serves, but none of the paths we know
FOREIGN_SEEN_MIN = 3  # polls in a row that found a stranger on the port
DETACHED_CHECK_S = 0.25
HEAD_BYTES_MAX = 64 * 1024
WARMUP_BYTES_MAX = 64 * 1024 * 1024
WHY_LINES = 5
WHY_LINE_CHARS_MAX = 300

_NO_ROUTE = frozenset({404, 405, 501})


@dataclass(frozen=True, slots=True)
class Ready:
    took_s: float
    how: str  # "health /health", "fallback /v1/models", "port", ... and "+ warm-up"
    host: str  # the address that answered (::1 when it only listens there)


class NotReady(Exception):
    """It did not get ready.  `why` is one sentence with the last log lines; the engine may still run: stop it."""

    def __init__(self, cause: Cause, why: str, *, foreign_pids: frozenset[int] = frozenset(), port_taken: bool = False) -> None:
        super().__init__(why)
        self.cause = cause
        self.why = why
        self.foreign_pids = foreign_pids
        self.port_taken = port_taken  # somebody else listens on its port: start it on another one


@dataclass(frozen=True, slots=True)
class Answer:
    """What one poll saw.  `status` None: no (whole) answer; `host` None: nobody listens."""

    host: str | None
    status: int | None
    path: str = ""

    def __str__(self) -> str:
        if self.host is None:
            return "nothing listens on its port yet"
        if self.status is None:
            return f"it accepts connections but does not answer{f' GET {self.path}' if self.path else ''}"
        return f"GET {self.path} answers {self.status}"


async def wait_ready(
    address: tuple[str, int],
    readiness: Readiness,
    *,
    process: Process,
    timeout_s: float,
    progress_counts: bool,
    clock: Callable[[], float],
) -> Ready:
    """Wait until the engine can serve, at most `timeout_s` (from the last log line when `progress_counts`).

    Raises NotReady: it exited, took too long, or somebody else listens on its port.
    """
    hosts = await _hosts(address[0])
    watch = _Watch(process, clock)
    try:
        return await _Waiting(hosts, address[1], readiness, process, watch, timeout_s, progress_counts).run()
    finally:
        watch.close()


async def probe_once(host: str, port: int, readiness: Readiness, timeout_s: float) -> bool:
    """Whether the engine answers its check now."""
    try:
        async with asyncio.timeout(timeout_s):
            answer = await _ask(await _hosts(host), port, readiness, _Line())
    except (TimeoutError, OSError):
        return False
    if readiness.path is None:
        return answer.host is not None
    return answer.status is not None and (200 <= answer.status < 300 or answer.status in _NO_ROUTE)


class _Line:
    """The connection in use, so that an exit of the engine can end the wait for its answer."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None

    def cut(self) -> None:
        if self.socket is not None:
            try:
                self.socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # not connected (any more)


class _Watch:
    """What can end a pause early: an exit, a telling log line."""

    def __init__(self, process: Process, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.line = _Line()
        self.eager_until = 0.0
        self.progress_at = 0.0
        self._hint = process.log.hint
        self._waiter: asyncio.Future[None] | None = None
        self._undo = (process.on_exit(self._exited), process.log.listen(self._printed))

    def close(self) -> None:
        for undo in self._undo:
            undo()

    async def pause(self, pause_s: float) -> None:
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = loop.call_later(pause_s, self._wake)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _exited(self) -> None:
        self.line.cut()
        self._wake()

    def _printed(self, lines: Sequence[str]) -> None:
        self.progress_at = self.clock()
        if self._hint is not None and any(self._hint(line) for line in lines):
            self.eager_until = self.progress_at + EAGER_S
            self._wake()


class _Waiting:
    """One wait_ready."""

    def __init__(
        self,
        hosts: Sequence[str],
        port: int,
        readiness: Readiness,
        process: Process,
        watch: _Watch,
        timeout_s: float,
        progress_counts: bool,
    ) -> None:
        self.hosts = hosts
        self.port = port
        self.readiness = readiness
        self.process = process
        self.watch = watch
        self.timeout_s = timeout_s
        self.progress_counts = progress_counts
        self.began_at = watch.clock()
        self.tree_checked_at = self.began_at
        self.no_route_since: float | None = None
        self.foreign_seen = 0
        self.owned = False
        self.last = Answer(None, None)

    async def run(self) -> Ready:
        while True:
            self._check_alive()
            self._check_time()
            self.last = await self._poll()
            self._check_alive()
            if self.last.host is not None and self._is_ours(self.last.host) and (how := self._ready_how()):
                return await self._finish(self.last.host, how)
            await self.watch.pause(self._pause_s())

    async def _poll(self) -> Answer:
        try:
            async with asyncio.timeout(min(PROBE_S_MAX, max(POLL_S_MIN, self._left_s()))):
                return await _ask(self.hosts, self.port, self.readiness, self.watch.line)
        except TimeoutError:
            # Cut short by the end of the start time, it says less than the answer before.
            return self.last if self._left_s() <= 0 and self.last.host else Answer(self.hosts[0], None, self.readiness.path or "")

    def _ready_how(self) -> str:
        """How the last answer shows that it can serve; "" = it does not yet."""
        if self.readiness.path is None:
            return "port"
        status, now = self.last.status, self.watch.clock()
        if status is not None and 200 <= status < 300:
            return f"{'health' if self.last.path == self.readiness.base_path + self.readiness.path else 'fallback'} {self.last.path}"
        if status not in _NO_ROUTE or not self.readiness.fallback_paths:
            self.no_route_since = None
            return ""
        self.no_route_since = now if self.no_route_since is None else self.no_route_since
        return f"port (no such path: {self.last.path})" if now - self.no_route_since >= NO_ROUTE_S else ""

    async def _finish(self, host: str, how: str) -> Ready:
        if self.readiness.warmup_path is not None:
            how += f" + {await self._warm_up(host, self.readiness.warmup_path)}"
            self._check_alive()
        return Ready(self.watch.clock() - self.began_at, how, host)

    async def _warm_up(self, host: str, path: str) -> str:
        body = self.readiness.warmup_body
        request = _request("POST", self.readiness.base_path + path, self.readiness, host, self.port, body)
        try:
            async with asyncio.timeout(max(POLL_S_MIN, self._left_s())):
                status = await _post(host, self.port, request, self.watch.line)
        except (TimeoutError, OSError):
            self._check_alive()
            raise NotReady(Cause.TIMEOUT, self._tell(f"its warm-up request POST {path} was not answered in {self.timeout_s:g} s")) from None
        # A refused warm-up is the configuration's fault; the engine serves.
        return "warm-up" if status is not None and status < 400 else f"warm-up (answered {status})"

    def _is_ours(self, host: str) -> bool:
        """Proof that the listener belongs to this engine, asked until it is given once and again when it is ready."""
        if self.process.launch.detached or self.owned:
            return self.process.up  # a container's port is held by its runtime, from before it runs
        answer = ports.owner_is(self.port, (self.process.pid,), host)
        if answer is False:
            answer = ports.owner_is(self.port, self.process.tree(), host)
        self.foreign_seen = self.foreign_seen + 1 if answer is False else 0
        if self.foreign_seen >= FOREIGN_SEEN_MIN:
            strangers = ports.owners(self.port, host)
            named = ", ".join(str(pid) for pid in sorted(strangers)) or "unknown"
            why = f"port {self.port} on {host} belongs to another program (pid {named}), not to this engine; end it or use another port"
            raise NotReady(Cause.EXITED, why, foreign_pids=strangers, port_taken=True)
        self.owned = answer is True
        return answer is not False

    def _check_alive(self) -> None:
        result = self.process.exit
        if result is None:
            return
        now = self.watch.clock()
        if result.code == 0 and now - self.tree_checked_at < DETACHED_CHECK_S and self.tree_checked_at > self.began_at:
            return
        if result.code == 0 and self.process.tree():
            self.tree_checked_at = now
            return  # the command has detached; its engine is followed
        raise NotReady(Cause.EXITED, self._tell(f"it {result} after {now - self.began_at:.1f} s, before it could serve"))

    def _check_time(self) -> None:
        if self._left_s() <= 0:
            why = str(self.last) if self.process.up else f"its runtime did not say that its container runs ({self.last})"
            raise NotReady(Cause.TIMEOUT, self._tell(f"it was not ready after {self.watch.clock() - self.began_at:.1f} s: {why}"))

    def _left_s(self) -> float:
        since = max(self.began_at, self.watch.progress_at) if self.progress_counts else self.began_at
        return min(since + self.timeout_s, self.began_at + START_S_MAX) - self.watch.clock()

    def _pause_s(self) -> float:
        now = self.watch.clock()
        if now < self.watch.eager_until:
            return POLL_S_MIN
        return min(POLL_S_MAX, max(POLL_S_MIN, POLL_SHARE * (now - self.began_at)))

    def _tell(self, what: str) -> str:
        lines = [line[:WHY_LINE_CHARS_MAX] for line in self.process.log.tail(WHY_LINES)]
        return f"{what}; last log lines: {' | '.join(lines)}" if lines else f"{what}; it printed nothing"


# ----------------------------------------------------------------------------------------------- one question, one answer


async def _ask(hosts: Sequence[str], port: int, readiness: Readiness, line: _Line) -> Answer:
    paths = () if readiness.path is None else (readiness.path, *readiness.fallback_paths)
    for host in hosts:
        answer = Answer(None, None)
        for path in paths or (None,):
            answer = await _ask_one(host, port, readiness, path, line)
            if answer.status not in _NO_ROUTE:
                break
        if answer.host is not None:
            return answer
    return Answer(None, None)


async def _ask_one(host: str, port: int, readiness: Readiness, path: str | None, line: _Line) -> Answer:
    """Connect, and ask for `path` unless it is None."""
    with _a_socket(host) as sock:
        line.socket = sock
        try:
            await asyncio.get_running_loop().sock_connect(sock, (host, port))
        except OSError:
            return Answer(None, None)
        finally:
            line.socket = None
        if path is None:
            return Answer(host, None)
        full = readiness.base_path + path
        return Answer(host, await _exchange(sock, _request("GET", full, readiness, host, port), line), full)


async def _post(host: str, port: int, request: bytes, line: _Line) -> int | None:
    with _a_socket(host) as sock:
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
        return await _exchange(sock, request, line, bytes_max=WARMUP_BYTES_MAX, whole=True)


def _a_socket(host: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


async def _exchange(
    sock: socket.socket, request: bytes, line: _Line, *, bytes_max: int = HEAD_BYTES_MAX, whole: bool = False
) -> int | None:
    """Send one request; its status, or None when the connection broke.  `whole`: wait for the end of the body."""
    loop = asyncio.get_running_loop()
    line.socket = sock
    answer = bytearray()
    try:
        await loop.sock_sendall(sock, request)
        while not _complete(answer, whole) and len(answer) < bytes_max and (part := await loop.sock_recv(sock, 65536)):
            answer += part
    except OSError:
        return None
    finally:
        line.socket = None
    return _status(answer)


def _complete(answer: bytearray, whole: bool) -> bool:
    """Whether enough has come.  Short bodies are read to their end, so that the engine logs no broken pipe."""
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = bytes(answer[:end]).lower()
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name == b"content-length" and value.strip().isdigit():
            return len(answer) - end - 4 >= int(value) or (not whole and int(value) > HEAD_BYTES_MAX)
        if name == b"transfer-encoding":
            return answer.endswith(b"0\r\n\r\n")
    return not whole


def _status(answer: bytearray) -> int | None:
    parts = bytes(answer[:64]).split(b" ", 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1][:3].isdigit():
        return None
    return int(parts[1][:3])


def _request(method: str, path: str, readiness: Readiness, host: str, port: int, body: bytes = b"") -> bytes:
    name = f"[{host}]" if ":" in host else host
    head = [f"{method} {path} HTTP/1.1", f"Host: {name}:{port}", "Connection: close", "Accept: */*"]
    head += [f"{key}: {value}" for key, value in readiness.headers]
    if body:
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join((*head, "", "")).encode("utf-8", "surrogateescape") + body


async def _hosts(host: str) -> list[str]:
    """Numeric addresses to try, in order.  An engine told `localhost` may listen on either loopback address."""
    if host in ("127.0.0.1", "localhost", "0.0.0.0", ""):
        return ["127.0.0.1", "::1"]
    if host in ("::", "::1"):
        return ["::1"]
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(each[4][0]) for each in found))
