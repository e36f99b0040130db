"""How much memory a llama-server will need: arithmetic on GGUF headers and flags, no file is opened here.

The formulas were fitted to llama.cpp b10434: what its `-v` log says it allocates, and the measured size of the process
after traffic.  Everything rounds up: a start that does not fit costs more than a little
memory booked and not used, and a measured size replaces the estimate soon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from greenroom.engines import gguf
from greenroom.engines.gguf import Header

MIB = 1 << 20
PROCESS_MIB = (
    44  # a server on the CPU without weights: libraries, threads, HTTP, request bodies; 28 MiB measured at start, 36 to 41 after traffic
)
MARGIN = 1.03
PROMPT_CACHE_LIMIT = 0.75  # of the RAM counted for kept prompts: the server adds a prompt before it drops the oldest
GPU_CONTEXT_MIB = {"nvidia": 480, "amd": 400}  # runtime, kernels and scratch on the device, before any weight
GPU_CONTEXT_OTHER_MIB = 256
GPU_PROCESS_HOST_MIB = 512  # what such a process holds in host RAM (driver, pinned staging buffers)
CTX_PAD = 256  # llama.cpp rounds the context up to this
CTX_UNKNOWN = 4096
UBATCH_DEFAULT = 512
PARALLEL_AUTO = 4  # slots of a server without --parallel (its log: "n_parallel is set to auto, using n_parallel = 4")
CACHE_RAM_DEFAULT_MIB = 8192  # --cache-ram: old prompts are kept in host RAM up to this much
CACHE_BYTES = {  # KV cache type -> bytes per value
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
# Architectures whose layers mostly attend to a window: every n-th layer sees everything.  Others count in full.
FULL_LAYER_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4, "exaone4": 4, "llama4": 4}
ENCODERS = frozenset(
    {"bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "modern-bert", "neo-bert", "eurobert", "t5encoder"}
)
# What the CPU backends copy into a layout of their own, beside the mapped file.
REPACKED_AVX2 = frozenset({gguf.Q4_0, gguf.Q4_K, gguf.Q2_K, gguf.Q5_K, gguf.Q6_K, gguf.IQ4_NL})
REPACKED_AMX = REPACKED_AVX2 | {gguf.F16, gguf.BF16, gguf.Q4_1, gguf.Q8_0, gguf.IQ4_XS}


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says, defaults filled in."""

    ctx: int = 0  # total tokens of all slots; 0 = as trained
    parallel: int = PARALLEL_AUTO
    ubatch: int = UBATCH_DEFAULT
    cache_k: float = 2.0  # bytes per value
    cache_v: float = 2.0
    gpu_layers: int | None = None  # None = all
    flash: bool = True
    swa_full: bool = False
    kv_offload: bool = True
    mmproj_offload: bool = True
    cpu_moe_layers: int = 0  # expert weights of this many layers stay in host RAM
    embedding: bool = False  # embedding or rerank server
    repack: bool = True
    mapped: bool = True
    cache_ram_mib: int | None = None  # None = not set by the operator
    fits_itself: bool = True  # --fit on and no context set: shrinks the context to what is free


@dataclass(frozen=True, slots=True)
class Need:
    """MiB of one server, split over the device and the host; the parts are for people."""

    device_mib: int
    host_mib: int
    weights_mib: int
    kv_mib: int
    compute_mib: int
    other_mib: int

    def describe(self) -> str:
        return f"weights {self.weights_mib:,} + KV {self.kv_mib:,} + compute {self.compute_mib:,} + other {self.other_mib:,} MiB"


@dataclass(frozen=True, slots=True)
class Files:
    """Headers of everything a server loads."""

    model: tuple[Header, ...]
    draft: tuple[Header, ...] = ()
    extra_bytes: int = 0  # mmproj, LoRA adapters


def on_host(files: Files, options: Options, cpu_flags: frozenset[str]) -> Need:
    """All of it in host RAM; device_mib is that RAM, host_mib 0 (it is the same memory)."""
    main, draft = files.model[0], files.draft
    mapped = _file_bytes(files.model) + _file_bytes(draft) + files.extra_bytes
    copies = _repacked_bytes(files.model + draft, cpu_flags) if options.repack and options.mapped else 0
    kv = kv_bytes(main, options) + (kv_bytes(draft[0], options) if draft else 0)
    compute = compute_bytes(main, options, logits=False) + (compute_bytes(draft[0], options, logits=False) if draft else 0)
    outputs = output_bytes(main, options)
    cache = prompt_cache_mib(main, options)
    total = math.ceil((_mib(mapped + copies + kv + compute + outputs) + cache + PROCESS_MIB) * MARGIN)
    return Need(
        device_mib=total,
        host_mib=0,
        weights_mib=_mib(mapped + copies),
        kv_mib=_mib(kv),
        compute_mib=_mib(compute + outputs),
        other_mib=total - _mib(mapped + copies) - _mib(kv) - _mib(compute + outputs),
    )


