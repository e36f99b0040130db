"""h11 on both ends, driven by hypothesis: what goes in comes out, in order, with one framing upstream."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import h11
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .relay_world import EngineSide, Seen, World, a_caller, a_world, on_uvloop

names = st.from_regex(r"\AX-[A-Za-z0-9!#$%&'*+.^`|~-]{1,12}\Z")
values = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20) | st.sampled_from(["", "a b", "a\tb", "ÿ"])
headers = st.lists(st.tuples(names, values), max_size=5)
bodies = st.binary(max_size=200) | st.builds(lambda unit, times: unit * times, st.binary(min_size=1, max_size=50), st.integers(1, 20_000))


@dataclass(frozen=True)
class Ask:
    method: str
    headers: list[tuple[str, str]]
    body: bytes
    is_chunked: bool
    cuts: list[int]  # where the bytes on the wire are split
    answer_headers: list[tuple[str, str]]
    answer_status: int
    answer: bytes
    answer_framing: str  # length | chunked | close
    answer_cuts: list[int]
    hangs_up: bool


asks = st.builds(
    Ask,
    method=st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"]),
    headers=headers,
    body=bodies,
    is_chunked=st.booleans(),
    cuts=st.lists(st.integers(1, 5000), max_size=4),
    answer_headers=headers,
    answer_status=st.sampled_from([200, 201, 404, 500, 204, 304]),
    answer=bodies,
    answer_framing=st.sampled_from(["length", "chunked", "close"]),
    answer_cuts=st.lists(st.integers(1, 5000), max_size=4),
    hangs_up=st.booleans(),
)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(data[at : at + cut])
        at += cut
    return [piece for piece in (*pieces, data[at:]) if piece]


def request_bytes(ask: Ask, number: int) -> bytes:
    parser = h11.Connection(h11.CLIENT)
    has_body = ask.method in ("POST", "PUT", "PATCH")
    framing = [("Transfer-Encoding", "chunked")] if ask.is_chunked else [("Content-Length", str(len(ask.body)))]
    lines = [("Host", "localhost"), *ask.headers, *(framing if has_body else [])]
    out = parser.send(
        h11.Request(
            method=ask.method, target=f"/upstream/m/p%2F{number}?q={number}", headers=[(n.encode(), v.encode("latin-1")) for n, v in lines]
        )
    )
    if has_body:
        for piece in split(ask.body, ask.cuts):
            out += parser.send(h11.Data(data=piece))
    return bytes(out + parser.send(h11.EndOfMessage()))


def answer_bytes(ask: Ask) -> bytes:
    """What the engine says; 204 and 304 have no body."""
    has_body = ask.answer_status not in (204, 304)
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(b"%b / HTTP/1.1\r\nHost: x\r\n\r\n" % (b"HEAD" if ask.method == "HEAD" else b"GET"))
    parser.next_event()
    framings = {
        "length": ("Content-Length", str(len(ask.answer))),
        "chunked": ("Transfer-Encoding", "chunked"),
        "close": ("Connection", "close"),
    }
    lines = [*ask.answer_headers, *([framings[ask.answer_framing]] if has_body else [])]
    out = parser.send(h11.Response(status_code=ask.answer_status, headers=[(n.encode(), v.encode("latin-1")) for n, v in lines]))
    assert out is not None
    if has_body and ask.method != "HEAD":
        for piece in split(ask.answer, ask.answer_cuts):
            out += parser.send(h11.Data(data=piece)) or b""
    return bytes(out + (parser.send(h11.EndOfMessage()) or b""))


def own(given_headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that are neither framing nor ours."""
    ours = (b"host", b"content-length", b"transfer-encoding", b"connection", b"date", b"server")
    return [(name, value) for name, value in given_headers if name not in ours and not name.startswith(b"x-greenroom-")]


def expected(lines: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode("latin-1").strip()) for name, value in lines]


async def play(world: World, conversation: list[Ask]) -> None:
    world.engine.seen.clear()
    world.engine.faults.clear()
    upcoming = iter(conversation)

    async def reply(seen: Seen, side: EngineSide) -> None:
        ask = next(upcoming)
        for piece in split(answer_bytes(ask), ask.answer_cuts):
            await side.send(piece)
            await asyncio.sleep(0)
        if ask.answer_framing == "close":
            side.fin()

    world.engine.reply = reply
    async with a_caller(world) as caller:
        for number, ask in enumerate(conversation):
            data = request_bytes(ask, number)
            if ask.hangs_up and number == len(conversation) - 1:
                await caller.send(data[: len(data) // 2])
                break
            for piece in split(data, ask.cuts):
                await caller.send(piece)
                await asyncio.sleep(0)
            answer = await caller.answer(ask.method)
            assert answer is not None
            assert (answer.status, answer.complete) == (ask.answer_status, True)
            no_body = ask.method == "HEAD" or ask.answer_status in (204, 304)
            assert answer.body == (b"" if no_body else ask.answer)
            check_seen(world.engine.seen[number], ask, number)
    assert not world.engine.faults
    assert len(world.engine.seen) <= len(conversation)


def check_seen(seen: Seen, ask: Ask, number: int) -> None:
    has_body = ask.method in ("POST", "PUT", "PATCH")
    assert (seen.method.decode(), seen.target.decode()) == (ask.method, f"/p%2F{number}?q={number}")
    assert seen.body == (ask.body if has_body else b"")
    assert seen.values(b"content-length") == ([b"%d" % len(ask.body)] if has_body else [])
    assert not seen.values(b"transfer-encoding")
    assert own(seen.headers) == expected(ask.headers)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(st.lists(asks, min_size=1, max_size=4))
def test_bytes_and_order_are_identical_between_h11_and_h11(conversation: list[Ask]) -> None:
    """Random valid heads, bodies, chunkings, pauses and hang-ups."""

    async def main() -> None:
        async with a_world() as world:
            await play(world, conversation)
            with contextlib.suppress(ConnectionError):
                async with a_caller(world) as caller:
                    assert (await caller.ask(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")).status == 200

    on_uvloop(main)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(st.lists(asks.filter(lambda ask: not ask.hangs_up), min_size=2, max_size=6))
def test_pipelined_requests_are_answered_in_order(conversation: list[Ask]) -> None:
    """All requests in one write; answers come one after the other."""

    async def main() -> None:
        async with a_world() as world:
            upcoming = iter(conversation)

            async def reply(seen: Seen, side: EngineSide) -> None:
                ask = next(upcoming)
                await side.send(answer_bytes(ask))
                if ask.answer_framing == "close":
                    side.fin()

            world.engine.reply = reply
            async with a_caller(world) as caller:
                await caller.send(b"".join(request_bytes(ask, number) for number, ask in enumerate(conversation)))
                for ask in conversation:
                    answer = await caller.answer(ask.method)
                    assert answer is not None
                    assert (answer.status, answer.complete) == (ask.answer_status, True)
            for number, ask in enumerate(conversation):
                check_seen(world.engine.seen[number], ask, number)

    on_uvloop(main)
