"""The operator's warm-up request is answered before any client's, after each start and after each wake."""

import hashlib
import json
from pathlib import Path

import pytest

from .rig import Rig, vllm

BODY = {"model": "a", "prompt": "warm me up", "max_tokens": 1}
SHA = hashlib.sha256(json.dumps(BODY).encode()).hexdigest()


@pytest.mark.parametrize("level", [1, 2])
async def test_it_comes_after_every_start_and_wake(tmp_path: Path, level: int) -> None:
    """Start, wake, wake: the body arrives each time, once, and the client after it."""
    model = vllm(sleep=level, config={"warmup": {"path": "/v1/completions", "body": BODY}, "canary": "off"})
    async with Rig(tmp_path, {"a": model}) as rig:
        await rig.warm("a")
        for _ in range(2):
            await rig.put_to_sleep("a")
            await rig.warm("a")
        seen = ["warm-up" if line["sha256"] == SHA else line["target"] for line in rig.inferences("a")]
        assert seen == 3 * ["warm-up", "/v1/chat/completions"]


async def test_one_that_is_never_answered_after_a_wake_is_a_cold_start(tmp_path: Path) -> None:
    """The first inference hangs: wake_timeout ends it, and the client is served by a fresh engine."""
    config = {"warmup": {"path": "/v1/completions", "body": BODY}, "wake_timeout": "0.6s"}
    async with Rig(tmp_path, {"a": vllm(sleep=1, on_first="hang*1", config=config)}) as rig:
        await rig.warm("a")
        await rig.put_to_sleep("a")
        reply = await rig.chat("a")
        assert (reply.done, reply.headers["x-greenroom-start"]) == (True, "cold")
        assert "warm-up" in (await rig.model("a"))["last_error"]
