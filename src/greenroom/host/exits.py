"""Waiting for processes to end, through pidfds: no polling where the kernel has them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable

from greenroom.host.proctable import Identity, read_entry

POLL_S = 0.02  # only where pidfds are not to be had


async def wait_exited(identities: Iterable[Identity], timeout_s: float) -> bool:
    """True as soon as none of these processes runs any more (zombies count as ended), False after `timeout_s`."""
    wanted = tuple(identities)
    handles = [handle for identity in wanted if (handle := open_pidfd(identity)) is not None]
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            await _all_readable(handles)
            # Only those without a pidfd can still run here, and nothing tells of their end.
            while any(_runs(identity) for identity in wanted):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        return not any(_runs(identity) for identity in wanted)
    finally:
        for handle in handles:
            os.close(handle)
    return True


def open_pidfd(identity: Identity) -> int | None:
    """A handle that becomes readable when that process ends; None when it is gone or there are no pidfds here."""
    try:
        handle = os.pidfd_open(identity[0])
    except OSError:
        return None
    entry = read_entry(identity[0])
    if entry is None or entry.started_ticks != identity[1]:
        os.close(handle)
        return None
    return handle


async def _all_readable(handles: Iterable[int]) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    waiting = set(handles)

    def ended(handle: int) -> None:
        loop.remove_reader(handle)
        waiting.discard(handle)
        if not waiting and not done.done():
            done.set_result(None)

    if not waiting:
        return
    for handle in tuple(waiting):
        loop.add_reader(handle, ended, handle)
    try:
        await done
    finally:
        for handle in waiting:
            loop.remove_reader(handle)


def _runs(identity: Identity) -> bool:
    entry = read_entry(identity[0])
    return entry is not None and entry.started_ticks == identity[1] and entry.live
