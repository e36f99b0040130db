"""B19: the idle clock was counted from the start of a request."""

import asyncio
from pathlib import Path

from .rig import Rig, fake

TTL_S = 1.2


async def test_a_busy_or_loading_model_is_not_idle(tmp_path: Path) -> None:
    """Load and answers longer than the ttl, a pause shorter than it, a silent stream: one start, and it leaves a ttl after the last end."""
    model = fake(ready_after=1.4, stream="9x0.17", config={"ttl": f"{TTL_S}s"})
    async with Rig(tmp_path, {"a": model}) as rig:
        first = await rig.chat("a", stream=True)
        await asyncio.sleep(TTL_S * 0.3)  # the pause is the story, not a wait for something
        second = await rig.chat("a", stream=True, fe={"stream": "2x1.4"})
        left = await rig.wait_journal("a", "term")
        await rig.wait_state("a", "stopped")

        assert (first.done, second.done) == (True, True)
        assert rig.starts("a") == 1
        assert TTL_S / 2 <= left["at"] - second.ended_at < TTL_S + 3
