"""The plain tale of the green room: two models, room for one awake."""

from pathlib import Path

import pytest

from .rig import Rig, vllm


@pytest.mark.parametrize("level", [1, 2])
async def test_two_models_take_turns_asleep(tmp_path: Path, level: int) -> None:
    """Each is started once; from then on the other sleeps, who asks is told that it was woken, and the answers stay the same."""
    models = {"a": vllm(8000, 1000, sleep=level), "b": vllm(8000, 1000, sleep=level)}
    async with Rig(tmp_path, models, budget_mib=10_000) as rig:
        replies = [await rig.chat(name, max_tokens=4, temperature=0) for name in "abababab"]

        assert [reply.status for reply in replies] == [200] * 8
        assert [reply.headers["x-greenroom-start"] for reply in replies] == ["cold", "cold", *["wake"] * 6]
        assert (rig.starts("a"), rig.starts("b")) == (1, 1)
        for first in (0, 1):
            assert len({reply.json["choices"][0]["message"]["content"] for reply in replies[first::2]}) == 1
        status = await rig.model("a")
        assert (status["state"], status["wakes"], status["instances"][0]["level"]) == ("asleep", 3, level)
