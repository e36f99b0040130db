"""Mutated answers against the engine protocol, in process: what our client takes for whole must be whole."""

from __future__ import annotations

import os
import random
import re

import h11
import pytest

from .engine_corpus import CASES
from .fake_wires import Bench
from .test_fuzz_requests import TOKENS, split

CASES_RUN = int(os.environ.get("GREENROOM_FUZZ_CASES", "2000"))
SEEDS = [case.data for case in CASES if len(case.data) < 2048]


def mutated(chance: random.Random) -> bytes:
    data = bytearray(chance.choice(SEEDS))
    for _ in range(chance.randint(0, 3)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0:
                data[at:at] = chance.choice(TOKENS)
            case 1:
                del data[at : at + chance.randint(1, 8)]
            case 2:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case _:
                data += chance.choice(SEEDS)
    return bytes(data)


def play(method: str, version: str, pieces: list[bytes], ending: str) -> tuple[bytes, bool, bool]:
    """(bytes to the client, whether its connection was closed by us, whether it was reset)."""
    bench = Bench(keys=())
    bench.feed(f"{method} /upstream/m/x HTTP/{version}\r\nHost: localhost\r\n\r\n".encode())
    wire = bench.pool.wires[0]
    for piece in pieces:
        if not wire.is_lost and not wire.is_closed:
            wire.protocol.data_received(piece)
        bench.settle()
    if ending != "open" and not wire.is_lost:
        wire.is_lost = wire.is_closed = True
        wire.protocol.connection_lost(None if ending == "fin" else ConnectionResetError())
        bench.settle()
    sent, closed, reset = bytes(bench.wire.out), bench.wire.has_eof or bench.wire.is_closed, bench.wire.is_aborted
    if ending != "open":
        assert sent, "the engine is gone and the client heard nothing"
    bench.hang_up()
    bench.check_over()
    return sent, closed, reset


def read(data: bytes, method: str, *, is_over: bool) -> tuple[int, bytes] | None:
    """(status, body) of a whole answer, else None."""
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    parser.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(data)
    if is_over:
        parser.receive_data(b"")
    status, body = 0, bytearray()
    try:
        while True:
            event = parser.next_event()
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                return status, bytes(body)
            elif not isinstance(event, h11.InformationalResponse):
                return None
    except h11.RemoteProtocolError:
        return None


@pytest.mark.parametrize("seed", [1, 2, int(os.environ.get("GREENROOM_FUZZ_SEED", "3"))])
def test_an_answer_is_whole_for_the_client_only_if_it_was_whole(seed: int) -> None:
    """Complete for our client means complete and equal for h11 reading the engine's bytes."""
    chance = random.Random(seed)
    checked = 0
    for number in range(CASES_RUN // 3):
        data = mutated(chance)
        method, version = chance.choice(("GET", "GET", "GET", "HEAD")), chance.choice(("1.1", "1.1", "1.0"))
        ending = chance.choice(("fin", "rst", "open"))
        label = (seed, number, method, version, ending, data)
        sent, closed, reset = play(method, version, split(data, chance), ending)
        if not sent:
            continue
        ours = read(sent, method, is_over=closed and not reset)
        if ours is None or ours[0] == 502:
            continue
        engine = read(_without_blank_lines(data), method, is_over=ending == "fin")
        if engine is None and not _is_plain_reason(data):
            continue  # llhttp forgives control bytes in the reason, which is not passed on
        assert ours == engine, label
        checked += 1
    assert checked > 20


def _without_blank_lines(data: bytes) -> bytes:
    """llhttp forgives blank lines before a status line."""
    return re.sub(rb"(?:\A|(?<=\r\n\r\n))[\r\n]+(?=HTTP/)", b"", data)


def _is_plain_reason(data: bytes) -> bool:
    lines = [line for line in re.split(rb"\r\n", data) if line.startswith(b"HTTP/")]
    return all(32 <= byte < 127 for line in lines for byte in line) and all(line[:9] in (b"HTTP/1.1 ", b"HTTP/1.0 ") for line in lines)
