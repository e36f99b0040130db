"""Thrash is seen as it happens: the pair is named once, with a way out."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.core.facts import Device, Model, Setup, Start, Tell
from greenroom.planner.virtual import Arrival, Play

CHAT = Model("chat", ("gpu0",), 8000, up_s=6.0, down_s=0.2)
TITLE = Model("title", ("gpu0",), 5000, up_s=3.0, down_s=0.2)
CARD = Device("gpu0", "gpu", 10_000, measured=False)


def told(load: list[Arrival], *models: Model, card: Device = CARD) -> tuple[list[Tell], int, Play]:
    """What was said of thrash, starts before it was said, and the play."""
    said: list[Tell] = []
    starts = [0, 0]

    def hear(event: Any, actions: Any) -> None:
        for action in actions:
            starts[0] += isinstance(action, Start)
            if isinstance(action, Tell) and action.kind == "thrash":
                said.append(action)
                starts[1] = starts[1] or starts[0]

    play = Play(Setup((card,), models), load, hear=[hear]).run()
    return said, starts[1], play


def ping_pong(times: int, every_s: float = 15.0, first_s: float = 0.0) -> list[Arrival]:
    """After each chat turn somebody asks another model for a title."""
    return [Arrival(first_s + n * every_s + k, name, 0.5) for n in range(times) for k, name in enumerate(("chat", "title"))]


def test_two_that_take_turns_are_told_within_six_switches() -> None:
    """Both are named, with what it cost and what would end it; once, however long it goes on."""
    said, starts, play = told(ping_pong(12), CHAT, TITLE)
    assert len(said) == 1
    assert starts <= 6
    assert said[0].level == "warning"
    assert said[0].text.startswith("chat and title take turns on gpu0: ")
    assert "holding all needs 2.9 GiB more" in said[0].text
    assert "greenroom thrash" in said[0].text
    circles = play._decider.thrashing(play.now)  # type: ignore[attr-defined]
    assert [circle.models for circle in circles] == [("chat", "title")]
    assert circles[0].share > 0.3


def test_what_else_is_there_counts_when_it_is_said_what_is_missing() -> None:
    """They would fit alone: a pinned model beside them is why they do not, and is named."""
    card = Device("gpu0", "gpu", 14_000, measured=False)
    said, _, _ = told(ping_pong(12), CHAT, TITLE, Model("embed", ("gpu0",), 2000, up_s=1.0, pinned=True), card=card)
    assert "holding all beside embed needs 1000 MiB more" in said[0].text


def test_it_is_told_again_when_it_comes_back() -> None:
    """Calm for an hour in between; while it is calm, nobody thrashes."""
    said, _, play = told([*ping_pong(6), *ping_pong(6, first_s=3600.0)], CHAT, TITLE)
    assert len(said) == 2
    assert play._decider.thrashing(play.now + 301.0) == []  # type: ignore[attr-defined]


def test_three_in_a_ring_are_told_as_one() -> None:
    """Each makes room for the next."""
    models = [Model(name, ("gpu0",), 8000, up_s=3.0) for name in "abc"]
    said, _, _ = told([Arrival(n * 8.0, "abc"[n % 3], 0.5) for n in range(30)], *models)
    assert said[0].text.startswith("a, b and c take turns on gpu0: ")


@pytest.mark.parametrize(
    ("load", "card"),
    [
        (ping_pong(12), Device("gpu0", "gpu", 14_000, measured=False)),  # both fit
        ([Arrival(n * 600.0, ("chat", "title")[n % 2], 0.5) for n in range(12)], CARD),  # one switch each ten minutes
        ([Arrival(n * 0.1, "chat", 8.0) for n in range(300)], CARD),  # one model, slow
    ],
)
def test_others_are_not_told(load: list[Arrival], card: Device) -> None:
    """Neither of those who fit, nor of those who seldom change, nor of one that is merely slow."""
    assert told(load, CHAT, TITLE, card=card)[0] == []
