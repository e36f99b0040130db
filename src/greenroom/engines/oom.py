"""What an exit meant: a table of log patterns, and the rules that pick the telling line.

Last lines are mostly wrappers ("engine core failed, see above"), so the class with the strongest claim wins, not the
last line.  Patterns are case-sensitive where the engines are.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from greenroom.core.facts import Cause
from greenroom.engines.base import Ending

LINES_READ_MAX = 2000
LINE_CHARS_MAX = 400
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Class(StrEnum):
    """What a log line says about an ending; declared strongest claim first."""

    BUDGET = "budget"  # refused itself at start: its share was not free
    SHARE = "share"  # its share is too small for what it is asked to hold: more room does not help
    HOST = "host"  # host RAM, not device memory
    WAKE = "wake"  # no room at wake
    CONTEXT = "context"  # no room for the KV cache or the compute buffers
    LOAD = "load"  # no room for weights or buffers
    RUNTIME = "runtime"  # ran out while serving
    CONFIG = "config"  # can never work like this
    PORT = "port"  # somebody else has the port: another one may do
    DISTURBED = "disturbed"  # another tenant spoilt its measuring: again
    CRASH = "crash"  # ended, but memory was not the reason
    WRAPPER = "wrapper"  # says that something failed, not what
    HARMLESS = "harmless"  # looks like the end of the world and is not


CAUSES = {
    Class.BUDGET: Cause.STARTUP_MEMORY,
    Class.SHARE: Cause.MISCONFIGURED,
    Class.HOST: Cause.OOM,
    Class.WAKE: Cause.OOM,
    Class.LOAD: Cause.OOM,
    Class.CONTEXT: Cause.OOM,
    Class.RUNTIME: Cause.OOM,
    Class.CONFIG: Cause.MISCONFIGURED,
    Class.PORT: Cause.EXITED,
    Class.DISTURBED: Cause.EXITED,
    Class.CRASH: Cause.EXITED,
    Class.WRAPPER: Cause.EXITED,
}
DEVICE_FULL = frozenset({Class.WAKE, Class.LOAD, Class.CONTEXT, Class.RUNTIME})
MEANINGS = {
    Class.BUDGET: "refused to start because its share of the device was not free",
    Class.SHARE: "cannot hold its weights and context in the share it was given; raise the share or lower the context",
    Class.HOST: "ran out of host RAM",
    Class.WAKE: "ran out of device memory while waking",
    Class.LOAD: "ran out of memory while loading",
    Class.CONTEXT: "ran out of memory for its context; lower the context or the batch size, or give it more room",
    Class.RUNTIME: "ran out of memory while serving",
    Class.CONFIG: "cannot start as configured",
    Class.PORT: "could not listen on its port",
    Class.DISTURBED: "was disturbed by another program while it measured the device",
    Class.CRASH: "crashed",
    Class.WRAPPER: "failed",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One pattern of one engine."""

    engine: str  # vllm | torch | cuda | llama.cpp | vulkan | metal | sglang | tei | ollama | host | any
    kind: Class
    pattern: str
    flags: int = 0


B, S, H, W, L, K, R, X = (
    Class.BUDGET,
    Class.SHARE,
    Class.HOST,
    Class.WAKE,
    Class.LOAD,
    Class.CONTEXT,
    Class.RUNTIME,
    Class.CRASH,
)
C, P, D, WRAP, OK = Class.CONFIG, Class.PORT, Class.DISTURBED, Class.WRAPPER, Class.HARMLESS

