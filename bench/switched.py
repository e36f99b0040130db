"""`greenroom` whose accounts can be taken away and given back while it serves, for benches only.

    python -m bench.switched serve -c FILE ...      as `greenroom serve -c FILE ...`

SIGUSR1: nobody is told of events and requests any more, as if there were neither ledger nor metrics.  SIGURG: requests that
ended are counted, and nothing more.  SIGUSR2: as before.
One process in both states: two processes differ by more than what is measured here.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from greenroom.cli import main
from greenroom.proxy.server import NoHooks
from greenroom.serve.server import GreenroomServer


class Switched(GreenroomServer):
    def _watch_signals(self) -> None:
        super()._watch_signals()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._take_away)
        loop.add_signal_handler(signal.SIGURG, self._count_only)
        loop.add_signal_handler(signal.SIGUSR2, self._give_back)
        self._kept: tuple[list[Any], Any] = (list(self.shell.hooks), self._plane_now.hooks)

    def _take_away(self) -> None:
        self.shell.hooks.clear()
        self._plane_now.hooks = NoHooks()

    def _count_only(self) -> None:
        self.shell.hooks.clear()
        self._plane_now.hooks = self.accounts

    def _give_back(self) -> None:
        hooks, told = self._kept
        self.shell.hooks[:] = hooks
        self._plane_now.hooks = told


if __name__ == "__main__":
    import greenroom.serve.server

    greenroom.serve.server.GreenroomServer = Switched  # type: ignore[misc]
    main()
