"""A WebSocket between a client and an engine: bytes both ways, frames only watched.

Frames are followed for two things: telling silence (pings are silence) from use, and closing with a
proper close frame, which may only stand between two frames.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Final

from greenroom.core.facts import Outcome

if TYPE_CHECKING:
    from .client import Client
    from .exchange import Exchange
    from .upstream import Upstream

RESTARTING: Final = 1012
INTERNAL: Final = 1011
REASON_BYTES_MAX: Final = 123  # of a close frame
_OP_CLOSE: Final = 8


def close_frame(code: int, reason: str) -> bytes:
    """A close frame as a server sends it (not masked)."""
    text = reason.encode("utf-8")[:REASON_BYTES_MAX].decode("utf-8", "ignore").encode("utf-8")
    return bytes((0x80 | _OP_CLOSE, 2 + len(text))) + code.to_bytes(2, "big") + text


class Frames:
    """Where one direction stands inside its frames."""

    __slots__ = ("_head", "_is_data", "_left", "has_closed")

    def __init__(self) -> None:
        self._head = b""
        self._left = 0  # payload bytes still to come
        self._is_data = False
        self.has_closed = False  # a close frame has begun

    @property
    def at_boundary(self) -> bool:
        return not self._left and not self._head

    def scan(self, data: bytes) -> tuple[bool, int]:
        """(whether data frames were in it, index after the first frame that ends in it or -1)."""
        at, size, spoke, first_end = 0, len(data), False, -1
        while at < size:
            if self._left:
                step = min(self._left, size - at)
                self._left -= step
                at += step
                spoke = spoke or self._is_data
            else:
                used = self._read_head(data, at)
                at += used
                if self._head:
                    break  # the rest of the frame's head has not come
                spoke = spoke or self._is_data
            if not self._left and first_end < 0:
                first_end = at
        return spoke, first_end

    def _read_head(self, data: bytes, at: int) -> int:
        """Take a frame's head, which may come in pieces; the bytes used of `data`."""
        known = len(self._head)
        head = self._head + data[at : at + 14 - known]
        need = 2
        if len(head) >= 2:
            short = head[1] & 0x7F
            extended = 2 if short == 126 else 8 if short == 127 else 0
            need = 2 + extended + (4 if head[1] & 0x80 else 0)
        if len(head) < need:
            self._head = head
            return len(head) - known
        self._left = short if not extended else int.from_bytes(head[2 : 2 + extended], "big")
        opcode = head[0] & 0x0F
        self._is_data = opcode < 8
        self.has_closed = self.has_closed or opcode == _OP_CLOSE
        self._head = b""
        return need - known


class _Leg(asyncio.Protocol):
    """One of the two connections."""

    __slots__ = (
        "frames",
        "has_ended",
        "has_written_eof",
        "is_full",
        "is_lost",
        "other",
        "stalled_at",
        "stalled_size",
        "transport",
        "tunnel",
    )

    other: _Leg

    def __init__(self, tunnel: Tunnel, transport: asyncio.Transport) -> None:
        self.tunnel = tunnel
        self.transport = transport
        self.frames = Frames()
        self.has_ended = self.is_lost = self.has_written_eof = False  # no more bytes come; the connection is gone; none may go
        self.is_full = False  # it takes so little that the other side is not read meanwhile
        self.stalled_size = 0  # bytes that wait to be taken by this side
        self.stalled_at = inf

    def stalled_s(self, now: float) -> float:
        """For how long this side has taken nothing of what waits for it."""
        size = 0 if self.is_lost else self.transport.get_write_buffer_size()
        if not size or size != self.stalled_size:
            self.stalled_at = now if size else inf
        self.stalled_size = size
        return now - self.stalled_at

    def data_received(self, data: bytes) -> None:
        self.tunnel.heard(self, data)

    def eof_received(self) -> bool:
        self.tunnel.ended(self)
        return bool(self.transport.can_write_eof())

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self.tunnel.lost(self, exc)

    def pause_writing(self) -> None:
        self.is_full = True
        if not self.other.is_lost:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        self.is_full = False
        if not self.other.is_lost and not self.other.has_ended:
            self.other.transport.resume_reading()

    def write(self, data: bytes) -> None:
        if not self.is_lost and not self.has_written_eof and not self.transport.is_closing():
            self.transport.write(data)

    def write_eof(self) -> None:
        if not self.is_lost and not self.has_written_eof and not self.transport.is_closing():
            self.has_written_eof = True
            if self.transport.can_write_eof():
                self.transport.write_eof()
            else:  # TLS has no half-closed connections
                self.transport.close()


