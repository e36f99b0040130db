"""A small supervisor of its own, for tests that kill it: STATE_DIR, then starts engines, prints their pids as JSON, and waits."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from greenroom.host.logs import LogRing
from greenroom.host.processes import spawn
from greenroom.host.supervisor import start_watcher
from tests.host.engines import a_launch, a_port, daemon_argv, engine_argv, printed


async def main(state_dir: Path, watched: bool) -> None:
    supervisor = start_watcher(state_dir)
    plain = engine_argv(a_port(), "on_term=ignore")
    engines = {
        "plain": plain,
        "wrapped": ("sh", "-c", f"{' '.join(engine_argv(a_port(), 'on_term=ignore'))}; echo after"),
        "daemon": daemon_argv(a_port(), "plain", "on_term=ignore"),
    }
    pids = {}
    for name, argv in engines.items():
        log = LogRing(name)
        process = await spawn(a_launch(argv), token=f"{name}-{os.getpid()}", log=log, supervisor=supervisor)
        await printed(log, "listening")
        pids[name] = sorted(process.tree())
    if not watched and supervisor.watcher_pid is not None:
        os.kill(supervisor.watcher_pid, 9)
    print(json.dumps({"pids": pids, "watcher": supervisor.watcher_pid}), flush=True)
    await asyncio.Event().wait()


asyncio.run(main(Path(sys.argv[1]), sys.argv[2] == "watched"))
