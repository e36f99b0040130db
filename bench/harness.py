"""What the benchmarks share: a greenroom of their own, CPU and memory of a process, percentiles, tables."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENGINE = [sys.executable, "-S", "-E", str(HERE / "fake_engine.py")]
UP_S_MAX = 30.0
STOP_S_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Server:
    """A running process that listens on 127.0.0.1:port."""

    pid: int
    port: int
    work: Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def get_status(port: int, path: str, timeout_s: float = 5.0) -> int:
    """HTTP status of a GET; 0 when nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def ask(port: int, path: str, body: dict[str, Any] | None, key: str = "", timeout_s: float = 60.0) -> tuple[int, bytes]:
    """POST `body` as JSON; returns (status, body)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request("POST", path, json.dumps(body or {}), headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@contextmanager
def process(
    argv: Sequence[str], port: int, work: Path, *, ready_path: str = "/health", name: str = "process", cwd: Path | None = None
) -> Iterator[Server]:
    """Start a server, wait until `ready_path` answers 200, end it afterwards; its output goes to WORK/NAME.log."""
    log_path = work / f"{name}.log"
    with open(log_path, "wb") as log:
        child = subprocess.Popen(list(argv), stdout=log, stderr=subprocess.STDOUT, cwd=cwd or work, start_new_session=True)
    try:
        end = time.monotonic() + UP_S_MAX
        while get_status(port, ready_path) != 200:
            if child.poll() is not None or time.monotonic() > end:
                tail = log_path.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise SystemExit(f"{name} did not come up; exit status {child.poll()}; its last words:\n{tail}")
            time.sleep(0.02)
        yield Server(child.pid, port, work)
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextmanager
def greenroom(config: str, work: Path) -> Iterator[Server]:
    """`greenroom serve` over this configuration text, as a user would run it."""
    port = free_port()
    path = work / "greenroom.yaml"
    path.write_text(config, encoding="utf-8")
    command = [str(Path(sys.executable).with_name("greenroom")), "serve", "-c", str(path)]
    options = ["--listen", f"127.0.0.1:{port}", "--state-dir", str(work / "state")]
    with process([*command, *options], port, work, name="greenroom") as server:
        yield server


@contextmanager
def workplace(kept: str = "") -> Iterator[Path]:
    """A fresh folder: a temporary one, or `kept`, which stays."""
    if kept:
        path = Path(kept).resolve()
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="greenroom-bench-") as folder:
        yield Path(folder)


def cpu_s(pid: int) -> float:
    """Seconds of CPU a process has used in all its threads; in nanosecond steps where the kernel tells."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9
    except (FileNotFoundError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    """Resident memory of one process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation; `share` 0..1; nan for nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Plain columns; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))
