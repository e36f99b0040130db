"""The first level-1 sleep is slow and shows what a sleeper costs: it is made early, and the model is ready again at once."""

import asyncio
from pathlib import Path
from typing import Any

from .rig import Rig, vllm

EARLY_S = 0.3
CONFIG: dict[str, Any] = {"scheduling": {"early_sleep_s": EARLY_S}}


async def test_it_is_ready_again_and_is_not_rehearsed_twice(tmp_path: Path) -> None:
    """One sleep, one wake, no client; a later idle time changes nothing."""
    async with Rig(tmp_path, {"a": vllm(8000, 1000, sleep=1), "b": vllm(8000, 1000, sleep=1)}, budget_mib=10_000, config=CONFIG) as rig:
        chat = await rig.chat("a")
        begun = await rig.wait_journal("a", "sleep_begin")
        await rig.wait_journal("a", "wake_end")
        await rig.wait_state("a", "ready")
        assert begun["at"] - chat.ended_at >= EARLY_S / 2
        second = await rig.chat("a")
        assert second.headers["x-greenroom-start"] == "hot"
        await asyncio.sleep(3 * EARLY_S)  # nothing may happen: there is no other sign of it
        assert rig.moves("a") == ["start", "sleep 1", "wake", "forget"]
        now = await rig.model("a")
        assert (now["sleeps"], now["wakes"], now["state"]) == (1, 1, "ready")


async def test_a_request_during_it_is_served_by_its_wake(tmp_path: Path) -> None:
    """Whoever comes in the middle waits for sleep and wake, and loses nothing else."""
    models = {"a": vllm(8000, 1000, sleep=1, on_sleep="slow:0.4*1"), "b": vllm(8000, 1000, sleep=1)}
    async with Rig(tmp_path, models, budget_mib=10_000, config=CONFIG) as rig:
        await rig.warm("a")
        await rig.wait_journal("a", "sleep_begin")
        reply = await rig.chat("a", stream=True)
        assert (reply.done, reply.headers["x-greenroom-start"], rig.starts("a")) == (True, "wake", 1)


async def test_another_model_that_comes_during_it_takes_the_room(tmp_path: Path) -> None:
    """It sleeps already: it stays so, and the other one is started."""
    models = {"a": vllm(8000, 1000, sleep=1, on_sleep="slow:0.4*1"), "b": vllm(8000, 1000, sleep=1)}
    async with Rig(tmp_path, models, budget_mib=10_000, config=CONFIG) as rig:
        await rig.warm("a")
        await rig.wait_journal("a", "sleep_begin")
        assert (await rig.chat("b")).done
        assert ((await rig.model("a"))["state"], rig.moves("a")) == ("asleep", ["start", "sleep 1"])


async def test_where_everybody_fits_nobody_rehearses(tmp_path: Path) -> None:
    """There is nothing to learn for."""
    models = {"a": vllm(4000, 1000, sleep=1), "b": vllm(4000, 1000, sleep=1)}
    async with Rig(tmp_path, models, budget_mib=10_000, config=CONFIG) as rig:
        await rig.warm("a", "b")
        await asyncio.sleep(3 * EARLY_S)  # nothing may happen
        assert [rig.moves(name) for name in "ab"] == [["start"], ["start"]]
