"""Write the benchmark traces to bench/traces/; the same seeds give the same files.

Columns: t, model, kind, prompt_tokens, output_tokens, client.  `t` is the second at which a request may be sent.  Without
a client it is sent then, whatever else goes on (open loop); with one, when that client's previous request is answered
and `t` has come (closed loop).  Kinds: chat (streamed), chat_json, embed, rerank.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from pathlib import Path

Row = tuple[float, str, str, int, int, str]
FOLDER = Path(__file__).resolve().parent / "traces"
HEADING = ("t", "model", "kind", "prompt_tokens", "output_tokens", "client")


def swap_latency() -> list[Row]:
    """One client alternates between two models: nothing but swaps."""
    return [(0.0, "m1" if i % 2 == 0 else "m2", "chat", 4, 1, "c") for i in range(8)]


def alternate_open() -> list[Row]:
    """A request a second, the model alternates strictly."""
    return [(round(i * 1.0, 3), "m1" if i % 2 == 0 else "m2", "chat", 200, 32, "") for i in range(20)]


def alternate_closed() -> list[Row]:
    """Two clients, each faithful to its own model, each asking again as soon as it is answered."""
    return [(t, model, "chat", 200, 32, client) for _ in range(10) for t, model, client in ((0.0, "m1", "c1"), (0.05, "m2", "c2"))]


def bursty_zipf() -> list[Row]:
    """Four models of Zipf popularity; about five seconds of four requests a second, then five of one in five seconds."""
    rng = random.Random(20261129)
    rows: list[Row] = []
    start, busy = 0.0, True
    while start < 60:
        rate = 4.0 if busy else 0.2
        end = start + rng.expovariate(1 / 5)
        t = start + rng.expovariate(rate)
        while t < min(end, 60):
            model = rng.choices(range(4), [1 / (rank + 1) for rank in range(4)])[0] + 1
            kind = rng.choice(["chat", "chat", "chat_json"])
            prompt = int(rng.lognormvariate(5.5, 0.8))
            answer = max(4, min(128, int(rng.lognormvariate(3.4, 0.6))))
            rows.append((round(t, 3), f"m{model}", kind, prompt, answer, ""))
            t += rng.expovariate(rate)
        start, busy = end, not busy
    return rows


def retrieval_chain() -> list[Row]:
    """Embed, rerank, chat, strictly one after the other within a chain; a new chain about every three seconds."""
    rng = random.Random(7)
    rows: list[Row] = []
    t = 0.0
    for number in range(12):
        client, at = f"rag{number}", round(t, 3)
        rows += [(at, "emb", "embed", 64, 0, client), (at, "rr", "rerank", 900, 0, client), (at, "llm", "chat", 1200, 48, client)]
        t += rng.expovariate(1 / 3)
    return rows


def rare_visitor() -> list[Row]:
    """Two requests a second for one model, and every eight seconds one for another."""
    rng = random.Random(11)
    rows: list[Row] = []
    t = 0.0
    while t < 40:
        t += rng.expovariate(2.0)
        rows.append((round(t, 3), "m1", "chat", 200, 24, ""))
    return sorted(rows + [(4 + 8 * i, "m2", "chat", 200, 24, "") for i in range(5)])


TRACES = {
    "s_swap_latency": swap_latency,
    "a1_alternate_open": alternate_open,
    "a2_alternate_closed": alternate_closed,
    "b_bursty_zipf4": bursty_zipf,
    "c_rag_chain": retrieval_chain,
    "d_rare_visitor": rare_visitor,
}


def write(path: Path, rows: Sequence[Row]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([HEADING, *rows])


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, make in TRACES.items():
        write(FOLDER / f"{name}.csv", make())
        print(f"bench/traces/{name}.csv")
