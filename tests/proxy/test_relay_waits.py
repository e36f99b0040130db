"""Waiting for a model: refusals, comments to streaming clients, retries, cuts; and event streams as they pass."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from greenroom.config.model import KeyConfig
from greenroom.core.facts import Outcome
from greenroom.proxy.admission import ModelRoute, Refusal

from .relay_world import EngineSide, FakeTicket, Seen, a_caller, a_catalog, a_world, answer_ok, get, on_uvloop, post, until

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM = post(b'{"model":"m","stream":true}')
PLAIN = post(b'{"model":"m"}')
SOON = {"keepalive_after_s": 0.1, "keepalive_every_s": 0.1}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def one_event(seen: Seen, side: EngineSide) -> None:
    await side.send(SSE + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def test_a_refusal_is_an_answer_with_retry_after_and_keeps_the_connection() -> None:
    """Whether it comes inside `ask` or later."""

    async def main() -> None:
        async with a_world() as world, a_caller(world) as caller:
            world.admissions.refusal = Refusal(429, "queue_full", "256 requests wait for m; try again later.", retry_after_s=11.2)
            answer = await caller.ask(PLAIN)
            assert (answer.status, answer.headers[b"retry-after"]) == (429, b"12")
            world.admissions.refusal, world.admissions.hold = None, True
            await caller.send(STREAM)
            ticket = await world.admissions.ticket(1)
            ticket.waiter.refused(Refusal(503, "no_room", "No room for m."))
            answer = await caller.answer()
            assert answer is not None
            assert (answer.status, answer.headers[b"content-type"]) == (503, b"application/json")
            assert [t.events for t in world.admissions.tickets] == [[], []]
            assert not world.engine.seen

    on_uvloop(main)


def test_a_streaming_client_that_waits_gets_comments_and_then_the_engines_events() -> None:
    """B54: a head and comments while the model loads, then the engine's bytes; no second head."""

    async def main() -> None:
        async with a_world(one_event, limits=SOON) as world, a_caller(world) as caller:
            world.admissions.hold = True
            await caller.send(STREAM)
            ticket = await world.admissions.ticket()
            await caller.read_until(b": loading, about 12 s\n\n\r\n1a".replace(b"1a", b""))
            await until(lambda: caller.reader._buffer.count(b": loading") >= 1)  # type: ignore[attr-defined]
            world.admissions.admit(ticket)
            caller.left = bytes(caller.raw)
            answer = await caller.answer()
            assert answer is not None
            assert answer.complete
            assert answer.headers[b"content-type"] == b"text/event-stream"
            assert answer.headers[b"x-accel-buffering"] == b"no"
            assert answer.headers[b"cache-control"] == b"no-cache"
            assert answer.headers[b"x-greenroom-model"] == b"m"
            assert answer.body.count(b": loading, about 12 s\n\n") >= 2
            assert answer.body.replace(b": loading, about 12 s\n\n", b"") == b"data: 1\n\ndata: [DONE]\n\n"
            assert ticket.outcome is Outcome.OK
            world.admissions.hold = False
            assert (await caller.ask(get())).status == 200

    on_uvloop(main)


@pytest.mark.parametrize(
    ("request_bytes", "keepalive"),
    [(PLAIN, True), (STREAM, False), (STREAM.replace(b"HTTP/1.1", b"HTTP/1.0"), True)],
    ids=["not streaming", "switched off", "1.0"],
)
def test_other_clients_just_wait(request_bytes: bytes, keepalive: bool) -> None:
    """No head is written before the engine's own."""

    async def main() -> None:
        catalog = a_catalog(m=ModelRoute("m", keepalive=keepalive))
        async with a_world(limits=SOON, catalog=catalog) as world, a_caller(world) as caller:
            world.admissions.hold = True
            await caller.send(request_bytes)
            ticket = await world.admissions.ticket()
            await asyncio.sleep(0.4)
            assert not caller.reader._buffer  # type: ignore[attr-defined]
            world.admissions.admit(ticket)
            answer = await caller.answer()
            assert answer is not None
            assert (answer.status, answer.headers[b"content-type"]) == (200, b"application/json")

    on_uvloop(main)


