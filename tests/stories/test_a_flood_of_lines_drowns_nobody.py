"""B45: a reader that was too slow made the log of its own losses flood the log.

100 MB in a few seconds against the host's part alone is in tests/host, single readers of events in tests/control.
"""

import asyncio
import json
import shlex
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil

from .rig import FAKES, Rig, fake, until

LINES, FLOOD_S = 200_000, 4.0  # 20 MB, with lines of 1 MiB, bad bytes, colours and NULs among them
ENGINE_S_MAX = 3 * FLOOD_S  # a pipe that nobody empties would never let it end; a loaded machine only slows it
STALL_S = 2.0  # then a client that takes nothing is cut
GROWTH_MIB_MAX = 50
OWN_LOG_BYTES_MAX = 1 << 20
FILES_BYTES_MAX = 21 << 20  # two pieces of 10 MiB
LATE_S, LATE_S_WORST = 0.1, 1.5  # events of a stream, from the engine's hand to the client's
FOLLOWED = ("/api/models/a/logs?follow=1", "/logs/stream", "/api/events")


def flooding(command: Sequence[str]) -> Sequence[str]:
    """The engine with a second process that prints into the same pipe."""
    flood = shlex.join([sys.executable, "-S", "-E", str(FAKES / "host_flood.py"), str(LINES), str(FLOOD_S)])
    return ["sh", "-c", f'{flood} & exec "$@"', "sh", *command]


def open_socket(rig: Rig, target: str) -> socket.socket:
    """A reader of a stream, with as small a buffer as the kernel grants."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect(("127.0.0.1", rig.port))
    one.sendall(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    return one


def holds(rig: Rig, ports: set[int]) -> bool:
    """Whether the server still has a connection from one of these ports; the reader, who takes no byte, could not tell."""
    return any(one.raddr and one.raddr.port in ports for one in psutil.Process(rig.pid).net_connections("tcp"))


async def come_and_go(rig: Rig, count: list[int]) -> None:
    """Connect and reset, a hundred times a second."""
    while True:
        one = open_socket(rig, FOLLOWED[count[0] % len(FOLLOWED)])
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()
        count[0] += 1
        await asyncio.sleep(0.01)


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4 / 1024


async def test_neither_the_engine_nor_another_reader_waits_for_the_slow(tmp_path: Path) -> None:
    """One reads all, some never read, some come and reset: the flood ends in time, memory and logs stay small, a stream keeps its beat."""
    models = {"a": fake(wrap=flooding)}
    async with Rig(tmp_path, models, config={"limits": {"client_stall_s_max": STALL_S}}) as rig:
        loading = asyncio.ensure_future(rig.chat("a"))
        await until(lambda: rig.starts("a") == 1, "it starts")
        before_mib = resident_mib(rig.pid)
        dead = [open_socket(rig, target) for target in FOLLOWED[:2]]
        reader = await rig.send("GET", FOLLOWED[0])
        comers = [0]
        coming = asyncio.ensure_future(come_and_go(rig, comers))

        async def read_all() -> None:
            while b"\ntook " not in reader.reply.body[-200:]:
                await reader.head() if not reader.reply.status else await reader._more()

        reading = asyncio.ensure_future(read_all())
        assert (await loading).done
        stream = await rig.chat("a", stream=True, fe={"stream": "25x0.1"})
        async with asyncio.timeout(60):
            await reading
        ports = {one.getsockname()[1] for one in dead}
        await until(lambda: not holds(rig, ports), "who never reads is cut", STALL_S + 20)
        grown_mib = resident_mib(rig.pid) - before_mib
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        reader.close()
        for one in dead:
            one.close()
        tail = (await rig.api("GET", "/api/models/a/logs?lines=10000")).body
        own = (rig.state_dir / "greenroom.log").stat().st_size
        files = sum(path.stat().st_size for path in (rig.state_dir / "logs").iterdir())

        took_s = float(tail.rpartition(b"took ")[2])
        late_s = [arrived - json.loads(part[5:])["sent_at"] for arrived, part in stream.arrivals if b"sent_at" in part]
        print(
            f"flood {took_s:.1f} s, grown {grown_mib:.1f} MiB, own log {own}, files {files}, {comers[0]} came and went, "
            f"late {median(late_s) * 1000:.0f} ms, at most {max(late_s) * 1000:.0f}"
        )
        assert took_s < ENGINE_S_MAX
        assert stream.done
        assert len(late_s) == 25
        assert median(late_s) < LATE_S
        assert max(late_s) < LATE_S_WORST
        assert grown_mib < GROWTH_MIB_MAX
        assert own < OWN_LOG_BYTES_MAX
        assert files < FILES_BYTES_MAX
        assert comers[0] > 20
        assert b"%07d aaa" % (LINES - 1) in tail
        assert b"\x1b" not in tail
        assert b"\0" not in tail
        assert max(map(len, tail.splitlines())) < 3 * 4096, "long lines are cut"
        tail.decode()
