"""A call answers 200, and the engine says of itself that it sleeps not, or sleeps on."""

from pathlib import Path
from typing import Any

from .rig import Fake, Rig, fake, vllm


def stays_awake() -> Fake:
    """An engine with routes of its own, whose word for asleep never comes."""
    asleep = {"path": "/is_sleeping", "field": "is_sleeping", "value": "really"}
    config: dict[str, Any] = {"sleep": {"path": "/sleep", "asleep": asleep}, "wake": {"path": "/wake_up"}, "sleep_timeout": "0.6s"}
    return fake(vram=8000, config=config)


async def test_one_that_says_it_is_awake_after_its_sleep_is_stopped(tmp_path: Path) -> None:
    """Within its sleep_timeout; who needed the room gets it, and nobody was sent into what it may be doing."""
    async with Rig(tmp_path, {"a": stays_awake(), "b": fake(vram=8000)}, budget_mib=10_000) as rig:
        await rig.warm("a")
        reply = await rig.chat("b")
        assert reply.done
        assert reply.took_s < 8
        assert "still says that it is awake" in (await rig.model("a"))["last_error"]
        assert (await rig.model("a"))["state"] == "stopped"
        assert (await rig.chat("a")).headers["x-greenroom-start"] == "cold"


async def test_one_that_says_it_sleeps_after_its_wake_is_started_anew(tmp_path: Path) -> None:
    """Within its wake_timeout; the request that waits is served, and never saw the one that sleeps on."""
    async with Rig(tmp_path, {"a": vllm(sleep=1, on_wake="stuck*1", config={"wake_timeout": "1s"})}) as rig:
        await rig.warm("a")
        await rig.put_to_sleep("a")
        reply = await rig.chat("a")
        assert (reply.done, reply.headers["x-greenroom-start"], reply.took_s < 10) == (True, "cold", True)
        now = await rig.model("a")
        assert (now["wake_failures"], "still says that it is asleep" in now["last_error"]) == (1, True)
