"""The arithmetic of a llama-server's memory, checked against figures it logs itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from greenroom.engines import gguf
from greenroom.engines import llama_memory as memory
from greenroom.engines.gguf import Header, Tensor, Value
from greenroom.engines.llama_memory import Files, Options

MIB = 1 << 20


def a_header(
    architecture: str = "llama", *, tensors: tuple[Tensor, ...] = (), vocabulary: int = 0, file_mib: int = 0, **fields: Value
) -> Header:
    """A header with these fields; dots in names are written as two underscores."""
    named = {f"{architecture}.{name.replace('__', '.')}": value for name, value in fields.items()}
    return Header(
        Path("x"), file_mib * MIB, {"general.architecture": architecture, **named}, {"tokenizer.ggml.tokens": vocabulary}, tensors
    )


SMOLLM2 = a_header(
    block_count=30,
    embedding_length=576,
    feed_forward_length=1536,
    context_length=8192,
    attention__head_count=9,
    attention__head_count_kv=3,
    vocabulary=49_152,
    file_mib=94,
)
LLAMA_8B = a_header(
    block_count=32,
    embedding_length=4096,
    feed_forward_length=14_336,
    context_length=131_072,
    attention__head_count=32,
    attention__head_count_kv=8,
    vocabulary=128_256,
)
MINILM = a_header(
    "bert", block_count=6, embedding_length=384, feed_forward_length=1536, context_length=512, attention__head_count=12, vocabulary=30_522
)


@pytest.mark.parametrize(
    ("header", "options", "mib"),
    [
        (SMOLLM2, Options(ctx=8192), 180),  # the server's log: "size = 180.00 MiB ( 8192 cells, 30 layers ..."
        (SMOLLM2, Options(ctx=2048), 45),
        (SMOLLM2, Options(), 180),  # as trained
        (SMOLLM2, Options(ctx=2000), 45),  # padded to 256
        (SMOLLM2, Options(ctx=8192, cache_k=34 / 32, cache_v=34 / 32), 95.625),
        (LLAMA_8B, Options(ctx=8192), 1024),
        (MINILM, Options(), 0),  # nothing to cache
    ],
)
def test_the_kv_cache_is_exact(header: Header, options: Options, mib: float) -> None:
    """Layers x KV heads x head size x context x bytes, for K and for V."""
    assert memory.kv_bytes(header, options) == mib * MIB


def test_layers_with_a_window_keep_only_the_window() -> None:
    """Gemma 3: five of six layers see 1,024 tokens."""
    gemma = a_header(
        "gemma3",
        block_count=12,
        embedding_length=1024,
        context_length=32_768,
        attention__head_count=4,
        attention__head_count_kv=1,
        attention__key_length=256,
        attention__value_length=256,
        attention__sliding_window=1024,
    )
    per_token = 2 * 256 * 2

    assert memory.kv_bytes(gemma, Options(ctx=32_768, parallel=1)) == per_token * (2 * 32_768 + 10 * 1536)
    assert memory.kv_bytes(gemma, Options(ctx=32_768, swa_full=True)) == per_token * 12 * 32_768


def test_layers_without_attention_cache_nothing() -> None:
    """Hybrids say so with an array of KV heads."""
    hybrid = a_header(
        "jamba", block_count=4, embedding_length=64, context_length=256, attention__head_count=4, attention__head_count_kv=(0, 2, 0, 2)
    )

    assert memory.kv_bytes(hybrid, Options()) == 2 * (2 * 16 * 256 * 2 * 2)


@pytest.mark.parametrize(
    ("header", "options", "mib"),
    [(SMOLLM2, Options(ctx=8192), 21.5), (SMOLLM2, Options(ctx=2048), 15.5)],  # the server's log: "compute buffer size"
)
def test_the_compute_buffer_is_what_the_server_logs(header: Header, options: Options, mib: float) -> None:
    """Scratch for one physical batch."""
    assert memory.compute_bytes(header, options, logits=False) == mib * MIB


def test_without_flash_attention_the_scores_need_room() -> None:
    """Batch x context x heads."""
    more = memory.compute_bytes(SMOLLM2, Options(ctx=2048, flash=False), logits=False) - memory.compute_bytes(
        SMOLLM2, Options(ctx=2048), logits=False
    )

    assert more == 512 * 2048 * 9 * 4


def test_an_embedding_server_keeps_logits_of_every_token() -> None:
    """60 MiB for MiniLM's vocabulary: more than its weights."""
    assert memory.output_bytes(MINILM, Options(embedding=True)) == 512 * 4 * (30_522 + 384)
    assert memory.output_bytes(SMOLLM2, Options()) == 4 * 4 * (49_152 + 576)