def on_gpus(files: Files, options: Options, *, count: int, vendor: str, total_mib: int) -> Need:
    """Split over `count` devices (the fullest one is given) and the host.  `total_mib` 0 = unknown."""
    main, draft = files.model[0], files.draft
    on_device, on_cpu = _split_weights(files.model, options)
    drafts, extra = _file_bytes(draft), files.extra_bytes
    if not options.mmproj_offload:
        on_cpu, extra = on_cpu + extra, 0
    share = offloaded_share(main, options)
    kv = kv_bytes(main, options) + (kv_bytes(draft[0], options) if draft else 0)
    kv_device = int(kv * share) if options.kv_offload else 0
    compute = compute_bytes(main, options, logits=True)
    context = GPU_CONTEXT_MIB.get(vendor, GPU_CONTEXT_OTHER_MIB)
    # Layers are whole: with k devices the fullest one holds up to a layer more than its share.
    layer = -(-on_device // max(1, layers(main))) if count > 1 else 0
    weights = -(-(on_device + drafts) // count) + extra + layer
    device = _mib(weights + -(-kv_device // count) + compute) + context
    if options.fits_itself and total_mib:
        device = min(device, max(total_mib - 1024, _mib(weights + compute) + context))
    host = _mib(on_cpu + (kv - kv_device) + output_bytes(main, options)) + prompt_cache_mib(main, options) + GPU_PROCESS_HOST_MIB
    return Need(
        device_mib=device,
        host_mib=host,
        weights_mib=_mib(weights),
        kv_mib=_mib(-(-kv_device // count)),
        compute_mib=_mib(compute),
        other_mib=context,
    )


# ----------------------------------------------------------------------------------------------------------- the parts


def layers(header: Header) -> int:
    return header.number("block_count", 1)


def context_tokens(header: Header, options: Options) -> int:
    """Tokens of the whole KV cache, all slots together."""
    trained = header.number("context_length", CTX_UNKNOWN)
    wanted = options.ctx if options.ctx > 0 else trained
    if is_encoder(header):
        wanted = min(wanted, trained)
    return -(-wanted // CTX_PAD) * CTX_PAD


def is_encoder(header: Header) -> bool:
    """No token waits for an earlier one: nothing is cached."""
    return header.architecture in ENCODERS or header.fields.get(f"{header.architecture}.attention.causal") is False


def kv_bytes(header: Header, options: Options) -> int:
    """The KV cache (and the state of recurrent layers) for the whole context."""
    if is_encoder(header):
        return 0
    count = layers(header)
    heads = header.per_layer("attention.head_count", count, 1)
    embd = header.number("embedding_length", 1)
    head_dim = embd // max(1, heads[0])
    kv_heads = header.per_layer("attention.head_count_kv", count, heads[0])
    k_values = header.number("attention.key_length", head_dim)
    v_values = header.number("attention.value_length", head_dim)
    per_head = k_values * options.cache_k + v_values * options.cache_v
    tokens = _tokens_per_layer(header, options, count)
    cache = sum(kv * per_head * seen for kv, seen in zip(kv_heads, tokens, strict=True))
    return int(cache) + _recurrent_bytes(header, options, count)


def _tokens_per_layer(header: Header, options: Options, count: int) -> list[int]:
    ctx = context_tokens(header, options)
    window = header.number("attention.sliding_window")
    every = FULL_LAYER_EVERY.get(header.architecture)
    if not window or every is None or options.swa_full:
        return [ctx] * count
    windowed = min(ctx, -(-(window * options.parallel + options.ubatch) // CTX_PAD) * CTX_PAD)
    return [ctx if (layer + 1) % every == 0 else windowed for layer in range(count)]


def _recurrent_bytes(header: Header, options: Options, count: int) -> int:
    inner, state = header.number("ssm.inner_size"), header.number("ssm.state_size")
    conv = max(0, header.number("ssm.conv_kernel") - 1) * (inner + 2 * header.number("ssm.group_count") * state)
    return (inner * state + conv) * 4 * count * options.parallel


def compute_bytes(header: Header, options: Options, *, logits: bool) -> int:
    """Scratch for one physical batch; `logits`: with room for the logits of every token of it (older builds reserve that)."""
    embd = header.number("embedding_length", 1)
    feed_forward = max(header.per_layer("feed_forward_length", layers(header), 4 * embd))
    feed_forward = max(feed_forward, header.number("expert_feed_forward_length") * header.number("expert_used_count"))
    ctx = context_tokens(header, options)
    per_token = 4 * (3 * feed_forward + 4 * embd) + 2 * ctx
    if not options.flash:
        per_token += 4 * ctx * max(header.per_layer("attention.head_count", layers(header), 1))
    if logits and not options.embedding:
        per_token += 4 * header.vocabulary
    return per_token * min(options.ubatch, ctx)


def output_bytes(header: Header, options: Options) -> int:
    """The output buffer (always in host RAM): an embedding or rerank server keeps a row of logits for *every* token."""
    rows = min(options.ubatch, context_tokens(header, options)) if options.embedding else options.parallel
    return rows * 4 * (header.vocabulary + header.number("embedding_length"))


def prompt_cache_mib(header: Header, options: Options) -> int:
    """Host RAM for kept prompts: what the operator allows, but no more than one full context is counted beforehand.

    The server itself would go up to 8 GiB; `LlamaServer.launch` holds it to this figure where host RAM is the budget.
    """
    one_context = _mib(kv_bytes(header, options))
    if options.cache_ram_mib is None:
        return one_context
    if options.cache_ram_mib < 0:
        return CACHE_RAM_DEFAULT_MIB if one_context else 0
    return options.cache_ram_mib if one_context else 0


def prompt_cache_limit_mib(header: Header, options: Options) -> int:
    """What to tell a server in host RAM as its limit for kept prompts; 0 keeps none (an encoder has nothing to keep)."""
    return math.floor(prompt_cache_mib(header, options) * PROMPT_CACHE_LIMIT)


def offloaded_share(header: Header, options: Options) -> float:
    """Share of the layers on the device."""
    count = layers(header)
    return 1.0 if options.gpu_layers is None else min(1.0, options.gpu_layers / max(1, count))


def _split_weights(parts: Sequence[Header], options: Options) -> tuple[int, int]:
    """Bytes on the devices, and on the host.  llama.cpp puts the *last* layers on the device, the output after them."""
    count = layers(parts[0])
    wanted = count + 1 if options.gpu_layers is None else options.gpu_layers
    first = max(0, count - wanted) if wanted <= count else 0
    tensors = [tensor for part in parts for tensor in part.tensors]
    tied = not any(tensor.name == "output.weight" for tensor in tensors)
    device = host = 0
    for tensor in tensors:
        layer = _layer_of(tensor.name)
        if layer is None:
            is_input = tensor.name.startswith(("token_embd", "position_embd", "token_types"))
            host += tensor.bytes if is_input or wanted <= count else 0
            device += tensor.bytes if wanted > count and (not is_input or (tied and tensor.name == "token_embd.weight")) else 0
        elif layer < first or (layer < options.cpu_moe_layers and "_exps" in tensor.name):
            host += tensor.bytes
        else:
            device += tensor.bytes
    return device, host


def _layer_of(name: str) -> int | None:
    if not name.startswith("blk."):
        return None
    number = name.split(".", 2)[1]
    return int(number) if number.isdigit() else None


def _repacked_bytes(parts: Sequence[Header], cpu_flags: frozenset[str]) -> int:
    if {"amx_tile", "amx_int8"} <= cpu_flags:
        types = REPACKED_AMX
    elif "avx2" in cpu_flags:
        types = REPACKED_AVX2
    else:
        types = frozenset()
    return sum(
        tensor.bytes
        for part in parts
        for tensor in part.tensors
        if tensor.type in types and len(tensor.dims) > 1 and not tensor.name.startswith(("token_embd", "position_embd", "token_types"))
    )


def _file_bytes(parts: Sequence[Header]) -> int:
    return sum(part.file_bytes for part in parts)


def _mib(count: int) -> int:
    return math.ceil(count / MIB)


def cache_type_bytes(name: str | None) -> float:
    """Bytes per value of a KV cache type; an unknown one counts as f16."""
    table: Mapping[str, float] = CACHE_BYTES
    return table.get((name or "f16").lower(), 2.0)
