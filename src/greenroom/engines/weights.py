"""Where the weights of a Hugging Face style model lie on this host, and how large they are."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from greenroom.engines import gguf

HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?$")
# What names the hub's cache, strongest first, and where below it the models lie.
CACHE_VARIABLES: Mapping[str, str] = {
    "HF_HUB_CACHE": "",
    "HUGGINGFACE_HUB_CACHE": "",
    "HF_HOME": "hub",
    "XDG_CACHE_HOME": "huggingface/hub",
}
COMMIT_CHARS_MAX = 64


def folder_mib(path: Path | None) -> int:
    """MiB of the weights in a local model folder; 0 when it is not one."""
    try:
        return -(-gguf.folder_bytes(path) // (1 << 20)) if path is not None and path.is_dir() else 0
    except OSError:
        return 0


def folder_files(path: Path | None) -> tuple[Path, ...]:
    """The weight files and the configuration of a local model folder, sorted."""
    if path is None or not path.is_dir():
        return ()
    return tuple(sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".bin", ".json") and file.is_file()))


def hub_cache(env: Mapping[str, str], home: str) -> str:
    """The folder in which the hub's library keeps models, by its environment."""
    for variable, below in CACHE_VARIABLES.items():
        if env.get(variable):
            return os.path.join(env[variable], below)
    return os.path.join(home, ".cache/huggingface/hub")


def hub_snapshot(hub: Path, name: str, revision: str) -> Path | None:
    """Where a revision of a model of this name lies in that folder, if it was ever fetched."""
    if not HUB_NAME.match(name):
        return None
    model = hub / f"models--{name.replace('/', '--')}"
    try:
        with (model / "refs" / revision).open(encoding="utf-8", errors="replace") as file:
            revision = file.read(COMMIT_CHARS_MAX).strip()
    except OSError:
        pass  # it is a commit already, or not there
    return model / "snapshots" / revision
