"""B08: an abandoned request still caused minutes of loading."""

import asyncio
from pathlib import Path

from .rig import Rig, fake

LONG_S = 8.0


async def test_the_right_model_does_not_wait_for_the_wrong_one_that_nobody_wants_any_more(tmp_path: Path) -> None:
    """The load is stopped for the next one, its engine never saw a request; a load with one more client goes on."""
    models = {
        "wrong": fake(vram=9000, ready_after=LONG_S),
        "right": fake(vram=3000, ready_after=0.2),
        "shared": fake(vram=9000, ready_after=0.7),
    }
    async with Rig(tmp_path, models) as rig:
        wrong = await rig.ask("wrong")
        started = await rig.wait_journal("wrong", "start")
        wrong.close()
        right = await rig.chat("right")

        assert right.status == 200
        assert right.ended_at - started["at"] < LONG_S / 2
        assert rig.inferences("wrong") == []
        assert (await rig.model("wrong"))["state"] == "stopped"
        assert [line["why"] for line in rig.journal("wrong", "exit")] == ["term"]

        one, other = await rig.ask("shared"), asyncio.create_task(rig.chat("shared"))
        await rig.wait_journal("shared", "start")
        one.close()

        assert (await other).status == 200
        assert (rig.starts("shared"), len(rig.inferences("shared"))) == (1, 1)


async def test_idle_time_of_a_load_nobody_waits_for_counts_from_its_end(tmp_path: Path) -> None:
    """With nobody else asking the load goes on; no request reaches the engine, and a ttl after its end it leaves."""
    async with Rig(tmp_path, {"big": fake(vram=9000, ready_after=0.7, config={"ttl": "0.6s"})}) as rig:
        wrong = await rig.ask("big")
        await rig.wait_journal("big", "start")
        wrong.close()
        ready = await rig.wait_journal("big", "ready")
        ended = await rig.wait_journal("big", "exit")
        await rig.wait_state("big", "stopped")

        assert rig.inferences("big") == []
        assert 0.55 <= ended["at"] - ready["at"] < 2.5
        assert rig.starts("big") == 1
