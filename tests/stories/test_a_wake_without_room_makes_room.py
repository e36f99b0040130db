"""A wake finds the card full: another program took memory since the model fell asleep."""

import asyncio
import http.client
import time
from pathlib import Path
from typing import Any

import pytest

from .card import Card, Slot
from .rig import Fake, Rig, vllm

TOTAL_MIB = 20_000
CARD = (Slot(0, "GPU-aaa", TOTAL_MIB),)
ROOM_WAIT_S = 1.0
SLACK_S = 6.0
CONFIG: dict[str, Any] = {"devices": {"gpu0": {"headroom": "0MiB"}}, "scheduling": {"room_wait_s": ROOM_WAIT_S}}
FOREIGN_PID = 4242


def on_card(vram: int, level: int, **knobs: Any) -> Fake:
    return vllm(vram, 1000, weights=500, sleep=level, enforce=1, config={"device": "gpu0"}, **knobs)


def takes(card: Card, rig: Rig, mib: int) -> None:
    """Another program holds so much of the card from now on; the engines really get no more than the rest."""
    card.foreign.clear()
    if mib:
        card.foreign[FOREIGN_PID] = (0, mib)
    for model in "abc":
        rig.steer(model, budget=TOTAL_MIB - mib)


def knock(rig: Rig, model: str) -> None:
    """A fake looks at its steering when it is asked something."""
    line = http.client.HTTPConnection("127.0.0.1", rig.journal(model, "start")[-1]["port"], timeout=5)
    line.request("GET", "/version")
    line.getresponse().read()
    line.close()


@pytest.mark.parametrize("level", [1, 2])
async def test_idle_models_leave_and_the_wake_is_called_again(tmp_path: Path, level: int) -> None:
    """It happens in the middle of the wake, unseen by any sample before: others make room, the second wake serves who waits."""
    models = {"a": on_card(8000, level, on_wake="slow:0.5*1"), "b": on_card(8000, level), "c": on_card(3000, level)}
    card = Card(tmp_path, CARD)
    async with card.rig(models, budget_mib=TOTAL_MIB, config=CONFIG) as rig:
        await rig.warm("a", "b", "c")
        await rig.put_to_sleep("a")
        waiting = asyncio.create_task(rig.chat("a"))
        await rig.wait_journal("a", "wake_begin")
        takes(card, rig, 3000)
        knock(rig, "a")
        reply = await waiting

        assert (reply.done, reply.headers["x-greenroom-start"]) == (True, "wake")
        now = await rig.model("a")
        assert (now["starts"], now["wake_failures"], now["state"]) == (1, 1, "ready")
        assert sorted(state for state in [(await rig.model(name))["state"] for name in "bc"]) != ["ready", "ready"]
        assert "could not be woken" in await rig.why("a")
    assert card.over == []


async def test_with_no_room_at_all_it_is_refused_with_numbers_and_works_when_memory_is_back(tmp_path: Path) -> None:
    """503 within bounds says who holds how much and how much is missing; nobody hangs; the next request after it went is served."""
    card = Card(tmp_path, CARD)
    async with card.rig({"a": on_card(8000, 1)}, budget_mib=TOTAL_MIB, config=CONFIG) as rig:
        await rig.warm("a")
        await rig.put_to_sleep("a")
        takes(card, rig, 15_000)
        reply = await rig.chat("a")
        assert (reply.status, reply.took_s < ROOM_WAIT_S + SLACK_S) == (503, True)
        said = reply.error["message"]
        assert (f"pid {FOREIGN_PID} (15000 MiB)" in said, "needs 7.8 GiB" in said, "are missing" in said) == (True, True, True), said
        assert int(reply.headers["retry-after"]) >= 1

        takes(card, rig, 0)
        assert (await rig.chat("a")).done
    assert card.over == []


async def test_memory_that_goes_during_the_wake_and_stays_gone_is_told_too(tmp_path: Path) -> None:
    """The same, seen only by the failed wake itself."""
    card = Card(tmp_path, CARD)
    async with card.rig({"a": on_card(8000, 1, on_wake="slow:0.5*1")}, budget_mib=TOTAL_MIB, config=CONFIG) as rig:
        await rig.warm("a")
        await rig.put_to_sleep("a")
        waiting = asyncio.create_task(rig.chat("a"))
        await rig.wait_journal("a", "wake_begin")
        takes(card, rig, 15_000)
        knock(rig, "a")
        reply = await waiting
        assert (reply.status, reply.took_s < 0.5 + ROOM_WAIT_S + SLACK_S) == (503, True)
        assert f"pid {FOREIGN_PID} (15000 MiB)" in reply.error["message"]

        takes(card, rig, 0)
        began_at = time.monotonic()
        assert (await rig.chat("a")).done
        assert time.monotonic() - began_at < SLACK_S
    assert card.over == []
