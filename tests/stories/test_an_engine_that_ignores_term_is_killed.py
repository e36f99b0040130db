"""B21: an engine that did not react to SIGTERM blocked the swap and the unload call."""

import asyncio
import os
import signal
from pathlib import Path

from .rig import Rig, fake

GRACE_S = 0.6
GRACE = {"unloadTimeout": f"{GRACE_S}s"}
KILLED = {"ignores": True, "is-frozen": True, "needs-a-while": False}


async def test_an_unload_ends_with_the_truth_and_the_next_model_gets_the_room(tmp_path: Path) -> None:
    """TERM, then after its grace KILL, never for one that goes in time; unload tells the outcome, the other model is served."""
    models = {
        "ignores": fake(vram=8000, on_term="ignore", config=GRACE),
        "is-frozen": fake(vram=8000, config=GRACE),
        "needs-a-while": fake(vram=8000, on_term="slow:0.3", config={"unloadTimeout": "5s"}),
        "next": fake(vram=8000, ready_after=0.1),
    }
    async with Rig(tmp_path, models) as rig:
        for name, killed in KILLED.items():
            await rig.warm(name)
            if name == "is-frozen":
                os.kill(rig.journal(name, "start")[0]["pid"], signal.SIGSTOP)
            unloading = asyncio.create_task(rig.unload(name))
            other = await rig.chat("next")
            unloaded = await unloading

            assert (name, unloaded.status, other.status) == (name, 200, 200)
            assert (GRACE_S * 0.9 if killed else 0.25) <= unloaded.took_s < GRACE_S + 2
            now = await rig.model(name)
            assert (name, now["state"], now["failures"], now["last_error"]) == (name, "stopped", 0, "")
            lines = (await rig.api("GET", f"/api/models/{name}/logs")).body.decode()
            assert (name, "greenroom: TERM" in lines, "greenroom: KILL" in lines) == (name, True, killed)
            assert (name, len(rig.journal(name, "exit"))) == (name, 0 if killed else 1)
