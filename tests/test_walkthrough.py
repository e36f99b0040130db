"""docs/walkthrough.md is done step by step: each command succeeds, and prints what the text says."""

from __future__ import annotations

import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.documents import Play, blocks
from tests.validators import tool

PAGE = Path(__file__).resolve().parent.parent / "docs" / "walkthrough.md"
UP_S_MAX = 30.0


@pytest.fixture
def registry(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[str]:
    """HOST:PORT of a real registry on this machine."""
    program, port = tool("docker-registry"), free_port()
    settings = tmp_path / "registry.yml"
    settings.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {tmp_path / 'registry'}}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    process = subprocess.Popen([str(program), "serve", str(settings)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + UP_S_MAX
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=2):
                    break
            except OSError:
                assert time.monotonic() < end, "the registry did not come up"
                time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_every_step_of_the_walkthrough_works(tmp_path: Path, registry: str, llama_server: Path) -> None:
    """In the order of the page, in one folder, with a registry and a server of its own."""
    assert llama_server.exists()
    folder = tmp_path / "walk"
    folder.mkdir()
    play, steps = Play(folder, {"127.0.0.1:5000": registry}), blocks(PAGE)
    assert [step.mark for step in steps].count("run") >= 12
    try:
        for step in steps:
            play.step(step)
    finally:
        play.end()
    written = {path.relative_to(folder / "out").parts[0] for path in (folder / "out").rglob("*") if path.is_file()}
    assert written == {"quadlet", "compose", "systemd", "kube", "llm-d", "llm-d-local"}
