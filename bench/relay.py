"""What a request costs on its way through greenroom, next to a bare aiohttp relay in the same run, alternating.

    python -m bench.relay [--rounds 5] [--seconds 4]

CPU is that of the relaying process alone, per request at 32 clients and at 1, and per 1,000 chunks of 50 streams paced at
100 chunks a second each.  Greenroom runs as a user runs it: API key, scheduler, accounts and journal on.  Also: latency
added to a direct call at one client, and the memory of 1,000 idle keep-alive connections.  The yardstick is aiohttp as it
comes, on asyncio; the same on uvloop is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .harness import ENGINE, HERE, Server, ask, cpu_s, free_port, greenroom, median, print_table, process, rss_mib, workplace

LOAD_S_MAX = 120.0
KEY = "bench-key-0123456789"
STREAMS = 50
PACED_DELAY_S = 0.01
IDLE_CONNECTIONS = 1000
REQUEST_RATIO_MAX = 0.35
CHUNK_RATIO_MAX = 0.7
ADDED_MS_MAX = 1.0
IDLE_MIB_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Parts:
    """One set-up: an engine of its own kind, the bare relay and greenroom in front of it."""

    engine: Server
    bare: Server  # on asyncio
    bare_uvloop: Server
    greenroom: Server

    @property
    def relays(self) -> tuple[tuple[str, Server, str], ...]:
        """(name, server, key) in the order in which they take turns."""
        return (("bare", self.bare, ""), ("bare_uvloop", self.bare_uvloop, ""), ("greenroom", self.greenroom, KEY))


def configuration(engine_port: int, work: Path, token_delay_s: float) -> str:
    command = " ".join([*ENGINE, "--port", str(engine_port), "--model m1", f"--token-delay {token_delay_s}", "--slots 1000"])
    model = [
        f"    cmd: {command}",
        f"    proxy: http://127.0.0.1:{engine_port}",
        "    memory: 100MiB",
        "    device: bench0",
        "    parallel: 1000",
    ]
    device = "  bench0: {memory: 1000MiB, headroom: 0MiB, probe: none}"
    return "\n".join(["devices:", device, f"apiKeys: [{KEY}]", "models:", "  m1:", *model]) + "\n"


def start(stack: ExitStack, work: Path, token_delay_s: float) -> Parts:
    """The engine is greenroom's child; the bare relay and the direct calls share it."""
    work.mkdir(parents=True, exist_ok=True)
    engine_port = free_port()
    server = stack.enter_context(greenroom(configuration(engine_port, work, token_delay_s), work))
    status, body = ask(server.port, "/v1/chat/completions", {"model": "m1", "max_tokens": 1, "messages": []}, KEY)
    if status != 200:
        raise SystemExit(f"greenroom answered {status}: {body[:400]!r}")
    bare, bare_uvloop = (start_bare(stack, work, engine_port, loop) for loop in ("asyncio", "uvloop"))
    return Parts(Server(0, engine_port, work), bare, bare_uvloop, server)


def start_bare(stack: ExitStack, work: Path, engine_port: int, loop: str) -> Server:
    port = free_port()
    argv = [sys.executable, "-m", "bench.bare_relay", f"--port={port}", f"--engine-port={engine_port}", f"--loop={loop}"]
    return stack.enter_context(process(argv, port, work, name=f"bare-{loop}", cwd=HERE.parent))


def load(kind: str, server: Server, *, key: str = "", **options: Any) -> dict[str, Any]:
    """Run the load generator against one server; adds the CPU its process used, seconds."""
    flags = [f"--{name}={value}" for name, value in options.items()]
    argv = [sys.executable, "-m", "bench.load", kind, f"--port={server.port}", *flags, *([f"--key={key}"] if key else [])]
    before = cpu_s(server.pid) if server.pid else 0.0
    done = subprocess.run(argv, cwd=HERE.parent, check=True, capture_output=True, text=True, timeout=LOAD_S_MAX)
    result: dict[str, Any] = json.loads(done.stdout)
    result["cpu_s"] = (cpu_s(server.pid) if server.pid else 0.0) - before
    if result["errors"]:
        raise SystemExit(f"{result['errors']} errors from port {server.port}: {result}")
    return result