WEIGHTS = (
    Tensor("token_embd.weight", (1, 1), gguf.F16, 100 * MIB),
    *(Tensor(f"blk.{layer}.attn_q.weight", (1, 1), gguf.Q4_0, 10 * MIB) for layer in range(4)),
    *(Tensor(f"blk.{layer}.ffn_up_exps.weight", (1, 1), gguf.Q4_0, 50 * MIB) for layer in range(4)),
    Tensor("output.weight", (1, 1), gguf.Q8_0, 80 * MIB),
)
SMALL: Any = {"block_count": 4, "embedding_length": 64, "feed_forward_length": 128, "context_length": 256, "attention__head_count": 4}


def gpu_need(options: Options, count: int = 1, total_mib: int = 0) -> memory.Need:
    header = a_header(tensors=WEIGHTS, file_mib=420, **SMALL)
    return memory.on_gpus(Files((header,)), options, count=count, vendor="nvidia", total_mib=total_mib)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        (Options(ctx=256), 320),  # all layers and the output; the token table stays on the host
        (Options(ctx=256, gpu_layers=99), 320),
        (Options(ctx=256, gpu_layers=4), 240),  # without the output
        (Options(ctx=256, gpu_layers=1), 60),
        (Options(ctx=256, gpu_layers=0), 0),
        (Options(ctx=256, cpu_moe_layers=4), 120),  # experts stay on the host
        (Options(ctx=256, cpu_moe_layers=1), 270),
    ],
)
def test_offloaded_layers_weigh_on_the_device_and_the_rest_on_the_host(options: Options, weights: int) -> None:
    """-ngl and --n-cpu-moe move weights between the two; nothing is lost."""
    need = gpu_need(options)

    assert need.weights_mib == weights
    assert need.host_mib >= 420 - weights


def test_a_model_over_two_devices_weighs_half_and_a_layer_on_each() -> None:
    """Layers are whole."""
    assert gpu_need(Options(ctx=256), count=2).weights_mib == 160 + 80


def test_a_server_that_fits_itself_never_needs_more_than_the_card() -> None:
    """Without -c it shrinks the context to what is free; with -c it does not."""
    header = a_header(tensors=WEIGHTS, file_mib=420, **{**SMALL, "context_length": 1 << 20, "attention__head_count_kv": 4})
    files = Files((header,))
    itself = memory.on_gpus(files, Options(), count=1, vendor="nvidia", total_mib=3_000)
    told = memory.on_gpus(files, Options(ctx=1 << 20, fits_itself=False), count=1, vendor="nvidia", total_mib=3_000)

    assert itself.device_mib == 3_000 - 1024
    assert told.device_mib > 2_800


@pytest.mark.parametrize(
    ("flags", "copies"),
    [(frozenset({"sse4_2"}), 0), (frozenset({"avx2"}), 240), (frozenset({"avx2", "amx_tile", "amx_int8"}), 320)],
)
def test_weights_count_twice_where_the_cpu_repacks_them(flags: frozenset[str], copies: int) -> None:
    """The file stays mapped beside the copy; which types are copied depends on the machine."""
    header = a_header(tensors=WEIGHTS, file_mib=420, **SMALL)

    assert memory.on_host(Files((header,)), Options(), flags).weights_mib == 420 + copies
    assert memory.on_host(Files((header,)), Options(repack=False), flags).weights_mib == 420
    assert memory.on_host(Files((header,)), Options(mapped=False), flags).weights_mib == 420


def test_drafts_and_projectors_weigh_too() -> None:
    """Everything the server loads."""
    plain = memory.on_host(Files((SMOLLM2,)), Options(ctx=2048), frozenset())
    more = memory.on_host(Files((SMOLLM2,), (SMOLLM2,), 10 * MIB), Options(ctx=2048), frozenset())

    assert more.weights_mib == 2 * plain.weights_mib + 10
    assert more.kv_mib == 2 * plain.kv_mib


@pytest.mark.parametrize(("asked", "booked", "limit"), [(None, 45, 33), (16, 16, 12), (0, 0, 0), (-1, 8192, 6144)])
def test_room_for_kept_prompts_is_booked_and_limited(asked: int | None, booked: int, limit: int) -> None:
    """One full context unless the operator says otherwise; the server alone would keep up to 8 GiB."""
    options = Options(ctx=2048, cache_ram_mib=asked)

    assert memory.prompt_cache_mib(SMOLLM2, options) == booked
    assert memory.prompt_cache_limit_mib(SMOLLM2, options) == limit
