"""Documents whose commands are run: blocks of code marked by a comment on the line before.

`file: NAME` is written to that file, `run` must exit 0, `run: WORDS` must print WORDS as well, `serve` is started in the
background and stays until the end.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

BLOCK = re.compile(
    r"^<!-- (?P<mark>[a-z]+)(?:: (?P<argument>[^\n]+?))? -->\n```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
SERVER = "127.0.0.1:8080"  # as documents write it
UP_S_MAX = 60.0
COMMAND_S_MAX = 110.0


@dataclass(frozen=True, slots=True)
class Block:
    mark: str
    argument: str
    text: str


def blocks(page: Path) -> list[Block]:
    """All that are marked, in their order."""
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(match["mark"], (match["argument"] or "").strip('"'), match["text"]) for match in found]


def environment(folder: Path, port: int) -> dict[str, str]:
    """Of a reader's shell in `folder`, who asks the server on `port`."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '/usr/bin:/bin')}"  # what `. .venv/bin/activate` does
    own = {"XDG_STATE_HOME": str(folder / "state"), "GREENROOM_MODELS": str(folder / "store")}
    return os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1", "GREENROOM_URL": f"http://127.0.0.1:{port}", **own}


def bash(text: str, folder: Path, port: int) -> subprocess.CompletedProcess[str]:
    argv = ["bash", "-euo", "pipefail", "-c", text]
    env = environment(folder, port)
    return subprocess.run(argv, check=False, cwd=folder, env=env, capture_output=True, text=True, timeout=COMMAND_S_MAX)


def wait_up(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + UP_S_MAX
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"the server did not come up:\n{log.read_text(encoding='utf-8', errors='replace')}")


@dataclass(slots=True)
class Play:
    """One document, done step by step in a folder.  `places`: what is written -> what it is here."""

    folder: Path
    places: Mapping[str, str] = field(default_factory=dict)
    server: subprocess.Popen[bytes] | None = None
    port: int = 0

    def here(self, text: str) -> str:
        for written, place in self.places.items():
            text = text.replace(written, place)
        return text.replace(SERVER, f"127.0.0.1:{self.port}")

    def step(self, block: Block) -> None:
        if block.mark == "file":
            (self.folder / block.argument).write_text(self.here(block.text), encoding="utf-8")
        elif block.mark == "serve":
            self._serve(block.text)
        elif block.mark == "run":
            done = bash(self.here(block.text), self.folder, self.port)
            said = done.stdout + done.stderr
            assert done.returncode == 0, f"{block.text}\nexit {done.returncode}:\n{said}"
            assert block.argument.lower() in said.lower(), f"{block.text}\ndid not print {block.argument!r}:\n{said}"
        else:
            raise AssertionError(f"no such mark: {block.mark}")

    def _serve(self, text: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = f"exec {self.here(text).strip()} --listen 127.0.0.1:{self.port}"
        log = self.folder / "server.log"
        with log.open("wb") as out:
            env = environment(self.folder, self.port)
            self.server = subprocess.Popen(["bash", "-c", command], cwd=self.folder, env=env, stdout=out, stderr=out)
        wait_up(self.server, self.port, log)

    def end(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            self.server.wait(60)