ROWS: tuple[Row, ...] = (
    # vLLM
    Row("vllm", B, r"is less than desired (?:GPU|CPU) memory utilization"),
    Row("vllm", B, r"exceed the desired GPU memory utilization"),
    Row("vllm", B, r"is less than the engine's budget"),
    Row("vllm", S, r"No available memory for the cache blocks"),
    Row("vllm", S, r"is larger than the available KV cache memory"),
    Row("vllm", S, r"is larger than the maximum number of tokens that can be stored in KV cache"),
    Row("vllm", S, r"Cannot auto-fit max_model_len"),
    Row("vllm", D, r"Error in memory profiling"),
    Row("vllm", L, r"CUDA out of memory occurred when warming up (?:sampler|pooler)"),
    Row("vllm", D, r"Memory usage increased after sleeping"),
    Row("vllm", W, r"CUDA Error: out of memory at "),
    Row("vllm", X, r"CUDA Error: invalid argument at .*cumem"),  # a second wake over what the first one left
    Row("vllm", H, r"Worker proc .* died unexpectedly \(exit code: -9\)"),
    Row("vllm", WRAP, r"Worker proc .* died unexpectedly"),
    Row("vllm", WRAP, r"EngineCore encountered a fatal error"),
    Row("vllm", WRAP, r"EngineCore encountered an issue"),
    Row("vllm", WRAP, r"EngineDeadError"),
    Row("vllm", WRAP, r"Engine core initialization failed"),
    Row("vllm", WRAP, r"WorkerProc failed to start"),
    Row("vllm", WRAP, r"EngineCore failed to start"),
    Row("vllm", C, r"Sleep mode is not supported on current platform"),
    Row("vllm", C, r"error: unrecognized arguments:"),
    Row("vllm", C, r"error: argument \S+: "),
    # PyTorch
    Row("torch", R, r"CUDA out of memory\. Tried to allocate"),
    Row("torch", R, r"HIP out of memory\. Tried to allocate"),
    Row("torch", R, r"XPU out of memory"),
    Row("torch", R, r"torch\.(?:cuda\.)?OutOfMemoryError"),
    Row("torch", R, r"UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"),
    Row("torch", H, r"DefaultCPUAllocator: can't allocate memory"),
    # CUDA runtime and driver
    Row("llama.cpp", L, r"cudaMalloc failed: out of memory"),
    Row("cuda", H, r"(?:cudaHostAlloc|cudaMallocHost|pin(?:ned)? memory).*(?:out of memory|failed)"),
    Row("cuda", R, r"CUDA error: out of memory"),
    Row("cuda", R, r"cudaErrorMemoryAllocation"),
    Row("cuda", R, r"CUBLAS_STATUS_ALLOC_FAILED"),
    Row("cuda", R, r"CUDNN_STATUS_ALLOC_FAILED"),
    Row("cuda", R, r"NCCL .*out of memory"),
    Row("cuda", R, r"Triton Error \[CUDA\]: out of memory"),
    Row("cuda", X, r"an illegal memory access was encountered"),
    Row("cuda", X, r"device-side assert"),
    Row("cuda", X, r"unspecified launch failure"),
    Row("cuda", X, r"NVRM: Xid"),
    # llama.cpp
    Row("llama.cpp", K, r"failed to allocate buffer for kv cache"),
    Row("llama.cpp", K, r"ggml_gallocr_reserve_n(?:_impl)?: failed to allocate"),
    Row("llama.cpp", K, r"failed to allocate compute (?:pp )?buffers?"),
    Row("llama.cpp", K, r"graph_reserve: failed"),
    Row("llama.cpp", L, r"unable to allocate (?:backend|\w+) buffer"),
    Row("llama.cpp", L, r"alloc_tensor_range: failed to allocate"),
    Row("llama.cpp", L, r"failed to allocate buffer of size \d+"),
    Row("llama.cpp", H, r"mmap failed: Cannot allocate memory"),
    Row("llama.cpp", OK, r"failed to fit params to free device memory"),
    Row("llama.cpp", OK, r"cannot meet free memory target"),
    Row("llama.cpp", OK, r"projected to use \d+ MiB of (?:device|host) memory"),
    Row("llama.cpp", OK, r"failed to find a memory slot"),
    Row("llama.cpp", OK, r"could not find a KV slot"),
    Row("llama.cpp", OK, r"Context size has been exceeded"),
    Row("llama.cpp", C, r"failed to open GGUF file"),
    Row("llama.cpp", C, r"data is not within the file bounds"),
    Row("llama.cpp", C, r"gguf_init_from_\w+: (?:invalid magic|failed to read magic)"),
    Row("llama.cpp", C, r"unknown model architecture"),
    Row("llama.cpp", C, r"error: invalid argument:"),
    Row("llama.cpp", C, r'error while handling argument "'),
    Row("llama.cpp", P, r"couldn't bind HTTP server socket"),
    Row("llama.cpp", WRAP, r"failed to create context"),
    Row("llama.cpp", WRAP, r"exiting due to (?:model loading|HTTP server) error"),
    Row("llama.cpp", WRAP, r"error loading model"),
    # Vulkan
    Row("vulkan", H, r"ErrorOutOfHostMemory"),
    Row("vulkan", L, r"ErrorOutOfDeviceMemory"),
    Row("vulkan", L, r"ggml_vulkan: Device memory allocation of size"),
    Row("vulkan", L, r"VK_ERROR_OUT_OF_DEVICE_MEMORY"),
    Row("vulkan", OK, r"Failed to allocate pinned memory"),
    Row("vulkan", X, r"DeviceLostError|ErrorDeviceLost"),
    # Metal
    Row("metal", R, r"kIOGPUCommandBufferCallbackErrorOutOfMemory"),
    Row("metal", R, r"Insufficient Memory \(00000008"),
    Row("metal", X, r"command buffer \d+ failed with status 5"),
    # SGLang
    Row("sglang", B, r"Not enough memory\. Please try to increase --mem-fraction-static"),
    Row("sglang", R, r"Prefill out of memory"),
    Row("sglang", R, r"Decode out of memory"),
    Row("sglang", R, r"Out of memory even after retracting"),
    Row("sglang", R, r"alloc_req_slots runs out of memory"),
    Row("sglang", L, r"Capture (?:prefill )?(?:cuda|CUDA) graph failed"),
    Row("sglang", W, r"\[torch_memory_saver\.cpp\] CUresult error: 2"),
    Row("sglang", WRAP, r"Scheduler hit an exception"),
    Row("sglang", WRAP, r"SIGQUIT received"),
    # TEI
    Row("tei", L, r"Could not start (?:Candle )?backend.*CUDA_ERROR_OUT_OF_MEMORY"),
    Row("tei", R, r"CUDA_ERROR_OUT_OF_MEMORY"),
    Row("tei", WRAP, r"Could not start (?:Candle )?backend"),
    Row("tei", OK, r"Model is overloaded"),
    # Ollama
    Row("ollama", H, r"model requires more system memory \(.*\) than is available"),
    Row("ollama", WRAP, r"(?:llama runner process|llama-server process) has terminated"),
    Row("ollama", OK, r"server busy, please try again\. +maximum pending requests exceeded"),
    # the host
    Row("host", H, r"oom-kill:|oom_kill [1-9]"),
    Row("host", H, r"Out of memory: Killed process"),
    Row("host", H, r"std::bad_alloc"),
    Row("host", H, r"ggml_aligned_malloc: insufficient memory"),
    Row("host", H, r"^(?:\S+: )?(?:line \d+: +\d+ )?Killed\b"),
    Row("host", H, r"^MemoryError\b"),
    Row("host", H, r"Cannot allocate memory"),
    # anything
    Row("any", P, r"(?:Address already in use|EADDRINUSE)", re.IGNORECASE),
    Row("any", C, r"(?:command not found|exec: .*: not found|No such file or directory: '[^']*')"),
    Row("any", C, r"error while loading shared libraries"),
    Row("any", C, r"ModuleNotFoundError: No module named"),
)
COMPILED = tuple((row, re.compile(row.pattern, row.flags)) for row in ROWS)
RANK = {kind: rank for rank, kind in enumerate(Class)}


