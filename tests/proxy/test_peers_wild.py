"""Peers that do anything: whatever happens, every client is told, no answer is mixed of two, and the books agree."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.facts import Outcome
from greenroom.proxy.admission import Catalog, Grant, ModelRoute, Refusal, Wish
from greenroom.proxy.peer_door import PeerDoor, Peers
from greenroom.proxy.peers import FAILURES_MAX
from tests.proxy.peer_world import (
    a_far_world,
    a_peer,
    by,
    dies,
    dies_after_its_head,
    dies_in_its_head,
    dies_in_its_stream,
    hangs,
    never_ends_its_head,
    told,
)
from tests.proxy.relay_world import EngineSide, FakeAdmissions, Reply, Seen, a_caller, on_uvloop, post

# ---------------------------------------------------------------------------------------------------- over real sockets


def wild(name: str, chance: random.Random) -> Reply:
    """Each request another behaviour."""
    ways: list[Reply] = [dies, dies_after_its_head, dies_in_its_head, dies_in_its_stream, hangs, never_ends_its_head]
    ways += [told(status) for status in (301, 401, 404, 500, 502, 503, 504)] + [told(429, extra="Retry-After: 1\r\n")]

    async def reply(seen: Seen, side: EngineSide) -> None:
        await (by(name) if chance.random() < 0.5 else chance.choice(ways))(seen, side)

    return reply


@pytest.mark.parametrize("seed", range(6))
def test_every_client_of_wild_peers_is_told(seed: int) -> None:
    """A whole answer of one peer, a whole error, or an answer that is seen to be cut; some clients leave before it comes."""
    chance = random.Random(seed)

    async def main() -> None:
        names = ("p0", "p1", "p2")
        more = [{"response_s": 0.3, "stall_s": 0.3, "models": ["far", "m"], "overflow": chance.random() < 0.5} for _ in names]
        async with a_far_world(*(wild(name, chance) for name in names), peers=more) as far:

            async def one(number: int) -> None:
                model = chance.choice(["far", "far", "m", "p1/far"])
                if model == "m":
                    far.world.admissions.refusal = chance.choice([None, Refusal(429, "queue_full", "Full.", 1.0)])
                async with a_caller(far.world) as caller:
                    await caller.send(post(b'{"model":"%b","n":%d}' % (model.encode(), number)))
                    if chance.random() < 0.2:
                        await asyncio.sleep(chance.random() / 10)
                        return
                    answer = await caller.answer("POST")
                assert answer is not None
                if not answer.complete:
                    assert answer.status == 200
                    assert b"data: one" in answer.body
                    assert b'"error"' in answer.body
                elif answer.status == 200:
                    value = json.loads(answer.body)
                    assert value.get("by") == answer.headers.get(b"x-greenroom-peer", b"").decode() or "got" in value
                else:
                    assert json.loads(answer.body)["error"]["message"]
                    assert answer.status not in (301, 401)

            for _ in range(8):
                await asyncio.gather(*(one(number) for number in range(8)))

    on_uvloop(main)


# --------------------------------------------------------------------------------------------------- without any sockets


class Waiter:
    def __init__(self) -> None:
        self.request = 0
        self.asked: list[str] = []
        self.grant: Grant | None = None
        self.refusal: Refusal | None = None

    def admitted(self, grant: Grant) -> None:
        assert self.refusal is None
        self.grant = grant
        assert grant.far is not None
        self.asked.append(grant.far.peer)

    def refused(self, refusal: Refusal) -> None:
        assert self.refusal is None
        self.grant, self.refusal = None, refusal

    def cut(self, code: str, message: str) -> None:
        """Nobody does."""


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ok", "503", "429", "302", "401", "lost", "timeout", "broke", "gone", "wait", "reload"]),
        st.integers(0, 30),
        st.floats(0, 60),
    ),
    max_size=80,
)


@given(STEPS)
def test_the_books_agree_after_any_history(steps: list[tuple[str, int, float]]) -> None:
    """No peer twice for one request, none with an open circuit; who is refused is told why; all that was begun has ended."""
    now, numbers = [0.0], itertools.count(1)
    door = PeerDoor(FakeAdmissions(), Peers(), numbers.__next__, lambda: now[0])
    local = Catalog(models={"m": ModelRoute("m")}, names={"m": "m"})
    servers = [a_peer("a", 1, priority=1), a_peer("b", 2), a_peer("c", 3, weight=2.0)]

    def take(count: int) -> None:
        door.peers = Peers(servers[:count], now[0], door.peers)
        door.peers.catalog(local)

    take(3)
    everybody = [door.peers]
    running: list[tuple[Waiter, object]] = []
    for what, which, seconds in steps:
        now[0] += seconds if what == "wait" else 0.0
        if what == "ask":
            if door.peers.targets("far"):
                waiter = Waiter()
                running.append((waiter, door.ask(Wish("far", "far", "/v1/x"), waiter)))
        elif what == "reload":
            take(which % 4)
            everybody.append(door.peers)
        elif running and what != "wait":
            waiter, ticket = running[which % len(running)]
            if waiter.grant is not None:
                step(what, waiter, ticket)
        for waiter, _ in running:
            assert len(set(waiter.asked)) == len(waiter.asked)
            if waiter.refusal is not None:
                assert waiter.refusal.message
                assert waiter.refusal.retry_after_s is None or waiter.refusal.retry_after_s >= 1
        running = [pair for pair in running if pair[0].grant is not None]
        assert set(door.open) == {waiter.request for waiter, _ in running}
    for waiter, ticket in running:
        step("gone", waiter, ticket)
    assert not door.open
    for peers in everybody:
        for standing in peers.standings.values():
            assert standing.in_flight == 0
            assert sum(standing.outcomes.values()) == standing.requests
            assert standing.failures <= standing.requests
            assert standing.is_up == (standing.health.failures < FAILURES_MAX)
            assert not standing.health.trying
            assert not any(one.trying for one in standing.serving.values())


def step(what: str, waiter: Waiter, ticket: object) -> None:
    """What the data plane would call."""
    answered, lost, finish = ticket.answered, ticket.lost, ticket.finish  # type: ignore[attr-defined]
    if what in ("503", "429", "302", "401", "ok"):
        why = answered(200 if what == "ok" else int(what), b"5" if what in ("503", "429") else b"")
        if why:
            lost(why)
        else:
            waiter.grant = None
            finish(Outcome.OK, 200, 1, 0.1)
    elif what == "lost":
        lost("it closed the connection without answering")
    elif what == "timeout":
        lost(ticket.timed_out(3.0))  # type: ignore[attr-defined]
    elif what == "broke":
        assert answered(200, b"") == ""
        waiter.grant = None
        finish(Outcome.ENGINE_BROKE, 200, 1, 0.1)
    else:
        waiter.grant = None
        finish(Outcome.CLIENT_GONE, 0, 0, None)


def test_who_is_over_as_soon_as_this_machine_admits_can_say_so() -> None:
    """A preferred peer fails, this machine admits at once, and the request ends within that word: its ticket hears of it."""

    class Hasty(Waiter):
        ticket: Any = None

        def admitted(self, grant: Grant) -> None:
            if grant.far is not None:
                super().admitted(grant)
                return
            self.grant = grant
            self.ticket.finish(Outcome.CLIENT_GONE, 0, 0, None)

    local = FakeAdmissions()
    door = PeerDoor(local, Peers([a_peer("a", 1, models=("m",), prefer=True)]), itertools.count(1).__next__, lambda: 0.0)
    door.peers.catalog(Catalog(models={"m": ModelRoute("m")}, names={"m": "m"}))
    waiter = Hasty()
    waiter.ticket = door.ask(Wish("m", "m", "/v1/x"), waiter)
    assert waiter.asked == ["a"]
    waiter.ticket.lost("it takes no connection")
    assert waiter.refusal is None
    (ticket,) = local.tickets
    assert ticket.named("finish") == [("finish", Outcome.CLIENT_GONE, 0, 0)]
    assert not door.open
