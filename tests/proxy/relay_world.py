"""The data plane on loopback between raw clients and scripted engines, with a scheduler that does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import h11
import uvloop

from greenroom.config.model import KeyConfig
from greenroom.core.facts import Outcome
from greenroom.proxy.admission import Catalog, Grant, ModelRoute, Refusal, Wish
from greenroom.proxy.guards import Guards
from greenroom.proxy.keys import Keys
from greenroom.proxy.limits import Limits
from greenroom.proxy.server import DataPlane, Record, Server, serve

T = TypeVar("T")
PATIENCE_S = 30.0  # for what must come; generous, because machines may be slow


def on_uvloop(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a test's coroutine on the loop of production."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def on_asyncio(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    with asyncio.Runner() as runner:
        return runner.run(main())


# ---------------------------------------------------------------------------------------------------------- scheduler


@dataclass
class FakeTicket:
    wish: Wish
    waiter: Any
    admissions: FakeAdmissions
    events: list[tuple[Any, ...]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    beats: int = 0  # times that it was called alive

    def _note(self, *event: Any) -> None:
        self.events.append(event)
        self.changed.set()

    def cancel(self) -> None:
        self._note("cancel")

    def finish(self, outcome: Outcome, status: int, bytes_out: int, first_byte_s: float | None) -> None:
        self._note("finish", outcome, status, bytes_out)

    def lost(self, why: str) -> None:
        self._note("lost", why)
        self.admissions.on_lost(self)

    def quiet(self, is_quiet: bool) -> None:
        self._note("quiet", is_quiet)

    def alive(self) -> None:
        self.beats += 1
        if ("alive",) not in self.events:
            self._note("alive")

    def held(self) -> None:
        if ("held",) not in self.events:
            self._note("held")

    def progress(self) -> str:
        return "loading, about 12 s"

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [event for event in self.events if event[0] == name]

    @property
    def outcome(self) -> Outcome | None:
        ends = self.named("finish")
        return ends[0][1] if ends else None

    async def wait_for(self, name: str) -> tuple[Any, ...]:
        async with asyncio.timeout(PATIENCE_S):
            while not self.named(name):
                self.changed.clear()
                await self.changed.wait()
        return self.named(name)[0]


class FakeAdmissions:
    """Admits at once to `address`, or holds (`hold`) until the test says what."""

    def __init__(self) -> None:
        self.address: tuple[str, int] = ("127.0.0.1", 1)
        self.generation = 1
        self.hold = False
        self.refusal: Refusal | None = None
        self.tickets: list[FakeTicket] = []
        self.asked = asyncio.Event()
        self.is_warm = True
        self.secret_headers: tuple[tuple[bytes, bytes], ...] = ()
        self.base_path = ""
        self.after_loss: Callable[[FakeTicket], None] = lambda ticket: ticket.waiter.refused(
            Refusal(502, "engine_lost", "The engine died before its first byte.")
        )

    def grant(self, model: str) -> Grant:
        host, port = self.address
        return Grant(model, host, port, self.generation, "hot", 3, self.base_path, self.secret_headers)

    def ask(self, wish: Wish, waiter: Any) -> FakeTicket:
        ticket = FakeTicket(wish, waiter, self)
        self.tickets.append(ticket)
        self.asked.set()
        if self.refusal is not None:
            waiter.refused(self.refusal)
        elif not self.hold:
            waiter.admitted(self.grant(wish.model))
        return ticket

    def on_lost(self, ticket: FakeTicket) -> None:
        self.after_loss(ticket)

    def admit(self, ticket: FakeTicket) -> None:
        ticket.waiter.admitted(self.grant(ticket.wish.model))

    def is_ready(self, model: str) -> bool:
        return self.is_warm

    def state_of(self, model: str) -> str:
        return "ready"

    async def ticket(self, number: int = 0) -> FakeTicket:
        """The ticket of that number, once it was asked for."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.tickets) <= number:
                self.asked.clear()
                await self.asked.wait()
        return self.tickets[number]


