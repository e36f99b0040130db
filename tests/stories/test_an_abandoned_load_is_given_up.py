"""B08: an abandoned request still caused minutes of loading."""

import asyncio
from pathlib import Path

from .rig import Rig, fake

LONG_S = 8.0


async def test_the_right_model_does_not_wait_for_the_wrong_one_that_nobody_wants_any_more(tmp_path: Path) -> None:
    """The load is stopped for the next one, and its engine never saw a request."""
    models = {"big": fake(vram=9000, ready_after=LONG_S), "small": fake(vram=3000, ready_after=0.2)}
    async with Rig(tmp_path, models) as rig:
        wrong = await rig.ask("big")
        started = await rig.wait_journal("big", "start")
        wrong.close()
        right = await rig.chat("small")

        assert right.status == 200
        assert right.ended_at - started["at"] < LONG_S / 2
        assert rig.inferences("big") == []
        assert (await rig.model("big"))["state"] == "stopped"
        assert [line["why"] for line in rig.journal("big", "exit")] == ["term"]


async def test_idle_time_of_a_load_nobody_waits_for_counts_from_its_end(tmp_path: Path) -> None:
    """With nobody else asking, the load goes on or not; no request reaches the engine, and it does not stay for ever."""
    async with Rig(tmp_path, {"big": fake(vram=9000, ready_after=0.7, config={"ttl": "0.6s"})}) as rig:
        wrong = await rig.ask("big")
        await rig.wait_journal("big", "start")
        wrong.close()
        ended = await rig.wait_journal("big", "exit")
        await rig.wait_state("big", "stopped")

        assert rig.inferences("big") == []
        for ready in rig.journal("big", "ready"):
            assert ended["at"] - ready["at"] >= 0.55
        assert rig.starts("big") == 1


async def test_one_of_two_who_wait_may_leave(tmp_path: Path) -> None:
    """The load goes on for the other one."""
    async with Rig(tmp_path, {"big": fake(vram=9000, ready_after=0.7)}) as rig:
        one, other = await rig.ask("big"), asyncio.create_task(rig.chat("big"))
        await rig.wait_journal("big", "start")
        one.close()

        assert (await other).status == 200
        assert rig.starts("big") == 1
        assert len(rig.inferences("big")) == 1
