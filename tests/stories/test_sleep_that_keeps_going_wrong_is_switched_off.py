"""B31: a model whose wakes fail again and again was put to sleep again and again."""

from pathlib import Path

import pytest

from .rig import Rig, vllm


@pytest.mark.parametrize(("level", "knob", "hazard"), [(1, "on_wake", "500*2"), (2, "on_wake", "garbage*2"), (1, "on_first", "die:139*2")])
async def test_after_two_wakes_that_failed_it_is_stopped_instead_until_an_operator_says_sleep(
    tmp_path: Path, level: int, knob: str, hazard: str
) -> None:
    """Status and why say so; as a victim it is stopped; `sleep` lifts it, and then it sleeps as a victim again."""
    models = {"a": vllm(sleep=level, **{knob: hazard}), "b": vllm(sleep=level)}
    async with Rig(tmp_path, models, budget_mib=10_000) as rig:
        replies = [await rig.chat(name) for name in "ababa"]
        assert [reply.done for reply in replies] == [True] * 5
        now = await rig.model("a")
        assert (now["starts"], now["wake_failures"]) == (3, 2)
        assert "2 sleeps or wakes went wrong" in now["sleep"]["off"]
        assert now["sleep"]["levels"] == []
        assert "sleep is switched off" in await rig.why("a")

        await rig.warm("b")
        assert (await rig.model("a"))["state"] == "stopped"
        await rig.warm("a")
        lifted = await rig.put_to_sleep("a")
        assert (lifted.status, (await rig.model("a"))["state"]) == (200, "asleep")
        assert (await rig.model("a"))["sleep"]["off"] == ""
        assert (await rig.chat("a")).headers["x-greenroom-start"] == "wake"
        await rig.warm("b")
        assert (await rig.model("a"))["state"] == "asleep"
        assert (await rig.model("a"))["starts"] == 4
