"""Replay a trace against an OpenAI-compatible address and report what its clients saw.

    python -m bench.drive bench/traces/b_bursty_zipf4.csv --port 8080 [--events FILE]

The events file is the one that fake engines write to (fake_engine.py --events): starts and swap gaps come from it.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from .harness import median, percentile

PATHS = {"chat": "/v1/chat/completions", "chat_json": "/v1/chat/completions", "embed": "/v1/embeddings", "rerank": "/v1/rerank"}
TIMEOUT_S = 300.0
TAIL_BYTES = 400
RERANK_DOCUMENTS = 10


@dataclass(frozen=True, slots=True)
class Row:
    at_s: float
    model: str
    kind: str
    prompt_tokens: int
    output_tokens: int
    client: str


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as its client saw it; times in seconds."""

    row: Row
    sent_at: float
    done_at: float
    first_token_s: float
    error: str = ""

    @property
    def latency_s(self) -> float:
        return self.done_at - self.sent_at


@dataclass(frozen=True, slots=True)
class Report:
    trace: str
    seen: tuple[Seen, ...]
    makespan_s: float
    starts: int
    starts_by_model: Mapping[str, int]
    ooms: int
    ready_to_first_request_s: tuple[float, ...]

    @property
    def failed(self) -> Mapping[str, int]:
        return Counter(seen.error for seen in self.seen if seen.error)

    def latencies(self, model: str = "") -> list[float]:
        return [seen.latency_s for seen in self.seen if not seen.error and model in ("", seen.row.model)]

    def chains(self) -> list[float]:
        """From the first request of each client to its last answer."""
        by_client: dict[str, list[Seen]] = defaultdict(list)
        for seen in self.seen:
            if seen.row.client:
                by_client[seen.row.client].append(seen)
        return [max(seen.done_at for seen in chain) - min(seen.sent_at for seen in chain) for chain in by_client.values()]


def read_trace(path: Path) -> list[Row]:
    with open(path, encoding="utf-8", newline="") as file:
        return [
            Row(float(line["t"]), line["model"], line["kind"], int(line["prompt_tokens"]), int(line["output_tokens"]), line["client"] or "")
            for line in csv.DictReader(file)
        ]


def body_of(row: Row) -> dict[str, Any]:
    """The request's JSON; a token is four characters."""
    text = "word" * row.prompt_tokens
    if row.kind == "embed":
        return {"model": row.model, "input": text}
    if row.kind == "rerank":
        each = "word" * max(1, (row.prompt_tokens - 80) // RERANK_DOCUMENTS)
        return {"model": row.model, "query": "word" * 8, "documents": [each] * RERANK_DOCUMENTS, "top_n": 3}
    messages = [{"role": "user", "content": text}]
    return {"model": row.model, "messages": messages, "max_tokens": row.output_tokens, "stream": row.kind == "chat"}


async def send(session: aiohttp.ClientSession, row: Row, began: float) -> Seen:
    sent = time.perf_counter()
    first: float | None = None
    error = ""
    try:
        async with session.post(PATHS[row.kind], json=body_of(row)) as response:
            tail = b""
            async for data in response.content.iter_any():
                # Comments that keep a loading stream alive are no answer yet.
                if first is None and (row.kind != "chat" or b'"content"' in data):
                    first = time.perf_counter()
                tail = (tail + data)[-TAIL_BYTES:]
            if response.status != 200:
                error = f"{response.status}: {tail.decode('utf-8', 'replace')}"
            elif row.kind == "chat" and b"[DONE]" not in tail:
                error = "stream cut"
    except (aiohttp.ClientError, TimeoutError) as exc:
        error = type(exc).__name__
    done = time.perf_counter()
    return Seen(row, sent - began, done - began, (first or done) - sent, error)


async def replay(rows: Sequence[Row], port: int, headers: Mapping[str, str]) -> tuple[list[Seen], float]:
    """All requests of a trace; returns what was seen and how long it all took, seconds."""
    chains: dict[str, list[Row]] = defaultdict(list)
    for number, row in enumerate(rows):
        chains[row.client or f"#{number}"].append(row)
    seen: list[Seen] = []
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector, timeout=timeout, headers=headers) as session:
        began = time.perf_counter()

        async def follow(chain: Sequence[Row]) -> None:
            for row in chain:
                await asyncio.sleep(max(0.0, began + row.at_s - time.perf_counter()))
                seen.append(await send(session, row, began))

        await asyncio.gather(*(follow(chain) for chain in chains.values()))
        return seen, time.perf_counter() - began


def engine_events(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    return sorted((json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()), key=lambda event: float(event["at"]))


def gaps(events: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """For each engine: seconds from its being ready to its first request."""
    ready = {event["pid"]: float(event["at"]) for event in events if event["event"] == "ready"}
    first = {event["pid"]: float(event["at"]) for event in events if event["event"] == "first_request"}
    return tuple(first[pid] - ready[pid] for pid in first if pid in ready)


def run(trace: Path, port: int, events_path: Path | None, headers: Mapping[str, str] | None = None) -> Report:
    seen, makespan_s = asyncio.run(replay(read_trace(trace), port, headers or {}))
    events = engine_events(events_path)
    starts = Counter(str(event["model"]) for event in events if event["event"] == "exec")
    ooms = sum(event["event"] == "oom" for event in events)
    return Report(trace.stem, tuple(seen), makespan_s, starts.total(), starts, ooms, gaps(events))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--events", type=Path)
    parser.add_argument("--key", default="", help="API key")
    options = parser.parse_args()
    headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
    report = run(options.trace, options.port, options.events, headers)
    latencies = report.latencies()
    print(f"{report.trace}: {len(latencies)} of {len(report.seen)} ok in {report.makespan_s:.1f} s")
    print(f"{report.starts} starts, {report.ooms} out of memory")
    print(f"latency p50 {median(latencies):.2f}  p95 {percentile(latencies, 0.95):.2f}  worst {max(latencies, default=0):.2f} s")
    for error, count in report.failed.items():
        print(f"{count} x {error}")


if __name__ == "__main__":
    main()
