"""Between its weights and its cache an engine may run what it gets, and die of it: nobody is let in before it is whole."""

from pathlib import Path

import pytest

from .rig import Rig, codes, together, until, vllm


@pytest.mark.parametrize("version", ["0.17.0", "0.24.0"])
async def test_who_comes_during_a_partial_wake_waits(tmp_path: Path, version: str) -> None:
    """0.17 takes requests again after the first half, 0.24 after the second; neither gets one in between."""
    async with Rig(tmp_path, {"a": vllm(sleep=2, version=version, on_reload="slow:0.5*1")}) as rig:
        await rig.warm("a")
        await rig.put_to_sleep("a")
        first = await rig.ask("a")
        await until(lambda: [line["kind"] for line in rig.journal("a", "fault")] == ["slow"], "its weights are being read")
        replies = await together(first.rest(), rig.chat("a", stream=True), rig.chat("a"))

        assert codes(replies) == [200] * 3
        assert rig.moves("a") == ["start", "sleep 2", "wake weights", "reload", "wake kv_cache", "forget"]
        forgotten = rig.journal("a", "reset_prefix_cache")[0]["at"]
        assert [line["at"] > forgotten for line in rig.chats("a")[1:]] == [True] * 3
        assert (await rig.model("a"))["wake_failures"] == 0
