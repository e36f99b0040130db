"""Misbehaving engines: what the client sees, and that the next request never suffers."""

from __future__ import annotations

import asyncio

import pytest

from greenroom.core.facts import Outcome

from .engine_corpus import CASES, MARKER, EngineCase
from .relay_world import EngineSide, Seen, World, a_caller, a_world, answer_ok, get, on_uvloop


class Scripted:
    """Answers the first request with the case's bytes, every other one well."""

    def __init__(self) -> None:
        self.case: EngineCase | None = None
        self.piece = 0

    async def __call__(self, seen: Seen, side: EngineSide) -> None:
        case, self.case = self.case, None
        if case is None:
            await answer_ok(seen, side)
            return
        step = self.piece or len(case.data)
        for at in range(0, len(case.data), step):
            side.writer.write(case.data[at : at + step])
            if self.piece:
                await asyncio.sleep(0)
        await side.writer.drain()
        if case.ending == "fin":
            side.fin()
        elif case.ending == "rst":
            await asyncio.sleep(0.02)  # what was sent must be read before the reset overtakes it
            side.rst()


async def play(world: World, script: Scripted, case: EngineCase) -> None:
    script.case = case
    async with a_caller(world) as caller:
        await caller.send(get(method=case.method))
        answer = await caller.answer(case.method)
        assert answer is not None, case.name
        assert (answer.status, answer.complete) == (case.status, case.complete), (case.name, answer)
        if case.status != 502:
            assert answer.body == case.body, case.name
        assert MARKER not in caller.raw, case.name
        if answer.complete and answer.headers.get(b"connection") != b"close":
            again = await caller.ask(get())
            assert again.status == 200, case.name
            assert again.body == b'{"got":0}', case.name
    async with a_caller(world) as caller:
        again = await caller.ask(get())
        assert (again.status, again.body) == (200, b'{"got":0}'), case.name
    ends = [ticket.outcome for ticket in world.admissions.tickets]
    first, world.admissions.tickets = ends[0], []
    assert first is (Outcome.OK if case.complete and case.status != 502 else Outcome.ENGINE_BROKE), case.name


@pytest.mark.parametrize("piece", [0, 3], ids=["whole", "by 3"])
def test_no_engine_can_pass_a_broken_answer_for_a_whole_one_nor_spoil_the_next(piece: int) -> None:
    """Each scripted answer is complete, cut or 502 as it should be; then a plain request succeeds."""

    async def main() -> None:
        script = Scripted()
        async with a_world(script) as world:
            for case in CASES:
                script.piece = piece if len(case.data) < 4096 else 0
                await play(world, script, case)

    on_uvloop(main)


def test_two_hundred_requests_use_one_engine_connection() -> None:
    """The pool is used: one client, one engine connection."""

    async def main() -> None:
        async with a_world() as world, a_caller(world) as caller:
            for _ in range(200):
                assert (await caller.ask(get())).status == 200
            assert world.engine.connections == 1

    on_uvloop(main)


def test_an_engine_that_speaks_unasked_loses_its_connection() -> None:
    """Bytes on an idle pooled connection would be taken for the next answer."""

    async def main() -> None:
        async with a_world() as world, a_caller(world) as caller:
            await caller.ask(get())
            side = world.engine.sides[0]
            await side.send(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nSURPLUS")
            await side.gone.wait()
            answer = await caller.ask(get())
            assert (answer.body, world.engine.connections) == (b'{"got":0}', 2)

    on_uvloop(main)