def classify(line: str) -> Row | None:
    """The strongest row that this one line matches, or None."""
    found = [row for row, pattern in COMPILED if pattern.search(line)]
    if any(row.kind is Class.HARMLESS for row in found):
        return next(row for row in found if row.kind is Class.HARMLESS)
    return min(found, key=lambda row: RANK[row.kind], default=None)


def ran_out(lines: Iterable[str]) -> bool:
    """Whether one of these lines (of a log, of an error answer) says that device memory was full: more room may help."""
    rows = (classify(ANSI.sub("", line)) for line in lines)
    return any(row is not None and row.kind in DEVICE_FULL for row in rows)


def ending(exit_code: int | None, log_tail: Sequence[str]) -> Ending:
    """Class an exit by its log and code.  `exit_code` is negative for a signal, None when it is not known."""
    best: tuple[Row, str] | None = None
    for line in [ANSI.sub("", line).strip() for line in log_tail[-LINES_READ_MAX:]]:
        row = classify(line)
        if row is not None and row.kind is not Class.HARMLESS and (best is None or RANK[row.kind] < RANK[best[0].kind]):
            best = row, line
    if best is None or best[0].kind is Class.WRAPPER:
        return _by_code(exit_code, best[1] if best else _last_words(log_tail))
    row, line = best
    return _told(row, line, exit_code)


