"""B29: a request that came during the sleep call hung, or killed the engine."""

import asyncio
from pathlib import Path

import pytest

from .rig import Rig, codes, together, vllm


@pytest.mark.parametrize(("version", "level"), [("0.16.0", 1), ("0.32.0", 2)])
async def test_it_is_answered_after_sleep_and_wake(tmp_path: Path, version: str, level: int) -> None:
    """The sleep is not broken off, nobody is sent into it, and all who came meanwhile are answered by one wake."""
    model = vllm(sleep=level, version=version, strict=1, on_sleep="slow:0.5*1")
    async with Rig(tmp_path, {"a": model}) as rig:
        await rig.warm("a")
        sleeping = asyncio.create_task(rig.put_to_sleep("a"))
        await rig.wait_journal("a", "sleep_begin")
        replies = await together(rig.chat("a"), rig.chat("a", stream=True))
        operator = await sleeping

        assert [reply.done for reply in replies] == [True, True]
        assert {reply.headers["x-greenroom-start"] for reply in replies} == {"wake"}
        assert codes([operator]) == [200]
        assert min(line["at"] for line in rig.chats("a")[1:]) > rig.journal("a", "wake_end")[-1]["at"]
        now = await rig.model("a")
        assert (now["starts"], now["sleeps"], now["wakes"], now["state"]) == (1, 1, 1, "ready")
