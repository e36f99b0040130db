"""A `greenroom serve` of a command's own: started, waited for, ended with it however it ends."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from greenroom.cli import text
from greenroom.cli.folder import Folder

HOST = "127.0.0.1"
UP_S_MAX = 30.0
STOP_S_MAX = 40.0  # the server lets requests in flight end
LOG_LINES_SHOWN = 12
PR_SET_PDEATHSIG = 1


class CannotRun(Exception):
    """It cannot run here; one sentence that says what to do."""


@contextlib.contextmanager
def serving(config: Path, work: Folder, port: int, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """The server, up.  Its state and its output are kept in `work`.  Raises CannotRun."""
    argv = [sys.executable, "-c", "from greenroom.cli import main; main()", "serve", "-c", str(config)]
    argv += ["--listen", f"{HOST}:{port}", "--state-dir", str(work.path / "state")]
    output_path = work.path / "server.log"
    with open(output_path, "wb") as output:
        # A session of its own: Ctrl-C reaches the command, which ends the server in order.
        follow = _end_with(os.getpid())
        server = subprocess.Popen(  # no other thread runs yet that a function called after the fork could wait for
            argv,
            stdout=output,
            stderr=output,
            env={**os.environ, **(env or {})},
            start_new_session=True,
            pass_fds=(work.lock.fileno(),),
            preexec_fn=follow,  # noqa: PLW1509
        )
    try:
        _wait_up(server, port, output_path)
        yield server
    finally:
        server.terminate()
        try:
            server.wait(STOP_S_MAX)
        except (subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):  # told again
            server.kill()
            server.wait()


def _end_with(parent: int) -> Callable[[], None] | None:
    """What a child calls to get SIGTERM when its parent dies without a word."""
    if sys.platform != "linux":
        return None
    import ctypes

    libc = ctypes.CDLL(None)  # loaded before the fork: nothing may be imported after it

    def arrange() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return arrange


def _wait_up(server: subprocess.Popen[bytes], port: int, output: Path) -> None:
    end = time.monotonic() + UP_S_MAX
    while time.monotonic() < end and server.poll() is None:
        connection = http.client.HTTPConnection(HOST, port, timeout=1)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.02)
        finally:
            connection.close()
    words = output.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    raise CannotRun("the server did not come up; its last words:\n" + "\n".join(map(text.safe_line, words)))
