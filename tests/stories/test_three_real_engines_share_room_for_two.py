"""Three real llama-servers and a RAM budget for two, under mixed load from many clients (bench/soak.py runs it in full)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.soak import reap_adopted, soak, state_and_parent


@pytest.mark.engine
def test_all_is_answered_nothing_is_overbooked_and_nothing_is_left(tmp_path: Path, llama_server: Path) -> None:
    """Every answer 200 and complete, the book within the budget in every sample, nothing left after SIGTERM nor after SIGKILL."""
    figures = soak(tmp_path, clients=8, requests=15, seed=1)
    print(figures)
    assert figures.wrong() == []
    assert (figures.asked, figures.complete, figures.streamed) == (120, 120, 40)
    assert (figures.together_max, figures.reserved_max_mib) == (2, figures.budget_mib)
    assert figures.samples > 10
    assert min(figures.starts.values()) >= 1
    assert sum(figures.starts.values()) > 3


def test_dead_orphans_that_came_to_this_process_are_no_leftovers() -> None:
    """Greenroom's host code makes its process the reaper of orphans; under a runner of several tests that is the soak's own."""
    child = subprocess.Popen([sys.executable, "-S", "-E", "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
    assert state_and_parent(child.pid) == ("Z", os.getpid())

    reap_adopted([child.pid, os.getppid()])

    assert state_and_parent(child.pid) == ("", 0)
    child.wait()
