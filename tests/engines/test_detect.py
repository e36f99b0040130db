"""Which dialect a command speaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.config.model import ContainerConfig
from greenroom.engines.detect import describe, devices_count, identity
from tests.engines.builders import GPU0, a_model


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("llama-server -m x", "llama_server"),
        ("/opt/llama.cpp/build/bin/llama-server-cuda -m x", "llama_server"),
        ("llama-server-vulkan -m x", "llama_server"),
        ("llama serve -m x", "llama_server"),
        ("vllm serve m", "vllm"),
        ("vllm bench m", "generic"),
        ("python -m vllm.entrypoints.openai.api_server --model m", "vllm"),
        ("python3 -m sglang.launch_server --model-path m", "sglang"),
        ("text-embeddings-router --model-id m", "tei"),
        ("env CUDA_VISIBLE_DEVICES=1 nice -n 5 vllm serve m", "vllm"),
        ("sh -c 'exec llama-server -m x'", "llama_server"),
        ("docker run --rm vllm/vllm-openai:latest --model m", "vllm"),
        ("docker run --rm ghcr.io/huggingface/text-embeddings-inference:1.8 --model-id m", "tei"),
        ("docker run --rm somebody/else", "generic"),
        ("./serve.sh --port 1", "generic"),
        ("python app.py", "generic"),
    ],
)
def test_the_dialect_is_told_by_the_command(command: str, kind: str) -> None:
    """A program nobody knows is a generic engine, not an error."""
    assert describe(a_model(command)).kind == kind


def test_the_configs_own_word_wins() -> None:
    """`engine:` is for wrappers whose name says nothing."""
    assert describe(a_model("./serve.sh", engine="vllm")).kind == "vllm"
    with pytest.raises(ValueError, match="there is no engine 'vlm'; write one of generic, llama_server"):
        describe(a_model("./serve.sh", engine="vlm"))


def test_a_container_entry_keeps_the_dialect_and_wraps_the_launch() -> None:
    """The engine inside is still a llama-server."""
    engine = describe(a_model("llama-server --port ${PORT}", container=ContainerConfig("podman", "img")))

    assert engine.kind == "llama_server"
    assert engine.launch(5801, [GPU0]).argv[:2] == ("podman", "run")


def test_devices_are_counted_from_the_config_else_from_the_flags() -> None:
    """Tensor parallel size times pipeline parallel size."""
    assert devices_count(a_model("vllm serve m -tp 2 --pipeline-parallel-size 2")) == 4
    assert devices_count(a_model("vllm serve m -tp 2", devices_count=3)) == 3
    assert devices_count(a_model("python -m sglang.launch_server --tp 8")) == 8
    assert devices_count(a_model("llama-server -m x")) == 1


def test_a_footprint_is_keyed_by_files_command_and_environment(tmp_path: Path) -> None:
    """Another context size or another file of the same name is another footprint; an alias is not."""
    model = tmp_path / "a.gguf"
    model.write_bytes(b"one")
    config = a_model(f"llama-server -m {model} -c 64")
    before = identity(config)

    assert before.files == ((str(model), 3, model.stat().st_mtime_ns),)
    assert identity(replace(config, aliases=("b",))) == before
    assert identity(replace(config, env=(("A", "1"),))) != before
    assert identity(a_model(f"llama-server -m {model} -c 128")) != before
    model.write_bytes(b"three")
    assert identity(config) != before
