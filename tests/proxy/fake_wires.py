"""The two protocol classes without sockets: transports that keep what is written and refuse what a real one would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h11

from greenroom.proxy.guards import Guards
from greenroom.proxy.keys import Keys
from greenroom.proxy.limits import Limits, Stats
from greenroom.proxy.server import Client, DataPlane, Server
from greenroom.proxy.upstream import Key, Pool, Sink, Upstream

from .relay_world import FakeAdmissions, KeptRecords, a_catalog


class FakeTransport:
    """Asserts that nothing is written after an end."""

    def __init__(self, on_write: Callable[[bytes], None] | None = None) -> None:
        self.out = bytearray()
        self.has_eof = self.is_closed = self.is_aborted = self.is_paused = False
        self.on_write = on_write
        self.protocol: Any = None
        self.is_lost = False

    def write(self, data: bytes) -> None:
        assert not self.has_eof, "write after write_eof"
        assert not self.is_lost, "write after the connection was lost"
        if self.is_closed:
            return
        self.out += data
        if self.on_write is not None:
            self.on_write(bytes(data))

    def write_eof(self) -> None:
        assert not self.has_eof
        self.has_eof = True

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_extra_info(self, name: str) -> Any:
        return None

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, **_: int) -> None: ...

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def settle(self) -> None:
        """What the loop's next turn would do."""
        if self.is_closed and not self.is_lost:
            self.is_lost = True
            self.protocol.connection_lost(None)


class FakeLoop:
    def __init__(self) -> None:
        self.now = 1.0

    def time(self) -> float:
        return self.now


class FakePool(Pool):
    """Connects at once, to engines that a test answers for."""

    def __init__(self, limits: Limits, stats: Stats, loop: Any) -> None:
        super().__init__(limits, stats, loop)
        self.wires: list[FakeTransport] = []
        self.on_request: Callable[[Upstream, bytes], None] = lambda upstream, data: None

    def dial(self, key: Key, sink: Sink) -> None:
        upstream = Upstream(self, key)
        wire = FakeTransport(lambda data: self.on_request(upstream, data))
        wire.protocol = upstream
        self.wires.append(wire)
        upstream.connection_made(wire)  # type: ignore[arg-type]
        sink.connected(upstream)


class Bench:
    """One client connection, any number of engine connections."""

    def __init__(self, keys: tuple[str, ...] = ("k1",)) -> None:
        loop: Any = FakeLoop()
        self.admissions = FakeAdmissions()
        self.hooks = KeptRecords()
        plane = DataPlane(
            self.admissions,
            a_catalog(),
            Keys(keys),
            Guards("127.0.0.1", (), ("*",)),
            Limits(),
            hooks=self.hooks,
        )
        self.server = Server(plane, loop)
        self.pool = FakePool(plane.limits, self.server.stats, loop)
        self.server.pool = self.pool
        self.wire = FakeTransport()
        self.client = Client(self.server)
        self.wire.protocol = self.client
        self.client.connection_made(self.wire)  # type: ignore[arg-type]

    def feed(self, data: bytes) -> None:
        if not self.wire.is_lost and not self.wire.is_closed:
            self.wire.protocol.data_received(data)
        self.settle()

    def settle(self) -> None:
        for wire in (*self.pool.wires, self.wire):
            wire.settle()

    def hang_up(self) -> None:
        if not self.wire.is_lost:
            self.wire.is_lost = self.wire.is_closed = True
            self.wire.protocol.connection_lost(None)
        self.settle()

    def check_over(self) -> None:
        """After the client left: nothing is held, every admission ended once."""
        stats = self.server.stats.as_dict()
        assert not {name: value for name, value in stats.items() if name.endswith("_now") and name != "engine_connections_now" and value}
        for ticket in self.admissions.tickets:
            ends = [event for event in ticket.events if event[0] in ("finish", "cancel", "lost")]
            assert len(ends) == 1, ticket.events


def statuses(raw: bytes, methods: list[str]) -> tuple[list[int], bool]:
    """(final statuses of the answers in `raw`, whether all are whole), as h11 reads them."""
    found: list[int] = []
    left = raw
    for method in [*methods, *["GET"] * 50]:
        if not left:
            return found, True
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 22)
        headers = [("host", "x"), ("connection", "upgrade"), ("upgrade", "websocket")]
        parser.send(h11.Request(method=method, target="/", headers=headers))
        parser.send(h11.EndOfMessage())
        parser.receive_data(left)
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                return found, False
            if isinstance(event, h11.Response):
                found.append(event.status_code)
            if isinstance(event, h11.InformationalResponse) and event.status_code == 101:
                found.append(101)
                return found, True
            if isinstance(event, h11.EndOfMessage):
                left = parser.trailing_data[0]
                break
    return found, True
