"""The disk of the state directory is full when the server begins: nothing is remembered, and all the rest goes on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.serve.test_keys import FE, Running

from .rig import until

FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, -1))\n"  # no file of it can grow, as on a full disk


async def test_a_full_disk_keeps_no_model_from_being_served(tmp_path: Path) -> None:
    model = {"cmd": [sys.executable, "-S", "-E", str(FE), "--port", "${PORT}"], "memory": "10MiB", "device": "d0"}
    config = {
        "devices": {"d0": {"memory": "100MiB", "headroom": "0MiB", "probe": "none"}},
        "startPort": 24_000 + os.getpid() * 40 % 16_000,
        "models": {"a1": model},
    }
    async with Running(tmp_path, config, FULL) as server:
        status, answer = await server.ask("POST", "/v1/chat/completions", body={"model": "a1", "messages": []})
        assert status == 200, answer
        # The ledger, what was learned, and logs: each is told once, however many files of it there are.
        await until(lambda: len(warnings(server.output, tmp_path)) >= 3, "told of all three")
    told = warnings(server.output, tmp_path)
    assert len(told) == 3, server.output
    assert all("kept in memory only" in line for line in told)


def warnings(output: list[str], folder: Path) -> list[str]:
    return [line for line in output if "WARNING" in line and str(folder / "state") in line]
