"""Asking peers now and then whether they are there: a GET that no greenroom starts or wakes anything for.

    watch = PeerWatch(door, pool)
    await watch.run()                      # until cancelled

Any answer below 500 will do, 401 and 404 as well: somebody speaks HTTP there.  What a model does is found by requests.
A peer that worked lately is not asked.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from . import peers as rules
from .heads import request_head
from .peer_door import ERROR_CHARS_MAX, Peer, PeerDoor, Standing
from .upstream import Pool, Upstream

log = logging.getLogger("greenroom")

PROBE_EVERY_S: Final = 15.0  # each peer is asked once in this time ...
PROBE_SOON_S: Final = 2.0  # ... but so soon after a failure, until it is known to be up or down
PROBE_S_MAX: Final = 5.0  # for the whole answer
PROBE_BYTES_MAX: Final = 64 * 1024  # read of it
TICK_S: Final = 0.5


class Probe:
    """One question (a Sink); ends exactly once, by `done`."""

    def __init__(self, pool: Pool, peer: Peer, until: float) -> None:
        self.peer, self.until = peer, until
        self.verdict: str | None = None  # "": it is there; else why not; None: not known yet
        self.is_over = False
        self._pool = pool
        self._upstream: Upstream | None = None
        self._bytes = 0
        key, _ = peer.wire
        upstream = pool.take(key)
        if upstream is not None:
            self.connected(upstream)
        else:
            pool.dial(key, self)

    def connected(self, upstream: Upstream) -> None:
        if self.is_over or upstream.closed:
            upstream.abandon()
            self._end("it closed the connection at once")
            return
        self._upstream = upstream
        peer = self.peer
        path = (peer.base + (peer.probe or "/health")).encode("latin-1")
        head = request_head(b"GET", path, peer.host_header, [(b"accept", b"*/*")], (), None, peer.key_headers)
        upstream.begin(self, head, b"", 0, is_head=False, upgrade=False, keeps_cors=False)

    def unreachable(self, why: str) -> None:
        self._end(why)

    def answered(self, upstream: Upstream) -> None:
        self.verdict = "" if upstream.status < 500 else f"it answered {upstream.status}"

    def push(self, pieces: list[bytes], done: bool) -> None:
        self._bytes += sum(map(len, pieces))
        if self._bytes > PROBE_BYTES_MAX and not done:
            self.give_up("")

    def completed(self) -> None:
        self._upstream = None
        self._end("")

    def silent(self, upstream: Upstream, why: str) -> None:
        self._upstream = None
        if upstream.reused and not self.is_over:
            self._pool.dial(self.peer.wire[0], self)  # an old connection proves nothing
        else:
            self._end(why)

    def broke(self, why: str) -> None:
        self._upstream = None
        self._end(why)

    def switched(self, upstream: Upstream, early: bytes) -> None:
        upstream.abandon()
        self._end("")

    def give_up(self, why: str) -> None:
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.abandon()
        self._end(why)

    def _end(self, why: str) -> None:
        self.is_over = True
        if self.verdict is None:
            self.verdict = why


class PeerWatch:
    """Probes all peers of a door, whichever it has at the time."""

    def __init__(self, door: PeerDoor, pool: Pool, *, every_s: float = PROBE_EVERY_S) -> None:
        self._door, self._pool, self._every_s = door, pool, every_s
        self._asked_at: dict[str, float] = {}
        self._running: list[Probe] = []
        self._told: dict[str, bool] = {}

    async def run(self) -> None:
        try:
            while True:
                self.step(self._door.clock())
                await asyncio.sleep(TICK_S)
        finally:
            for probe in self._running:
                probe.give_up("")

    def step(self, now: float) -> None:
        """Look at what came, ask who is due."""
        peers = self._door.peers
        for probe in list(self._running):
            if not probe.is_over and now >= probe.until:
                probe.give_up(f"it sent no answer to GET {probe.peer.probe} within {PROBE_S_MAX:g} s")
            if probe.is_over:
                self._running.remove(probe)
                if any(peer.id == probe.peer.id and peer.identity == probe.peer.identity for peer in peers.all):  # no other by now
                    judge(peers.standings[probe.peer.id], now, probe.verdict or "")
        busy = {probe.peer.id for probe in self._running}
        for peer in peers.all:
            standing = peers.standings[peer.id]
            self._tell(peer, standing)
            heard_at = standing.heard_at if standing.is_up and not standing.health.failures else None
            latest = max(self._asked_at.get(peer.id, -self._every_s + now), heard_at if heard_at is not None else -1e18)
            is_in_doubt = standing.is_up and standing.health.failures > 0
            every_s = min(PROBE_SOON_S, self._every_s) if is_in_doubt else self._every_s
            if peer.probe is None or peer.id in busy or now - latest < every_s:
                continue
            self._asked_at[peer.id] = now
            self._running.append(Probe(self._pool, peer, now + PROBE_S_MAX))

    def _tell(self, peer: Peer, standing: Standing) -> None:
        """In the log, when it goes or comes back."""
        if self._told.get(peer.id, True) != standing.is_up:
            if standing.is_up:
                log.info("peer %s (%s) answers again", peer.id, peer.shown)
            else:
                log.warning("peer %s (%s) does not answer: %s", peer.id, peer.shown, standing.health.last_error)
        self._told[peer.id] = standing.is_up


def judge(standing: Standing, now: float, why: str) -> None:
    """Count what a probe found."""
    if why:
        standing.health = rules.failed(standing.health, now, why)
        standing.last_error, standing.last_error_at = why[:ERROR_CHARS_MAX], now
    else:
        standing.health = rules.worked(standing.health)
        standing.heard_at = now
    standing.settle(now)
