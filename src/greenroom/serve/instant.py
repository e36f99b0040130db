"""A configuration for models that are named on the command line: an engine for each, and flags that fit this machine.

What is written here a person could have written: it is a file, to be looked at, kept and changed.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from greenroom.config.model import ModelConfig
from greenroom.deploy.images import engine_image
from greenroom.engines import gguf
from greenroom.engines.base import DeviceRef
from greenroom.engines.detect import describe
from greenroom.engines.discovery import PROGRAM, Advice, find_llama_server
from greenroom.engines.llama_memory import is_encoder
from greenroom.host.gpus import GpuInfo
from greenroom.host.memory import total_mib
from greenroom.store.facts import Stored
from greenroom.store.references import model_ids
from greenroom.store.resolve import placed

CONTEXTS = (32768, 16384, 8192, 4096, 2048)  # tokens for each slot; the largest that the model was trained for and that fits
SLOTS = (4, 2, 1)
SHARE_MAX = 0.9  # of a device, for one model
VLLM_ROOM_MIB = 6144  # beside the weights: KV cache, graphs, activations
VLLM_SHARE_MIN = 0.1
RANK = 4  # llama.cpp's pooling type of a reranker
PLAIN_WORD = re.compile(r"[\w./:=@%+,${}-]+")
RUNTIMES = ("podman", "docker")
VLLM_CPU_CACHE_GIB = 4
VLLM_CPU_ROOM_MIB = 2048  # of host RAM, beside weights and KV cache
CHAT, EMBEDDING, RERANKING = "chat", "embedding", "reranking"


class NoEngine(Exception):
    """Nothing here can serve it; one sentence that says what to install."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What runs: a program, or an image."""

    program: str
    runtime: str = ""
    image: str = ""


def device_of(gpus: Sequence[GpuInfo]) -> DeviceRef:
    """The largest device of this machine, host RAM where there is no GPU."""
    if not gpus:
        return DeviceRef("ram", "ram", total_mib=total_mib())
    best = max(gpus, key=lambda gpu: gpu.total_mib)
    return DeviceRef("gpu0", best.kind, "nvidia", best.uuid, best.index, best.total_mib)


def configuration(stored: Sequence[Stored], gpus: Sequence[GpuInfo], *, llama_server: str | None = None) -> dict[str, Any]:
    """As plain values for a file.  Raises NoEngine."""
    device = device_of(gpus)
    names = model_ids(one.reference for one in stored)
    return {"models": {names[one.reference]: entry(one, names[one.reference], device, llama_server) for one in stored}}


def entry(stored: Stored, name: str, device: DeviceRef, llama_server: str | None = None) -> dict[str, Any]:
    """One model of it."""
    target, more = "cpu" if device.kind == "ram" else "nvidia", dict[str, Any]()
    if is_gguf(stored):
        engine = find("llama_server", llama_server, target)
        argv = llama_argv(stored, name, engine, device)
    else:
        engine = find("vllm", None, target)
        argv = vllm_argv(stored, name, engine, device)
        more = vllm_on_ram(stored) if device.kind == "ram" else {}
    container = {"runtime": engine.runtime, "image": engine.image, "volumes": ["${MODEL_DIR}:${MODEL_DIR}"]} if engine.image else None
    # One line where that cannot be misread.
    cmd: str | list[str] = " ".join(argv) if all(PLAIN_WORD.fullmatch(word) for word in argv) else list(argv)
    return {"model": str(stored.reference), "cmd": cmd, **more, **({"container": container} if container else {})}


def is_gguf(stored: Stored) -> bool:
    return stored.entry.suffix.lower() == ".gguf"


def purpose(stored: Stored) -> str:
    """CHAT, EMBEDDING or RERANKING, as far as its header tells."""
    if not is_gguf(stored):
        return CHAT
    header = gguf.read_header(stored.entry)
    if header.fields.get(f"{header.architecture}.pooling_type") == RANK:
        return RERANKING
    return EMBEDDING if is_encoder(header) else CHAT


def check_engines(llama_server: str | None) -> None:
    """Before anything is fetched: raises NoEngine where nothing here could serve any model."""
    try:
        find("llama_server", llama_server, "cpu")
    except NoEngine:
        if llama_server or not shutil.which("vllm"):
            raise


