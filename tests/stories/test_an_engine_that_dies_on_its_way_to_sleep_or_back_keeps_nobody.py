"""An engine dies during the sleep call, or during the wake call: who waits is served by a cold start."""

from pathlib import Path

import pytest

from .rig import Rig, vllm

LEVELS = pytest.mark.parametrize("level", [1, 2])


@LEVELS
@pytest.mark.parametrize("hazard", ["die:139*1", "die:kill*1", "500*1"])
async def test_a_sleep_that_fails_gives_its_room_all_the_same(tmp_path: Path, level: int, hazard: str) -> None:
    """The model that wanted the room gets it, the failed one is stopped, it says why, and it comes back cold."""
    models = {"a": vllm(sleep=level, on_sleep=hazard), "b": vllm(sleep=level)}
    async with Rig(tmp_path, models, budget_mib=10_000) as rig:
        await rig.warm("a")
        forced = await rig.chat("b")
        now = await rig.model("a")
        assert (forced.done, now["state"], now["sleeps"], now["failures"]) == (True, "stopped", 0, 0)
        assert "could not be put to sleep" in await rig.why("a")
        assert now["last_error"]
        back = await rig.chat("a")
        assert (back.done, back.headers["x-greenroom-start"]) == (True, "cold")


@LEVELS
@pytest.mark.parametrize("hazard", ["die:139*1", "die:kill*1"])
async def test_a_wake_that_fails_is_a_cold_start(tmp_path: Path, level: int, hazard: str) -> None:
    """The request that waited is answered once, and the failure is counted as one of waking."""
    async with Rig(tmp_path, {"a": vllm(sleep=level, on_wake=hazard)}) as rig:
        await rig.warm("a")
        await rig.put_to_sleep("a")
        reply = await rig.chat("a", stream=True)
        assert (reply.done, reply.headers["x-greenroom-start"]) == (True, "cold")
        now = await rig.model("a")
        assert (now["starts"], now["wake_failures"], now["failures"]) == (2, 1, 0)
        assert len(rig.chats("a")) == 2