async def started_early(world, caller) -> FakeTicket:  # type: ignore[no-untyped-def]
    """A streaming client that has its head and a comment."""
    world.admissions.hold = True
    await caller.send(STREAM)
    await caller.read_until(b": loading, about 12 s\n\n")
    caller.left = bytes(caller.raw)
    return await world.admissions.ticket()  # type: ignore[no-any-return]


def test_a_refusal_after_the_comments_began_is_an_error_event_and_a_cut() -> None:
    """The status is spent: an event says it, the stream has no clean end."""

    async def main() -> None:
        async with a_world(limits=SOON) as world, a_caller(world) as caller:
            ticket = await started_early(world, caller)
            ticket.waiter.refused(Refusal(503, "start_failed", "m did not start."))
            answer = await caller.answer()
            assert answer is not None
            assert not answer.complete
            assert b'data: {"error":{"message":"m did not start."' in answer.body

    on_uvloop(main)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (b"HTTP/1.1 500 x\r\nContent-Length: 31\r\n\r\n" + b'{"error":{"message":"too long"}}'[:31], b"answered 500"),
        (b'HTTP/1.1 400 x\r\nTransfer-Encoding: chunked\r\n\r\n16\r\n{"error":"bad prompt"}\r\n0\r\n\r\n', b"bad prompt"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}", b"answered 200"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", b"middle of its answer"),
    ],
    ids=["500", "400", "200 but no stream", "broken"],
)
def test_an_engines_refusal_after_the_comments_began_is_an_error_event_and_a_cut(reply: bytes, text: bytes) -> None:
    """Its message is told; its head is not."""

    async def answer_so(seen: Seen, side: EngineSide) -> None:
        await side.send(reply)
        side.fin()

    async def main() -> None:
        async with a_world(answer_so, limits=SOON) as world, a_caller(world) as caller:
            ticket = await started_early(world, caller)
            world.admissions.admit(ticket)
            answer = await caller.answer()
            assert answer is not None
            assert not answer.complete
            assert b'data: {"error":' in answer.body
            assert text in answer.body
            assert (await ticket.wait_for("finish"))[1] is Outcome.ENGINE_BROKE

    on_uvloop(main)


def test_a_pooled_connection_that_died_is_replaced_silently() -> None:
    """The engine closed it just as the request came: a fresh connection, once, and 200."""
    die = False

    async def reply(seen: Seen, side: EngineSide) -> None:
        nonlocal die
        if die and side.number == 1:
            side.rst()
        else:
            await answer_ok(seen, side)

    async def main() -> None:
        nonlocal die
        async with a_world(reply) as world, a_caller(world) as caller:
            await caller.ask(PLAIN)
            die = True
            answer = await caller.ask(PLAIN)
            assert (answer.status, answer.body) == (200, b'{"got":13}')
            assert (world.stats["retried"], world.engine.connections) == (1, 2)
            assert [ticket.outcome for ticket in world.admissions.tickets] == [Outcome.OK, Outcome.OK]

    on_uvloop(main)


def test_a_death_before_the_first_byte_goes_back_to_the_scheduler_and_is_served_by_the_next_instance() -> None:
    """`lost` once, admitted again, the same body, 200."""

    async def die(seen: Seen, side: EngineSide) -> None:
        side.rst()

    async def main() -> None:
        async with a_world(die) as world, a_caller(world) as caller:

            def again(ticket: FakeTicket) -> None:
                world.engine.reply = answer_ok
                world.admissions.generation = 2
                asyncio.get_running_loop().call_later(0.05, world.admissions.admit, ticket)

            world.admissions.after_loss = again
            answer = await caller.ask(PLAIN)
            assert (answer.status, answer.body) == (200, b'{"got":13}')
            ticket = await world.admissions.ticket()
            assert [event[0] for event in ticket.events if event[0] != "alive"] == ["lost", "finish"]
            assert [seen.body for seen in world.engine.seen] == [b'{"model":"m"}'] * 2

    on_uvloop(main)