class Tunnel:
    """Couples the two connections of an accepted upgrade until both are done, or it is cut."""

    __slots__ = (
        "bytes_out",
        "client",
        "cutting",
        "down",
        "exchange",
        "is_over",
        "is_quiet",
        "last_at",
        "limits",
        "reason",
        "stop_at",
        "up",
    )

    def __init__(self, client: Client, exchange: Exchange, upstream: Upstream, early: bytes) -> None:
        self.client = client
        self.exchange = exchange
        self.limits = client.server.limits
        self.bytes_out = 0
        self.is_over = self.is_quiet = self.cutting = False
        self.reason = ""
        self.stop_at: float | None = None
        self.last_at = client.loop.time()
        upstream.detach()
        self.down = _Leg(self, upstream.transport)  # what the engine says
        self.up = _Leg(self, client.transport)  # what the client says
        self.down.other, self.up.other = self.up, self.down
        client.tunnel = self
        client.server.stats.tunnels += 1
        client.server.stats.tunnels_now += 1
        upstream.transport.set_protocol(self.down)
        client.transport.set_protocol(self.up)
        ahead = client.take_ahead()
        if ahead:
            self.heard(self.up, ahead)
        if early:
            self.heard(self.down, early)
        if client.eof:
            self.ended(self.up)

    def heard(self, leg: _Leg, data: bytes) -> None:
        """Bytes of one leg."""
        spoke, frame_end = leg.frames.scan(data)
        if self.cutting or self.is_over:
            self._heard_while_cut(leg, data, frame_end)
            return
        if spoke:
            self._spoke()
        if leg is self.down:
            self.bytes_out += len(data)
            self.exchange.heard = True
        leg.other.write(data)

    def _spoke(self) -> None:
        self.last_at = self.client.loop.time()
        if self.is_quiet:
            self.is_quiet = False
            if self.exchange.ticket is not None:
                self.exchange.ticket.quiet(False)

    def _heard_while_cut(self, leg: _Leg, data: bytes, frame_end: int) -> None:
        if leg is self.up:
            if leg.frames.has_closed:
                self._close(self.up.transport)
        elif not self.is_over and frame_end >= 0:
            self.up.write(data[:frame_end])
            self._say_goodbye(RESTARTING)

    def ended(self, leg: _Leg) -> None:
        """One leg says nothing more."""
        leg.has_ended = True
        if leg.other.has_ended:
            self._close(leg.transport)
            self._close(leg.other.transport)
        elif self.is_over:
            self._close(leg.transport)
        else:
            leg.other.write_eof()

    def lost(self, leg: _Leg, exc: Exception | None) -> None:
        """One connection is gone: the other has no use any more."""
        other = leg.other
        if leg is self.up:
            if not other.is_lost:
                self._let_go(other.transport)
            self._over(Outcome.CLIENT_GONE if exc is not None else Outcome.OK)
            self.client.server.stats.tunnels_now -= 1
            self.client.connection_lost(exc)
            return
        if self.is_over:
            return
        if leg.frames.has_closed or leg.has_ended:
            self._over(Outcome.OK)
            self._close(other.transport)
        else:
            self.reason = "The engine went away."
            self._say_goodbye(INTERNAL)

    def cut(self, message: str) -> None:
        """Close it with an order: a close frame as soon as one may stand there."""
        if self.cutting or self.is_over:
            return
        self.cutting = True
        self.reason = message
        self.client.server.stats.cut += 1
        self.stop_at = self.client.loop.time() + self.limits.tunnel_close_s_max
        if self.down.frames.at_boundary:
            self._say_goodbye(RESTARTING)

    def _say_goodbye(self, code: int) -> None:
        if self.down.frames.at_boundary or self.cutting:
            self.up.write(close_frame(code, self.reason))
        self.stop_at = self.client.loop.time() + self.limits.tunnel_close_s_max
        if not self.down.is_lost:
            self.down.transport.abort()
        self._over(Outcome.CUT if self.cutting else Outcome.ENGINE_BROKE)
        if not self.up.is_lost:
            self.up.transport.resume_reading()  # for the client's close frame, or its end

    def _over(self, outcome: Outcome) -> None:
        if not self.is_over:
            self.is_over = True
            self.exchange.tunnel_ended(outcome, self.bytes_out)

    def _hold(self, now: float) -> None:
        """The engine has more to say than its client takes: that is no silence, and none of the engine's."""
        self.last_at = now
        if self.exchange.ticket is not None:
            self.exchange.ticket.held()

    @staticmethod
    def _close(transport: asyncio.Transport) -> None:
        if not transport.is_closing():
            transport.close()

    @staticmethod
    def _let_go(transport: asyncio.Transport) -> None:
        """Close what no sweep looks after any more: a plain close waits for ever for an engine that does not read."""
        if transport.get_write_buffer_size():
            transport.abort()
        else:
            transport.close()

    def tick(self, now: float) -> None:
        """Called by the sweep."""
        if self.stop_at is not None and now >= self.stop_at:
            self._over(Outcome.CUT if self.cutting else Outcome.OK)
            for leg in (self.down, self.up):
                if not leg.is_lost:
                    leg.transport.abort()
            return
        if self.is_over:
            if self.stop_at is None:
                self.stop_at = now + self.limits.linger_s_max
            return
        if self.stop_at is None and self.up.frames.has_closed and self.down.frames.has_closed:
            self.stop_at = now + self.limits.tunnel_close_s_max  # both said good-bye: somebody should close
        if self.up.is_full:
            self._hold(now)
        silent_s = now - self.last_at
        if max(self.down.stalled_s(now), self.up.stalled_s(now)) >= self.limits.client_stall_s_max:
            self.stop_at = now  # the other side is not read meanwhile, so that its end would never be seen
        elif (self.up.has_ended or self.down.has_ended) and silent_s >= self.limits.tunnel_half_closed_s_max:
            self.stop_at = now
        elif not self.is_quiet and silent_s >= self.limits.tunnel_quiet_s:
            self.is_quiet = True
            if self.exchange.ticket is not None:
                self.exchange.ticket.quiet(True)
