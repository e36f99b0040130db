"""Three real llama-servers behind one address with a RAM budget for two: all is answered, nothing overbooked, nothing left behind.

    python -m bench.soak [--clients 8] [--requests 200] [--seed 1]

Tiny generated models (chat, embedding, reranker) of random weights; clients send mixed requests at once, a third of
them streaming, while the status is read every 20 ms.  Then the server is ended by SIGTERM, and another one, with
engines up and requests under way, by SIGKILL.  Prints the figures; exit 1 when one is not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.harness import STOP_S_MAX, UP_S_MAX, free_port, get_status, percentile, workplace
from greenroom import demo_models

SAMPLE_S = 0.02
REQUEST_S_MAX = 120.0
GONE_S_MAX = 10.0  # for what may take its time to go after the server
NEED_MIB = 200  # declared for each model; more than a tiny one ever takes
MARK = "GREENROOM_SOAK"  # an environment variable every process of one run inherits

CONFIG = """
devices: {{ram: {{memory: {budget_mib}MiB}}}}
startPort: {port}
models:
  chat: {{cmd: "llama-server -m {models}/chat.gguf -c 2048 -np 4 --no-warmup -t 1 --port ${{PORT}}", memory: {need_mib}MiB}}
  embed: {{cmd: "llama-server -m {models}/embed.gguf --embedding --no-warmup -t 1 --port ${{PORT}}", memory: {need_mib}MiB}}
  rerank: {{cmd: "llama-server -m {models}/rerank.gguf --reranking --no-warmup -t 1 --port ${{PORT}}", memory: {need_mib}MiB}}