def test_an_engine_that_takes_no_connection_is_lost_too() -> None:
    """The scheduler's refusal is what the client gets."""

    async def main() -> None:
        async with a_world() as world, a_caller(world) as caller:
            world.admissions.address = ("127.0.0.1", 1)
            answer = await caller.ask(PLAIN)
            assert answer.status == 502
            assert [event[0] for event in world.admissions.tickets[0].events] == ["lost"]
            world.admissions.address = ("127.0.0.1", world.engine.port)
            assert (await caller.ask(PLAIN)).status == 200

    on_uvloop(main)


def test_connections_of_an_older_generation_are_not_used() -> None:
    """The address is the same, the engine is not."""

    async def main() -> None:
        async with a_world() as world, a_caller(world) as caller:
            await caller.ask(PLAIN)
            world.admissions.generation = 2
            await caller.ask(PLAIN)
            assert world.engine.connections == 2

    on_uvloop(main)


def test_an_order_to_cut_is_an_error_answer_before_the_head_and_an_error_event_after_it() -> None:
    """Forced unload: never a short success."""

    async def stuck(seen: Seen, side: EngineSide) -> None:
        if b"stream" in seen.body:
            await side.send(SSE + chunk(b"data: 1\n"))
        await side.wait_gone()

    async def main() -> None:
        async with a_world(stuck) as world:
            async with a_caller(world) as caller:
                await caller.send(PLAIN)
                await world.engine.wait_seen(1)
                world.admissions.tickets[0].waiter.cut("unloaded", "m was unloaded by force.")
                answer = await caller.answer()
                assert answer is not None
                assert (answer.status, answer.complete) == (503, True)
                await caller.send(STREAM)
                await caller.read_until(b"data: 1")
                world.admissions.tickets[1].waiter.cut("unloaded", "m was unloaded by force.")
                caller.left = bytes(caller.raw).partition(b"unloaded by force")[2].partition(b"}}")[2]
                answer = await caller.answer()
                assert answer is not None
                assert not answer.complete
                assert answer.body.startswith(b"data: 1\n\n\ndata: {")
            assert [ticket.outcome for ticket in world.admissions.tickets] == [Outcome.CUT, Outcome.CUT]

    on_uvloop(main)


def test_a_cut_answer_without_length_is_reset_for_a_client_of_1_0() -> None:
    """A close would look like a whole answer to it."""

    async def cut(seen: Seen, side: EngineSide) -> None:
        await side.send(SSE + chunk(b"data: 1\n\n"))
        await asyncio.sleep(0.05)
        side.rst()

    async def main() -> None:
        async with a_world(cut) as world:
            reader, writer = await world.connect()
            writer.write(b"GET /upstream/m/x HTTP/1.0\r\n\r\n")
            with pytest.raises(ConnectionResetError):
                await reader.read(-1)
            writer.close()

    on_uvloop(main)


@pytest.mark.parametrize(
    "events",
    [
        [b"data: %d\n\n" % n for n in range(10)],
        [b"data: %d\r\n\r\n" % n for n in range(10)],
        [b": ping\n\n", b"data: " + b"x" * 300_000 + b"\n\n"],
    ],
    ids=["LF", "CRLF", "comments and 300 KiB"],
)
def test_events_pass_byte_for_byte_and_as_they_come(events: list[bytes]) -> None:
    """B10: unchanged, unbuffered, with the headers that keep other proxies from buffering."""
    has_come = asyncio.Event()

    async def stream(seen: Seen, side: EngineSide) -> None:
        await side.send(SSE.replace(b"Transfer", b"cache-control: no-store\r\nTransfer") if len(events) == 2 else SSE)
        for event in events:
            has_come.clear()
            await side.send(chunk(event))
            await has_come.wait()  # there is no next one before the client has this one
        await side.send(b"0\r\n\r\n")

    async def main() -> None:
        async with a_world(stream) as world, a_caller(world) as caller:
            await caller.send(STREAM)
            for event in events:
                await caller.read_until(event[-20:])
                has_come.set()
            caller.left = bytes(caller.raw)
            answer = await caller.answer()
            assert answer is not None
            assert answer.body == b"".join(events)
            assert answer.headers[b"x-accel-buffering"] == b"no"
            assert answer.headers[b"cache-control"] == (b"no-store" if len(events) == 2 else b"no-cache")
            assert b"content-length" not in answer.headers

    on_uvloop(main)


