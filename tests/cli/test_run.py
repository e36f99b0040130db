"""`run` and `serve` with references: a model becomes a chat, or a server, without a configuration."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from greenroom.cli.run_cmd import printable
from greenroom.store.library import Library
from greenroom.store.locks import is_held
from greenroom.store.pull import Options
from greenroom.store.push import Pusher, loose
from greenroom.store.references import parse
from tests.documents import wait_up
from tests.store.servers import docker_registry

PROGRAM = [sys.executable, "-c", "from greenroom.cli import main; main()"]
S_MAX = 90.0


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "GREENROOM_MODELS": str(tmp_path / "store"), "TERM": "dumb", **more}


def greenroom(tmp_path: Path, *words: str, said: str | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *words], input=said, capture_output=True, text=True, timeout=S_MAX, env=environment(tmp_path, **more), check=False
    )


@pytest.mark.engine
def test_a_prompt_is_answered_once(tmp_path: Path, tiny_chat: Path) -> None:
    """From the command line or standard input; the model is in the store afterwards, and nothing runs any more."""
    done = greenroom(tmp_path, "run", str(tiny_chat), "--max-tokens", "4", "--timings", "say", "hello")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "4 tokens" in done.stderr
    piped = greenroom(tmp_path, "run", str(tiny_chat), "--max-tokens", "4", "--temperature", "0", said="hello\n")
    assert piped.returncode == 0, piped.stderr
    assert "fetching" not in piped.stderr
    listed = json.loads(greenroom(tmp_path, "list", "--json").stdout)
    assert "tiny-chat" in json.dumps(listed)


@pytest.mark.engine
def test_a_terminal_holds_a_conversation(tmp_path: Path, tiny_chat: Path) -> None:
    """Lines are answered in turn, edited and brought back, commands obeyed, an unknown one told; /bye ends it."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, "run", str(tiny_chat), "--max-tokens", "4"],
        stdin=child,
        stdout=child,
        stderr=child,
        env=environment(tmp_path),
        close_fds=True,
    )
    os.close(child)
    heard = ""

    def until(words: str) -> None:
        nonlocal heard
        end = time.monotonic() + S_MAX
        while words not in heard:
            ready, _, _ = select.select([parent], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {words!r} in {heard!r}"
            heard += os.read(parent, 65536).decode(errors="replace")
        heard = heard.partition(words)[2]

    def say(line: str) -> None:
        os.write(parent, f"{line}\n".encode())

    try:
        until(">>> ")
        say("/nonsense")
        until("there is no /nonsense")
        until(">>> ")
        say("\x1b[A")  # the key up: the line before
        until("there is no /nonsense")
        until(">>> ")
        say("/help" + "x" * 5000)  # more than a terminal's own line takes
        until("x" * 50 + ";")
        until(">>> ")
        say("hello")
        until(">>> ")
        say('"""two')
        until("... ")
        say('lines"""')
        until(">>> ")
        say("/bye")
        assert process.wait(S_MAX) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)


