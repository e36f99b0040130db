"""A command's folder goes with it, or with the next command when it was killed; never under somebody who works in it."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.cli.folder import LOCK, own_folder, sweep

OWNER = """
import subprocess, sys
from greenroom.cli.folder import own_folder
with own_folder("greenroom-x-") as work:
    (work.path / "state").mkdir()
    (work.path / "state" / "file").write_text("x")
    held = subprocess.Popen([sys.executable, "-c", "input()"], stdin=sys.stdin, stdout=subprocess.DEVNULL, pass_fds=(work.lock.fileno(),))
    print(work.path, held.pid, flush=True)
    held.wait()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    tempfile.tempdir = None


def test_it_is_there_while_the_command_runs_and_gone_afterwards(temporary: Path) -> None:
    """No other command takes it meanwhile."""
    with own_folder("greenroom-x-") as work:
        (work.path / "file").write_text("x")
        with own_folder("greenroom-x-") as other:
            assert other.path != work.path
        assert (work.path / "file").exists()
    assert list(temporary.iterdir()) == []


def test_a_killed_command_leaves_its_folder_to_the_next_one(temporary: Path) -> None:
    """As soon as its child has ended, too, which works in it for a while longer."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        name, pid = owner.stdout.readline().split()
        child, work = os.pidfd_open(int(pid)), Path(name)
        sweep("greenroom-x-")
        assert (work / "state" / "file").exists()  # the owner lives

        owner.kill()
        owner.wait()
        sweep("greenroom-x-")
        assert (work / "state" / "file").exists()  # its child does

        signal.pidfd_send_signal(child, signal.SIGKILL)
        assert select.select([child], [], [], 30)[0]
        os.close(child)
    with own_folder("greenroom-x-") as mine:
        assert list(temporary.iterdir()) == [mine.path]


def left(temporary: Path, name: str = "greenroom-x-left") -> Path:
    """What a killed command left."""
    (path := temporary / name).mkdir()
    (path / LOCK).touch()
    (path / "file").touch()
    return path


def test_what_is_not_ours_to_remove_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is just being made, a file or a link of the name, another prefix, another user's folder."""
    (temporary / "greenroom-x-new").mkdir()
    (temporary / "greenroom-x-file").touch()
    elsewhere = left(temporary, "elsewhere")
    (temporary / "greenroom-x-link").symlink_to(elsewhere)
    names = {item.name for item in temporary.iterdir()}
    sweep("greenroom-x-")
    assert {item.name for item in temporary.iterdir()} == names
    assert (elsewhere / "file").exists()

    path = left(temporary)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    sweep("greenroom-x-")
    assert (path / "file").exists()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    sweep("greenroom-x-")
    assert not path.exists()


def test_what_could_not_be_removed_is_tried_again(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock goes last; the command itself goes on."""
    path = left(temporary)
    (path / "state").mkdir()
    remove = shutil.rmtree

    def fails(folder: Path) -> None:
        raise PermissionError(folder)

    monkeypatch.setattr(shutil, "rmtree", fails)
    sweep("greenroom-x-")
    assert (path / LOCK).exists()
    monkeypatch.setattr(shutil, "rmtree", remove)
    sweep("greenroom-x-")
    assert not path.exists()