def test_the_answer_tells_model_start_and_wait_and_drops_what_is_not_the_engines_to_say() -> None:
    """X-Greenroom-*, one Allow-Origin, no hop-by-hop headers, the engine's key upstream."""

    async def reply(seen: Seen, side: EngineSide) -> None:
        await side.send(
            b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: http://engine\r\nConnection: keep-alive, X-Hop\r\n"
            b"X-Hop: 1\r\nKeep-Alive: timeout=9\r\n"
            b"X-Greenroom-Model: forged\r\nX-Own: kept\r\nContent-Length: 0\r\n\r\n"
        )

    async def main() -> None:
        catalog = a_catalog(**{"modèle 7b": ModelRoute("modèle 7b")})
        async with a_world(reply, catalog=catalog, keys=["k1"]) as world, a_caller(world) as caller:
            world.admissions.secret_headers = ((b"authorization", b"Bearer engine-key"),)
            world.admissions.base_path = "/base"
            body = '{"model":"modèle 7b"}'.encode()
            answer = await caller.ask(
                post(body, extra="Authorization: Bearer k1\r\nOrigin: http://page\r\nX-Greenroom-Deadline-Ms: 1500\r\n")
            )
            assert answer.headers == {
                b"x-own": b"kept",
                b"content-length": b"0",
                b"x-greenroom-model": b"mod%C3%A8le 7b",
                b"x-greenroom-start": b"hot",
                b"x-greenroom-wait-ms": b"3",
                b"access-control-allow-origin": b"*",
                b"access-control-expose-headers": answer.headers[b"access-control-expose-headers"],
            }
            seen = world.engine.seen[0]
            assert seen.values(b"authorization") == [b"Bearer engine-key"]
            assert seen.target == b"/base/v1/chat/completions"
            wish = world.admissions.tickets[0].wish
            assert (wish.deadline_s, wish.client) == (1.5, "key-1")

    on_uvloop(main)


