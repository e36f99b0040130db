"""A llama-server that falls asleep by itself: its memory is free for others, and only a request wakes it."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from .rig import Reply, Rig

IDLE_S = 1
NEED_MIB = 300
ROOM_MIB = 400  # for one awake beside one asleep
QUIET_S = 2.5  # so long is looked at a sleeper that nothing may wake
WITHIN_S = 30.0
ENTERS, LEAVES = "entering sleeping state", "exiting sleeping state"  # its own log lines


def models(program: Path, chat: Path, *names: str) -> dict[str, Any]:
    words = [str(program), "-m", str(chat), "-c", "512", "-np", "1", "--no-warmup", "-t", "1", "--sleep-idle-seconds", str(IDLE_S)]
    entry = {"cmd": [*words, "--metrics", "--slots", "--port", "${PORT}"], "memory": f"{NEED_MIB}MiB", "device": "ram"}
    return dict.fromkeys(names, entry)


def on_ram(mib: int) -> dict[str, Any]:
    return {"devices": {"ram": {"memory": f"{mib}MiB", "headroom": "0MiB"}}}


async def complete(rig: Rig, model: str) -> Reply:
    asked = await rig.ask(model, path="/v1/completions", prompt="once", max_tokens=2)
    return await asked.rest()


async def log_of(rig: Rig, model: str) -> str:
    return (await rig.api("GET", f"/api/models/{model}/logs?limit=1000")).body.decode()


@pytest.mark.engine
@pytest.mark.timeout(240)
async def test_nothing_but_a_request_wakes_it(tmp_path: Path, llama_server: Path, tiny_chat: Path) -> None:
    """Status, listing, events and our own looks leave it asleep; a request wakes it and is told so; it is one process all the time."""
    async with Rig(tmp_path, models(llama_server, tiny_chat, "a"), config=on_ram(ROOM_MIB)) as rig:
        assert (await complete(rig, "a")).done
        first = await rig.wait_state("a", "asleep", within_s=WITHIN_S)
        until_at = time.monotonic() + QUIET_S
        while time.monotonic() < until_at:
            for target in ("/v1/models", "/api/status", "/running", "/api/models/a", "/api/models/a/why"):
                assert (await rig.api("GET", target)).status == 200
            assert (await rig.model("a"))["state"] == "asleep"
            await asyncio.sleep(0.1)
        slept = await log_of(rig, "a")
        assert (ENTERS in slept, LEAVES in slept) == (True, False), slept

        reply = await complete(rig, "a")
        assert (reply.done, reply.headers["x-greenroom-start"]) == (True, "wake")
        woken = await log_of(rig, "a")
        assert LEAVES in woken, woken
        again = await rig.wait_state("a", "asleep", within_s=WITHIN_S)
        assert first["instances"][0]["pid"] == again["instances"][0]["pid"]
        assert (again["starts"], again["wakes"], again["sleeps"], again["wake_failures"]) == (1, 1, 2, 0)


@pytest.mark.engine
@pytest.mark.timeout(240)
async def test_two_of_them_share_room_for_one(tmp_path: Path, llama_server: Path, tiny_chat: Path) -> None:
    """Each sleeps after its request and frees the book for the other: both stay, none is stopped, and the budget holds."""
    async with Rig(tmp_path, models(llama_server, tiny_chat, "a", "b"), config=on_ram(ROOM_MIB)) as rig:
        for round_number in range(2):
            for name in "ab":
                reply = await complete(rig, name)
                assert (reply.done, reply.headers["x-greenroom-start"]) == (True, "wake" if round_number else "cold")
                await rig.wait_state(name, "asleep", within_s=WITHIN_S)
        now = {one["id"]: (one["starts"], one["wakes"], one["evictions"]) for one in (await rig.status())["models"]}
        assert now == {"a": (1, 1, 0), "b": (1, 1, 0)}
        reserved = [device["reserved_mib"] for _, status in rig.seen for device in status["devices"]]
        assert max(reserved, default=0) <= ROOM_MIB
