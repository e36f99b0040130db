"""B29: an engine was put to sleep over a request, or got one while it slept.

GREENROOM_SLEEP_ROUNDS and GREENROOM_SLEEP_SEED make it longer and other.
"""

import asyncio
import os
import random
from pathlib import Path

import pytest

from .rig import Reply, Rig, until, vllm

ROUNDS = int(os.environ.get("GREENROOM_SLEEP_ROUNDS", "200"))
SEED = int(os.environ.get("GREENROOM_SLEEP_SEED", "1"))
CLIENTS = 4
IDLE_S = 0.03  # of a, until it sleeps by itself
FORCED_SHARE = 0.25  # of the rounds in which b wants the room of a as well
STRICT = {"version": "0.16.0", "strict": 1, "stream": "4x0.002", "sleep_s": 0.004, "wake_s": 0.004}


@pytest.mark.timeout(300)
async def test_whatever_comes_around_the_moment_of_sleep_is_answered(tmp_path: Path) -> None:
    """200 rounds: streams from 4 clients when a falls asleep, by itself or for b.  The engines die of any wrong order; none does."""
    models = {"a": vllm(8000, 1000, sleep=1, sleep_after=IDLE_S, **STRICT), "b": vllm(8000, 1000, sleep=1, **STRICT)}
    rng = random.Random(SEED)
    async with Rig(tmp_path, models, budget_mib=10_000) as rig:
        await rig.warm("a")
        for _ in range(ROUNDS):
            asking = ["a"] * CLIENTS + ["b"] * (rng.random() < FORCED_SHARE)
            await asyncio.gather(*(ask_at(rig, name, rng.uniform(0.5, 1.5) * IDLE_S) for name in asking))

        assert [reply for reply in rig.replies if not reply.done or (reply.is_stream and len(reply.tokens) < 4)] == []
        assert len(rig.replies) >= 1 + ROUNDS * CLIENTS
        assert (rig.starts("a"), rig.starts("b")) == (1, 1)
        await until(lambda: awake_or_asleep(rig), "no engine is between the two", 5)
        assert [fault for name in "ab" for fault in out_of_order(rig, name)] == []
        told = {one["id"]: one for one in (await rig.status())["models"]}
        assert told["a"]["sleeps"] >= ROUNDS // 10
        assert told["b"]["sleeps"] >= ROUNDS * FORCED_SHARE // 4
        assert [(told[name]["failures"], told[name]["wake_failures"]) for name in "ab"] == [(0, 0), (0, 0)]


async def ask_at(rig: Rig, model: str, after_s: float) -> Reply:
    await asyncio.sleep(after_s)  # the moment is the story
    return await rig.chat(model, stream=True)


def awake_or_asleep(rig: Rig) -> bool:
    def counts(name: str) -> bool:
        begun = sum(len(rig.journal(name, event)) for event in ("sleep_begin", "wake_begin"))
        return begun == sum(len(rig.journal(name, event)) for event in ("sleep_end", "wake_end"))

    return all(map(counts, "ab"))


def out_of_order(rig: Rig, model: str) -> list[str]:
    """Where the engine's own journal is not: nothing in flight, sleep, wake, and only then requests again."""
    faults, in_flight, state = [], 0, "awake"
    after = {
        "sleep_begin": ("awake", "falling"),
        "sleep_end": ("falling", "asleep"),
        "wake_begin": ("asleep", "rising"),
        "wake_end": ("rising", "awake"),
    }
    for line in rig.journal(model):
        event = line["event"]
        if event in after:
            expected, then = after[event]
            if state != expected or in_flight:
                faults.append(f"{event} while {state} with {in_flight} in flight, at {line['at']}")
            state = then
        elif event == "begin" and line["target"].startswith("/v1/") and line["method"] == "POST":
            in_flight += 1
            if state != "awake":
                faults.append(f"a request while {state}, at {line['at']}")
        elif event == "finished":
            in_flight -= 1
    return faults
