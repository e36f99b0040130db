"""WebSockets through /upstream, with an independent implementation at both ends."""

from __future__ import annotations

import asyncio
import os

import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.connection import Connection, ConnectionState
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Ping, Pong, Request, TextMessage

from greenroom.core.facts import Outcome
from greenroom.proxy.tunnel import Frames, close_frame

from .relay_world import Caller, EngineSide, Seen, World, a_caller, a_world, answer_ok, get, on_uvloop, until

UPGRADE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    "Sec-WebSocket-Protocol: realtime, other\r\n"
)


async def echo(seen: Seen, side: EngineSide) -> None:
    """Accepts the sub-protocol `realtime` and sends every message back."""
    if not seen.values(b"upgrade"):
        await answer_ok(seen, side)
        return
    ws = WSConnection(ConnectionType.SERVER)
    lines = b"".join(b"%b: %b\r\n" % (name, value) for name, value in seen.headers)
    ws.receive_data(b"GET %b HTTP/1.1\r\n%b\r\n" % (seen.target, lines))
    request = next(ws.events())
    assert isinstance(request, Request)
    assert "realtime" in request.subprotocols
    await side.send(ws.send(AcceptConnection(subprotocol="realtime")))
    whole: list[bytes | str] = []
    while data := await side.reader.read(65536):
        ws.receive_data(data)
        for event in ws.events():
            if isinstance(event, Ping):
                await side.send(ws.send(event.response()))
            elif isinstance(event, CloseConnection):
                if ws.state is ConnectionState.REMOTE_CLOSING:
                    await side.send(ws.send(event.response()))
                return
            elif isinstance(event, (TextMessage, BytesMessage)):
                whole.append(event.data)
                if event.message_finished:
                    first = whole[0]
                    message = b"".join(whole) if isinstance(first, (bytes, bytearray)) else "".join(whole)  # type: ignore[arg-type]
                    whole = []
                    event_back = BytesMessage(bytes(message)) if isinstance(message, bytes) else TextMessage(message)
                    await side.send(ws.send(event_back))


class Socket:
    """The client's end."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.ws = Connection(ConnectionType.CLIENT)
        self.events: list[object] = []

    async def open(self, early: bytes = b"") -> dict[bytes, bytes]:
        await self.caller.send(get("/upstream/m/ws", UPGRADE) + early)
        answer = await self.caller.answer(upgrade=True)
        assert answer is not None
        assert answer.status == 101
        if self.caller.left:
            self.ws.receive_data(self.caller.left)
        return answer.headers

    async def send(self, event: TextMessage | BytesMessage | Ping | CloseConnection) -> None:
        await self.caller.send(self.ws.send(event))

    async def message(self) -> bytes | str:
        parts: list[bytes | str] = []
        while True:
            event = await self.event()
            assert isinstance(event, (TextMessage, BytesMessage)), event
            parts.append(event.data)
            if event.message_finished:
                return b"".join(parts) if isinstance(parts[0], (bytes, bytearray)) else "".join(parts)  # type: ignore[arg-type]

    async def event(self) -> object:
        while not self.events:
            self.events = list(self.ws.events())
            if not self.events:
                data = await self.caller._read()
                self.ws.receive_data(data or None)
        return self.events.pop(0)


def test_a_websocket_passes_with_its_sub_protocol_and_a_frame_of_1_mib() -> None:
    """B13: 101 with the engine's choice, frames equal both ways, a clean end."""
    large = os.urandom(1 << 20)

    async def main() -> None:
        async with a_world(echo) as world, a_caller(world) as caller:
            socket = Socket(caller)
            headers = await socket.open()
            assert headers[b"sec-websocket-protocol"] == b"realtime"
            assert headers[b"x-greenroom-model"] == b"m"
            await socket.send(TextMessage("hello"))
            assert await socket.message() == "hello"
            await socket.send(BytesMessage(large))
            assert await socket.message() == large
            await socket.send(CloseConnection(1000))
            assert isinstance(await socket.event(), CloseConnection)
            ticket = await world.admissions.ticket()
            await ticket.wait_for("finish")
            assert ticket.outcome is Outcome.OK
            assert world.stats["tunnels"] == 1

    on_uvloop(main)


