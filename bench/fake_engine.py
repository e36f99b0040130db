#!/usr/bin/env python3
"""A fake OpenAI-compatible engine for benchmarks: an exact start-up time, a shared memory ledger, paced answers.

Standard library only, so that it runs under `python -S -E` and is up long before it says so.

* It is ready exactly `--startup` seconds after the process was made, not after Python came up.  Until then its port is
  closed, or with `--bind-early` answers 503 as llama-server does.
* `--ledger DIR` is the pretended device: every engine books its MiB there, and one that does not fit prints an
  out-of-memory error and exits 1, as the real thing would.
* `--events FILE` gets one JSON line for exec, ready, first_request, oom, sleep, wake, term and exit, with wall-clock times.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WORDS = "green room stage actor waits the curtain lifts and falls again while another player takes the light".split()  # noqa: SIM905
KINDS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/embeddings": "embed",
    "/v1/rerank": "rerank",
    "/rerank": "rerank",
}
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 411: "Length Required", 503: "Service Unavailable"}
HEAD_BYTES_MAX = 64 * 1024
EMBEDDING = [0.001 * i for i in range(384)]
FRAME_CACHE_MAX = 256  # streams of one model name and length share their frames


def process_start_s() -> float:
    """Wall-clock time at which this process was made; exact to 10 ms."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


EXEC_AT = process_start_s()


class Ledger:
    """The pretended device: a folder with one file per engine that holds memory, guarded by a lock file."""

    def __init__(self, folder: str | None, total_mib: int) -> None:
        self.folder = Path(folder) if folder else None
        self.total_mib = total_mib
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)

    def claim(self, mib: int) -> bool:
        """Hold `mib` from now on instead of what was held; False when that does not fit."""
        if self.folder is None:
            return True
        with self._locked():
            others = sum(held for pid, held in held_mib(self.folder).items() if pid != os.getpid())
            if self.total_mib and others + mib > self.total_mib:
                return False
            fresh = self.folder / f"{os.getpid()}.new"
            fresh.write_text(str(mib), encoding="ascii")
            fresh.rename(self.folder / f"{os.getpid()}.mib")
            return True

    def drop(self) -> None:
        if self.folder:
            (self.folder / f"{os.getpid()}.mib").unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        assert self.folder is not None
        with open(self.folder / "lock", "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def held_mib(folder: Path) -> dict[int, int]:
    """pid -> MiB of every living engine in the ledger."""
    held: dict[int, int] = {}
    for path in folder.glob("*.mib"):
        pid = int(path.stem)
        try:
            os.kill(pid, 0)
            held[pid] = int(path.read_text(encoding="ascii"))
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (OSError, ValueError):
            continue
    return held


class Engine:
    """The state of the one model served here."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ready = False
        self.awake = asyncio.Event()
        self.awake.set()
        self.served = 0
        self.slots = asyncio.Semaphore(options.slots)
        self.ledger = Ledger(options.ledger, options.vram_total)
        self.stopping = asyncio.Event()
        self.frames: dict[tuple[str, str], list[bytes]] = {}
        self.events_fd = os.open(options.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if options.events else None

    def tell(self, event: str, **facts: Any) -> None:
        if self.events_fd is not None:
            line = {"at": round(time.time(), 4), "event": event, "model": self.options.model, "pid": os.getpid(), **facts}
            os.write(self.events_fd, (json.dumps(line) + "\n").encode())

    async def load(self) -> None:
        # Memory is claimed half-way, as real engines do once they have read their weights.
        await asyncio.sleep(max(0.0, EXEC_AT + self.options.startup / 2 - time.time()))
        if not self.ledger.claim(self.options.vram):
            self.die_of_memory("at start")
        await asyncio.sleep(max(0.0, EXEC_AT + self.options.startup - time.time()))
        self.ready = True
        self.tell("ready", startup_s=round(self.options.startup, 3))

    def die_of_memory(self, when: str) -> None:
        self.tell("oom", when=when)
        wanted = f"Tried to allocate {self.options.vram} MiB ({when})"
        print(f"torch.OutOfMemoryError: CUDA out of memory. {wanted}", file=sys.stderr, flush=True)
        os._exit(1)

    async def sleep(self, level: int) -> None:
        if self.awake.is_set():
            self.awake.clear()
            await asyncio.sleep(self.options.sleep_cost)
            self.ledger.claim(self.options.sleep_residue)
            self.tell("sleep", level=level)

    async def wake(self) -> bool:
        if not self.awake.is_set():
            await asyncio.sleep(self.options.wake_cost)
            if not self.ledger.claim(self.options.vram):
                self.tell("oom", when="wake")
                return False
            self.awake.set()
            self.tell("wake")
        return True

    def stream_frames(self, kind: str, model: str) -> list[bytes]:
        """The chunks of a stream, ready to be written; one for each word."""
        key = (kind, model)
        if key not in self.frames:
            if len(self.frames) >= FRAME_CACHE_MAX:
                self.frames.clear()
            self.frames[key] = [chunk(event(stream_part(kind, model, word + " "))) for word in WORDS]
        return self.frames[key]


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def stream_part(kind: str, model: str, text: str | None, usage: dict[str, int] | None = None) -> dict[str, Any]:
    """One stream event; text None = the last one."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": None if text is not None else "length"}
    if kind == "chat":
        choice["delta"] = {"content": text} if text is not None else {}
    else:
        choice["text"] = text or ""
    name = "chat.completion.chunk" if kind == "chat" else "text_completion"
    part: dict[str, Any] = {"id": "fake", "object": name, "created": int(EXEC_AT), "model": model, "choices": [choice]}
    return part | ({"usage": usage} if usage else {})