@pytest.mark.engine
def test_references_are_served_under_sensible_names(
    tmp_path: Path, tiny_chat: Path, tiny_embed: Path, tiny_rerank: Path, free_port: Callable[[], int]
) -> None:
    """A chat model, an embedder and a reranker each get the flags of their kind; the configuration can be kept."""
    port, state = free_port(), tmp_path / "state"
    words = ["serve", str(tiny_chat), str(tiny_embed), str(tiny_rerank), "--listen", f"127.0.0.1:{port}", "--state-dir", str(state)]
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen([*PROGRAM, *words], stdout=log, stderr=log, env=environment(tmp_path))
    try:
        wait_up(process, port, tmp_path / "log")
        config = YAML(typ="safe").load((state / "references.yaml").read_text())
        assert list(config["models"]) == ["tiny-chat", "tiny-embed", "tiny-rerank"]
        assert "--jinja" in config["models"]["tiny-chat"]["cmd"]
        assert "--embedding" in config["models"]["tiny-embed"]["cmd"]
        assert "--reranking" in config["models"]["tiny-rerank"]["cmd"]
        chat = ask(port, "/v1/chat/completions", {"model": "tiny-chat", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]})
        assert chat["model"] == "tiny-chat"
        assert ask(port, "/v1/embeddings", {"model": "tiny-embed", "input": "hi"})["data"]
        assert ask(port, "/v1/rerank", {"model": "tiny-rerank", "query": "hi", "documents": ["a", "b"]})["results"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(S_MAX)
        log.close()
    checked = greenroom(tmp_path, "check", str(state / "references.yaml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.engine
def test_a_reference_is_served_from_a_registry_with_an_authority_of_its_own(
    tmp_path: Path, tiny_chat: Path, free_port: Callable[[], int]
) -> None:
    """What the command is told of it stands in the configuration that is made, for a later fetch."""
    with docker_registry(tmp_path / "registry", free_port(), tls=True) as registry:
        place = f"oci://{registry.host}/tiny/chat:v1"
        asyncio.run(Pusher(Library(tmp_path / "unused"), Options(tls_ca=registry.ca)).push(loose(tiny_chat), parse(place)))
        port, state = free_port(), tmp_path / "state"
        words = ["serve", place, "--tls-ca", str(registry.ca), "--allow-host", "cdn.example"]
        words += ["--listen", f"127.0.0.1:{port}", "--state-dir", str(state)]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen([*PROGRAM, *words], stdout=log, stderr=log, env=environment(tmp_path))
            try:
                wait_up(process, port, tmp_path / "log")
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(S_MAX)
    config = YAML(typ="safe").load((state / "references.yaml").read_text())
    assert config["pull"] == {"tls_ca": str(registry.ca), "allow_host": ["cdn.example"]}
    checked = greenroom(tmp_path, "check", str(state / "references.yaml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_what_is_said_of_registries_is_about_references(tmp_path: Path) -> None:
    """A configuration has its own place for it, which is named."""
    (tmp_path / "greenroom.yaml").write_text("models: {}\n")
    done = greenroom(tmp_path, "serve", "-c", str(tmp_path / "greenroom.yaml"), "--plain-http", "--tls-verify", "false")
    assert (done.returncode, "--plain-http, --tls-verify is about REFERENCES" in done.stderr) == (2, True), done.stderr
    assert "`pull:`" in done.stderr


@pytest.mark.engine
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_chat_that_is_told_to_end_ends(tmp_path: Path, tiny_chat: Path, number: int, code: int) -> None:
    """In the middle of an answer, unlike with Ctrl-C; its server goes with it, and its folder."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, "run", str(tiny_chat), "--temperature", "0"],
        stdin=child,
        stdout=child,
        stderr=child,
        env=environment(tmp_path, TMPDIR=str(tmp_path)),
        close_fds=True,
    )
    os.close(child)
    heard, end = "", time.monotonic() + S_MAX
    try:
        while heard.count(">>> ") < 1 or len(heard.rpartition("hello")[2]) < 20:
            ready, _, _ = select.select([parent], [], [], max(0.0, end - time.monotonic()))
            assert ready, heard
            heard += os.read(parent, 65536).decode(errors="replace")
            if heard.endswith(">>> "):
                os.write(parent, b"hello\n")
        process.send_signal(number)
        assert process.wait(20) == code  # less than the server gives answers that somebody reads
    finally:
        process.kill()
        process.wait()
        os.close(parent)
    assert not list(tmp_path.glob("greenroom-run-*"))


@pytest.mark.engine
def test_a_chat_that_was_killed_leaves_nothing_for_long(tmp_path: Path, tiny_chat: Path) -> None:
    """The next one finds its folder, once the server that it had has ended in order."""
    parent, child = pty.openpty()
    words = [*PROGRAM, "run", str(tiny_chat)]
    process = subprocess.Popen(
        words, stdin=child, stdout=child, stderr=child, env=environment(tmp_path, TMPDIR=str(tmp_path)), close_fds=True
    )
    os.close(child)
    heard, end = "", time.monotonic() + S_MAX
    try:
        while ">>> " not in heard:
            ready, _, _ = select.select([parent], [], [], max(0.0, end - time.monotonic()))
            assert ready, heard
            heard += os.read(parent, 65536).decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(parent)
    (left,) = tmp_path.glob("greenroom-run-*")
    while is_held(left / "lock"):
        assert time.monotonic() < end, "its server is still there"
        time.sleep(0.05)
    done = greenroom(tmp_path, "run", str(tiny_chat), "--max-tokens", "2", "hi", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("greenroom-run-*"))


@pytest.mark.engine
def test_bytes_that_are_no_text_do_no_harm(tmp_path: Path, tiny_chat: Path) -> None:
    """Each is asked about as a mark in its place."""
    for words, said in (((), b"\xff\xfe hello"), ((b"\xff hello",), b"")):
        done = subprocess.run(
            [*PROGRAM, "run", str(tiny_chat), "--max-tokens", "2", *words],
            input=said,
            capture_output=True,
            timeout=S_MAX,
            env=environment(tmp_path),
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_a_model_that_cannot_chat_is_told_so(tmp_path: Path, tiny_embed: Path, tiny_rerank: Path) -> None:
    """With what it is for, and how to serve it."""
    for model, route in ((tiny_embed, "/v1/embeddings"), (tiny_rerank, "/v1/rerank")):
        done = greenroom(tmp_path, "run", str(model), "hi")
        assert (done.returncode, route in done.stderr, "cannot chat" in done.stderr) == (1, True, True), done.stderr


def test_an_engine_that_is_missing_is_told_before_anything_is_fetched(tmp_path: Path) -> None:
    """Not after forty gigabytes."""
    for command in (["run", "hf://a/b", "hi"], ["serve", "hf://a/b", "--state-dir", str(tmp_path / "state")]):
        done = greenroom(tmp_path, *command, "--llama-server", "/nowhere/llama-server")
        assert done.returncode == 1
        assert "/nowhere/llama-server is not an executable file" in done.stderr


def test_a_server_that_may_not_start_writes_nothing_over(tmp_path: Path, tiny_chat: Path) -> None:
    """The state directory is another's: so is the configuration in it."""
    state = tmp_path / "state"
    state.mkdir()
    with (state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (state / "references.yaml").write_text("models: {}\n")
        done = greenroom(tmp_path, "serve", str(tiny_chat), "--state-dir", str(state))
    assert (done.returncode, "another greenroom" in done.stderr) == (1, True), done.stderr
    assert (state / "references.yaml").read_text() == "models: {}\n"


def ask(port: int, path: str, body: Mapping[str, object]) -> dict[str, object]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=S_MAX) as answer:
        value: dict[str, object] = json.load(answer)
    return value


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (("run", "oci://127.0.0.1:1/a:b", "hi"), "cannot be reached", 1),
        (("run", "/nowhere/x.gguf", "hi"), "x.gguf", 1),
        (("run", "--offline", "hf://a/b", "hi"), "offline", 1),
        (("serve", "-c", "x.yaml", "hf://a/b"), "not both", 2),
        (("serve",), "name a configuration", 2),
        (("serve", "/nowhere/x.gguf"), "x.gguf", 1),
    ],
)
def test_what_cannot_be_is_told_in_a_line(tmp_path: Path, words: tuple[str, ...], said: str, code: int) -> None:
    """Without a traceback."""
    done = subprocess.run(
        [*PROGRAM, *words],
        capture_output=True,
        text=True,
        timeout=S_MAX,
        env=environment(tmp_path),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_model_writes_moves_no_cursor() -> None:
    """Escapes and turned text go; lines, tabs and joined letters stay."""
    assert printable("a\x1b[2Jb\r\x07\n\tc\u202ed\u200de") == "a[2Jb\n\tcd\u200de"