"""


@dataclass(slots=True)
class Figures:
    """What was seen; `faults` is what must not be."""

    asked: int = 0
    complete: int = 0
    streamed: int = 0
    wall_s: float = 0.0
    p50_s: float = 0.0
    p99_s: float = 0.0
    starts: dict[str, int] = field(default_factory=dict)
    samples: int = 0
    sample_gap_p50_ms: float = 0.0
    reserved_max_mib: int = 0
    budget_mib: int = 0
    together_max: int = 0  # models resident at once
    left_after_term: list[str] = field(default_factory=list)
    left_after_kill: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)

    def wrong(self) -> list[str]:
        """Sentences about everything that is not as it must be; [] = all is well."""
        said = [f"{count} x {what}" for what, count in self.faults.items()]
        if self.complete != self.asked:
            said.append(f"{self.complete} of {self.asked} answers were 200 and complete")
        if self.reserved_max_mib > self.budget_mib:
            said.append(f"{self.reserved_max_mib} MiB were booked with a budget of {self.budget_mib}")
        said += [f"left after SIGTERM: {what}" for what in self.left_after_term]
        said += [f"left after SIGKILL: {what}" for what in self.left_after_kill]
        return said


# ------------------------------------------------------------------------------------------------------------- server


@dataclass(frozen=True, slots=True)
class Run:
    """One server with its own mark, temporary folder and ports."""

    child: subprocess.Popen[bytes]
    port: int
    mark: str
    temp: Path
    first_engine_port: int


def make_models(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    demo_models.tiny_llama(folder / "chat.gguf")
    demo_models.tiny_bert(folder / "embed.gguf", rank=False)
    demo_models.tiny_bert(folder / "rerank.gguf", rank=True)


@contextmanager
def server(work: Path, name: str) -> Iterator[Run]:
    """`greenroom serve`, up; whatever still lives at the end of the block is killed."""
    home, port, mark = work / name, free_port(), uuid.uuid4().hex
    temp = home / "tmp"
    temp.mkdir(parents=True)
    first_engine_port = free_port()
    config = home / "greenroom.yaml"
    config.write_text(CONFIG.format(models=work / "models", budget_mib=2 * NEED_MIB, need_mib=NEED_MIB, port=first_engine_port))
    command = [str(Path(sys.executable).with_name("greenroom")), "serve", "-c", str(config)]
    options = ["--listen", f"127.0.0.1:{port}", "--state-dir", str(home / "state")]
    environment = {**os.environ, MARK: mark, "TMPDIR": str(temp), "VK_DRIVER_FILES": "/nonexistent"}
    with open(home / "greenroom.log", "wb") as log:
        child = subprocess.Popen([*command, *options], stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        end = time.monotonic() + UP_S_MAX
        while get_status(port, "/health") != 200:
            if child.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"greenroom did not come up:\n{(home / 'greenroom.log').read_text()[-2000:]}")
            time.sleep(0.02)
        yield Run(child, port, mark, temp, first_engine_port)
    finally:
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.kill()
        child.wait()


def marked(mark: str) -> list[int]:
    """Live processes of one run, whoever their parent is now."""
    sign = f"{MARK}={mark}\0".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if sign in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def state_and_parent(pid: int) -> tuple[str, int]:
    """(the kernel's letter: R, S, Z ..., the parent's id); ("", 0) when there is no such process."""
    try:
        letter, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "", 0
    return letter, int(parent)


def reap_adopted(pids: Sequence[int]) -> None:
    """Reap those dead ones that are children of this process.

    Orphans of a killed server go to the nearest reaper above it: init, or this very process if something in it made
    it one (greenroom's own host code does so, and tests run it in-process).  Then nobody else can reap them.
    """
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass  # another's child, or gone


def leftovers(run: Run, pids: Sequence[int]) -> list[str]:
    """What is there although the server is gone: processes, zombies, open ports, temporary files."""
    reap_adopted(pids)
    found = [f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()[:80]!r}" for pid in marked(run.mark)]
    found += [f"zombie {pid}, child of {parent}" for pid in pids for state, parent in [state_and_parent(pid)] if state == "Z"]
    for port in (run.port, *range(run.first_engine_port, run.first_engine_port + 3)):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                found.append(f"port {port}")
    return found + [f"file {path.name}" for path in run.temp.rglob("*")]


# ------------------------------------------------------------------------------------------------------------ clients


def body_of(kind: str, dice: random.Random) -> tuple[str, dict[str, Any]]:
    """(path, JSON) of one request; `kind` is stream, chat, embed or rerank."""
    words = " ".join(dice.choice(("stage", "door", "lamp", "rope", "song")) for _ in range(dice.randint(3, 40)))
    if kind == "embed":
        return "/v1/embeddings", {"model": "embed", "input": words}
    if kind == "rerank":
        return "/v1/rerank", {"model": "rerank", "query": "lamp", "documents": [words, "a rope", "a song about a door"]}
    message = [{"role": "user", "content": words}]
    return "/v1/chat/completions", {"model": "chat", "messages": message, "max_tokens": dice.randint(2, 24), "stream": kind == "stream"}


def fault_of(kind: str, status: int, body: bytes) -> str:
    """ "" for a whole and right answer."""
    if status != 200:
        return f"{kind} answered {status}: {body[:120]!r}"
    if kind == "stream":
        if not body.endswith(b"data: [DONE]\n\n"):
            return f"stream without its end: {body[-80:]!r}"
        return "error event in a stream" if b'"error"' in body else ""
    value = json.loads(body)
    expected = {"chat": "choices", "embed": "data", "rerank": "results"}[kind]
    return "" if value.get(expected) else f"{kind} without {expected}"


async def client(session: aiohttp.ClientSession, base: str, kinds: Sequence[str], dice: random.Random, figures: Figures) -> list[float]:
    took = []
    for kind in kinds:
        path, body = body_of(kind, dice)
        began_at = time.monotonic()
        figures.asked += 1
        figures.streamed += kind == "stream"
        try:
            async with session.post(base + path, json=body) as response:
                fault = fault_of(kind, response.status, await response.read())
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            fault = f"{kind}: {type(exc).__name__}: {exc}"
        took.append(time.monotonic() - began_at)
        if fault:
            figures.faults[fault] += 1
        else:
            figures.complete += 1
    return took


async def sample(session: aiohttp.ClientSession, base: str, figures: Figures, pids: set[int], stop: asyncio.Event) -> None:
    """Reads the status every 20 ms until told to stop."""
    gaps: list[float] = []
    last_at = None
    while not stop.is_set():
        next_at = time.monotonic() + SAMPLE_S
        async with session.get(base + "/api/status") as response:
            status = await response.json()
        now = time.monotonic()
        if last_at is not None:
            gaps.append(now - last_at)
        last_at = now
        look(status, figures, pids)
        await asyncio.sleep(max(0.0, next_at - time.monotonic()))
    figures.sample_gap_p50_ms = percentile(gaps, 0.5) * 1000


def look(status: dict[str, Any], figures: Figures, pids: set[int]) -> None:
    """One sample: is the sum of reservations within the budget, by the device's own figure and by the instances'?"""
    (device,) = status["devices"]
    instances = [instance for model in status["models"] for instance in model["instances"]]
    booked = max(device["reserved_mib"], sum(instance["reserved_mib"] for instance in instances))
    figures.samples += 1
    figures.budget_mib = device["capacity_mib"] - device["headroom_mib"]
    figures.reserved_max_mib = max(figures.reserved_max_mib, booked)
    figures.together_max = max(figures.together_max, sum(instance["reserved_mib"] > 0 for instance in instances))
    figures.starts = {model["id"]: model["starts"] for model in status["models"]}
    pids |= {instance["pid"] for instance in instances if instance["pid"]}


def shares(requests: int, dice: random.Random) -> list[str]:
    """A third streaming, the rest evenly chat, embeddings and reranking, in a random order."""
    kinds = [("stream", "chat", "stream", "embed", "rerank", "embed", "stream", "rerank", "chat")[each % 9] for each in range(requests)]
    dice.shuffle(kinds)
    return kinds


async def load(run: Run, clients: int, requests: int, seed: int, figures: Figures, pids: set[int]) -> None:
    base = f"http://127.0.0.1:{run.port}"
    stop = asyncio.Event()
    began_at = time.monotonic()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(REQUEST_S_MAX)) as session:
        watching = asyncio.ensure_future(sample(session, base, figures, pids, stop))
        dice = [random.Random(seed * 1000 + each) for each in range(clients)]
        took = await asyncio.gather(*(client(session, base, shares(requests, each), each, figures) for each in dice))
        figures.wall_s = time.monotonic() - began_at
        stop.set()
        await watching
    every = [each for one in took for each in one]
    figures.p50_s, figures.p99_s = percentile(every, 0.5), percentile(every, 0.99)


async def busy_until_killed(run: Run, pids: set[int]) -> None:
    """Bring two engines up, then SIGKILL the server while a stream runs."""
    base = f"http://127.0.0.1:{run.port}"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(REQUEST_S_MAX)) as session:
        dice = random.Random(0)
        for kind in ("embed", "chat"):
            path, body = body_of(kind, dice)
            async with session.post(base + path, json=body) as response:
                await response.read()
        async with session.get(base + "/api/status") as response:
            look(await response.json(), Figures(), pids)
        path, body = body_of("stream", dice)
        try:
            async with session.post(base + path, json=body | {"max_tokens": 1000}) as response:
                await response.content.readany()
                run.child.kill()
                await response.read()
        except aiohttp.ClientError:
            pass  # cut, as it must be


# ---------------------------------------------------------------------------------------------------------- the whole


def soak(work: Path, clients: int, requests: int, seed: int) -> Figures:
    """The load, the end by SIGTERM, the end by SIGKILL."""
    figures = Figures()
    make_models(work / "models")
    with server(work, "term") as run:
        pids: set[int] = set()
        asyncio.run(load(run, clients, requests, seed, figures, pids))
        run.child.terminate()
        try:
            if code := run.child.wait(STOP_S_MAX):
                figures.faults[f"exit {code} after SIGTERM"] += 1
        except subprocess.TimeoutExpired:
            figures.faults[f"still there {STOP_S_MAX:g} s after SIGTERM"] += 1
        figures.left_after_term = gone_or_left(run, [*pids], waits_for="zombie")
    with server(work, "kill") as run:
        pids = set()
        asyncio.run(busy_until_killed(run, pids))
        run.child.wait()
        if len(pids) < 2:
            figures.faults["fewer than two engines were up before SIGKILL"] += 1
        figures.left_after_kill = gone_or_left(run, [*pids])
    return figures


def gone_or_left(run: Run, pids: Sequence[int], waits_for: str = "") -> list[str]:
    """What is left, after at most GONE_S_MAX; only things whose name begins with `waits_for` are waited for.

    Engines end on their own after SIGKILL of the server, and init reaps orphans when it gets round to it.
    """
    end = time.monotonic() + GONE_S_MAX
    while (left := leftovers(run, pids)) and all(one.startswith(waits_for) for one in left) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=200, help="by each client")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", default="", help="a folder for the files of the run; default: a temporary one")
    options = parser.parse_args()
    with workplace(options.keep) as work:
        figures = soak(work, options.clients, options.requests, options.seed)
    for name, value in asdict(figures).items():
        print(f"{name:20} {round(value, 3) if isinstance(value, float) else value}")
    wrong = figures.wrong()
    print("\n".join(wrong) if wrong else "all as it must be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
