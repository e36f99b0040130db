"""The question a container is asked about itself: run here against a server, with the programs that an image may have."""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from greenroom.deploy import health
from greenroom.deploy.intent import Probe, Workload


class Answers(http.server.BaseHTTPRequestHandler):
    """200 for the path that is asked for, 503 for what begins with /bad."""

    def do_GET(self) -> None:
        body = b"ok" * 10_000
        self.send_response(503 if self.path.startswith("/bad") else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def asked(kind: str, path: str, port: int, folder: Path, programs: tuple[str, ...]) -> bool:
    """Whether it is well, in an image with these programs only."""
    for name in programs:
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"{name} is not here")
        (folder / name).symlink_to(found)
    workload = Workload("w", "m", "i", ("x",), port, ready=Probe(path, port, 10), kind=kind)
    done = subprocess.run(health.command(workload), env={"PATH": str(folder)}, capture_output=True, timeout=60, check=False)
    return done.returncode == 0


@pytest.mark.parametrize("programs", [("curl",), ("wget",), ("bash", "timeout"), ("curl", "wget", "bash", "timeout")])
@pytest.mark.parametrize(("path", "is_well"), [("/health", True), ("/bad", False), ("", True)])
def test_whatever_an_image_has_can_ask(tmp_path: Path, port: int, programs: tuple[str, ...], path: str, is_well: bool) -> None:
    """The same verdict by curl, by wget and by bash alone; without a path any answer will do."""
    assert asked("tei", path, port, tmp_path, programs) is is_well


@pytest.mark.parametrize("programs", [("curl",), ("wget",), ("bash", "timeout")])
def test_nobody_there_is_not_well(tmp_path: Path, free_port: Callable[[], int], programs: tuple[str, ...]) -> None:
    """A closed port fails, whoever asks."""
    assert not asked("generic", "/health", free_port(), tmp_path, programs)


def test_a_container_in_which_nobody_can_ask_is_left_alone(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """It would be ended again and again for what its image lacks."""
    assert asked("greenroom", "/health", free_port(), tmp_path, ())


@pytest.mark.skipif(not os.path.exists("/bin/sh"), reason="no shell")
def test_a_path_is_no_format_and_no_script(tmp_path: Path, port: int) -> None:
    """Percent signs, backslashes, quotes and dollars of a path are asked for as they are."""
    for path in ("/%s%n", "/a\\nb", "/it's", "/$HOME`id`", '/"'):
        folder = tmp_path / str(abs(hash(path)))
        folder.mkdir()
        assert asked("tei", path, port, folder, ("bash", "timeout")), path


def test_images_that_have_curl_are_asked_plainly() -> None:
    """One program, no shell."""
    workload = Workload("w", "m", "i", ("x",), 8000, ready=Probe("/health", 8000, 10), kind="vllm")
    assert health.command(workload)[0] == "curl"
    assert health.command(workload)[-1] == "http://127.0.0.1:8000/health"
