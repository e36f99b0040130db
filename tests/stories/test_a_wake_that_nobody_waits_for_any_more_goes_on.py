"""A client leaves while its model is woken.  The wake goes on: it is short, and half a wake is no use to anybody."""

import asyncio
from pathlib import Path

from .rig import Rig, vllm

IDLE_S = 0.6


async def test_nothing_is_sent_for_it_and_idle_time_counts_from_the_wake(tmp_path: Path) -> None:
    """No request reaches the engine, nothing is started or stopped, and `sleep_after` its wake it sleeps again."""
    async with Rig(tmp_path, {"a": vllm(sleep=1, sleep_after=IDLE_S, on_wake="slow:0.4*1")}) as rig:
        await rig.warm("a")
        await rig.wait_state("a", "asleep")
        asked = await rig.ask("a")
        await rig.wait_journal("a", "wake_begin")
        asked.close()
        woken = await rig.wait_journal("a", "wake_end")
        again = await rig.wait_journal("a", "sleep_begin", 2)
        await rig.wait_state("a", "asleep")

        assert IDLE_S - 0.05 <= again["at"] - woken["at"] < IDLE_S + 2
        assert len(rig.chats("a")) == 1
        now = await rig.model("a")
        assert (now["starts"], now["wakes"], now["sleeps"], now["wake_failures"]) == (1, 1, 2, 0)
        assert rig.moves("a").count("wake") == 1


async def test_who_comes_after_it_finds_the_model_awake(tmp_path: Path) -> None:
    """The wake was not for nothing: the next request is served by it."""
    async with Rig(tmp_path, {"a": vllm(sleep=2, on_wake="slow:0.4*1")}) as rig:
        await rig.warm("a")
        await rig.put_to_sleep("a")
        left = await rig.ask("a")
        await rig.wait_journal("a", "wake_begin")
        left.close()
        other = asyncio.create_task(rig.chat("a"))
        reply = await other

        assert (reply.done, reply.headers["x-greenroom-start"]) == (True, "wake")
        assert rig.starts("a") == 1
        assert len(rig.chats("a")) == 2
