"""What the ledger costs: the event loop, the writer, a proxied request, and each question and command with a million requests in the file.

python -m bench.ledger                       a million requests (a minute to make them)
python -m bench.ledger --rows 100000         fewer
python -m bench.ledger --served              and what a proxied request costs with and without it (see bench/ledger_cost.py)
python -m bench.ledger --check               all of it; exit 1 when a question or command takes over 300 ms, a hook over 15 µs, or
                                             ledger, metrics and an open dashboard over 10 % of a proxied request
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from greenroom.core.facts import Admit, Device, Model, Outcome, RequestArrived, RequestFinished, Setup
from greenroom.ledger import schema
from greenroom.ledger.rows import RequestRow, SampleRow, TellRow, TransitionRow
from greenroom.ledger.store import Ledger
from greenroom.planner.past import ROWS_MAX
from greenroom.proxy.record import Record

from .harness import median
from .ledger_cost import ROUND_S, ROUNDS, SHARE_MAX, STATES, costs, shares, show

READ_S_MAX = 0.3
HOOK_S_MAX = 15e-6
NOW = time.time()
DAY_S = 86400.0
SPAN_S = 30 * DAY_S
MODELS = tuple(f"model-{n}" for n in range(12))
SETUP = Setup((Device("gpu0", "gpu", 80_000),), tuple(Model(name, ("gpu0",), 10_000) for name in MODELS))


def make_rows(path: Path, count: int, seed: int = 1) -> None:
    """A ledger of thirty days: `count` requests, a third of which waited, and what goes with them."""
    rng = random.Random(seed)
    ledger = Ledger(path)
    ledger.boot(SETUP, "bench")
    ledger.close()
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA synchronous=OFF")
    (run,) = db.execute("SELECT max(run) FROM boots").fetchone()
    step = SPAN_S / count

    def requests() -> Any:
        before = ""
        for n in range(count):
            model = MODELS[min(int(rng.expovariate(0.4)), len(MODELS) - 1)]
            waits = [0.0, 0.0, 0.0, 0.0]
            if rng.random() < 0.33:
                waits = [rng.expovariate(1.0), rng.choice((0.0, 0.4)), rng.choice((0.0, 0.0, rng.uniform(2, 30))), 0.0]
            outcome = rng.choices(("ok", "client_gone", "engine_broke", "cut", "refused"), (95, 2, 1, 1, 1))[0]
            row = RequestRow(
                n + 1, NOW - SPAN_S + n * step, model, 1 + n // 1000, f"key-{n % 7}", "interactive", "/v1/chat/completions", *waits, 0.2,
                sum(waits) + rng.expovariate(0.3), rng.randint(10, 9000), rng.randint(1, 900), rng.choice(("hot", "cold")), outcome, 200,
                "", before if before != model else "",
            )  # fmt: skip
            before = model
            number, *rest = schema.request_values(row)
            yield (run << schema.RUN_SHIFT | number, *rest, sum(waits))

    few = max(1, count // 50)
    db.execute("BEGIN")
    for rows in batches(requests(), 10_000):
        schema.insert(db, "requests", rows)
    schema.insert(db, "transitions", [schema.transition_values(_transition(rng, n, few)) for n in range(few)])
    told = "ready after 4.2 s: the usual words"
    schema.insert(db, "tells", [schema.tell_values(TellRow(_at(n, few), rng.choice(MODELS), "ready", "info", told)) for n in range(few)])
    half = count // 2
    samples = (SampleRow(_at(n, half), "gpu0", 60_000, n % 70_000, 100, {MODELS[0]: 9000}) for n in range(half))
    schema.insert(db, "samples", [schema.sample_values(row) for row in samples])
    db.execute("COMMIT")
    db.close()


def batches(rows: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while some := list(islice(rows, size)):
        yield some


def _at(n: int, count: int) -> float:
    return NOW - SPAN_S + n * SPAN_S / count


def _transition(rng: random.Random, n: int, count: int) -> TransitionRow:
    kind = rng.choice(("start", "stop", "sleep", "wake"))
    return TransitionRow(_at(n, count), rng.choice(MODELS), n, kind, ("gpu0",), 3.0, True, reason="it was needed", mib={"gpu0": 9000})


def questions(ledger: Ledger) -> dict[str, Callable[[], Any]]:
    find = ledger.find
    ids = find.requests(limit=1).ids
    day = NOW - DAY_S
    middle = find.requests(until=NOW - SPAN_S / 2, limit=100).next
    return {
        "requests, the newest": find.requests,
        "requests, page in the middle": lambda: find.requests(cursor=middle),
        "requests of the rarest model": lambda: find.requests(model=MODELS[-1]),
        "requests that broke": lambda: find.requests(outcome="engine_broke"),
        "requests cut, of one model": lambda: find.requests(model=MODELS[3], outcome="cut"),
        "requests that waited over 20 s": lambda: find.requests(waited_over_s=20.0),
        "requests that waited over 40 s, of one model": lambda: find.requests(model=MODELS[-1], waited_over_s=40.0),
        "requests that waited at all, a thousand": lambda: find.requests(waited_over_s=0.0, limit=1000),
        "requests of the busiest model, a thousand": lambda: find.requests(model=MODELS[0], limit=1000),
        "requests of the rarest model, a thousand": lambda: find.requests(model=MODELS[-1], limit=1000),
        "requests of a day, all of them, for thrash and ttl": lambda: find.served(day, NOW, limit=ROWS_MAX),
        "requests that waited over an hour (none)": lambda: find.requests(waited_over_s=3600.0),
        "one request": lambda: find.request(ids[0]),
        "transitions": find.transitions,
        "transitions of a kind": lambda: find.transitions(model=MODELS[2], kind="wake"),
        "tells": lambda: find.tells(model=MODELS[2]),
        "samples of a day": lambda: find.samples(day, NOW, device="gpu0"),
        "samples of thirty days": lambda: find.samples(NOW - SPAN_S, NOW, device="gpu0"),
        "counts of a day": lambda: find.counts(day),
        "counts of thirty days": find.counts,
        "waits of a day": lambda: find.waits(day),
        "waits of thirty days": find.waits,
        "pairs of thirty days": find.pairs,
        "gaps of the busiest model": lambda: find.gaps(MODELS[0], least_s=1.0),
        "models": find.models,
    }


COMMANDS = (  # each with the time it looks back on by default, then with longer ones
    ("thrash", "--since", "1h"),
    ("thrash", "--since", "24h"),
    ("thrash", "--since", "7d"),
    ("ttl", "--since", "24h"),
    ("ttl", "--since", "7d"),
)


def commands_cost(state_dir: Path, rounds: int = 5) -> dict[str, float]:
    """Seconds of each command, from its start to its end."""
    greenroom, found = Path(sys.executable).with_name("greenroom"), {}
    for command in COMMANDS:
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            done = subprocess.run([greenroom, *command, "--state-dir", str(state_dir)], capture_output=True, text=True, check=False)
            times.append(time.perf_counter() - began)
            if done.returncode not in (0, 3):  # 3: somebody thrashes
                raise SystemExit(f"greenroom {' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        found[f"greenroom {' '.join(command)}"] = statistics.median(times)
    return found


def hooks_cost(folder: Path, rounds: int) -> dict[str, float]:
    """Seconds of the loop for each word about a request, and of the writer for a whole one."""
    ledger = Ledger(folder / "hooks.sqlite", gather_s=3600.0)
    ledger.boot(SETUP)
    ledger.flush()
    at = time.monotonic()
    name = MODELS[0]
    made = [
        (
            RequestArrived(at, n, name, None, None, "key-1"),
            [Admit(n, name, 1, "hot")],
            RequestFinished(at, n, Outcome.OK),
            Record(name, "chat", "POST", "/v1/chat/completions", "key-1", 200, "ok", "hot", 900, 9000, 0, 0.1, 0.5, 100, 200, request=n),
        )
        for n in range(1, rounds + 1)
    ]
    none: list[Any] = []
    began = time.thread_time()
    for arrived, actions, _, _ in made:
        ledger.saw(arrived, actions)
    arrivals = time.thread_time()
    for _, _, finished, record in made:
        ledger.saw(finished, none)
        ledger.ended(record)
    ends = time.thread_time()
    cpu = time.process_time()
    ledger.flush(60.0)
    cpu = time.process_time() - cpu
    ledger.close()
    return {
        "loop: an arrival": (arrivals - began) / rounds,
        "loop: an end, both words": (ends - arrivals) / rounds,
        "writer: a whole request, cpu": cpu / rounds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--served", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    bad = []
    with tempfile.TemporaryDirectory() as folder:
        for what, took_s in hooks_cost(Path(folder), 20_000).items():
            print(f"{what:52} {took_s * 1e6:8.2f} µs")
            if took_s > HOOK_S_MAX and what.startswith("loop"):
                bad.append(what)
        path = Path(folder) / "journal.sqlite"
        began = time.perf_counter()
        make_rows(path, options.rows)
        print(f"{options.rows} requests made in {time.perf_counter() - began:.0f} s, {path.stat().st_size / 2**20:.0f} MiB")
        ledger = Ledger(path)
        for what, ask in questions(ledger).items():
            times = []
            for _ in range(3):
                began = time.perf_counter()
                ask()
                times.append(time.perf_counter() - began)
            print(f"{what:52} {statistics.median(times) * 1e3:8.1f} ms")
            if statistics.median(times) > READ_S_MAX:
                bad.append(what)
        ledger.close()
        for what, took_s in commands_cost(path.parent).items():
            print(f"{what:52} {took_s * 1e3:8.1f} ms")
            if took_s > READ_S_MAX:
                bad.append(what)
    if options.served or options.check:
        found = costs(ROUNDS, ROUND_S)
        show(found)
        if median(shares(found, STATES[-1])) > SHARE_MAX:
            bad.append(STATES[-1])
    if options.check and bad:
        print("too slow:", ", ".join(bad))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