def _told(row: Row, line: str, exit_code: int | None) -> Ending:
    wanted, free = _startup_numbers(line) if row.kind is Class.BUDGET else (None, None)
    numbers = f" ({wanted:,} MiB wanted, {free:,} MiB free)" if wanted is not None and free is not None else ""
    size = _allocation(line)
    if not numbers and size is not None and CAUSES[row.kind] is Cause.OOM:
        numbers = f" (an allocation of {size:,} MiB failed)"
    return Ending(CAUSES[row.kind], f"{MEANINGS[row.kind]}{numbers}, {_how(exit_code)}: {_short(line)}", wanted, free)


def _by_code(exit_code: int | None, line: str) -> Ending:
    said = f": {_short(line)}" if line else ", without a word in its log"
    code = -(exit_code - 128) if exit_code is not None and 128 < exit_code < 160 else exit_code
    if code == -signal.SIGKILL:
        # Not called out-of-memory: an operator's `kill -9` looks the same, and a wrong cause would raise the booking.
        hint = "killed by signal 9 from outside; if nobody did that, the kernel's out-of-memory killer did (see the kernel log)"
        return Ending(Cause.EXITED, hint + said)
    if code == 127:
        return Ending(Cause.MISCONFIGURED, f"the command was not found (exit code 127){said}")
    if code == 126:
        return Ending(Cause.MISCONFIGURED, f"the command cannot be executed (exit code 126){said}")
    if code == 0:
        return Ending(Cause.EXITED, f"ended by itself with exit code 0; an engine must stay in the foreground{said}")
    return Ending(Cause.EXITED, f"ended by itself, {_how(exit_code)}{said}")


def _how(exit_code: int | None) -> str:
    if exit_code is None:
        return "exit code unknown"
    number = -exit_code if exit_code < 0 else exit_code - 128 if 128 < exit_code < 160 else None
    if number is None:
        return f"exit code {exit_code}"
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


UNITS_MIB = {"B": 1 / (1 << 20), "KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0, "TiB": 1024.0 * 1024}
FREE_AND_WANTED = re.compile(
    r"\((?P<free>[\d.]+)/[\d.]+ (?P<free_unit>[KMGT]iB)\).*?utilization \([\d.]+, (?P<wanted>[\d.]+) (?P<wanted_unit>[KMGT]iB)\)"
)
FREE_AND_BUDGET = re.compile(
    r"\(?(?P<free>[\d.]+) ?(?P<free_unit>[KMGT]iB)\)? is less than .*?\(?(?P<wanted>[\d.]+) ?(?P<wanted_unit>[KMGT]iB)"
)
ALLOCATIONS = (
    re.compile(r"buffer of size (?P<bytes>\d+)"),
    re.compile(r"allocation of size (?P<bytes>\d+)"),
    re.compile(r"allocating (?P<number>[\d.]+) (?P<unit>[KMGT]iB)"),
    re.compile(r"Tried to allocate (?P<number>[\d.]+) (?P<unit>[KMGT]iB)"),
)


def _startup_numbers(line: str) -> tuple[int | None, int | None]:
    """(wanted, free) in MiB out of a start-up refusal; wanted rounded up, free rounded down."""
    match = FREE_AND_WANTED.search(line) or FREE_AND_BUDGET.search(line)
    if match is None:
        return None, None
    wanted = math.ceil(float(match["wanted"]) * UNITS_MIB[match["wanted_unit"]])
    free = math.floor(float(match["free"]) * UNITS_MIB[match["free_unit"]])
    return wanted, free


def _allocation(line: str) -> int | None:
    for pattern in ALLOCATIONS:
        match = pattern.search(line)
        if match is not None:
            groups = match.groupdict()
            size = int(groups["bytes"]) / (1 << 20) if groups.get("bytes") else float(groups["number"]) * UNITS_MIB[groups["unit"]]
            return math.ceil(size)
    return None


def _last_words(log_tail: Sequence[str]) -> str:
    return next((text for line in reversed(log_tail) if (text := ANSI.sub("", line).strip())), "")


def _short(line: str) -> str:
    return line if len(line) <= LINE_CHARS_MAX else line[: LINE_CHARS_MAX - 1] + "…"
