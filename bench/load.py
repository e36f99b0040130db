"""A load generator with next to no cost of its own: raw asyncio connections, one kept alive for each client.

    python -m bench.load json --port 8080 --clients 32 --seconds 4 [--key K]
    python -m bench.load stream --port 8080 --clients 50 --chunks 400 [--key K]

Prints one JSON object: requests or chunks, seconds, latency percentiles in microseconds, errors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from functools import partial
from typing import Any, cast

import uvloop

from .harness import percentile

PROMPT = "hello there " * 20
END_OF_HEAD = b"\r\n\r\n"


def request_bytes(options: argparse.Namespace, *, stream: bool) -> bytes:
    """One chat completion, head and body."""
    messages = [{"role": "user", "content": PROMPT}]
    tokens = options.chunks if stream else 8
    body = json.dumps({"model": options.model, "max_tokens": tokens, "stream": stream, "messages": messages}).encode()
    key = f"Authorization: Bearer {options.key}\r\n" if options.key else ""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{options.port}\r\nUser-Agent: bench\r\nAccept: */*\r\n{key}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Asker(asyncio.Protocol):
    """Sends the same request again and again until the time is over."""

    transport: asyncio.Transport

    def __init__(self, request: bytes, until: float, latencies_s: list[float], done: asyncio.Future[int]) -> None:
        self.request, self.until, self.latencies_s, self.done = request, until, latencies_s, done
        self.received = bytearray()
        self.sent_at = 0.0
        self.errors = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop has transports of its own
        self.transport = transport
        self.send()

    def send(self) -> None:
        self.received.clear()
        self.sent_at = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not is_whole(self.received):
            return
        now = time.perf_counter()
        self.latencies_s.append(now - self.sent_at)
        self.errors += not self.received.startswith(b"HTTP/1.1 200")
        if now < self.until:
            self.send()
        else:
            self.transport.close()
            self.done.set_result(self.errors)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(self.errors + 1)


def is_whole(received: bytearray) -> bool:
    """Whether a response with a length, or a chunked one, has come in full."""
    end = received.find(END_OF_HEAD)
    if end < 0:
        return False
    head = bytes(received[:end]).lower()
    place = head.find(b"content-length:")
    if place < 0:
        return received.endswith(b"0\r\n\r\n")
    length = int(head[place + 15 :].split(b"\r\n", 1)[0])
    return len(received) >= end + 4 + length


class Listener(asyncio.Protocol):
    """Reads one event stream to its end and counts the events."""

    def __init__(self, request: bytes, done: asyncio.Future[tuple[int, bool]]) -> None:
        self.request, self.done = request, done
        self.events = 0
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop has transports of its own
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: ")
        self.tail = (self.tail + data)[-24:]
        if b"[DONE]" in self.tail and not self.done.done():
            self.done.set_result((self.events, True))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result((self.events, False))


def itself(protocol: asyncio.Protocol) -> asyncio.Protocol:
    return protocol


async def ask_repeatedly(options: argparse.Namespace) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    request = request_bytes(options, stream=False)
    latencies_s: list[float] = []
    done: list[asyncio.Future[int]] = [loop.create_future() for _ in range(options.clients)]
    began = time.perf_counter()
    for future in done:
        asker = Asker(request, began + options.seconds, latencies_s, future)
        await loop.create_connection(partial(itself, asker), "127.0.0.1", options.port)
    errors = sum(await asyncio.gather(*done))
    took_s = time.perf_counter() - began
    shares = {f"p{round(share * 100)}_us": round(percentile(latencies_s, share) * 1e6, 1) for share in (0.5, 0.9, 0.99)}
    return {"requests": len(latencies_s), "seconds": round(took_s, 3), "errors": errors, **shares}


async def listen(options: argparse.Namespace) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    request = request_bytes(options, stream=True)
    done: list[asyncio.Future[tuple[int, bool]]] = [loop.create_future() for _ in range(options.clients)]
    began = time.perf_counter()
    for future in done:
        await loop.create_connection(partial(itself, Listener(request, future)), "127.0.0.1", options.port)
    results = await asyncio.gather(*done)
    took_s = time.perf_counter() - began
    return {"chunks": sum(count for count, _ in results), "seconds": round(took_s, 3), "errors": sum(not whole for _, whole in results)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=("json", "stream"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--chunks", type=int, default=400)
    parser.add_argument("--model", default="m1")
    parser.add_argument("--key", default="")
    options = parser.parse_args()
    job = ask_repeatedly if options.kind == "json" else listen
    print(json.dumps(uvloop.run(job(options))))


if __name__ == "__main__":
    main()
