"""Which dialect a model speaks: told by the config, or read from its command."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace

from greenroom.config.model import ModelConfig
from greenroom.engines.base import Engine, Identity
from greenroom.engines.container import Containerized
from greenroom.engines.flags import Unwrapped, basename, unwrap
from greenroom.engines.generic import Generic
from greenroom.engines.llama_server import LlamaServer
from greenroom.engines.sglang import Sglang
from greenroom.engines.tei import Tei
from greenroom.engines.vllm import Vllm

DIALECTS: Mapping[str, type[Generic]] = {dialect.kind: dialect for dialect in (LlamaServer, Vllm, Sglang, Tei, Generic)}
LLAMA = re.compile(r"^llama-server([-_.].*)?$")
IMAGES: tuple[tuple[re.Pattern[str], type[Generic]], ...] = (
    (re.compile(r"vllm"), Vllm),
    (re.compile(r"llama[.-]cpp"), LlamaServer),
    (re.compile(r"sglang"), Sglang),
    (re.compile(r"text-embeddings-inference"), Tei),
)
IMAGE_ENTRY = "(the image's own entry point)"
# the program that an image of this engine starts by itself
ENTRIES: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm", "serve"),
    "llama_server": ("llama-server",),
    "sglang": ("sglang", "serve"),
    "tei": ("text-embeddings-router",),
    "generic": (IMAGE_ENTRY,),
}


def describe(config: ModelConfig) -> Engine:
    """The engine of one model.  Raises ValueError when the config names an engine that does not exist."""
    inner, own_entry = _inner(config)
    return inner if config.container is None else Containerized(inner, own_entry)


def _inner(config: ModelConfig) -> tuple[Generic, int]:
    """The dialect, and how many words were put before a command that begins with a flag: the image's own entry point."""
    dialect = _dialect(config)
    if config.container is None or not config.argv[:1] or not config.argv[0].startswith("-"):
        return dialect(config), 0
    entry = ENTRIES[dialect.kind]
    return dialect(replace(config, argv=(*entry, *config.argv))), len(entry)


def devices_count(config: ModelConfig) -> int:
    """Devices one instance takes: what the config says, else what the flags ask for, else 1."""
    if config.devices_count > 1:
        return config.devices_count
    return _inner(config)[0].devices_count() or 1


def identity(config: ModelConfig) -> Identity:
    """What a learned footprint is keyed by: the model files (size, time), and the command with its environment."""
    files = []
    try:
        paths = tuple(_inner(config)[0].files())
    except OSError:  # which of them there are cannot be told: that is said where it is to be started
        paths = ()
    for path in paths:
        try:
            stat = path.stat()
        except OSError:
            continue
        files.append((str(path), stat.st_size, stat.st_mtime_ns))
    words = [*config.argv, "", *(f"{name}={value}" for name, value in sorted(config.env))]
    if config.container is not None:
        words += ["", config.container.image, *config.container.args]
    digest = hashlib.sha256("\0".join(words).encode("utf-8", "surrogatepass")).hexdigest()
    return Identity(tuple(files), digest)


def _dialect(config: ModelConfig) -> type[Generic]:
    if config.engine is not None:
        dialect = DIALECTS.get(config.engine.replace("-", "_"))
        if dialect is None:
            raise ValueError(f"{config.id}: there is no engine {config.engine!r}; write one of {', '.join(sorted(DIALECTS))}")
        return dialect
    if config.container is not None and config.argv[:1] and config.argv[0].startswith("-"):
        return _by_image(config.container.image)
    return _by_command(unwrap(config.argv))


def _by_image(image: str) -> type[Generic]:
    return next((dialect for pattern, dialect in IMAGES if pattern.search(image)), Generic)


def _by_command(command: Unwrapped) -> type[Generic]:
    argv = command.argv
    if not argv:
        return Generic
    if command.client:
        return _by_image(argv[0])
    name = basename(argv[0])
    if LLAMA.match(name) or (name == "llama" and "serve" in argv[1:2]):
        return LlamaServer
    if (name == "vllm" and "serve" in argv[1:2]) or name.startswith("vllm.entrypoints."):
        return Vllm
    if (name == "sglang" and "serve" in argv[1:2]) or name == "sglang.launch_server":
        return Sglang
    if name == "text-embeddings-router":
        return Tei
    return Generic
