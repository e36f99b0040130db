"""Generated commands run for real: taken out of the units as systemd and podman would run them, and asked a question."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from greenroom.config.yaml_out import dump
from tests.deploy import units
from tests.deploy.readback import back
from tests.deploy.test_quadlet import run_of
from tests.validators import tool

UP_S_MAX = 60.0  # loaded machines are slow
DOWN_S_MAX = 60.0
GREENROOM = Path(sys.executable).with_name("greenroom")

pytestmark = pytest.mark.engine


def generate(*words: str, cwd: Path) -> None:
    """`greenroom generate …`, as it is typed."""
    done = subprocess.run([GREENROOM, "generate", *words], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def running(argv: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(argv, env={**os.environ, **env}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(DOWN_S_MAX)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def ask(port: int, model: str, key: str = "") -> dict[str, Any]:
    body = json.dumps({"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=UP_S_MAX) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + UP_S_MAX
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text(errors="replace")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    pytest.fail(f"not healthy within {UP_S_MAX} s: {log.read_text(errors='replace')}")


def config(folder: Path, model: Path, engine: Path, port: int, start_port: int, **top: Any) -> Path:
    """A configuration with one real model of an awkward name, in a folder with a space."""
    home = folder / "my models"
    home.mkdir()
    (home / "tiny chat.gguf").symlink_to(model)
    entry = {
        "cmd": [str(engine), "--model", str(home / "tiny chat.gguf"), "--port", "${PORT}", "--ctx-size", "256", "--parallel", "1"],
        "env": ['NOTE=50% "x" \\d$HOME', f"LD_LIBRARY_PATH={engine.parent}"],
        "device": "ram",
    }
    path = folder / "greenroom.yaml"
    path.write_text(dump({"startPort": start_port, "devices": {"ram": {"memory": "2GiB"}}, "models": {"org/tiny:1 q4": entry}, **top}))
    return path


def test_the_unit_of_a_bare_host_serves(tmp_path: Path, llama_server: Path, tiny_chat: Path, free_port: Callable[[], int]) -> None:
    """ExecStart as systemd would run it: it says that it is ready, answers with the key from the environment, and ends on TERM."""
    port, start_port = free_port(), free_port()
    path = config(tmp_path, tiny_chat, llama_server, port, start_port, apiKeys=["sk-$ecret%1"])
    generate(
        "systemd", "-c", str(path), "--target", "cpu", "--listen", f"127.0.0.1:{port}", "--user", "-o", str(tmp_path / "out"), cwd=tmp_path
    )
    unit = units.parse((tmp_path / "out" / "greenroom.service").read_text())
    (tmp_path / "etc" / "greenroom").mkdir(parents=True)
    (tmp_path / "etc" / "greenroom" / "greenroom.yaml").write_text((tmp_path / "out" / "greenroom.yaml").read_text())
    argv = units.words(units.value(unit, "Service", "ExecStart"), {"%E": str(tmp_path / "etc"), "%S": str(tmp_path / "state")})
    assert argv[0] == str(GREENROOM)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        address = os.path.relpath(tmp_path / "notify")
        manager.bind(address)
        manager.settimeout(UP_S_MAX)
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "GREENROOM_API_KEY": "sk-$ecret%1"}
        with running(argv, env, tmp_path / "log") as process:
            assert manager.recv(4096).decode().splitlines()[0] == "READY=1"
            answer = ask(port, "org/tiny:1 q4", "sk-$ecret%1")
            assert answer["choices"][0]["message"]["role"] == "assistant"
            with pytest.raises(urllib.error.HTTPError, match="401"):
                ask(port, "org/tiny:1 q4")
            process.send_signal(signal.SIGTERM)
            assert manager.recv(4096) == b"STOPPING=1"
            assert process.wait(DOWN_S_MAX) == 0, (tmp_path / "log").read_text(errors="replace")


def test_the_container_of_greenroom_serves(tmp_path: Path, llama_server: Path, tiny_chat: Path, free_port: Callable[[], int]) -> None:
    """The command that podman would run, with paths turned back by its own mounts, serves the model."""
    port, start_port = free_port(), free_port()
    path = config(tmp_path, tiny_chat, llama_server, port, start_port)
    generate("quadlet", "-c", str(path), "--target", "cpu", "--listen", f"127.0.0.1:{port}", "-o", str(tmp_path / "out"), cwd=tmp_path)
    run = run_of(units.quadlet(tmp_path / "out")["greenroom.service"])
    assert run.all("--publish") == [f"127.0.0.1:{port}:8080"]
    for mount in run.mounts.values():
        if mount["type"] == "volume":
            mount["source"] = str(tmp_path / mount["source"])
    mounts = {target: mount for target, mount in run.mounts.items() if mount["type"] == "bind"}
    volumes = {target: {"source": str(tmp_path / mount["source"])} for target, mount in run.mounts.items() if mount["type"] == "volume"}
    inside = mounts["/etc/greenroom/greenroom.yaml"]["source"]
    # What the file says inside, at home: its paths, and the program that an image has by name.
    text = back(Path(inside).read_text(), {target: mount for target, mount in mounts.items() if target.startswith("/models/")})
    Path(inside).write_text(text.replace("- llama-server\n", f"- {json.dumps(str(llama_server))}\n"))
    words = [back(word, {**mounts, **volumes}) for word in run.command]
    argv = [str(GREENROOM), *(word.replace("0.0.0.0:8080", f"127.0.0.1:{port}") for word in words[1:])]
    env = {name: back(value, volumes) for name, value in run.env.items()}
    with running(argv, env, tmp_path / "log") as process:
        until_healthy(process, port, tmp_path / "log")
        health = json.loads(run.one("--health-cmd"))
        assert (
            subprocess.run([tool(health[0]), *health[1:-1], health[-1].replace(":8080", f":{port}")], timeout=60, check=False).returncode
            == 0
        )
        assert ask(port, "org/tiny:1 q4")["choices"][0]["message"]["role"] == "assistant"
        process.terminate()
        assert process.wait(DOWN_S_MAX) == 0


def test_the_container_of_an_engine_serves(tmp_path: Path, llama_server: Path, tiny_chat: Path, free_port: Callable[[], int]) -> None:
    """One unit a model: the engine's own command answers on its port, by the model's name, and is healthy by its own check."""
    start_port = free_port()
    path = config(tmp_path, tiny_chat, llama_server, free_port(), start_port)
    generate("quadlet", str(path), "--mode", "engines", "--target", "cpu", "-o", str(tmp_path / "out"), cwd=tmp_path)
    (service,) = (text for name, text in units.quadlet(tmp_path / "out").items() if name.startswith("greenroom-org"))
    run = run_of(service)
    assert run.all("--publish") == [f"127.0.0.1:{start_port}:{start_port}"]
    assert run.command[0] == "/app/llama-server"
    argv = [str(llama_server), *(back(word, run.mounts).replace("0.0.0.0", "127.0.0.1") for word in run.command[1:])]
    with running(argv, run.env, tmp_path / "log") as process:
        until_healthy(process, start_port, tmp_path / "log")
        health = json.loads(run.one("--health-cmd"))
        assert subprocess.run([tool(health[0]), *health[1:]], timeout=60, check=False).returncode == 0
        answer = ask(start_port, "org/tiny:1 q4")
        assert answer["model"] == "org/tiny:1 q4"
