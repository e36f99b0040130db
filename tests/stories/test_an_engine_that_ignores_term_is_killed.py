"""B21: an engine that did not react to SIGTERM blocked the swap and the unload call."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from .rig import Rig, fake

GRACE_S = 0.6


@pytest.mark.parametrize("how", ["ignores", "is frozen", "needs a while"])
async def test_an_unload_ends_with_the_truth_and_the_next_model_gets_the_room(tmp_path: Path, how: str) -> None:
    """TERM, then after its grace KILL, never for one that goes in time; unload tells the outcome, the other model is served."""
    on_term = {"ignores": "ignore", "is frozen": "exit", "needs a while": "slow:0.3"}[how]
    config = {"unloadTimeout": f"{GRACE_S if how != 'needs a while' else 3}s"}
    models = {"a": fake(vram=8000, on_term=on_term, config=config), "b": fake(vram=8000, ready_after=0.2)}
    async with Rig(tmp_path, models) as rig:
        await rig.warm("a")
        pid = rig.journal("a", "start")[0]["pid"]
        if how == "is frozen":
            os.kill(pid, signal.SIGSTOP)
        unloading = asyncio.create_task(rig.unload("a"))
        other = await rig.chat("b")
        unloaded = await unloading

        assert unloaded.status == 200
        assert unloaded.took_s < GRACE_S + 2
        assert other.status == 200
        a = await rig.model("a")
        assert (a["state"], a["failures"], a["last_error"]) == ("stopped", 0, "")
        lines = (await rig.api("GET", "/api/models/a/logs")).body.decode()
        assert "greenroom: TERM" in lines
        assert ("greenroom: KILL" in lines) == (how != "needs a while")
        assert len(rig.journal("a", "exit")) == (how == "needs a while")
        if how != "needs a while":
            assert unloaded.took_s >= GRACE_S * 0.9
