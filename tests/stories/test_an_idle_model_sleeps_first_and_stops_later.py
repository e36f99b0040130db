"""The idle ladder: asleep after `sleep_after`, stopped after `ttl`, both counted from the last end."""

from pathlib import Path

import pytest

from .rig import Rig, vllm

SLEEP_S, TTL_S = 0.4, 1.6
SLACK_S = 3.0


@pytest.mark.parametrize("level", [1, 2])
async def test_it_goes_down_step_by_step_and_comes_back_from_each(tmp_path: Path, level: int) -> None:
    """Asleep, woken by a request, asleep again, stopped, started by a request."""
    async with Rig(tmp_path, {"a": vllm(sleep=level, sleep_after=SLEEP_S, ttl=TTL_S)}) as rig:
        first = await rig.chat("a")
        slept = await rig.wait_journal("a", "sleep_begin")
        await rig.wait_state("a", "asleep")
        second = await rig.chat("a")
        again = await rig.wait_journal("a", "sleep_begin", 2)
        left = await rig.wait_journal("a", "term")
        await rig.wait_state("a", "stopped")
        third = await rig.chat("a")

        assert [reply.headers["x-greenroom-start"] for reply in (first, second, third)] == ["cold", "wake", "cold"]
        assert SLEEP_S / 2 <= slept["at"] - first.ended_at < SLEEP_S + SLACK_S
        assert SLEEP_S / 2 <= again["at"] - second.ended_at < SLEEP_S + SLACK_S
        assert TTL_S / 2 <= left["at"] - second.ended_at < TTL_S + SLACK_S
        assert again["at"] < left["at"]
