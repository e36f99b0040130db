"""A command that detaches: forks twice, starts a session of its own, and exits 0 while the engine goes on.

    host_daemon.py [plain|blank] PROGRAM ARGS...

`blank`: the engine also gets an empty environment, as some launchers do.
"""

import os
import sys


def main() -> None:
    how, *argv = sys.argv[1:]
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(argv[0], argv, {} if how == "blank" else dict(os.environ))
        os._exit(0)
    os.wait()


main()
