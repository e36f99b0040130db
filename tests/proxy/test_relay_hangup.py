"""Clients that leave, in every phase; and clients that only half-close, who are served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from greenroom.core.facts import Outcome

from .relay_world import Caller, EngineSide, Seen, World, a_caller, a_world, answer_ok, get, on_uvloop, post, until

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHAT = post(b'{"model":"m","stream":true}')
SOON_S = 1.0  # the promise; tests measure it only where the engine side is told by the kernel


def event(number: int) -> bytes:
    data = b"data: %d\n\n" % number
    return b"%x\r\n%b\r\n" % (len(data), data)


async def stream_for_ever(seen: Seen, side: EngineSide) -> None:
    await side.send(STREAM_HEAD)
    gone = asyncio.ensure_future(side.wait_gone())
    number = 0
    while not gone.done():
        side.writer.write(event(number))
        number += 1
        await asyncio.wait([gone], timeout=0.05)


async def silent(seen: Seen, side: EngineSide) -> None:
    """The prompt phase: nothing yet."""
    await side.wait_gone()


async def half_answer(seen: Seen, side: EngineSide) -> None:
    await side.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
    await side.wait_gone()


async def quiet_stream(seen: Seen, side: EngineSide) -> None:
    await side.send(STREAM_HEAD + event(0))
    await side.wait_gone()


async def read_nothing(caller: Caller, world: World) -> None:
    await world.engine.wait_seen(1)


async def read_an_event(caller: Caller, world: World) -> None:
    await caller.read_until(b"data: 0")


async def read_half(caller: Caller, world: World) -> None:
    await caller.read_until(b"half")


@pytest.mark.parametrize(
    ("reply", "read"),
    [(stream_for_ever, read_an_event), (silent, read_nothing), (quiet_stream, read_an_event)],
    ids=["streaming", "prompt phase", "between events"],
)
def test_a_client_that_closes_is_gone_for_the_engine_within_a_second(
    reply: Callable[[Seen, EngineSide], Awaitable[None]], read: Callable[[Caller, World], Awaitable[None]]
) -> None:
    """The engine's connection closes, the admission ends as client_gone, the next request is served."""

    async def main() -> None:
        async with a_world(reply, limits={"sweep_s": 0.25}) as world:
            async with a_caller(world) as caller:
                await caller.send(CHAT)
                await read(caller, world)
                before = time.monotonic()
                caller.close()
                ticket = await world.admissions.ticket()
                await ticket.wait_for("finish")
                await world.engine.sides[0].gone.wait() if reply is silent else None
                took_s = time.monotonic() - before
            assert ticket.outcome is Outcome.CLIENT_GONE
            assert took_s < SOON_S
            world.engine.reply = answer_ok
            async with a_caller(world) as caller:
                assert (await caller.ask(get())).status == 200

    on_uvloop(main)


def test_a_client_that_resets_in_the_middle_of_a_plain_answer_frees_the_engine() -> None:
    """No probe is possible inside a body, but a reset is seen at once."""

    async def main() -> None:
        async with a_world(half_answer) as world, a_caller(world) as caller:
            await caller.send(get())
            await caller.read_until(b"half")
            caller.writer.transport.abort()
            ticket = await world.admissions.ticket()
            # An abort with nothing unread is a FIN; the relay learns by writing.
            await world.engine.sides[0].send(b"x" * 48)
            await world.engine.sides[0].send(b"x" * 48)
            await ticket.wait_for("finish")

    on_uvloop(main)


def test_a_client_that_leaves_while_it_waits_cancels() -> None:
    """Before the admission the ticket is cancelled, not finished, and no engine sees anything."""

    async def main() -> None:
        async with a_world() as world:
            world.admissions.hold = True
            async with a_caller(world) as caller:
                await caller.send(CHAT)
                ticket = await world.admissions.ticket()
                caller.close()
                await ticket.wait_for("cancel")
            assert [event[0] for event in ticket.events] == ["cancel"]
            world.admissions.admit(ticket)  # a word that was under way is answered
            assert ticket.outcome is Outcome.CLIENT_GONE
            assert not world.engine.seen
            ticket.events.pop()

    on_uvloop(main)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "plain"])
def test_a_half_closed_client_gets_its_whole_answer(streamed: bool) -> None:
    """FIN is not a hang-up: probes are answered by the client's kernel, and the client sees nothing odd."""

    async def slowly(seen: Seen, side: EngineSide) -> None:
        await asyncio.sleep(0.4)
        if streamed:
            await side.send(STREAM_HEAD)
            for number in range(8):
                await side.send(event(number))
                await asyncio.sleep(0.05)
            await side.send(b"0\r\n\r\n")
        else:
            await side.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n01234")
            await asyncio.sleep(0.2)
            await side.send(b"56789")

    async def main() -> None:
        async with a_world(slowly, limits={"probe_every_s": 0.1}) as world, a_caller(world) as caller:
            await caller.send(CHAT if streamed else get())
            caller.writer.write_eof()
            answer = await caller.answer()
            assert answer is not None
            assert answer.complete
            if streamed:
                assert answer.body.replace(b":\n\n", b"") == b"".join(b"data: %d\n\n" % number for number in range(8))
            else:
                assert answer.body == b"0123456789"
            assert world.stats["probes"] >= 2
            assert set(caller.interim) == {100}
            assert (await world.admissions.ticket()).outcome is Outcome.OK

    on_uvloop(main)


