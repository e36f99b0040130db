"""The request corpus: every case whole, in pieces of 7 bytes and of 1 byte."""

from __future__ import annotations

import asyncio

import pytest

from .corpus import CASES, NEXT, Case
from .relay_world import Caller, World, a_caller, a_world, on_uvloop

SLOW_BYTES = 8192  # longer cases are not sent byte by byte; 1,000-byte pieces instead


def pieces(data: bytes, size: int) -> list[bytes]:
    if size and len(data) > SLOW_BYTES:
        size = 1000
    return [data[at : at + size] for at in range(0, len(data), size)] if size else [data]


async def play(world: World, case: Case, size: int) -> None:
    world.engine.seen.clear()
    async with a_caller(world) as caller:
        for piece in pieces(case.data, size):
            caller.writer.write(piece)
            if size:
                await asyncio.sleep(0)
        for status in case.statuses:
            answer = await caller.answer()
            assert answer is not None, (case.name, size, bytes(caller.raw))
            assert (answer.status, answer.complete) == (status, True), (case.name, size, answer)
            if status >= 400:
                assert b'"error"' in answer.body
        if case.closes:
            await caller.read_all()
            assert not caller.left, (case.name, caller.left)
        else:
            await check_still_served(caller, case)
        assert tuple(caller.interim) == case.interim
    seen = len(world.engine.seen) - (0 if case.closes else 1)
    assert seen == case.engine, (case.name, size, world.engine.seen)
    for request in world.engine.seen:
        assert len(request.values(b"content-length")) <= 1
        assert not request.values(b"transfer-encoding")
        assert not request.values(b"x-smuggled")
        assert not request.values(b"x-api-key")


async def check_still_served(caller: Caller, case: Case) -> None:
    await caller.send(NEXT)
    answer = await caller.answer()
    assert answer is not None, case.name
    assert answer.status == 200
    assert not caller.left


@pytest.mark.parametrize("size", [0, 7, 1], ids=["whole", "by 7", "by 1"])
def test_every_request_of_the_corpus_gets_its_answer_and_the_engine_sees_no_more_than_it_should(size: int) -> None:
    """Refusals reach no engine and close; what is served leaves the next request intact."""

    async def main() -> None:
        async with a_world(keys=["k1"]) as world:
            for case in CASES:
                await play(world, case, size)

    on_uvloop(main)


def test_a_chunk_that_never_ends_is_given_up() -> None:
    """A chunk of 2^64-1 bytes waits for its time limit, then 408."""

    async def main() -> None:
        async with a_world(limits={"body_idle_s_max": 0.2}) as world, a_caller(world) as caller:
            await caller.send(b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n{")
            answer = await caller.answer()
            assert answer is not None
            assert answer.status == 408
            await caller.read_all()
            assert not world.engine.seen

    on_uvloop(main)


def test_a_head_that_never_ends_is_given_up() -> None:
    """A slow head gets 408; a silent connection is closed without a word."""

    async def main() -> None:
        async with a_world(limits={"head_s_max": 0.2, "idle_s_max": 0.2}) as world:
            async with a_caller(world) as caller:
                await caller.send(b"GET /x HTTP/1.1\r\nHo")
                answer = await caller.answer()
                assert answer is not None
                assert answer.status == 408
                await caller.read_all()
            async with a_caller(world) as caller:
                assert await caller.read_all() == b""

    on_uvloop(main)
