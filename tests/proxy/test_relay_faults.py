"""The faults a first relay had; each stays found."""

from __future__ import annotations

import asyncio

from greenroom.core.facts import Outcome
from greenroom.proxy.admission import Refusal

from .corpus import GET, H2C, HOST, JSON, NEXT, POST, SIZE, TE, UPGRADE
from .fake_wires import Bench, statuses
from .relay_world import EngineSide, FakeTicket, Seen, a_caller, a_world, answer_ok, get, on_asyncio, on_uvloop, post

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def test_a_refusal_behind_an_upgrade_keeps_its_status() -> None:
    """The parser ran inside the handler of the upgrade: 401 became 500."""
    bench = Bench()
    no_key = b"GET /upstream/m/x HTTP/1.1\r\n" + HOST + b"\r\n"
    bench.feed(POST + H2C + b"Content-Length: " + SIZE + b"\r\n\r\n" + JSON + no_key)
    bench.pool.wires[0].protocol.data_received(OK)
    bench.settle()
    assert statuses(bytes(bench.wire.out), ["POST"]) == ([200, 401], True)
    bench.hang_up()
    bench.check_over()


def test_there_is_one_refusal_a_connection() -> None:
    """The parser goes on behind a refusal in the same read; a second answer would come after our own end."""
    bench = Bench()
    bench.feed((GET + HOST + b"\r\n") * 3 + b"\0\0\0")
    assert statuses(bytes(bench.wire.out), []) == ([400], True)
    assert bench.wire.has_eof
    bench.feed(NEXT)
    bench.hang_up()
    bench.check_over()
    assert not bench.pool.wires


def test_a_cut_answer_ends_for_the_client() -> None:
    """The link to the client was gone before the error was written: it waited for ever."""

    async def cut(seen: Seen, side: EngineSide) -> None:
        await side.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nda")
        side.rst()

    async def main() -> None:
        async with a_world(cut) as world, a_caller(world) as caller:
            await caller.send(get())
            answer = await caller.answer()
            assert answer is not None
            assert answer.status == 502 or (b'data: {"error":' in answer.body and not answer.complete)
            assert (await (await world.admissions.ticket()).wait_for("finish"))[1] is Outcome.ENGINE_BROKE

    on_uvloop(main)
    on_asyncio(main)


def test_a_head_is_written_once() -> None:
    """It was written again when a length body was cut in a later read."""
    bench = Bench()
    bench.feed(NEXT)
    wire = bench.pool.wires[0]
    wire.protocol.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")
    wire.protocol.data_received(b"def")
    wire.abort()
    bench.settle()
    assert bytes(bench.wire.out).count(b"HTTP/1.1") == 1
    assert bench.wire.has_eof
    bench.hang_up()
    bench.check_over()


def test_overhead_that_came_with_the_head_counts() -> None:
    """One read holds the head and 200 KiB of chunk extension."""
    bench = Bench()
    bench.feed(POST + TE + b"\r\nd;" + b"x" * (200 << 10))
    assert statuses(bytes(bench.wire.out), []) == ([400], True)
    bench.hang_up()
    bench.check_over()


def test_engine_connections_are_used_again() -> None:
    """`should_keep_alive` was asked too late, and nothing looked wrong."""
    bench = Bench()
    for _ in range(5):
        bench.feed(NEXT)
        bench.pool.wires[0].protocol.data_received(OK)
    assert (len(bench.pool.wires), bench.server.stats.reused) == (1, 4)
    bench.hang_up()
    bench.check_over()


def test_whether_an_upgrade_is_honoured_does_not_depend_on_timing() -> None:
    """Refused behind another request, whether that one is still running or long done."""
    upgrade = GET + UPGRADE + b"\r\n"
    outs = []
    for is_done_first in (True, False):
        bench = Bench()
        bench.feed(NEXT)
        if is_done_first:
            bench.pool.wires[0].protocol.data_received(OK)
        bench.feed(upgrade)
        if not is_done_first:
            bench.pool.wires[0].protocol.data_received(OK)
        bench.settle()
        outs.append(bytes(bench.wire.out))
        bench.hang_up()
        bench.check_over()
    assert outs[0] == outs[1]
    assert statuses(outs[0], []) == ([200, 400], True)


def test_the_relay_serves_on_plain_asyncio_too() -> None:
    """uvloop is faster, not necessary."""

    async def main() -> None:
        async with a_world() as world, a_caller(world) as caller:
            for _ in range(3):
                assert (await caller.ask(post(JSON))).status == 200
            answers = await asyncio.gather(*(one(world.port) for _ in range(8)))
            assert answers == [200] * 8

    async def one(port: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get())
        line = await reader.readline()
        writer.close()
        return int(line.split()[1])

    on_asyncio(main)


def test_a_request_is_sent_three_times_at_most_however_silently_engines_die() -> None:
    """On a kept connection that proves dead, on a fresh one, and once more where the scheduler says."""

    async def die(seen: Seen, side: EngineSide) -> None:
        if seen.body == b'{"model":"m","die":1}':
            side.fin()
            await side.wait_gone()
        else:
            await answer_ok(seen, side)

    async def main() -> None:
        async with a_world(die) as world, a_caller(world) as caller, a_caller(world) as other:
            lost: list[object] = []

            def after_loss(ticket: FakeTicket) -> None:
                lost.append(ticket)
                if len(lost) == 1:
                    world.admissions.admit(ticket)
                else:
                    ticket.waiter.refused(Refusal(502, "engine_lost", "It died."))

            world.admissions.after_loss = after_loss
            await asyncio.gather(caller.ask(post(b'{"model":"m"}')), other.ask(post(b'{"model":"m"}')))  # two kept connections
            assert (await caller.ask(post(b'{"model":"m","die":1}'))).status == 502
            assert sum(b"die" in seen.body for seen in world.engine.seen) == 3
            assert len(lost) == 2

    on_uvloop(main)


def test_an_early_hint_says_nothing_about_the_answer() -> None:
    """Its headers are its own: an event stream announced in a 103 made the answer one."""
    hint = b"HTTP/1.1 103 Early Hints\r\nContent-Type: text/event-stream\r\nCache-Control: max-age=9\r\nContent-Encoding: gzip\r\n\r\n"

    async def hinted(seen: Seen, side: EngineSide) -> None:
        kind = b"Content-Type: text/event-stream\r\n" if seen.target == b"/events" else b""
        await side.send(hint + b"HTTP/1.1 200 OK\r\n" + kind + b"Content-Length: 2\r\n\r\nok")

    async def main() -> None:
        async with a_world(hinted) as world, a_caller(world) as caller:
            plain = await caller.ask(get("/upstream/m/plain"))
            assert not {b"x-accel-buffering", b"content-type", b"content-encoding"} & set(plain.headers)
            assert (await caller.ask(get("/upstream/m/events"))).headers[b"cache-control"] == b"no-cache"

    on_uvloop(main)
