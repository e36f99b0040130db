"""Mutated requests against the client protocol, in process: whole and split must come to the same."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import h11
import pytest

from greenroom.proxy.upstream import Upstream

from .corpus import CASES
from .fake_wires import Bench

CASES_RUN = int(os.environ.get("GREENROOM_FUZZ_CASES", "1500"))
TOKENS = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b";", b"0", b"-1", b"+1", b"chunked", b"identity", b"close", b"keep-alive",
    b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
    b"Expect: 100-continue\r\n", b"Host: localhost\r\n", b"HTTP/1.0", b"HTTP/1.1", b"HEAD", b"GET", b"POST", b"d\r\n", b"\xff",
    b"x-api-key: k1\r\n", b"\r\n\r\n", b"GET /upstream/m/y HTTP/1.1\r\nHost: localhost\r\nx-api-key: k1\r\n\r\n",
)  # fmt: skip
SEEDS = [case.data for case in CASES if len(case.data) < 4096]


def mutated(chance: random.Random) -> bytes:
    data = bytearray(chance.choice(SEEDS))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(6):
            case 0:
                data[at:at] = chance.choice(TOKENS)
            case 1:
                del data[at : at + chance.randint(1, 8)]
            case 2:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 3:
                other = chance.choice(SEEDS)
                data[at:] = other[chance.randrange(len(other) + 1) :]
            case 4:
                ends = (b"\r\n", b"\n", b"\r\r\n")
                data = bytearray(bytes(data).replace(chance.choice(ends), chance.choice(ends), chance.randint(1, 3)))
            case _:
                data += chance.choice(SEEDS)
    return bytes(data[:8192])


@dataclass
class EngineWire:
    """What one engine connection was sent, read by h11."""

    parser: h11.Connection = field(default_factory=lambda: h11.Connection(h11.SERVER))
    request: h11.Request | None = None
    body: bytes = b""


@dataclass
class Outcome:
    forwarded: list[tuple[bytes, bytes, bytes]]  # method, target, body
    answers: bytes
    is_closed: bool


def play(pieces: list[bytes]) -> Outcome:
    bench = Bench()
    wires: dict[Upstream, EngineWire] = {}
    forwarded: list[tuple[bytes, bytes, bytes]] = []
    ready: list[tuple[Upstream, bytes]] = []

    def on_request(upstream: Upstream, data: bytes) -> None:
        wire = wires.setdefault(upstream, EngineWire())
        wire.parser.receive_data(data)
        while True:
            event = wire.parser.next_event()  # RemoteProtocolError: we sent something that is not clean HTTP
            if isinstance(event, h11.Request):
                wire.request, wire.body = event, b""
                names = [name for name, _ in event.headers]
                assert names.count(b"content-length") <= 1
                assert b"transfer-encoding" not in names
                assert names.count(b"host") == 1
            elif isinstance(event, h11.Data):
                wire.body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert wire.request is not None
                assert not wire.parser.trailing_data[0]
                forwarded.append((wire.request.method, wire.request.target, wire.body))
                answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"
                ready.append((upstream, answer if wire.request.method == b"HEAD" else answer + b"ok"))
                wire.parser = h11.Connection(h11.SERVER)
            else:
                return

    bench.pool.on_request = on_request
    for piece in pieces:
        bench.feed(piece)
        while ready:
            upstream, answer = ready.pop(0)
            if not upstream.closed:
                upstream.data_received(answer)
            bench.settle()
    is_closed = bench.wire.has_eof or bench.wire.is_closed
    answers = bytes(bench.wire.out)
    bench.hang_up()
    bench.check_over()
    return Outcome(forwarded, answers.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b""), is_closed)


def by_h11(data: bytes) -> tuple[list[tuple[bytes, bytes]], bool]:
    """(method, body) of the requests h11 finds, and whether it understood all."""
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    parser.receive_data(data)
    found: list[tuple[bytes, bytes]] = []
    method, body = b"", b""
    try:
        while True:
            event = parser.next_event()
            if isinstance(event, h11.Request):
                method, body = event.method, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                found.append((method, body))
                parser.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                parser.send(h11.EndOfMessage())
                if parser.our_state is not h11.DONE or parser.their_state is not h11.DONE:
                    return found, True
                parser.start_next_cycle()
            else:
                return found, True
    except (h11.RemoteProtocolError, h11.LocalProtocolError):
        return found, False


def is_subsequence(few: list[tuple[bytes, bytes]], many: list[tuple[bytes, bytes]]) -> bool:
    left = iter(many)
    return all(any(item == other for other in left) for item in few)


def split(data: bytes, chance: random.Random) -> list[bytes]:
    pieces, at = [], 0
    while at < len(data):
        step = chance.choice((1, 1, 2, 7, 40, 200))
        pieces.append(data[at : at + step])
        at += step
    return pieces


@pytest.mark.parametrize("seed", [1, 2, int(os.environ.get("GREENROOM_FUZZ_SEED", "3"))])
def test_mutated_requests_come_to_the_same_however_they_are_split(seed: int) -> None:
    """Same requests forwarded, same answers; what is forwarded is clean, and h11 found it in the same bytes, too."""
    chance = random.Random(seed)
    for number in range(CASES_RUN // 3):
        data = mutated(chance)
        label = (seed, number, data)
        whole = play([data])
        parts = play(split(data, chance))
        assert whole.forwarded == parts.forwarded, label
        assert whole.answers == parts.answers, label
        assert whole.is_closed == parts.is_closed, label
        found, understood = by_h11(data)
        if understood:  # h11 is stricter about the request line: then there is nothing to compare with
            ours = [(method, body) for method, _, body in whole.forwarded]
            assert is_subsequence(ours, found), (label, ours, found)


def test_every_prefix_of_a_request_can_be_the_last_thing_a_client_said() -> None:
    """A hang-up at any byte leaves nothing held."""
    for case in CASES:
        if len(case.data) > 600:
            continue
        for end in range(0, len(case.data), 3):
            play([case.data[:end]])
