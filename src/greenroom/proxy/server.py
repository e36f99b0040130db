"""The data plane's server: what it works with, its listeners, its sweep, its draining.

One protocol object a client, one `Exchange` a request, one sweep for every deadline: no task and no timer
belongs to a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

from .admission import Admissions, Catalog
from .client import Client
from .exchange import Exchange
from .guards import Guards
from .keys import Keys
from .limits import KIB, MIB, Limits, Stats
from .record import Record
from .spool import Spool
from .upstream import Pool

log = logging.getLogger(__name__)

BACKLOG: Final = 1024


class Hooks(Protocol):
    def on_request_end(self, record: Record) -> None: ...


class NoHooks:
    def on_request_end(self, record: Record) -> None:
        """Nobody wants to know."""


def _always_ready() -> bool:
    return True


@dataclass
class DataPlane:
    """What the data plane works with.  Everything may be replaced while it runs, except `limits` and `spool_dir`."""

    admissions: Admissions
    catalog: Catalog
    keys: Keys
    guards: Guards
    limits: Limits = field(default_factory=Limits)
    control_socket: str | None = None
    ready: Callable[[], bool] = _always_ready
    hooks: Hooks = field(default_factory=NoHooks)
    spool_dir: str | None = None  # None: the system's temporary directory


class Server:
    """A listening data plane."""

    def __init__(self, plane: DataPlane, loop: asyncio.AbstractEventLoop) -> None:
        self.plane = plane
        self.loop = loop
        limits = self.limits = plane.limits
        self.stats = Stats()
        self.pool = Pool(limits, self.stats, loop)
        self.spool = Spool(limits.spool_mib_max, plane.spool_dir, self.stats)
        self.clients: set[Client] = set()
        self.draining = False
        self.spool_after_bytes = limits.spool_after_kib * KIB
        self.memory_bytes_max = limits.memory_mib_max * MIB
        self.head_bytes_max = limits.head_kib_max * KIB
        self.target_bytes_max = limits.target_kib_max * KIB
        self.overhead_bytes_max = limits.overhead_kib_max * KIB
        self.ahead_bytes_max = limits.ahead_kib_max * KIB
        self._listeners: list[asyncio.AbstractServer] = []
        self._empty: asyncio.Event = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def _listen(self, where: socket.socket | tuple[str, int]) -> None:
        make: Callable[[], Client] = lambda: Client(self)  # noqa: E731
        if isinstance(where, socket.socket):
            self._listeners.append(await self.loop.create_server(make, sock=where, backlog=BACKLOG))
        else:
            self._listeners.append(await self.loop.create_server(make, where[0], where[1], backlog=BACKLOG))
        self._sweep()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where it listens."""
        return [
            sock.getsockname()[:2]
            for listener in self._listeners
            for sock in cast(asyncio.Server, listener).sockets
            if sock.family != socket.AF_UNIX
        ]

    def report(self, exchange: Exchange, outcome: str) -> None:
        """Tell the hooks of an ended request; their faults are not the client's."""
        if self.plane.hooks.__class__ is NoHooks:  # a record costs more than much of what a request needs
            return
        try:
            self.plane.hooks.on_request_end(exchange.record(outcome, self.loop.time()))
        except Exception:
            log.exception("on_request_end failed")

    def client_left(self) -> None:
        if not self.clients:
            self._empty.set()

    def _sweep(self) -> None:
        now = self.loop.time()
        for client in tuple(self.clients):
            try:
                client.sweep(now)
            except Exception:
                log.exception("a client connection could not be looked after")
                client.transport.abort()
        self.pool.sweep(now)
        self._timer = self.loop.call_later(self.limits.sweep_s, self._sweep)

    async def close(self, grace_s: float = 5.0) -> None:
        """Take no more connections, let running requests end for `grace_s`, then cut the rest; returns when all are gone."""
        self.draining = True
        for listener in self._listeners:
            listener.close()
        for client in tuple(self.clients):
            if client.active is None and not client.queue and client.tunnel is None:
                client.close_gently()
        await self._wait_empty(grace_s)
        for client in tuple(self.clients):
            if client.active is not None:
                client.active.cut("shutdown", "The server is shutting down.")
            else:
                client.close_gently()
        await self._wait_empty(self.limits.linger_s_max + 2 * self.limits.sweep_s)
        for client in tuple(self.clients):
            client.transport.abort()
        await self._wait_empty(1.0)
        self.pool.close()
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.sleep(0)  # aborted engine connections end in the loop's next turn
        await asyncio.sleep(0)

    async def _wait_empty(self, seconds: float) -> None:
        self._empty.clear()
        if self.clients and seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), seconds)


async def serve(plane: DataPlane, where: socket.socket | tuple[str, int]) -> Server:
    """Listen on a bound socket or a (host, port); OSError when that is impossible."""
    server = Server(plane, asyncio.get_running_loop())
    await server._listen(where)
    return server


__all__ = ["Client", "DataPlane", "Hooks", "NoHooks", "Record", "Server", "serve"]
