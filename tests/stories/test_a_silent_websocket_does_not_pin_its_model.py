"""B13: WebSocket upgrades broke, or an idle socket kept its model for ever."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from .rig import Rig, fake

QUIET_S = 0.3  # without a data frame, then the socket is called silent
SLACK_S = 3.0
FAREWELLS = (1001, 1012)
CONFIG: dict[str, Any] = {"limits": {"tunnel_quiet_s": QUIET_S}}


@asynccontextmanager
async def socket_to(rig: Rig, model: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """A WebSocket through the pass-through route, with sub-protocols offered."""
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{rig.port}/upstream/{model}/v1/realtime"
        async with session.ws_connect(url, protocols=("realtime", "other"), max_msg_size=1 << 22) as ws:
            yield ws


async def test_frames_pass_both_ways_and_only_a_silent_socket_makes_room(tmp_path: Path) -> None:
    """The engine's sub-protocol, text and 1 MiB binary frames; used, it is never cut; silent but for pings, it is told to go."""
    models = {"w": fake(vram=8000, ws=1), "b": fake(vram=8000)}
    async with Rig(tmp_path, models, config=CONFIG) as rig, socket_to(rig, "w") as ws:
        assert ws.protocol == "realtime"
        payload = os.urandom(1 << 20)
        await ws.send_bytes(payload)
        assert await ws.receive_bytes(timeout=10) == payload

        waiting = asyncio.ensure_future(rig.chat("b"))
        until_at = time.monotonic() + 4 * QUIET_S
        while time.monotonic() < until_at:
            await ws.send_str("still here")
            assert await ws.receive_str(timeout=10) == "still here"
            await asyncio.sleep(QUIET_S / 4)
        assert not waiting.done()

        async def ping() -> None:
            while True:
                await ws.ping()
                await asyncio.sleep(0.1)

        silent_at = time.monotonic()
        pinging = asyncio.ensure_future(ping())
        message = await ws.receive(timeout=20)
        pinging.cancel()
        assert (message.type, ws.close_code in FAREWELLS) == (aiohttp.WSMsgType.CLOSE, True)
        assert (await waiting).done
        assert time.monotonic() - silent_at < QUIET_S + SLACK_S
        assert rig.journal("w", "exit")[0]["at"] < rig.journal("b", "start")[0]["at"]


async def test_an_idle_model_leaves_by_its_ttl_although_a_socket_is_open(tmp_path: Path) -> None:
    """Nobody else asks: silence counts as idle, the socket is closed with a code."""
    async with Rig(tmp_path, {"w": fake(ws=1, config={"ttl": 1})}, config=CONFIG) as rig, socket_to(rig, "w") as ws:
        await ws.send_str("good evening")
        assert await ws.receive_str(timeout=10) == "good evening"
        message = await ws.receive(timeout=QUIET_S + 1 + SLACK_S)
        assert (message.type, ws.close_code in FAREWELLS) == (aiohttp.WSMsgType.CLOSE, True)
        await rig.wait_state("w", "stopped")
