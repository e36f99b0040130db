"""Nothing is leaked: connections, admissions, files, memory; under limits, faults and load."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from typing import Any

import psutil
import pytest

from greenroom.proxy.limits import Stats
from greenroom.proxy.spool import Patched, Spool, SpoolError, SpoolFile

from .relay_world import EngineSide, Seen, World, a_caller, a_world, answer_ok, chunked, get, on_uvloop, post, until

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


async def moody(seen: Seen, side: EngineSide) -> None:
    """Answers, streams, dies or stalls, by what the path says."""
    mood = seen.target.rpartition(b"/")[2].partition(b"?")[0]
    if mood == b"die":
        side.rst()
    elif mood == b"stream":
        await side.send(SSE)
        for number in range(5):
            await side.send(b"9\r\ndata: %d\n\n\r\n" % number)
            await asyncio.sleep(0.002)
        await side.send(b"0\r\n\r\n")
    elif mood == b"cut":
        await side.send(SSE + b"9\r\ndata: 1\n\n\r\n")
        side.fin()
    elif mood == b"stall":
        await side.wait_gone()
    else:
        await answer_ok(seen, side)


async def visit(world: World, chance: random.Random) -> None:
    """One client with a few requests, which may leave at any time."""
    async with a_caller(world) as caller:
        for _ in range(chance.randint(1, 5)):
            mood = chance.choice(["ok", "ok", "stream", "die", "cut", "stall", "big"])
            if mood == "big":
                await caller.send(post(b"x" * chance.randint(1, 600_000), "/upstream/m/ok"))
            else:
                await caller.send(get(f"/upstream/m/{mood}"))
            leaves = mood == "stall" or chance.random() < 0.2
            if leaves:
                await asyncio.sleep(chance.random() * 0.02)
                if chance.random() < 0.5:
                    caller.writer.transport.abort()
                else:
                    caller.close()
                return
            answer = await caller.answer()
            if answer is None or not answer.complete or answer.headers.get(b"connection") == b"close":
                return


def test_after_any_mixture_of_faults_everything_is_given_back() -> None:
    """300 visits, 30 at once: each admission ends once, nothing is held, the pool serves on."""

    async def main() -> None:
        chance = random.Random(7)
        async with a_world(moody) as world:
            gate = asyncio.Semaphore(30)

            async def guarded() -> None:
                async with gate:
                    with contextlib.suppress(ConnectionError):
                        await visit(world, chance)

            await asyncio.gather(*(guarded() for _ in range(300)))
            await until(lambda: world.stats["clients_now"] == 0)
            stats = world.stats
            assert stats["requests"] == len(world.hooks.records)
            assert stats["finished"] == len(world.hooks.records)
            for ticket in world.admissions.tickets:
                ends = [event[0] for event in ticket.events if event[0] in ("finish", "cancel", "lost")]
                assert len(ends) == 1, ticket.events
            async with a_caller(world) as caller:
                assert (await caller.ask(get())).status == 200

    on_uvloop(main)


def test_idle_connections_cost_little() -> None:
    """1,000 that were served once and kept open: both ends of them in this process stay below 40 MiB."""

    async def main() -> None:
        async with a_world() as world:
            async with a_caller(world) as caller:
                await caller.ask(get())
            before = psutil.Process().memory_info().rss
            writers = []
            for _ in range(1000):
                reader, writer = await world.connect()
                writer.write(get())
                await reader.readuntil(b"\r\n\r\n")
                writers.append(writer)
            grown = psutil.Process().memory_info().rss - before
            for writer in writers:
                writer.close()
            assert grown < 40 << 20

    on_uvloop(main)


def test_one_connection_too_many_is_told_so() -> None:
    """503, and the others are served on."""

    async def main() -> None:
        async with a_world(limits={"connections_max": 2}) as world, a_caller(world) as first, a_caller(world) as second:
            await first.ask(get())
            await second.ask(get())
            async with a_caller(world) as third:
                answer = await third.answer()
                assert answer is not None
                assert answer.status == 503
                await third.read_all()
            assert (await first.ask(get())).status == 200

    on_uvloop(main)


def test_a_client_of_1_0_may_keep_its_connection() -> None:
    """When it asks for it, and the length is known."""

    async def main() -> None:
        async with a_world() as world, a_caller(world) as caller:
            for _ in range(2):
                answer = await caller.ask(get(extra="Connection: keep-alive\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"))
                assert (answer.status, answer.headers[b"connection"]) == (200, b"keep-alive")
            assert world.stats["clients"] == 1

    on_uvloop(main)


def test_a_pooled_connection_is_closed_when_it_was_idle_too_long() -> None:
    """Before the engine closes it itself."""

    async def main() -> None:
        async with a_world(limits={"pool_idle_s_max": 0.2}) as world, a_caller(world) as caller:
            await caller.ask(get())
            assert world.server.pool.idle_count() == 1
            await until(lambda: world.server.pool.idle_count() == 0)
            assert (await caller.ask(get())).status == 200
            assert world.engine.connections == 2

    on_uvloop(main)


def test_an_engine_that_answers_before_it_read_the_body_is_not_used_again() -> None:
    """The rest of the body would be its next request."""

    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        number = connections
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 413 x\r\nContent-Length: 3\r\n\r\nbig")
                if number == 1:
                    await given_up.wait()
                    break
        writer.transport.abort()

    given_up = asyncio.Event()
    connections = 0

    async def main() -> None:
        engine = await asyncio.start_server(hasty, "127.0.0.1", 0)
        async with a_world() as world, a_caller(world) as caller:
            world.admissions.address = ("127.0.0.1", engine.sockets[0].getsockname()[1])
            answer = await caller.ask(post(b"x" * (24 << 20), "/upstream/m/x"))
            assert (answer.status, answer.body, answer.complete) == (413, b"big", True)
            assert (await caller.ask(get())).status == 413
            assert connections == 2
            assert world.stats["spool_bytes_now"] == 0
        given_up.set()
        engine.close()
        await asyncio.sleep(0.01)

    on_uvloop(main)


def test_chunks_of_one_byte_cost_no_list_of_pieces() -> None:
    """A body in 50,000 chunks is kept as one."""
    body = b'{"model":"m","x":"' + b"y" * 50_000 + b'"}'

    async def main() -> None:
        async with a_world() as world, a_caller(world) as caller:
            head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            await caller.send(head + chunked(*(body[at : at + 1] for at in range(len(body)))))
            answer = await caller.answer()
            assert answer is not None
            assert answer.status == 200
            assert world.engine.seen[0].body == body

    on_uvloop(main)


class FullDisk:
    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None: ...


def test_a_full_disk_is_507() -> None:
    """Whatever is written when the disk is full."""
    file = SpoolFile(Spool(10, None, Stats()), FullDisk())  # type: ignore[arg-type]
    with pytest.raises(SpoolError) as caught:
        file.append(b"x")
    assert caught.value.refusal.status == 507
    with pytest.raises(SpoolError):
        Spool(10, "/does/not/exist", Stats()).open()


def test_a_patched_body_reads_like_the_bytes_it_stands_for() -> None:
    """At every offset and length."""
    spool = Spool(10, None, Stats())
    file = spool.open()
    file.append(b"0123456789")
    for start, end, put in ((3, 5, b"abcdef"), (0, 0, b"x"), (10, 10, b"y"), (2, 9, b"")):
        body = Patched(file, start, end, put)
        expected = b"0123456789"[:start] + put + b"0123456789"[end:]
        for step in (1, 3, 100):
            got = b""
            while len(got) < body.size:
                got += body.read(len(got), min(step, body.size - len(got)))
            assert got == expected
    file.close()
    assert spool.stats.spool_bytes_now == 0
