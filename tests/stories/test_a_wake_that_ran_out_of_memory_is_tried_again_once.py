"""A wake runs out of memory though the book says that there is room (the device cannot be measured)."""

from pathlib import Path

import pytest

from .rig import Rig, vllm

LEVELS = pytest.mark.parametrize("level", [1, 2])


@LEVELS
@pytest.mark.parametrize("hazard", ["oom*1", "oom_partly*1"])
async def test_it_sleeps_on_and_the_second_wake_serves(tmp_path: Path, level: int, hazard: str) -> None:
    """Also when a part stayed mapped; what it answers is compared before anybody gets it, whatever its level."""
    async with Rig(tmp_path, {"a": vllm(sleep=level, on_wake=hazard)}) as rig:
        first = await rig.chat("a", temperature=0)
        await rig.put_to_sleep("a")
        reply = await rig.chat("a", temperature=0)

        assert (reply.done, reply.text, reply.headers["x-greenroom-start"]) == (True, first.text, "wake")
        now = await rig.model("a")
        assert (now["starts"], now["wake_failures"], now["sleep"]["off"]) == (1, 1, "")
        assert [line["target"] for line in rig.inferences("a")][-2:] == ["/v1/completions", "/v1/chat/completions"]


@LEVELS
async def test_after_the_second_it_is_started_anew(tmp_path: Path, level: int) -> None:
    """Two in a row: the sleeper is stopped, and a cold start serves who waits."""
    async with Rig(tmp_path, {"a": vllm(sleep=level, on_wake="oom*2")}) as rig:
        await rig.warm("a")
        await rig.put_to_sleep("a")
        reply = await rig.chat("a")

        assert (reply.done, reply.headers["x-greenroom-start"]) == (True, "cold")
        now = await rig.model("a")
        assert (now["starts"], now["wake_failures"]) == (2, 2)
        assert "no room to wake it twice" in await rig.why("a")


@LEVELS
async def test_a_second_half_without_room_is_woken_again_too(tmp_path: Path, level: int) -> None:
    """Weights are back, the cache finds no room: the whole wake is made again, and its answers are right."""
    async with Rig(tmp_path, {"a": vllm(sleep=level, on_wake_kv="oom*1")}) as rig:
        first = await rig.chat("a", temperature=0)
        await rig.put_to_sleep("a")
        reply = await rig.chat("a", temperature=0)
        assert (reply.done, reply.text) == (True, first.text)
