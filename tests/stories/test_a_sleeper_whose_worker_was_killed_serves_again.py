"""The kernel kills the worker of a sleeper; its API server says nothing and ends by itself a while later."""

from pathlib import Path

from .rig import Rig, vllm


async def test_a_request_before_its_server_has_noticed_is_served(tmp_path: Path) -> None:
    """The server still answers, with errors: the wake fails, and a cold start serves who waits."""
    async with Rig(tmp_path, {"a": vllm(sleep=1, on_asleep="worker_dies:0*1", dying_s=60)}) as rig:
        await rig.warm("a")
        await rig.put_to_sleep("a")
        await rig.wait_journal("a", "dead")
        reply = await rig.chat("a")
        assert (reply.done, reply.headers["x-greenroom-start"]) == (True, "cold")
        assert rig.starts("a") == 2


async def test_one_that_ends_unasked_is_gone_from_the_books(tmp_path: Path) -> None:
    """Nobody asks: the sleeper is told as ended, its room and its RAM are free, and the next request starts it."""
    async with Rig(tmp_path, {"a": vllm(sleep=1, on_asleep="worker_dies:0*1", dying_s=0.3)}) as rig:
        await rig.warm("a")
        await rig.put_to_sleep("a")
        gone = await rig.wait_state("a", "stopped")
        assert gone["instances"] == []
        assert [device["reserved_mib"] for device in (await rig.status())["devices"]] == [0, 0]
        assert (await rig.chat("a")).done
