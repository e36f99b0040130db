"""Keys of a whole server: a real process, a fake engine under it, clients and the command line in front."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from greenroom.cli import main as cli
from greenroom.config.model import Config, KeyConfig
from greenroom.serve.server import Refused, check_public, hide_keys

FE = Path(__file__).resolve().parent.parent / "fakes" / "fe.py"
BOSS, TEAM, LATER = "sk-boss-0a1b2c3d", "sk-team-4e5f6071", "sk-later-8293a4b5"
PROGRAM = "import sys; from greenroom.cli import main; sys.argv[0] = 'greenroom'; main()"
PATIENCE_S = 30.0


def test_what_holds_a_key_leaves_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever kind the key is; other variables stay."""
    for name, value in (("A", TEAM), ("B", BOSS), ("C", "other")):
        monkeypatch.setenv(f"GREENROOM_TEST_{name}", value)

    hide_keys(Config("c", (), keys=(KeyConfig(BOSS, "boss"), KeyConfig(TEAM, "team", ("view",)))))

    assert {name: value for name, value in os.environ.items() if name.startswith("GREENROOM_TEST_")} == {"GREENROOM_TEST_C": "other"}


def test_a_public_address_needs_a_key_of_any_scope() -> None:
    """As long as there is one, nobody comes in without."""
    with pytest.raises(Refused):
        check_public("0.0.0.0", Config("c", ()), no_auth=False)
    check_public("0.0.0.0", Config("c", (), keys=(KeyConfig(TEAM, "team", ("view",)),)), no_auth=False)


class Running:
    """A server in a process of its own."""

    def __init__(self, home: Path, config: Mapping[str, Any], first: str = "") -> None:
        """`first`: Python that its process runs before."""
        self.home, self.config, self.program = home, home / "greenroom.yaml", first + PROGRAM
        self.config.write_text(json.dumps(config))
        self.output: list[str] = []
        self.url = ""

    async def __aenter__(self) -> Running:
        environment = {**os.environ, "TEAM_KEY": TEAM, "BOSS_KEY": BOSS, "XDG_STATE_HOME": str(self.home)}
        command = ("serve", "-c", str(self.config), "--listen", "127.0.0.1:0", "--state-dir", str(self.home / "state"))
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", self.program, *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        self.reading = asyncio.ensure_future(self._read())
        found = re.search(r"http://\S+", await self.said("http://"))
        assert found is not None
        self.url = found[0]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), PATIENCE_S)
        except TimeoutError:
            self.process.kill()
        await self.reading

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.output.append(line.decode(errors="replace"))

    async def said(self, wanted: str) -> str:
        """The line of its output that holds it."""
        async with asyncio.timeout(PATIENCE_S):
            while not (lines := [line for line in self.output if wanted in line]):
                assert self.process.returncode is None, self.output
                await asyncio.sleep(0.02)
        return lines[0]

    async def ask(self, method: str, path: str, key: str = "", body: Any = None) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with aiohttp.ClientSession() as session, session.request(method, self.url + path, headers=headers, json=body) as answer:
            return answer.status, await answer.text()

    async def cli(self, *arguments: str, key: str) -> tuple[int, str]:
        result = await asyncio.to_thread(CliRunner().invoke, cli, [*arguments, "--url", self.url], env={"GREENROOM_API_KEY": key})
        return result.exit_code, result.output


async def test_keys_of_a_running_server(tmp_path: Path) -> None:
    """Scopes, models, the command line, a reload; no key in any log, status, event, file, engine's environment or command."""
    engine = [sys.executable, "-S", "-E", str(FE), "--port", "${PORT}", f"journal={tmp_path / 'journal'}", "env=TEAM_KEY,BOSS_KEY,HOME"]
    model = {"cmd": [*engine, f"log=told {TEAM} and {BOSS}"], "memory": "10MiB", "device": "d0"}
    keys: list[Any] = ["${env.BOSS_KEY}", {"key": "${env.TEAM_KEY}", "name": "team", "scopes": "inference", "models": ["a*"]}]
    config = {
        "apiKeys": keys,
        "devices": {"d0": {"memory": "100MiB", "headroom": "0MiB", "probe": "none"}},
        "startPort": 20_000 + os.getpid() * 40 % 20_000,
        "models": {"a1": model, "b1": model},
    }
    chat = {"model": "a1", "messages": []}
    async with Running(tmp_path, config) as server:
        assert (await server.ask("GET", "/health"))[0] == 200
        assert (await server.ask("GET", "/ui/"))[0] == 200
        assert (await server.ask("POST", "/v1/chat/completions", body=chat))[0] == 401
        assert (await server.ask("POST", "/v1/chat/completions", TEAM, chat))[0] == 200
        assert (await server.ask("POST", "/v1/chat/completions", TEAM, {**chat, "model": "b1"}))[0] == 403
        assert (await server.ask("GET", "/api/status", TEAM))[0] == 403
        assert (await server.ask("POST", "/api/models/a1/pin", TEAM))[0] == 403
        assert (await server.ask("POST", "/api/models/a1/pin", BOSS))[0] == 200
        seen = [await server.ask("GET", path, BOSS) for path in ("/api/status", "/api/logs", "/api/models/a1/logs", "/api/events?follow=0")]
        assert [status for status, _ in seen] == [200] * 4
        assert "told *** and ***" in seen[2][1]

        assert (await server.cli("ps", key=BOSS))[0] == 0
        code, said = await server.cli("ps", key=TEAM)
        assert (code, said) == (1, "This API key lacks the scope view, which this route needs; ask for another key.\n")
        checked = await asyncio.to_thread(
            CliRunner().invoke, cli, ["check", str(server.config)], env={"BOSS_KEY": BOSS, "TEAM_KEY": TEAM, "GREENROOM_API_KEY": BOSS}
        )
        assert checked.exit_code == 0, checked.output

        keys[1] = {"key": LATER, "name": "later", "scopes": ["view"]}
        server.config.write_text(json.dumps(config))
        server.process.send_signal(signal.SIGHUP)
        await server.said("configuration read again")
        assert (await server.ask("POST", "/v1/chat/completions", TEAM, chat))[0] == 401
        assert (await server.ask("POST", "/v1/chat/completions", LATER, chat))[0] == 403
        assert (await server.ask("GET", "/api/status", LATER))[0] == 200

        keys[1] = {"key": LATER, "scopes": ["everything"]}
        server.config.write_text(json.dumps(config))
        server.process.send_signal(signal.SIGHUP)
        await server.said("reload refused")
        assert (await server.ask("GET", "/api/status", LATER))[0] == 200
        assert (await server.ask("GET", "/api/status"))[0] == 401

    assert server.process.returncode == 0
    journal = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    starts = [line for line in journal if line.get("env") is not None]
    assert [set(line["env"]) & {"TEAM_KEY", "BOSS_KEY"} for line in starts] == [set()]
    told = [*server.output, *(text for _, text in seen), checked.output]
    told += [path.read_bytes().decode("latin-1") for path in (tmp_path / "state").rglob("*") if path.is_file()]
    for key in (BOSS, TEAM, LATER):
        assert [text for text in told if key in text] == []
