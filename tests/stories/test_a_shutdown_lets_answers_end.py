"""SIGTERM ends the server without cutting what is under way; a second one cuts it with a word to each client."""

import asyncio
import signal
from pathlib import Path

from .rig import Exchange, Rig, fake


async def under_way(rig: Rig) -> tuple[list[Exchange], Exchange]:
    """Three streams that run, and one request that waits."""
    running = [await rig.ask("a", stream=True) for _ in range(3)]
    for exchange in running:
        await exchange.events(1)
    waiting = await rig.ask("a")
    await rig.wait_queued("a", 1)
    return running, waiting


async def test_streams_end_whole_and_the_waiting_hear_why(tmp_path: Path) -> None:
    """One SIGTERM: three whole streams, a 503 for the one who waited, exit code 0."""
    async with Rig(tmp_path, {"a": fake(stream="12x0.05", config={"parallel": 3})}) as rig:
        running, waiting = await under_way(rig)
        ending = asyncio.create_task(rig.stop_server())
        replies = [await exchange.rest() for exchange in running]
        refused = await waiting.rest()

        assert await ending == 0
        assert [(reply.done, len(reply.tokens)) for reply in replies] == [(True, 12)] * 3
        assert (refused.status, refused.error["code"]) == (503, "shutting_down")


async def test_a_second_signal_cuts_with_an_error_event(tmp_path: Path) -> None:
    """Two SIGTERMs: streams that would last a minute end at once, each with an error event and no clean end."""
    async with Rig(tmp_path, {"a": fake(stream="600x0.1", config={"parallel": 3})}) as rig:
        running, waiting = await under_way(rig)
        ending = asyncio.create_task(rig.stop_server())
        assert (await waiting.rest()).status == 503
        rig.notify(signal.SIGTERM)
        replies = [await exchange.rest() for exchange in running]

        assert await ending == 0
        assert [(reply.complete, reply.error.get("code")) for reply in replies] == [(False, "shutdown")] * 3
        assert max(reply.took_s for reply in replies) < 10
