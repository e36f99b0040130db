"""systemd is told how it goes, where it has asked."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from greenroom.serve.notify import Notifier


def test_it_tells_by_the_socket_and_hides_it_from_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines arrive as one message, and the variable is gone from the environment that engines inherit."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "n"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        Notifier().tell("READY=1", "STATUS=ok")
        assert manager.recv(100) == b"READY=1\nSTATUS=ok"
    assert "NOTIFY_SOCKET" not in os.environ


def test_an_abstract_socket_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`@name` is a socket without a file."""
    name = f"greenroom-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        Notifier().tell("STOPPING=1")
        assert manager.recv(100) == b"STOPPING=1"


@pytest.mark.parametrize("address", ["", "relative", "/nonexistent/socket", "@" + "x" * 300])
def test_nobody_listening_is_no_fault(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a manager, or with one that is gone, nothing happens."""
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notifier = Notifier()
    notifier.tell("READY=1")
    assert notifier.address == address