class KeptRecords:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def on_request_end(self, record: Record) -> None:
        self.records.append(record)


# ------------------------------------------------------------------------------------------------------------ engines


@dataclass
class Seen:
    """One request as an independent parser understood it."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    connection: int

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


class Fin:
    """Close normally."""


class Rst:
    """Close with a reset."""


Reply = Callable[["Seen", "EngineSide"], Awaitable[None]]


class EngineSide:
    """One connection, from the engine's side."""

    def __init__(self, engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        self.engine = engine
        self.reader = reader
        self.writer = writer
        self.number = number
        self.gone = asyncio.Event()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def fin(self) -> None:
        self.writer.close()

    def rst(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def wait_gone(self) -> None:
        """Until the other side closed."""
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(65536):
                    pass
        self.gone.set()


async def answer_ok(seen: Seen, side: EngineSide) -> None:
    """200 with a JSON body that tells the body's size."""
    body = b'{"got":%d}' % len(seen.body)
    if seen.method == b"HEAD":
        await side.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
    else:
        await side.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


class Engine:
    """Reads requests with h11, keeps their raw bytes, answers as `reply` says."""

    def __init__(self, reply: Reply = answer_ok) -> None:
        self.reply = reply
        self.seen: list[Seen] = []
        self.raw = bytearray()
        self.faults: list[str] = []  # what h11 did not understand: always a finding
        self.connections = 0
        self.sides: list[EngineSide] = []
        self.port = 0
        self.changed = asyncio.Event()

    async def __aenter__(self) -> Engine:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for side in self.sides:
            with contextlib.suppress(AttributeError):  # asyncio: closed already, once its last bytes were out
                side.writer.transport.abort()
        await asyncio.sleep(0)

    async def wait_seen(self, count: int) -> Seen:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.seen) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.seen[count - 1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        side = EngineSide(self, reader, writer, self.connections)
        self.sides.append(side)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError, TimeoutError, RuntimeError):  # uvloop: write after the end
            await self._requests(side)
        if not writer.is_closing():  # what `fin` has still to send is not lost
            writer.transport.abort()

    async def _requests(self, side: EngineSide) -> None:
        while not side.writer.is_closing():
            seen = await self._read(side)
            if seen is None:
                side.gone.set()
                return
            self.seen.append(seen)
            self.changed.set()
            await self.reply(seen, side)

    async def _read(self, side: EngineSide) -> Seen | None:
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        request: h11.Request | None = None
        body = bytearray()
        while True:
            try:
                event = parser.next_event()
            except h11.RemoteProtocolError as exc:
                self.faults.append(str(exc))
                return None
            if event is h11.NEED_DATA:
                data = await side.reader.read(1 << 18)
                if not data and request is None:
                    return None
                self.raw += data
                parser.receive_data(data)
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, (h11.EndOfMessage, h11.PAUSED)):
                assert request is not None
                return Seen(request.method, request.target, list(request.headers), bytes(body), side.number)
            else:
                return None


# --------------------------------------------------------------------------------------------------------------- world


def a_catalog(**models: ModelRoute) -> Catalog:
    routes = {"m": ModelRoute("m"), "org/name:tag": ModelRoute("org/name:tag")} | models
    return Catalog(models=routes, names={name: name for name in routes} | {"alias": "m"})


@dataclass
class World:
    server: Server
    engine: Engine
    admissions: FakeAdmissions
    hooks: KeptRecords
    plane: DataPlane
    port: int

    @property
    def stats(self) -> dict[str, int]:
        return self.server.stats.as_dict()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)