def test_data_sent_right_behind_the_upgrade_is_not_lost() -> None:
    """Early frames wait for the engine's 101."""

    async def main() -> None:
        async with a_world(echo) as world, a_caller(world) as caller:
            socket = Socket(caller)
            await socket.open(early=socket.ws.send(TextMessage("early")))
            assert await socket.message() == "early"

    on_uvloop(main)


def test_a_silent_tunnel_is_called_quiet_and_pings_are_silence() -> None:
    """`quiet(True)` after `tunnel_quiet_s`, `quiet(False)` with the next message."""

    async def main() -> None:
        async with a_world(echo, limits={"tunnel_quiet_s": 0.3}) as world, a_caller(world) as caller:
            socket = Socket(caller)
            await socket.open()
            ticket = await world.admissions.ticket()
            for _ in range(8):
                await socket.send(Ping(b"x"))
                assert isinstance(await socket.event(), Pong)
                await asyncio.sleep(0.05)
            await ticket.wait_for("quiet")
            await socket.send(TextMessage("again"))
            assert await socket.message() == "again"
            assert [event for event in ticket.events if event[0] == "quiet"][:2] == [("quiet", True), ("quiet", False)]

    on_uvloop(main)


def test_a_tunnel_that_is_cut_is_closed_with_a_code() -> None:
    """1012 (restarting) with the reason, never a bare cut."""

    async def main() -> None:
        async with a_world(echo) as world, a_caller(world) as caller:
            socket = Socket(caller)
            await socket.open()
            ticket = await world.admissions.ticket()
            ticket.waiter.cut("evicted", "m makes room for b.")
            event = await socket.event()
            assert isinstance(event, CloseConnection)
            assert (event.code, event.reason) == (1012, "m makes room for b.")
            assert ticket.outcome is Outcome.CUT
            await socket.send(event.response())  # type: ignore[arg-type]
            assert await caller.read_all() is not None
            await world.engine.sides[0].gone.wait()

    on_uvloop(main)


async def half_a_frame(seen: Seen, side: EngineSide) -> None:
    await side.send(
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n\x82\x0ahalf"
    )
    await side.wait_gone()


def test_a_close_frame_never_stands_inside_a_frame() -> None:
    """The frame under way is finished first; if that does not happen, the connection just ends."""

    async def main() -> None:
        async with a_world(half_a_frame, limits={"tunnel_close_s_max": 0.4}) as world:
            for finishes in (True, False):
                async with a_caller(world) as caller:
                    await caller.send(get("/upstream/m/ws", UPGRADE))
                    await caller.read_until(b"\x82\x0ahalf")
                    caller.raw.clear()
                    world.admissions.tickets[-1].waiter.cut("evicted", "bye")
                    if finishes:
                        await world.engine.sides[-1].send(b"012345\x81\x05never")
                    expected = b"012345" + close_frame(1012, "bye") if finishes else b""
                    assert await caller.read_all() == expected
                    assert world.admissions.tickets[-1].outcome is Outcome.CUT

    on_uvloop(main)


def test_an_engine_that_vanishes_is_told_with_a_code() -> None:
    """1011, and the admission ends as broken."""

    async def vanish(seen: Seen, side: EngineSide) -> None:
        await side.send(half_head + b"\x81\x02ok")
        await side.reader.read(10)
        side.rst()

    half_head = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"

    async def main() -> None:
        async with a_world(vanish) as world, a_caller(world) as caller:
            await caller.send(get("/upstream/m/ws", UPGRADE))
            await caller.read_until(b"\x81\x02ok")
            caller.raw.clear()
            await caller.send(b"\x81\x80\0\0\0\0")
            assert await caller.read_all() == close_frame(1011, "The engine went away.")
            assert world.admissions.tickets[0].outcome is Outcome.ENGINE_BROKE

    on_uvloop(main)


