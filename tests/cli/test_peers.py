"""Peers in what people read: the footer of `ps`, the lines of `check`, which calls nobody."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from greenroom.cli import main, ps

ONE: dict[str, Any] = {
    "id": "big-box",
    "proxy": "https://10.0.0.5:8443",
    "healthy": True,
    "since_s": 3 * 3600.0,
    "last_error": "it broke off its answer",
    "models": ["llama-70b", "org/model-a"],
    "in_flight": 2,
    "requests": 140,
    "failures": 1,
}


def status(*peers: dict[str, Any]) -> dict[str, Any]:
    return {"models": [], "devices": [], "queue": {"length": 0, "oldest_s": 0.0}, "peers": list(peers)}


def test_ps_has_a_line_for_each_peer() -> None:
    """Why it is down is told, and nothing of the past while it is up."""
    lines = ps.page(status(ONE, {**ONE, "id": "other", "healthy": False, "failures": 0, "requests": 1, "in_flight": 0, "since_s": 12.0}))
    assert lines[-2:] == [
        "peer big-box  https://10.0.0.5:8443  up for 3 h, 2 in flight, 140 requests (1 failed): llama-70b, org/model-a",
        "peer other  https://10.0.0.5:8443  DOWN for 12 s, 0 in flight, 1 request: llama-70b, org/model-a; it broke off its answer",
    ]
    assert not any("peer" in line for line in ps.page(status()))


def test_ps_shows_no_control_character_of_a_peer() -> None:
    """What a peer answered stands in `last_error`."""
    (line,) = ps.page(status({**ONE, "healthy": False, "last_error": "it said \x1b[2J\n" + "x" * 900}))[-1:]
    assert "\x1b" not in line
    assert "\n" not in line
    assert len(line) < 300


def test_check_names_peers_and_calls_none(tmp_path: Path) -> None:
    """Their keys are shown nowhere."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.05)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        path = tmp_path / "c.yaml"
        path.write_text(f"peers:\n  box: {{proxy: '{address}', apiKey: sk-abcdefghij, models: [x, {{y: org/y}}]}}\n")
        shown = CliRunner().invoke(main, ["check", str(path)])
        assert shown.exit_code == 0, shown.output
        assert f"peer box  {address}: x, y (org/y)\n" in shown.output
        value = CliRunner().invoke(main, ["check", "--json", str(path)])
        assert json.loads(value.output)["peers"] == [{"id": "box", "proxy": address, "models": ["x", "y"]}]
        assert "sk-abcdefghij" not in shown.output + value.output
        try:
            listener.accept()
        except TimeoutError:
            return
        raise AssertionError("check called the peer")
