"""An engine greenroom knows nothing of sleeps by the calls that its entry writes out."""

from pathlib import Path
from typing import Any

from .rig import Rig, fake, vllm

ROUTES: dict[str, Any] = {
    "engine": "generic",
    "env": {"VLLM_SERVER_DEV_MODE": "1"},
    "sleep": {"path": "/sleep?level=1", "asleep": {"path": "/is_sleeping", "field": "is_sleeping", "value": True}, "residue": "1000MiB"},
    "wake": {"path": "/wake_up"},
}


async def test_its_calls_are_made_and_checked(tmp_path: Path) -> None:
    """Two of them take turns: one start each, the declared calls and nothing else, residue as declared."""
    models = {name: vllm(8000, 1000, config=ROUTES) for name in "ab"}
    async with Rig(tmp_path, models, budget_mib=10_000) as rig:
        replies = [await rig.chat(name) for name in "ababa"]
        assert [reply.headers["x-greenroom-start"] for reply in replies] == ["cold", "cold", "wake", "wake", "wake"]
        assert rig.moves("a") == ["start", "sleep 1", "wake", "sleep 1", "wake"]
        asleep = await rig.model("b")
        assert (asleep["state"], asleep["instances"][0]["reserved_mib"]) == ("asleep", 1000)


async def test_a_wake_of_several_calls_is_made_in_order(tmp_path: Path) -> None:
    """Level 2 by hand: weights, reload, cache; then the canary, then the client."""
    calls = [
        {"path": "/wake_up?tags=weights"},
        {"path": "/collective_rpc", "body": {"method": "reload_weights"}},
        {"path": "/wake_up?tags=kv_cache"},
    ]
    entry = {**ROUTES, "sleep": {**ROUTES["sleep"], "path": "/sleep?level=2", "level": 2}, "wake": calls}
    async with Rig(tmp_path, {"a": vllm(8000, 1000, config=entry)}) as rig:
        first = await rig.chat("a", temperature=0)
        assert (await rig.put_to_sleep("a")).status == 200
        reply = await rig.chat("a", temperature=0)
        assert (reply.text, reply.headers["x-greenroom-start"]) == (first.text, "wake")
        assert rig.moves("a") == ["start", "sleep 2", "wake weights", "reload", "wake kv_cache"]


async def test_one_without_a_question_is_believed(tmp_path: Path) -> None:
    """No `asleep`: the answers to its calls are all there is to go by."""
    config = {"sleep": {"path": "/sleep", "residue": "500MiB"}, "wake": {"path": "/wake_up"}}
    async with Rig(tmp_path, {name: fake(8000, residue=500, config=config) for name in "ab"}, budget_mib=10_000) as rig:
        replies = [await rig.chat(name) for name in "aba"]
        assert [reply.headers["x-greenroom-start"] for reply in replies] == ["cold", "cold", "wake"]
        assert [line for line in rig.journal() if "is_sleeping" in line.get("target", "")] == []
