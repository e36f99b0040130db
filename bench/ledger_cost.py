"""What ledger, metrics and an open dashboard cost a proxied request: CPU of the whole server, with and without, in turns.

python -m bench.ledger_cost                     9 rounds of 3 s, 32 clients on the load of bench/relay.py
python -m bench.ledger_cost --check             exit 1 when all of them together cost more than 10 %

One server is measured in every state, in turns (see bench/switched.py).  Counted is all the CPU of its process, user and
system, in all threads, from the first request until what they left behind is written.  `without`: nobody is told of events
or of requests' ends, no record of them is even made.  `records and counts`: what an ended request was is put together and
counted by model, which the page needs even where there is no ledger.  The dashboard, open while requests come, follows
/api/events as the page does and reads what the page reads.
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from .harness import HERE, Server, ask, cpu_s, free_port, median, print_table, process, workplace
from .relay import KEY, cell, configuration, load

SHARE_MAX = 0.10
CLIENTS = 32
ROUNDS = 9
ROUND_S = 3.0
SETTLE_S = 2.5  # until all is written
TIMELINE_EVERY_S = 2.0  # the page reads it at most so often
STATES = ("without", "records and counts", "ledger and metrics", "... and a dashboard")
SIGNALS = {"without": signal.SIGUSR1, "records and counts": signal.SIGURG}  # see bench/switched.py; the others: SIGUSR2


@contextmanager
def switched(work: Path) -> Iterator[Server]:
    """A greenroom that can be told to keep no accounts."""
    port, path = free_port(), work / "greenroom.yaml"
    path.write_text(configuration(free_port(), work, 0.0), encoding="utf-8")
    options = ["serve", "-c", str(path), "--listen", f"127.0.0.1:{port}", "--state-dir", str(work / "state")]
    with process([sys.executable, "-m", "bench.switched", *options], port, work, name="greenroom", cwd=HERE.parent) as server:
        yield server


class Page(threading.Thread):
    """What an open page asks of the server: one stream, and the timeline now and then."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port, self.ended, self.heard = port, threading.Event(), 0
        self.headers = {"Authorization": f"Bearer {KEY}"}

    def __enter__(self) -> Page:
        for path in ("/ui/", "/api/me", "/api/status", "/api/events?follow=0&limit=100", "/api/timeline?minutes=15"):
            self.read(path)
        self.stream = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        self.stream.sendall(f"GET /api/events HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
        assert self.stream.recv(1 << 16).startswith(b"HTTP/1.1 200")
        self.start()
        self.asker = threading.Thread(target=self.ask, daemon=True)
        self.asker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.asker.join()
        self.stream.shutdown(socket.SHUT_RDWR)
        self.join()
        self.stream.close()

    def run(self) -> None:
        with suppress(OSError):
            while piece := self.stream.recv(1 << 16):
                self.heard += len(piece)

    def ask(self) -> None:
        while not self.ended.wait(TIMELINE_EVERY_S):
            self.read("/api/timeline?minutes=15")

    def read(self, path: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path, headers=self.headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, (path, answer.status)
        connection.close()


def cost_us(server: Server, state: str, seconds: float) -> float:
    """CPU microseconds a request in this state, what is written afterwards included."""
    os.kill(server.pid, SIGNALS.get(state, signal.SIGUSR2))
    with Page(server.port) if state == STATES[-1] else nullcontext():
        time.sleep(0.2)
        before = cpu_s(server.pid)
        result = load("json", server, key=KEY, clients=CLIENTS, seconds=seconds)
    time.sleep(SETTLE_S)
    spent = cpu_s(server.pid) - before
    return spent * 1e6 / int(result["requests"])


def costs(rounds: int, seconds: float) -> dict[str, list[float]]:
    """State -> CPU microseconds a request, one value a round; the order within a round is drawn."""
    found: dict[str, list[float]] = defaultdict(list)
    order = random.Random(1)
    with workplace() as work, ExitStack() as stack:
        server = stack.enter_context(switched(work))
        status, body = ask(server.port, "/v1/chat/completions", {"model": "m1", "max_tokens": 1, "messages": []}, KEY)
        if status != 200:
            raise SystemExit(f"greenroom answered {status}: {body[:400]!r}")
        for state in STATES:
            cost_us(server, state, 1.0)  # warm
        for _ in range(rounds):
            for state in order.sample(STATES, len(STATES)):
                found[state].append(cost_us(server, state, seconds))
    return found


def shares(found: dict[str, list[float]], state: str) -> list[float]:
    """Of what a request costs without, more; one value a round."""
    return [more / less - 1.0 for more, less in zip(found[state], found[STATES[0]], strict=True)]


def show(found: dict[str, list[float]]) -> None:
    rows = [["CPU us a request, 32 clients (median, range)", "", "more, us", "more, %"]]
    for state in STATES:
        more = [ours - bare for ours, bare in zip(found[state], found[STATES[0]], strict=True)]
        rows.append([state, cell(found[state]), f"{median(more):.2f}", f"{100 * median(shares(found, state)):.1f}"])
    print_table(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=ROUND_S)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    found = costs(options.rounds, options.seconds)
    show(found)
    return int(options.check and median(shares(found, STATES[-1])) > SHARE_MAX)


if __name__ == "__main__":
    sys.exit(main())
