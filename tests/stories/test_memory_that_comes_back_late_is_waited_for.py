"""B25: GPU memory comes back seconds after the process has gone."""

from pathlib import Path
from typing import Any

from .card import Card, Slot
from .rig import Rig, fake

ROOM_WAIT_S = 1.5
SLACK_S = 6.0
SWAPS = 4
CARD = (Slot(0, "GPU-aaa", 10_000),)
CONFIG: dict[str, Any] = {"devices": {"gpu0": {"headroom": "0MiB"}}, "scheduling": {"room_wait_s": ROOM_WAIT_S}}
ON_CARD = {"device": "gpu0"}


def two_models() -> dict[str, Any]:
    return {"a": fake(vram=9000, ready_after=0.1, config=ON_CARD), "b": fake(vram=9000, ready_after=0.1, config=ON_CARD)}


async def swaps(rig: Rig) -> list[float]:
    """Seconds from the end of a's engine to the start of b's, some times: a busy machine makes one long, not all."""
    for _ in range(SWAPS):
        assert (await rig.chat("a")).done
        assert (await rig.chat("b")).done
    assert (rig.starts("a"), rig.starts("b")) == (SWAPS, SWAPS)
    pairs = zip(rig.journal("a", "exit"), rig.journal("b", "start"), strict=True)
    return [float(start["at"] - end["at"]) for end, start in pairs]


async def test_the_next_engine_starts_when_the_memory_is_back(tmp_path: Path) -> None:
    """The driver shows it as used for 0.8 s more: so long is waited, and not much longer."""
    card = Card(tmp_path, CARD, lag_s=0.8)
    async with card.rig(two_models(), config=CONFIG) as rig:
        waited_s = await swaps(rig)
    assert min(waited_s) >= 0.8
    assert min(waited_s) < 1.6
    assert card.over == []


async def test_nothing_is_waited_for_when_the_memory_is_back_at_once(tmp_path: Path) -> None:
    """No fixed pause between an end and the next start."""
    card = Card(tmp_path, CARD)
    async with card.rig(two_models(), config=CONFIG) as rig:
        waited_s = await swaps(rig)
    assert min(waited_s) < 0.3
    assert card.over == []


async def test_memory_taken_by_another_program_is_told_by_pid_and_size(tmp_path: Path) -> None:
    """Somebody takes 6000 MiB the moment a has left: after a bounded wait 503 says what b needs, what is free and who holds it."""
    card = Card(tmp_path, CARD, foreign_on_exit={4242: (0, 6000)})
    async with card.rig(two_models(), config=CONFIG) as rig:
        await rig.warm("a")
        reply = await rig.chat("b")
        assert (reply.status, rig.starts("b")) == (503, 0)
        assert int(reply.headers["retry-after"]) >= 1
        assert ROOM_WAIT_S <= reply.took_s < ROOM_WAIT_S + SLACK_S
        said = reply.error["message"]
        assert ("needs 8.8 GiB" in said, "3.9 GiB are free" in said, "pid 4242 (6000 MiB)" in said) == (True, True, True)
        # It goes, and b is served as if nothing had been.
        card.foreign_on_exit.clear()
        card.foreign.clear()
        assert (await rig.chat("b")).done
        assert rig.starts("b") == 1


async def test_memory_that_never_comes_back_is_waited_for_so_long_and_then_told(tmp_path: Path) -> None:
    """No process holds it any more and the driver keeps it all the same: no start into a certain failure, and an end to the waiting."""
    card = Card(tmp_path, CARD, lag_s=3600)
    async with card.rig(two_models(), config=CONFIG) as rig:
        await rig.warm("a")
        reply = await rig.chat("b")
        assert (reply.status, rig.starts("b")) == (503, 0)
        assert ROOM_WAIT_S <= reply.took_s < 2 * ROOM_WAIT_S + SLACK_S
        assert "needs 8.8 GiB" in reply.error["message"]
        assert "did not come back" in " ".join(event["text"] for event in await rig.events("a"))
        card.lag_s = 0
        assert (await rig.chat("b")).done
