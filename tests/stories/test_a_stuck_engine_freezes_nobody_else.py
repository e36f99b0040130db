"""B32: one stuck engine froze the whole supervisor."""

import asyncio
from pathlib import Path

from .rig import Rig, fake

BUSY_S = 1.0
HUNG = fake(vram=4000, fail="hang_after_headers", on_term="ignore", config={"busy_timeout": f"{BUSY_S}s", "unloadTimeout": "0.3s"})


async def test_others_are_served_while_a_stuck_engine_is_waited_for_and_ended(tmp_path: Path) -> None:
    """Its client hears of it after busy_timeout, it is killed, and all the while others load, unload and reload."""
    models = {"hung": HUNG, "a": fake(vram=4000, ready_after=0.2), "b": fake(vram=4000, ready_after=0.2)}
    async with Rig(tmp_path, models, budget_mib=20_000) as rig:
        stuck = asyncio.create_task(rig.chat("hung", stream=True))
        await rig.wait_journal("hung", "begin")
        a = await rig.chat("a")
        rig.reload()
        hung = await stuck
        b = await rig.chat("b")
        unloaded = await rig.unload("hung")

        assert (a.status, b.status) == (200, 200)
        assert a.took_s < BUSY_S + 6
        assert not hung.done
        assert hung.error["code"]
        begun = rig.journal("hung", "begin")[0]["at"]
        assert BUSY_S * 0.95 <= hung.ended_at - begun < BUSY_S + 8
        assert unloaded.status in (200, 409)
        assert rig.journal("hung", "exit") == []  # it never went by itself
        assert "hung" not in [words for _, words in rig.processes() if "model=hung" in words]


async def test_with_room_for_one_a_stuck_engine_is_no_deadlock(tmp_path: Path) -> None:
    """The next model waits until the stuck one is ended, and then it is served."""
    groups = {"one": {"members": ["hung", "a"], "swap": True}}
    async with Rig(tmp_path, {"hung": HUNG, "a": fake(vram=4000)}, config={"groups": groups}) as rig:
        stuck = asyncio.create_task(rig.chat("hung", stream=True))
        await rig.wait_journal("hung", "begin")
        a = await rig.chat("a")

        assert a.status == 200
        assert not (await stuck).done
