"""Somebody looks: event and log streams stay open for hours, and are no request that must be waited for."""

import time
from pathlib import Path

from .rig import Rig, fake

SOON_S = 12  # the grace for requests is 30 s


async def test_streams_end_with_the_server(tmp_path: Path) -> None:
    """Events and a model's log are being followed; the server ends at once all the same, and ends them cleanly."""
    async with Rig(tmp_path, {"a": fake(vram=1000)}) as rig:
        await rig.warm("a")
        followed = [await rig.send("GET", target) for target in ("/api/events?follow=1", "/api/models/a/logs?follow=1")]
        for one in followed:
            await one.head()
        asked_at = time.monotonic()

        assert await rig.stop_server() == 0
        assert time.monotonic() - asked_at < SOON_S
        for one in followed:
            one.close()