def json_costs(parts: Parts, clients: int, rounds: int, seconds: float) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """(CPU microseconds a request, median latency microseconds) of a direct call and of each relay, one value a round."""
    cpu_us: dict[str, list[float]] = defaultdict(list)
    p50_us: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, server, key in (("direct", parts.engine, ""), *parts.relays):
            result = load("json", server, key=key, clients=clients, seconds=seconds)
            cpu_us[name].append(result["cpu_s"] * 1e6 / result["requests"])
            p50_us[name].append(result["p50_us"])
    return cpu_us, p50_us


def chunk_costs(parts: Parts, rounds: int, seconds: float) -> dict[str, list[float]]:
    """CPU milliseconds per 1,000 paced chunks, one value a round."""
    cpu_ms: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, server, key in parts.relays:
            result = load("stream", server, key=key, clients=STREAMS, chunks=int(seconds / PACED_DELAY_S))
            cpu_ms[name].append(result["cpu_s"] * 1e6 / result["chunks"])
    return cpu_ms


def idle_mib(server: Server) -> float:
    """What 1,000 kept-alive connections that were used once hold, MiB."""
    request = f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    before = rss_mib(server.pid)
    with ExitStack() as stack:
        for _ in range(IDLE_CONNECTIONS):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            connection.sendall(request)
            if not connection.recv(65536).startswith(b"HTTP/1.1 200"):
                raise SystemExit("GET /v1/models was not answered with 200")
        time.sleep(0.5)
        return rss_mib(server.pid) - before


def cell(values: list[float], digits: int = 1) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def ratio(costs: dict[str, list[float]], to: str) -> float:
    """Median over the rounds of greenroom's cost by another relay's of the same round."""
    return median([ours / theirs for ours, theirs in zip(costs["greenroom"], costs[to], strict=True)])


def added_ms(through_us: list[float], direct_us: list[float]) -> list[float]:
    return [(through - direct) / 1e3 for through, direct in zip(through_us, direct_us, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    with workplace() as work, ExitStack() as stack:
        flood = start(stack, work / "flood", 0.0)
        paced = start(stack, work / "paced", PACED_DELAY_S)
        for _, server, key in flood.relays:  # all warm
            load("json", server, key=key, clients=8, seconds=1)
        alone, alone_p50 = json_costs(flood, 1, options.rounds, options.seconds)
        crowd, _ = json_costs(flood, 32, options.rounds, options.seconds)
        chunks = chunk_costs(paced, options.rounds, options.seconds)
        idle = idle_mib(flood.greenroom)
        peak = rss_mib(flood.greenroom.pid)
    judged = (
        ("CPU us a request, 32 clients", crowd, REQUEST_RATIO_MAX),
        ("CPU us a request, 1 client", alone, REQUEST_RATIO_MAX),
        ("CPU ms per 1,000 paced chunks", chunks, CHUNK_RATIO_MAX),
    )
    rows = [["figure (median, range)", "bare aiohttp", "on uvloop", "greenroom", "ratio", "to uvloop", "asked", "verdict"]]
    for what, costs, limit in judged:
        times = ratio(costs, "bare")
        shown = [cell(costs[name]) for name, _, _ in flood.relays]
        verdict = "ok" if times <= limit else "MISSED"
        rows.append([what, *shown, f"{times:.3f}", f"{ratio(costs, 'bare_uvloop'):.3f}", f"<= {limit}", verdict])
    added = {name: added_ms(alone_p50[name], alone_p50["direct"]) for name, _, _ in flood.relays}
    verdict = "ok" if median(added["greenroom"]) <= ADDED_MS_MAX else "MISSED"
    rows.append(["added ms, 1 client", *(cell(values, 3) for values in added.values()), "", "", f"<= {ADDED_MS_MAX:g}", verdict])
    verdict = "ok" if idle <= IDLE_MIB_MAX else "MISSED"
    rows.append([f"MiB for {IDLE_CONNECTIONS:,} idle connections", "", "", f"{idle:.1f}", "", "", f"<= {IDLE_MIB_MAX:g}", verdict])
    rows.append(["MiB resident after all this", "", "", f"{peak:.1f}", "", "", "", ""])
    print_table(rows)
    sys.exit(any(row[-1] == "MISSED" for row in rows))


if __name__ == "__main__":
    main()
