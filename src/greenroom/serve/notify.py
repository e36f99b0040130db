"""Tell systemd how it goes, where it has asked (`Type=notify`); without it nothing happens."""

from __future__ import annotations

import contextlib
import os
import socket

VARIABLE = "NOTIFY_SOCKET"


class Notifier:
    """Takes the variable out of the environment: engines inherit it, and must not speak for greenroom."""

    def __init__(self) -> None:
        self.address = os.environ.pop(VARIABLE, "")

    def tell(self, *lines: str) -> None:
        """Such as READY=1, STOPPING=1.  Never raises, never waits: nobody may listen."""
        if not self.address.startswith(("/", "@")):
            return
        where = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(lines).encode(), where)
