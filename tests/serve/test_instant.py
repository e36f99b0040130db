"""A configuration for models named on the command line: what is written is what a person could have written, and starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.config.load import load_config
from greenroom.config.yaml_out import dump
from greenroom.engines.base import DeviceRef
from greenroom.engines.detect import describe
from greenroom.serve import instant
from greenroom.serve.instant import NoEngine, check_engines, configuration, entry
from greenroom.store.facts import Description, ModelFile, Reference, Stored
from greenroom.store.library import Library
from greenroom.store.references import parse
from greenroom.store.resolve import resolve

RAM = DeviceRef("ram", "ram", total_mib=24_000)
CARD = DeviceRef("gpu0", "gpu", "nvidia", "GPU-1", 0, 24_000)


def program(folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of PATH, and no installed package."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("greenroom.engines.discovery._in_wheel", lambda: None)
    return folder


def folder_model(tmp_path: Path) -> Stored:
    files = (ModelFile("model.safetensors", 2 << 30), ModelFile("config.json", 100, role="config"))
    home = tmp_path / "m"
    home.mkdir(exist_ok=True)
    return Stored(
        Reference("hf", path="a/b"), "sha256:" + "0" * 64, "files", files, home, Description("safetensors", context_length=40960), 0.0
    )


def test_vllm_on_the_cpu_is_given_a_part_of_the_machine(tmp_path: Path, path: Path) -> None:
    """Left alone it takes all of it, and then fits nowhere; and it cannot sleep there."""
    program(path, "vllm")
    made = entry(folder_model(tmp_path), "b", RAM)
    assert "--enable-sleep-mode" not in made["cmd"]
    assert 4096 < int(made["memory"].removesuffix("MiB")) < 12_000
    assert made["env"]["VLLM_CPU_KVCACHE_SPACE"] == "4"
    on_card = entry(folder_model(tmp_path), "b", CARD)
    assert "--enable-sleep-mode" in on_card["cmd"]
    assert "memory" not in on_card
    file = tmp_path / "greenroom.yaml"
    file.write_text(dump({"models": {"b": made}}))
    assert load_config(str(file), env={}).models[0].memory_mib == int(made["memory"].removesuffix("MiB"))


@pytest.mark.parametrize(("device", "mark"), [(RAM, "server-b"), (CARD, "server-cuda")])
def test_a_container_has_the_engine_for_the_device_and_sees_the_model(
    tmp_path: Path, path: Path, tiny_chat: Path, device: DeviceRef, mark: str
) -> None:
    """Its folder is mounted where the command says it is, read-only."""
    program(path, "podman")
    library = Library(tmp_path / "store")
    stored = library.adopt(parse(str(tiny_chat)))
    file = tmp_path / "greenroom.yaml"
    file.write_text(dump({"models": {"chat": entry(stored, "chat", device)}}))
    model = resolve(load_config(str(file), env={}), library).config.models[0]
    assert model.container is not None
    assert mark in model.container.image
    launch = describe(model).launch(5800, (device,), 1)
    words = " ".join(launch.argv)
    assert f"{stored.folder}:{stored.folder}:ro" in words
    assert str(stored.entry) in words


def test_what_can_serve_nothing_is_told_what_to_install(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any one of the engines, or a container runtime, is enough to go on."""
    with pytest.raises(NoEngine, match="llama-server"):
        check_engines(None)
    program(path, "vllm")
    check_engines(None)
    with pytest.raises(NoEngine, match="not an executable"):
        check_engines("/nowhere/llama-server")
    (path / "vllm").unlink()
    program(path, "docker")
    check_engines(None)
    assert instant.find("vllm", None, "nvidia").runtime == "docker"


def test_two_models_of_one_name_get_different_ones(tmp_path: Path, path: Path) -> None:
    """And one that is named twice is one."""
    program(path, "vllm")
    one = folder_model(tmp_path)
    other = Stored(Reference("hf", path="c/b"), one.digest, one.layout, one.files, one.folder, one.description, 0.0)
    assert len(configuration([one, other, one], ())["models"]) == 2