@contextlib.asynccontextmanager
async def a_world(
    reply: Reply = answer_ok,
    *,
    limits: dict[str, int | float] | None = None,
    keys: Sequence[str | KeyConfig] = (),
    catalog: Catalog | None = None,
    **plane: Any,
) -> AsyncIterator[World]:
    """One engine, one data plane; at the end everything must have been given back."""
    admissions, hooks = FakeAdmissions(), KeptRecords()
    async with Engine(reply) as engine:
        admissions.address = ("127.0.0.1", engine.port)
        made = DataPlane(
            admissions=admissions,
            catalog=catalog or a_catalog(),
            keys=Keys(keys),
            guards=Guards("127.0.0.1", (), ("*",)),
            limits=Limits.from_mapping({"sweep_s": 0.05, "linger_s_max": 0.3, **(limits or {})}),
            hooks=hooks,
            **plane,
        )
        server = await serve(made, ("127.0.0.1", 0))
        world = World(server, engine, admissions, hooks, made, server.addresses[0][1])
        try:
            yield world
        finally:
            await server.close(0.0)
        check_nothing_left(world)


def check_nothing_left(world: World) -> None:
    """Each admission ended once; nothing is held."""
    stats = world.stats
    for name, value in stats.items():
        if name.endswith("_now") and name != "engine_connections_now":
            assert (name, value) == (name, 0)
    for ticket in world.admissions.tickets:
        ends = [event[0] for event in ticket.events if event[0] in ("finish", "cancel")]
        assert len(ends) <= 1, ticket.events
    assert not world.engine.faults


def get(target: str = "/upstream/m/x", extra: str = "", method: str = "GET") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n{extra}\r\n".encode()


def post(body: bytes, target: str = "/v1/chat/completions", extra: str = "", content_type: str = "application/json") -> bytes:
    head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@dataclass
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes
    complete: bool


class Caller:
    """A client that reads answers with h11."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.left = b""
        self.eof = False
        self.raw = bytearray()
        self.interim: list[int] = []

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def _read(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            try:
                data = await self.reader.read(1 << 18)
            except ConnectionError:
                data = b""
        self.raw += data
        self.eof = not data
        return data

    async def answer(self, method: str = "GET", *, upgrade: bool = False) -> Answer | None:
        """The next answer; None when the connection ended before one."""
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 22)
        headers = [("host", "x"), *([("connection", "upgrade"), ("upgrade", "websocket")] if upgrade else [])]
        parser.send(h11.Request(method=method, target="/", headers=headers))
        parser.send(h11.EndOfMessage())
        head: h11.Response | None = None
        body = bytearray()
        parser.receive_data(self.left) if self.left else None
        self.left = b""
        while True:
            try:
                event = parser.next_event()
            except h11.RemoteProtocolError:
                return Answer(head.status_code, dict(head.headers), bytes(body), False) if head else None
            if event is h11.NEED_DATA:
                data = await self._read()
                if not data and head is None:
                    return None
                parser.receive_data(data)
            elif isinstance(event, h11.InformationalResponse):
                self.interim.append(event.status_code)
                if event.status_code == 101:
                    self.left = parser.trailing_data[0]
                    return Answer(101, dict(event.headers), b"", True)
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                self.left = parser.trailing_data[0]
                return Answer(head.status_code, dict(head.headers), bytes(body), True)
            else:
                return None

    async def ask(self, request: bytes) -> Answer:
        await self.send(request)
        found = await self.answer(request.partition(b" ")[0].decode())
        assert found is not None
        return found

    async def read_until(self, wanted: bytes) -> bytes:
        while wanted not in self.raw:
            data = await self._read()
            assert data, bytes(self.raw)
        return bytes(self.raw)

    async def read_all(self) -> bytes:
        while await self._read():
            pass
        return bytes(self.raw)

    def close(self) -> None:
        self.writer.close()


@contextlib.asynccontextmanager
async def a_caller(world: World) -> AsyncIterator[Caller]:
    caller = Caller(*await world.connect())
    try:
        yield caller
    finally:
        caller.writer.transport.abort()
        await asyncio.sleep(0)


async def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait until the loop has made it true."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