def find(kind: str, configured: str | None, target: str) -> Engine:
    """On PATH, in an installed package, else in a container for `target` (cpu, nvidia)."""
    if kind == "llama_server":
        found = find_llama_server(configured)
        if not isinstance(found, Advice):
            return Engine(PROGRAM if found.source != "configured" else str(found.path))
        if configured:
            raise NoEngine(found.text)
        return _boxed(PROGRAM, engine_image(kind, target), found.text)
    program = shutil.which("vllm")
    if program is not None:
        return Engine("vllm")
    said = "this model needs vLLM, and no vllm was found: `pip install vllm` in an environment on PATH, or install podman or docker"
    return _boxed("vllm", engine_image(kind, target), said)


def _boxed(program: str, image: str, advice: str) -> Engine:
    runtime = next((name for name in RUNTIMES if shutil.which(name)), "")
    if not runtime:
        raise NoEngine(advice)
    return Engine(program, runtime, image)


# --------------------------------------------------------------------------------------------------------- llama-server


def llama_argv(stored: Stored, name: str, engine: Engine, device: DeviceRef) -> tuple[str, ...]:
    base = (engine.program, "--model", "${MODEL_PATH}", "--port", "${PORT}", "--alias", name, *_companions(stored))
    trained = gguf.read_header(stored.entry).number("context_length", CONTEXTS[-1])
    if (kind := purpose(stored)) != CHAT:
        return (*base, f"--{kind}", "--ctx-size", str(trained), "--ubatch-size", str(min(trained, 8192)))
    chat: tuple[str, ...] = (*base, "--jinja")
    wanted = [tokens for tokens in CONTEXTS if tokens <= trained] or [trained]
    argv = chat
    # Length first, then slots: a chat that is cut short is worse than one that waits.
    for tokens in wanted:
        for slots in SLOTS:
            argv = (*chat, "--ctx-size", str(tokens * slots), "--parallel", str(slots))
            need = _need(argv, stored, name, device)
            if need is None or need <= SHARE_MAX * device.total_mib:
                return argv
    return argv  # it fits nowhere in memory whole: the engine leaves layers on the host


def _companions(stored: Stored) -> tuple[str, ...]:
    """Files that belong to the model: a projector, a draft, a template."""
    words: list[str] = []
    for role, flag in (("projector", "--mmproj"), ("draft", "--model-draft")):
        found = sorted(file.path for file in stored.files if file.role == role and file.path.lower().endswith(".gguf"))
        words += [flag, f"${{MODEL_DIR}}/{found[0]}"] if found else []
    jinja = sorted(file.path for file in stored.files if file.role == "template" and file.path.lower().endswith((".jinja", ".jinja2")))
    words += ["--chat-template-file", f"${{MODEL_DIR}}/{jinja[0]}"] if jinja else []
    return tuple(words)


def _need(argv: Sequence[str], stored: Stored, name: str, device: DeviceRef) -> int | None:
    model = placed(ModelConfig(name, tuple(argv), reference=str(stored.reference)), stored)
    return describe(model).estimate([device]).device_mib


# ----------------------------------------------------------------------------------------------------------------- vLLM


def vllm_argv(stored: Stored, name: str, engine: Engine, device: DeviceRef) -> tuple[str, ...]:
    argv: tuple[str, ...] = (engine.program, "serve", "${MODEL_PATH}", "--port", "${PORT}", "--served-model-name", name)
    length = stored.description.context_length
    argv = (*argv, "--max-model-len", str(min(length, CONTEXTS[0]))) if length else argv
    if device.kind == "ram":
        return argv
    share = min(SHARE_MAX, max(VLLM_SHARE_MIN, (_weights_mib(stored) * 1.05 + VLLM_ROOM_MIB) / device.total_mib))
    return (*argv, "--enable-sleep-mode", "--gpu-memory-utilization", f"{share:.2f}")


def vllm_on_ram(stored: Stored) -> dict[str, Any]:
    """It takes what it is told to take; left alone, all of the machine.  It cannot sleep there."""
    need_mib = _weights_mib(stored) * 1.05 + (VLLM_CPU_CACHE_GIB << 10) + VLLM_CPU_ROOM_MIB
    return {"env": {"VLLM_CPU_KVCACHE_SPACE": str(VLLM_CPU_CACHE_GIB)}, "memory": f"{math.ceil(need_mib)}MiB"}


def _weights_mib(stored: Stored) -> float:
    return sum(file.size for file in stored.files if file.role == "weights") / (1 << 20)