def test_an_upgrade_the_engine_does_not_want_gets_its_answer_and_the_connection_closes() -> None:
    """The parser cannot go on behind it."""

    async def main() -> None:
        async with a_world(answer_ok) as world, a_caller(world) as caller:
            answer = await caller.ask(get("/upstream/m/ws", UPGRADE))
            assert (answer.status, answer.headers[b"connection"]) == (200, b"close")
            await caller.read_all()
            assert caller.eof

    on_uvloop(main)


def test_a_client_that_leaves_a_tunnel_leaves_the_engine_too() -> None:
    """Both by reset and by half-close."""

    async def main() -> None:
        async with a_world(echo) as world:
            for number, leave in enumerate(("abort", "write_eof")):
                async with a_caller(world) as caller:
                    await Socket(caller).open()
                    getattr(caller.writer.transport, leave)()
                    await world.admissions.tickets[number].wait_for("finish")

    on_uvloop(main)


def test_a_tunnel_does_not_buffer_for_a_slow_end() -> None:
    """Back-pressure holds across the tunnel."""
    total = 32 << 20

    async def flood(seen: Seen, side: EngineSide) -> None:
        await side.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        await side.send(b"\x82\x7f" + total.to_bytes(8, "big"))
        for _ in range(total >> 16):
            await side.send(b"z" * 65536)
        side.fin()

    async def main() -> None:
        async with a_world(flood) as world, a_caller(world) as caller:
            await caller.send(get("/upstream/m/ws", UPGRADE))
            await caller.read_until(b"\x82\x7f")
            await asyncio.sleep(0.3)
            assert _buffered(world) < 2 << 20
            assert len(await caller.read_all()) > total

    on_uvloop(main)


def _buffered(world: World) -> int:
    return sum(client.transport.get_write_buffer_size() for client in world.server.clients)


@pytest.mark.parametrize("step", [1, 2, 3, 1000])
def test_frames_are_followed_in_any_pieces(step: int) -> None:
    """Boundaries, silence and the close frame are seen however the bytes are split."""
    connection = Connection(ConnectionType.CLIENT)
    data = b"".join(
        connection.send(event)
        for event in (Ping(b"p"), TextMessage("x" * 10), BytesMessage(b"y" * 200), BytesMessage(b"z" * 70_000), CloseConnection(1000))
    )
    frames = Frames()
    boundaries, at = 0, 0
    spoke = False
    for start in range(0, len(data), step):
        piece = data[start : start + step]
        heard, _ = frames.scan(piece)
        spoke = spoke or heard
        at += len(piece)
        boundaries += frames.at_boundary
    assert frames.at_boundary
    assert frames.has_closed
    assert spoke
    assert boundaries >= (5 if step == 1 else 1)
    silent = Frames()
    assert silent.scan(Connection(ConnectionType.CLIENT).send(Ping(b"only")))[0] is False


@pytest.mark.parametrize("does_client_leave", [True, False])
def test_an_engine_that_does_not_read_is_let_go(does_client_leave: bool) -> None:
    """Back-pressure hides the client's end, so the tunnel would stay for ever."""
    opened = asyncio.Event()

    async def deaf(seen: Seen, side: EngineSide) -> None:
        side.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await side.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        opened.set()
        await asyncio.Event().wait()

    async def main() -> None:
        async with a_world(deaf, limits={"client_stall_s_max": 0.5}) as world:
            async with a_caller(world) as caller:
                await caller.send(get("/upstream/m/ws", UPGRADE))
                await opened.wait()
                await caller.read_until(b"101")
                caller.writer.write(bytes(64 << 20))  # more than the kernel takes
                (leg,) = [client.tunnel.down for client in world.server.clients if client.tunnel is not None]
                await until(lambda: leg.transport.get_write_buffer_size() > 0)
                if not does_client_leave:
                    await until(lambda: leg.is_lost)
            await until(lambda: leg.is_lost)
            assert world.stats["tunnels_now"] == 0

    on_uvloop(main)