def prompt_tokens(kind: str, body: dict[str, Any]) -> int:
    """A token is four characters here."""
    if kind == "rerank":
        documents = [document if isinstance(document, str) else document.get("text", "") for document in body.get("documents", [])]
        return (len(body.get("query", "")) * len(documents) + sum(map(len, documents))) // 4
    if kind == "chat":
        return sum(len(message.get("content") or "") for message in body.get("messages", [])) // 4
    given = body.get("prompt") or body.get("input") or ""
    return (len(given) if isinstance(given, str) else sum(len(part) if isinstance(part, str) else 4 for part in given)) // 4


class Connection(asyncio.Protocol):
    """HTTP/1.1 with Content-Length, one request at a time: all that a well-behaved proxy sends."""

    transport: asyncio.Transport

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.received = bytearray()
        self.task: asyncio.Task[None] | None = None
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.writable.set()
        if self.task:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.next_request()

    def next_request(self) -> None:
        if self.task is not None or self.transport.is_closing():
            return
        end = self.received.find(b"\r\n\r\n")
        if end < 0:
            if len(self.received) > HEAD_BYTES_MAX:
                self.transport.close()
            return
        first, *lines = bytes(self.received[:end]).split(b"\r\n")
        method, target, _ = first.decode("latin-1").split(" ", 2)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.decode("latin-1").partition(":") for line in lines)}
        length = int(headers.get("content-length", "0"))
        if len(self.received) < end + 4 + length:
            return
        body = bytes(self.received[end + 4 : end + 4 + length])
        del self.received[: end + 4 + length]
        path, _, query = target.partition("?")
        if "transfer-encoding" in headers:
            self.answer(411, {"error": {"message": "send a Content-Length"}})
            self.transport.close()
        elif path == "/health":
            self.answer(200 if self.engine.ready else 503, {"status": "ok" if self.engine.ready else "Loading model"})
            self.next_request()
        else:
            self.task = asyncio.get_running_loop().create_task(self.run(method, path, query, body))
            self.task.add_done_callback(self.request_done)

    def request_done(self, task: asyncio.Task[None]) -> None:
        self.task = None
        if not task.cancelled() and task.exception():
            self.transport.abort()
        elif self.received:
            self.next_request()

    def answer(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value, separators=(",", ":")).encode()
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    async def run(self, method: str, path: str, query: str, body: bytes) -> None:
        engine = self.engine
        if not engine.ready:
            return self.answer(503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})
        if path == "/v1/models":
            return self.answer(200, {"object": "list", "data": [{"id": engine.options.model, "object": "model"}]})
        if path == "/is_sleeping":
            return self.answer(200, {"is_sleeping": not engine.awake.is_set()})
        if path == "/sleep" and method == "POST":
            await engine.sleep(int(query.partition("level=")[2][:1] or "1"))
            return self.answer(200, {})
        if path == "/wake_up" and method == "POST":
            return self.answer(200 if await engine.wake() else 503, {})
        kind = KINDS.get(path)
        if kind is None or method != "POST":
            return self.answer(404 if kind is None else 405, {"error": {"message": f"no such route: {method} {path}"}})
        try:
            wanted = json.loads(body)
        except ValueError:
            return self.answer(400, {"error": {"message": "body is not JSON"}})
        await engine.awake.wait()  # a real sleeper holds the request until somebody wakes it
        if engine.served == 0:
            engine.served = 1
            engine.tell("first_request")
        async with engine.slots:
            await self.serve(kind, wanted)
        return None

    async def serve(self, kind: str, wanted: dict[str, Any]) -> None:
        options = self.engine.options
        tokens = prompt_tokens(kind, wanted)
        model = wanted.get("model", options.model)
        if options.prefill_tps:
            await asyncio.sleep(tokens / options.prefill_tps)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        if kind == "embed":
            count = 1 if isinstance(wanted.get("input"), str) else len(wanted.get("input") or [""])
            rows = [{"object": "embedding", "index": index, "embedding": EMBEDDING} for index in range(count)]
            self.answer(200, {"object": "list", "model": model, "data": rows, "usage": usage})
        elif kind == "rerank":
            rows = [{"index": index, "relevance_score": round(1 / (index + 1), 4)} for index in range(len(wanted.get("documents", [])))]
            self.answer(200, {"model": model, "results": rows[: wanted.get("top_n") or len(rows)], "usage": usage})
        else:
            out = int(wanted.get("max_tokens") or 16)
            usage |= {"completion_tokens": out, "total_tokens": tokens + out}
            await (self.stream if wanted.get("stream") else self.whole)(kind, model, out, usage)

    async def whole(self, kind: str, model: str, out: int, usage: dict[str, int]) -> None:
        if self.engine.options.token_delay:
            await asyncio.sleep(out * self.engine.options.token_delay)
        text = " ".join(WORDS[index % len(WORDS)] for index in range(out))
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if kind == "chat" else {"text": text}
        self.answer(200, {"id": "fake", "object": "chat.completion", "model": model, "choices": [choice], "usage": usage})

    async def stream(self, kind: str, model: str, out: int, usage: dict[str, int]) -> None:
        delay_s = self.engine.options.token_delay
        frames = self.engine.stream_frames(kind, model)
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        began = time.perf_counter()
        for index in range(out):
            # A deadline for each token, not a pause after each: a late wake-up is caught up.
            await asyncio.sleep(max(0.0, began + (index + 1) * delay_s - time.perf_counter()) if delay_s else 0)
            self.transport.write(frames[index % len(frames)])
            await self.writable.wait()
        self.transport.write(chunk(event(stream_part(kind, model, None, usage)) + b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def main(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    engine = Engine(options)
    engine.tell("exec", exec_at=round(EXEC_AT, 4))

    def terminate() -> None:
        engine.tell("term")
        loop.call_later(options.stop_delay, engine.stopping.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, terminate)
    stopping = loop.create_task(engine.stopping.wait())
    loading = loop.create_task(engine.load())
    if not options.bind_early:
        await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not engine.stopping.is_set():
        await loop.create_server(lambda: Connection(engine), options.host, options.port, backlog=1024)
        await stopping
    engine.ledger.drop()
    engine.tell("exit")
    os._exit(0)


def startup_with_jitter(options: argparse.Namespace) -> float:
    """Drawn from (seed, model, number of the start): two supervisors under comparison get the same starts."""
    if not options.startup_jitter:
        return float(options.startup)
    earlier = 0
    if options.events and Path(options.events).exists():
        lines = Path(options.events).read_text(encoding="utf-8").splitlines()
        earlier = sum('"event": "exec"' in line and f'"model": "{options.model}"' in line for line in lines)
    draw = random.Random(f"{options.jitter_seed}:{options.model}:{earlier}").uniform(-1, 1)
    return max(0.0, float(options.startup + draw * options.startup_jitter))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, required=True)
    add("--model", default="fake")
    add("--startup", type=float, default=0.0, help="seconds from the making of the process until ready")
    add("--startup-jitter", type=float, default=0.0, help="uniform, plus or minus, seconds")
    add("--jitter-seed", default="0")
    add("--bind-early", action="store_true", help="listen at once and answer 503 while loading")
    add("--vram", type=int, default=0, help="MiB booked in the ledger")
    add("--vram-total", type=int, default=0, help="MiB the device has; 0 = no limit")
    add("--ledger", help="folder shared by all engines of a device")
    add("--events", help="file that gets a JSON line for every event")
    add("--slots", type=int, default=64, help="requests served at once; more wait")
    add("--prefill-tps", type=float, default=0.0, help="prompt tokens a second; 0 = at once")
    add("--token-delay", type=float, default=0.0, help="seconds for each token of the answer")
    add("--sleep-cost", type=float, default=0.2, help="seconds to fall asleep")
    add("--wake-cost", type=float, default=0.3, help="seconds to wake")
    add("--sleep-residue", type=int, default=0, help="MiB still held while asleep")
    add("--stop-delay", type=float, default=0.0, help="seconds from SIGTERM to the exit")
    options = parser.parse_args()
    options.startup = startup_with_jitter(options)
    return options


if __name__ == "__main__":
    asyncio.run(main(arguments()))
