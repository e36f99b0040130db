"""The README tells the truth: its configurations load, and its commands run and print what they promise.

Blocks are marked by a comment on the line before: `file: NAME` is written to that file, `config` must load, `prepare` is
run first and must exit 0, `serve` is started in the background, `run` must exit 0, and `run: WORDS` must print WORDS as well.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from greenroom.config.load import load_config
from greenroom.proxy.limits import Limits
from tests import documents
from tests.documents import Block

ROOT = Path(__file__).resolve().parent.parent
README_PORT = "8080"


def blocks(*marks: str) -> list[Block]:
    return [block for block in documents.blocks(ROOT / "README.md") if block.mark in marks]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, llama_server: Path) -> Path:
    """A folder as the README makes it: its files, and what its preparing commands leave there.  llama-server is found by greenroom."""
    assert llama_server.exists()
    folder = tmp_path_factory.mktemp("readme")
    greenroom = Path(sys.executable).with_name("greenroom")
    assert greenroom.exists(), "the project is not installed in this environment: pip install --no-deps -e ."
    for block in blocks("file"):
        (folder / block.argument).write_text(block.text, encoding="utf-8")
    for block in blocks("prepare"):
        done = Shell(folder, 0).run(block.text)
        assert done.returncode == 0, f"{block.text}\nexit {done.returncode}:\n{done.stdout}{done.stderr}"
    return folder


@dataclass(frozen=True, slots=True)
class Shell:
    """Runs README commands in the folder; the address they name is the server's of this test."""

    folder: Path
    port: int

    def line(self, text: str) -> str:
        return text.replace(f":{README_PORT}", f":{self.port}")

    def run(self, text: str) -> subprocess.CompletedProcess[str]:
        return documents.bash(self.line(text), self.folder, self.port)


@pytest.fixture(scope="module")
def shell(place: Path) -> Iterator[Shell]:
    """The README's server is up, started by the README's command."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shell = Shell(place, port)
    (block,) = blocks("serve")
    command = f"exec {block.text.strip()} --listen 127.0.0.1:{port}"
    env = documents.environment(place, port)
    with open(place / "server.log", "wb") as log:
        server = subprocess.Popen(["bash", "-c", command], cwd=place, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        documents.wait_up(server, port, place / "server.log")
        yield shell
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def test_there_is_something_to_run() -> None:
    """The marks are found: a change of the README's form cannot silently empty these tests."""
    counts = {mark: len(blocks(mark)) for mark in ("file", "config", "prepare", "serve", "run")}

    assert (counts["prepare"], counts["serve"]) == (1, 1)
    assert counts["file"] >= 2
    assert counts["config"] >= 3
    assert counts["run"] >= 8


@pytest.mark.parametrize("number", range(len(blocks("config", "file"))))
def test_every_configuration_loads(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the README shows as a configuration is one."""
    monkeypatch.setenv("GREENROOM_KEY", "a-key-of-some-length")
    monkeypatch.setenv("TEAM_KEY", "another-key-of-some-length")
    path = tmp_path / "greenroom.yaml"
    path.write_text(blocks("config", "file")[number].text, encoding="utf-8")

    assert load_config(str(path)).models


@pytest.mark.engine
def test_the_commands_run_in_the_order_they_are_shown(shell: Shell) -> None:
    """A reader who types them one after the other sees each succeed, and print what the text says."""
    for block in blocks("run"):
        done = shell.run(block.text)
        said = done.stdout + done.stderr

        assert done.returncode == 0, f"{block.text}\nexit {done.returncode}:\n{said}"
        assert block.argument.lower() in said.lower(), f"{block.text}\ndid not print {block.argument!r}:\n{said}"


def test_every_limit_is_documented_with_its_default() -> None:
    """The table of docs/config.md is the one of the code: the same names in the same order, the same figures."""
    section = (ROOT / "docs" / "config.md").read_text(encoding="utf-8").split("### Limits\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `([\d.]+)` \| \S", section, re.MULTILINE)

    assert [(name, float(default)) for name, default in rows] == [(name, float(value)) for name, value in asdict(Limits()).items()]


def test_links_lead_to_files() -> None:
    """Every relative link of the README and of docs/ points to something that is there."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}, which does not exist"