def test_the_control_plane_is_relayed_over_its_socket_under_keys_of_its_own_scope(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """503 without one; its key is not the inference key; no model is asked for."""
    path = str(tmp_path / "control.sock")
    heads: list[bytes] = []

    async def control(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                heads.append(head)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nctrl")
        writer.close()

    async def main() -> None:
        server = await asyncio.start_unix_server(control, path)
        keys = [KeyConfig("k1", "one", ("inference",)), KeyConfig("admin", "two", ("view",))]
        async with a_world(keys=keys) as world:
            async with a_caller(world) as caller:
                assert (await caller.ask(get("/api/status", "x-api-key: admin\r\n"))).status == 503
                world.plane.control_socket = path
                for _ in range(2):
                    assert (await caller.ask(get("/api/status?x=1", "x-api-key: admin\r\n"))).body == b"ctrl"
                assert (await caller.ask(get("/api/status", "x-api-key: k1\r\n"))).status == 403
            assert heads[0].startswith(b"GET /api/status?x=1 HTTP/1.1\r\nHost: localhost\r\n")
            assert world.stats["reused"] == 1
            assert not world.admissions.tickets
        server.close()
        await asyncio.sleep(0.01)

    on_uvloop(main)


def test_closing_waits_for_running_requests_and_then_cuts() -> None:
    """Draining: idle connections close, a running one ends within its grace, a stuck one is cut."""
    go_on = asyncio.Event()

    async def slow(seen: Seen, side: EngineSide) -> None:
        if seen.target == b"/stuck":
            await side.wait_gone()
        else:
            await go_on.wait()
            await answer_ok(seen, side)

    async def main() -> None:
        async with a_world(slow) as world, a_caller(world) as idle, a_caller(world) as running, a_caller(world) as stuck:
            await running.send(get())
            await stuck.send(get("/upstream/m/stuck"))
            await world.engine.wait_seen(2)
            closing = asyncio.ensure_future(world.server.close(0.5))
            assert await idle.read_all() == b""
            go_on.set()
            answer = await running.answer()
            assert answer is not None
            assert (answer.status, answer.headers[b"connection"]) == (200, b"close")
            answer = await stuck.answer()
            assert answer is not None
            assert answer.status == 503
            await closing
            assert world.stats["clients_now"] == 0

    on_uvloop(main)


def test_every_request_is_reported_once() -> None:
    """To the hooks: refused, served and lost ones alike."""

    async def main() -> None:
        async with a_world() as world, a_caller(world) as caller:
            await caller.ask(PLAIN)
            await caller.ask(post(b'{"model":"nobody"}'))
            await caller.ask(get("/health"))
            found = [(record.kind, record.model, record.status, record.outcome) for record in world.hooks.records]
            assert found == [("inference", "m", 200, "ok"), ("inference", "", 404, "refused"), ("health", "", 200, "ok")]
            assert (world.stats["requests"], world.stats["finished"]) == (3, 3)

    on_uvloop(main)


def test_rerank_is_translated_for_an_engine_of_the_other_dialect() -> None:
    """A client speaks J, the engine T."""

    async def tei(seen: Seen, side: EngineSide) -> None:
        assert b'"texts"' in seen.body
        body = b'[{"index":0,"score":0.1},{"index":1,"score":0.9}]'
        await side.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async def main() -> None:
        async with a_world(tei, catalog=a_catalog(m=ModelRoute("m", engine="tei"))) as world, a_caller(world) as caller:
            answer = await caller.ask(post(b'{"model":"m","query":"q","documents":["x","y"],"top_n":1}', "/v1/rerank"))
            assert answer.status == 200
            assert b'"index":1' in answer.body
            assert b'"index":0' not in answer.body
            assert answer.headers[b"x-greenroom-model"] == b"m"

    on_uvloop(main)


@pytest.mark.parametrize("told", ["", "0", "000", "-1", "+5", "1.5", "1e3", "soon", "1_000", "0x10", "\xb2", "5, 5"])
def test_a_deadline_that_is_no_number_of_milliseconds_is_refused(told: str) -> None:
    """400 in one sentence, nobody is asked; not a request that silently waits for ever.  A GET keeps its connection."""

    async def main() -> None:
        line = f"X-Greenroom-Deadline-Ms: {told}\r\n"
        async with a_world() as world, a_caller(world) as caller:
            answer = await caller.ask(get(extra=line).decode().encode("latin-1"))
            assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "bad_deadline")
            assert "X-Greenroom-Deadline-Ms" in json.loads(answer.body)["error"]["message"]
            assert (await caller.ask(get())).status == 200
            answer = await caller.ask(post(b'{"model":"m"}', extra=line).decode().encode("latin-1"))
            assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "bad_deadline")
            assert len(world.admissions.tickets) == 1

    on_uvloop(main)


@pytest.mark.parametrize(
    ("told", "deadline_s"), [("1", 0.001), ("0020", 0.02), ("999999999999", 999999999.999), ("9" * 5000, None), (" 7 ", 0.007)]
)
def test_a_deadline_is_milliseconds(told: str, deadline_s: float | None) -> None:
    """Any whole number from 1; one of more than 12 digits is as good as none."""

    async def main() -> None:
        async with a_world() as world, a_caller(world) as caller:
            assert (await caller.ask(get(extra=f"X-Greenroom-Deadline-Ms: {told}\r\n"))).status == 200
            assert world.admissions.tickets[0].wish.deadline_s == deadline_s

    on_uvloop(main)