def test_a_half_closed_client_that_finally_closes_is_noticed() -> None:
    """Probes go on after the first."""

    async def main() -> None:
        async with a_world(silent, limits={"probe_every_s": 0.1}) as world, a_caller(world) as caller:
            await caller.send(CHAT)
            caller.writer.write_eof()
            await until(lambda: world.stats["probes"] >= 2)
            assert not (await world.admissions.ticket()).events
            caller.close()
            assert (await world.admissions.ticket()).outcome in (None, Outcome.CLIENT_GONE)
            await (await world.admissions.ticket()).wait_for("finish")

    on_uvloop(main)


def test_a_connection_is_reusable_after_a_normal_end() -> None:
    """Keep-alive holds over answers of every framing."""

    async def main() -> None:
        replies = [
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
            STREAM_HEAD + event(1) + b"0\r\n\r\n",
            b"HTTP/1.1 204 No Content\r\n\r\n",
        ]

        async def reply(seen: Seen, side: EngineSide) -> None:
            await side.send(replies[(len(side.engine.seen) - 1) % 3])

        async with a_world(reply) as world, a_caller(world) as caller:
            for number in range(9):
                answer = await caller.ask(get())
                assert (answer.complete, answer.status) == (True, (200, 200, 204)[number % 3])
            assert (world.stats["clients"], world.engine.connections) == (1, 1)

    on_uvloop(main)


def test_a_client_that_leaves_inside_its_request_leaves_nothing() -> None:
    """Whatever byte it stops at: no admission is left open, nothing is held."""

    async def main() -> None:
        async with a_world() as world:
            for end in range(1, len(CHAT)):
                async with a_caller(world) as caller:
                    await caller.send(CHAT[:end])
            await until(lambda: not world.stats["clients_now"])
            assert not world.admissions.tickets
            assert not world.engine.seen

    on_uvloop(main)


def test_an_engine_that_leaves_inside_its_answer_never_makes_a_whole_one() -> None:
    """Whatever byte it stops at: 502, or a cut; nothing is left open."""
    whole = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + event(1) + b"0\r\n\r\n"

    async def main() -> None:
        at = 0

        async def reply(seen: Seen, side: EngineSide) -> None:
            await side.send(whole[:at])
            side.fin()

        async with a_world(reply) as world:
            for at in range(1, len(whole)):
                async with a_caller(world) as caller:
                    await caller.send(get())
                    answer = await caller.answer()
                    assert answer is not None, at
                    assert answer.status == 502 or not answer.complete, at
                    if answer.status == 200:
                        assert b'data: {"error":' in answer.body
            assert {ticket.outcome for ticket in world.admissions.tickets} == {Outcome.ENGINE_BROKE}

    on_uvloop(main)


def test_a_stalled_client_stalls_the_engine_and_then_gets_every_byte() -> None:
    """Back-pressure: memory stays flat while the client does not read."""
    total = 64 << 20

    async def flood(seen: Seen, side: EngineSide) -> None:
        await side.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        piece = bytes(range(256)) * 1024
        for _ in range(total // len(piece)):
            await side.send(piece)
            side.engine.changed.set()

    async def main() -> None:
        async with a_world(flood) as world, a_caller(world) as caller:
            await caller.send(get())
            await until(lambda: world.server.clients and next(iter(world.server.clients)).write_paused)
            client = next(iter(world.server.clients))
            assert client.transport.get_write_buffer_size() < 2 << 20
            assert client.active is not None
            assert client.active.upstream is not None
            assert client.active.upstream.held
            answer = await caller.answer()
            assert answer is not None
            assert answer.complete
            assert len(answer.body) == total
            assert answer.body[: 1 << 20] == bytes(range(256)) * 4096
            assert (await caller.ask(get("/health"))).status == 200

    on_uvloop(main)


def test_a_client_that_takes_nothing_is_given_up() -> None:
    """Within `client_stall_s_max` the engine is free again."""

    async def flood(seen: Seen, side: EngineSide) -> None:
        await side.send(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await side.send(b"x" * 262144)

    async def main() -> None:
        async with a_world(flood, limits={"client_stall_s_max": 0.3}) as world, a_caller(world) as caller:
            await caller.send(get())
            ticket = await world.admissions.ticket()
            await ticket.wait_for("finish")
            assert ticket.outcome is Outcome.CLIENT_GONE

    on_uvloop(main)
