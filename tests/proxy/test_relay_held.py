"""A client that stops reading holds its engine back: that is no silence of the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from greenroom.core.facts import Outcome

from .relay_world import EngineSide, Seen, a_caller, a_world, get, on_asyncio, on_uvloop, post, until
from .test_relay_tunnel import UPGRADE

SIZE = 64 << 20  # more than the kernel takes
PLAIN = post(b'{"model":"m"}')
FRAME = b"\x82\x7f" + SIZE.to_bytes(8, "big")  # of a message that goes on and on


async def pours(seen: Seen, side: EngineSide) -> None:
    if seen.values(b"upgrade"):
        await side.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + FRAME)
    else:
        await side.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % SIZE)
    for _ in range(SIZE >> 16):
        await side.send(b"z" * (1 << 16))
    if seen.values(b"upgrade"):
        side.fin()


@pytest.mark.parametrize("run", [on_uvloop, on_asyncio])
@pytest.mark.parametrize("request_bytes", [PLAIN, get("/upstream/m/ws", UPGRADE)], ids=["plain", "tunnel"])
def test_an_engine_that_is_held_back_is_called_so_until_its_client_reads(run: Any, request_bytes: bytes) -> None:
    """As long as it takes; then the rest arrives."""

    async def main() -> None:
        async with a_world(pours) as world, a_caller(world) as caller:
            await caller.send(request_bytes)
            ticket = await world.admissions.ticket()
            await ticket.wait_for("held")
            still = 0
            while still < 3:  # until nothing moves any more, and it is called so all the same
                beats = ticket.beats
                ticket.events.remove(("held",))
                await ticket.wait_for("held")
                still = still + 1 if ticket.beats == beats else 0
            size = len(caller.raw)
            while size < SIZE:
                piece = await caller._read()
                assert piece
                size += len(piece)
            caller.close()
            await ticket.wait_for("finish")
            assert ticket.beats > beats

    run(main)


def test_a_held_back_tunnel_is_not_called_quiet_and_is_bounded_by_its_client() -> None:
    """Its engine has more to say, also when the client says nothing any more; who takes nothing at all is let go."""
    limits = {"tunnel_quiet_s": 0.1, "tunnel_half_closed_s_max": 0.2, "client_stall_s_max": 1.0}

    async def main() -> None:
        async with a_world(pours, limits=limits) as world, a_caller(world) as caller:
            await caller.send(get("/upstream/m/ws", UPGRADE))
            ticket = await world.admissions.ticket()
            await ticket.wait_for("held")
            caller.writer.write_eof()
            held_at = world.server.loop.time()
            await ticket.wait_for("finish")
            assert world.server.loop.time() - held_at > 0.7
            assert ticket.named("quiet") == []

    on_uvloop(main)


def test_a_client_that_takes_nothing_is_let_go_in_the_end() -> None:
    """So its engine is held back no longer than that."""

    async def main() -> None:
        async with a_world(pours, limits={"client_stall_s_max": 0.3}) as world, a_caller(world) as caller:
            await caller.send(PLAIN)
            ticket = await world.admissions.ticket()
            await ticket.wait_for("held")
            await ticket.wait_for("finish")
            assert ticket.outcome is Outcome.CLIENT_GONE

    on_uvloop(main)


def test_an_engine_that_takes_a_body_is_heard_of() -> None:
    """It can say nothing before it has the whole."""
    body = b'{"model":"m","x":"' + b"x" * SIZE + b'"}'

    async def main() -> None:
        more = asyncio.Semaphore(0)

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            left = len(body)
            while left:
                await more.acquire()
                left -= len(await reader.readexactly(min(left, SIZE >> 2)))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            writer.close()

        async with a_world(limits={"json_mib_max": 2 * SIZE >> 20}) as world, a_caller(world) as caller:
            server = await asyncio.start_server(slow, "127.0.0.1", 0, limit=1 << 16)
            world.admissions.address = ("127.0.0.1", server.sockets[0].getsockname()[1])
            await caller.send(post(body))
            ticket = await world.admissions.ticket()
            (exchange,) = [client.active for client in world.server.clients if client.active is not None]
            await until(lambda: exchange.taken)
            assert ticket.beats == 0  # what the kernel takes is not the engine's doing
            for _ in range(3):
                before = ticket.beats
                more.release()
                await until(lambda before=before: ticket.beats > before)  # type: ignore[misc]
            assert world.hooks.records == []
            more.release()
            more.release()
            answer = await caller.answer("POST")
            assert answer is not None
            assert answer.body == b"{}"
            server.close()

    on_uvloop(main)
