"""`canary`: after level 2 by itself, after every wake with `always`, never with `off`."""

from pathlib import Path

import pytest

from .rig import Rig, vllm

CANARY, CLIENT = "/v1/completions", "/v1/chat/completions"


async def woken(rig: Rig) -> list[str]:
    """What an engine was asked by us and by a client, over a start and a wake."""
    await rig.warm("a")
    await rig.put_to_sleep("a")
    await rig.warm("a")
    return [line["target"] for line in rig.inferences("a")]


@pytest.mark.parametrize(
    ("level", "when", "asked"),
    [
        (1, "auto", [CANARY, CLIENT, CLIENT]),
        (1, "always", [CANARY, CLIENT, CANARY, CLIENT]),
        (2, "auto", [CANARY, CLIENT, CANARY, CLIENT]),
        (2, "off", [CLIENT, CLIENT]),
    ],
)
async def test_as_configured(tmp_path: Path, level: int, when: str, asked: list[str]) -> None:
    """Recorded before the first client where it may be needed, compared before the first one after a wake."""
    async with Rig(tmp_path, {"a": vllm(sleep=level, config={"canary": when})}) as rig:
        assert await woken(rig) == asked
        assert rig.starts("a") == 1


async def test_always_keeps_rubbish_from_clients_at_level_1_too(tmp_path: Path) -> None:
    """An engine that lost its mind in a level-1 sleep is started anew; its client never knows."""
    async with Rig(tmp_path, {"a": vllm(sleep=1, on_wake="garbage*1", config={"canary": "always"})}) as rig:
        first = await rig.chat("a", temperature=0)
        await rig.put_to_sleep("a")
        reply = await rig.chat("a", temperature=0)
        assert (reply.text, reply.headers["x-greenroom-start"]) == (first.text, "cold")
        assert "answers differently since its wake" in (await rig.model("a"))["last_error"]


@pytest.mark.parametrize("runner", ["generate", "embed", "rank"])
async def test_each_kind_of_model_has_one(tmp_path: Path, runner: str) -> None:
    """An embedder and a reranker are asked what they can answer, and not slept at level 2 on trust."""
    async with Rig(tmp_path, {"a": vllm(sleep=2, runner=runner, on_reload="no_load*1")}) as rig:
        loaded = await rig.load("a")
        assert loaded.status == 200
        await rig.put_to_sleep("a")
        assert (await rig.load("a")).status == 200
        now = await rig.model("a")
        assert (now["starts"], now["wake_failures"]) == (2, 1)
        assert "answers differently since its wake" in now["last_error"]
