"""Containers on the stage of the stories: a runtime that runs engines as plain processes, and looking into it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.fakes.container_runtime import install

from .rig import Fake, fake

IMAGE = "registry.example/engine:1"


class Dock:
    """A fake podman or docker: where it lies, what it holds, what it was asked, and how it fails."""

    def __init__(self, tmp_path: Path, kind: str = "podman") -> None:
        self.kind = kind
        self.bin, self.state = tmp_path / "bin", tmp_path / "dock"
        self.program = install(self.bin, kind, self.state)
        (self.state / "images").write_text(IMAGE + "\n")

    @property
    def env(self) -> dict[str, str]:
        return {"PATH": f"{self.bin}:{os.environ['PATH']}"}

    def engine(self, vram: int = 1000, *, container: dict[str, Any] | None = None, **knobs: Any) -> Fake:
        """A fake engine in a container."""
        made = fake(vram, **knobs)
        return replace(made, config={**made.config, "container": {"image": IMAGE, "runtime": self.kind, **(container or {})}})

    def faults(self, **faults: Any) -> None:
        new = self.state / "faults.new"
        new.write_text(json.dumps(faults))
        new.rename(self.state / "faults.json")

    def boxes(self, *states: str) -> list[dict[str, Any]]:
        """The containers there are, in these states."""
        found = []
        for path in sorted((self.state / "containers").glob("*.json")):
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(path.read_text()))
        return [box for box in found if not states or box["State"]["Status"] in states]

    def calls(self, command: str = "") -> list[list[str]]:
        return [call["argv"] for call in self._calls() if not command or call["argv"][0] == command]

    def plant(self, box: dict[str, Any]) -> None:
        """A container that somebody else has left."""
        (self.state / "containers" / f"{box['Id']}.json").write_text(json.dumps(box))
        (self.state / "containers" / f"{box['Id']}.log").touch()

    def clients(self) -> list[int]:
        """Pids of the `run` that were started, oldest first."""
        return [call["pid"] for call in self._calls() if call["argv"][0] == "run"]

    def _calls(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in (self.state / "calls.jsonl").read_text().splitlines()]
        except FileNotFoundError:
            return []

    def kill_client(self) -> None:
        """SIGKILL to the newest client alone."""
        os.kill(self.clients()[-1], signal.SIGKILL)
