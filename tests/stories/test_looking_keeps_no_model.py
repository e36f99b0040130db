"""Somebody looks all the time: a page, a scraper, a list of models.  No model is started, woken or kept by it."""

import asyncio
from pathlib import Path

from greenroom.control import pages

from .rig import Rig, fake, vllm

SLEEP_S, TTL_S = 0.5, 2.0
SLACK_S = 3.0
PER_MODEL = ("", "/why", "/logs", "/logs?lines=5")
LOOKS = (
    *("/api/status", "/api/version", "/api/me", "/api/advice", "/api/events?follow=0", "/api/logs", "/api/timeline?minutes=60"),
    *("/api/requests", "/api/requests?outcome=open", "/api/requests?outcome=failed&limit=5"),
    *("/metrics", "/metrics?engines=1", "/health", "/ready", "/running", "/logs"),
    *("/v1/models", "/models", "/v1/models/idle", "/v1/models/deep", "/v1/models/cold"),
    *(f"/api/models/{model}{about}" for model in ("idle", "deep", "cold") for about in PER_MODEL),
)
# What the server itself asks of an engine, and what it must not: everything else is a request that somebody made.
CHECKS = {"/health", "/is_sleeping", "/v1/models", "/metrics", "/sleep"}


async def test_the_idle_ladder_goes_on_under_every_look(tmp_path: Path) -> None:
    """Read without a pause, with streams open: one model sleeps and stops on time, one sleeps on, one stays away."""
    models = {"idle": vllm(4000, 500, sleep_after=SLEEP_S, ttl=TTL_S), "deep": vllm(4000, 500), "cold": fake(1000)}
    looks = [*LOOKS, *(f"/ui/{name}" for name in ("", *pages.read_pages()))]
    async with Rig(tmp_path, models) as rig:
        await rig.warm("deep")
        assert (await rig.put_to_sleep("deep")).status == 200
        streams = [
            await rig.send("GET", target)
            for target in ("/api/events", "/api/models/idle/logs?follow=1", "/api/models/cold/logs?follow=1", "/logs/stream")
        ]
        for stream in streams:
            await stream.head()
        last = await rig.chat("idle")
        begun = {name: len(rig.journal(name, "begin")) for name in models}
        answers: dict[str, set[int]] = {}

        async def look(targets: list[str]) -> None:
            while not rig.journal("idle", "exit"):
                for target in targets:
                    answers.setdefault(target, set()).add((await rig.api("GET", target)).status)

        async with asyncio.timeout(60):
            await asyncio.gather(look(looks), look(looks[::-1]))
        slept, left = rig.journal("idle", "sleep_begin"), rig.journal("idle", "term")
        await rig.wait_state("idle", "stopped")
        for stream in streams:
            stream.close()

        assert answers.keys() == set(looks)
        assert {target: codes for target, codes in answers.items() if codes != {200}} == {}
        assert len(slept) == 1
        assert SLEEP_S / 2 <= slept[0]["at"] - last.ended_at < SLEEP_S + SLACK_S
        assert TTL_S / 2 <= left[0]["at"] - last.ended_at < TTL_S + SLACK_S
        assert {name: rig.starts(name) for name in models} == {"idle": 1, "deep": 1, "cold": 0}
        assert rig.journal(event="wake_end") == []
        assert (await rig.model("deep"))["state"] == "asleep"
        asked = {name: {line["target"].partition("?")[0] for line in rig.journal(name, "begin")[begun[name] :]} for name in models}
        assert set().union(*asked.values()) <= CHECKS, asked
        assert "/metrics" in asked["idle"], "engines that serve are asked for their figures"
        assert "/metrics" not in asked["deep"], "a sleeper is not even asked for those"
