"""A sleep or a wake call that never returns: its time limit ends the engine, and whoever waits goes on."""

from pathlib import Path

import pytest

from .rig import Rig, vllm

LIMIT_S = 0.6
SLACK_S = 6.0


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleep_that_hangs_is_ended(tmp_path: Path, level: int) -> None:
    """sleep_timeout after its call the room is given up by force, and its next client gets a cold start."""
    models = {"a": vllm(sleep=level, on_sleep="hang*1", config={"sleep_timeout": f"{LIMIT_S}s"}), "b": vllm(sleep=level)}
    async with Rig(tmp_path, models, budget_mib=10_000) as rig:
        await rig.warm("a")
        forced = await rig.chat("b")
        begun, started = rig.journal("a", "sleep_begin")[0]["at"], rig.journal("b", "start")[0]["at"]
        assert forced.done
        assert LIMIT_S - 0.05 <= started - begun < LIMIT_S + SLACK_S
        now = await rig.model("a")
        assert (now["state"], "/sleep" in now["last_error"], "0.6 s" in now["last_error"]) == ("stopped", True, True)
        assert (await rig.chat("a")).headers["x-greenroom-start"] == "cold"


@pytest.mark.parametrize(("level", "knob", "hazard"), [(1, "on_wake", "hang*1"), (2, "on_wake_kv", "hang*1"), (2, "on_reload", "slow:5*1")])
async def test_a_wake_that_takes_too_long_is_a_cold_start(tmp_path: Path, level: int, knob: str, hazard: str) -> None:
    """wake_timeout is for all its calls together; the client is served by a fresh engine."""
    async with Rig(tmp_path, {"a": vllm(sleep=level, config={"wake_timeout": f"{LIMIT_S}s"}, **{knob: hazard})}) as rig:
        await rig.warm("a")
        await rig.put_to_sleep("a")
        reply = await rig.chat("a")
        begun, started = rig.journal("a", "wake_begin")[0]["at"], rig.journal("a", "start")[1]["at"]
        assert (reply.done, reply.headers["x-greenroom-start"]) == (True, "cold")
        assert LIMIT_S - 0.05 <= started - begun < LIMIT_S + SLACK_S
        assert (await rig.model("a"))["wake_failures"] == 1


async def test_a_new_limit_holds_for_an_engine_that_sleeps_already(tmp_path: Path) -> None:
    """A reload that changes only times starts nothing anew, and its times hold from then on."""
    model = vllm(sleep=1, on_wake="hang*1")
    async with Rig(tmp_path, {"a": model}) as rig:
        await rig.warm("a")
        await rig.put_to_sleep("a")
        rig.write_config({"a": vllm(sleep=1, on_wake="hang*1", config={"wake_timeout": f"{LIMIT_S}s"})})
        await rig.reloaded()
        assert (await rig.model("a"))["state"] == "asleep"
        reply = await rig.chat("a")
        assert (reply.done, reply.took_s < LIMIT_S + SLACK_S, rig.starts("a")) == (True, True, 2)
