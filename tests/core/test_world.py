"""Thousands of small worlds of faults, each checked against every invariant after every event.

The seeds are always the same (GREENROOM_SEEDS of them), so that a change is judged by what it changed; `make worlds`
looks for faults in worlds never seen before.  A failing seed names the command that plays it again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.world import SeedFailed, play

SEEDS = int(os.environ.get("GREENROOM_SEEDS", "400"))
BATCH = 25
REPLAYS = 16
ROOT = Path(__file__).resolve().parent.parent.parent


def fixed() -> list[range]:
    return [range(first, min(first + BATCH, SEEDS)) for first in range(0, SEEDS, BATCH)]


def play_all(seeds: range) -> None:
    failures = []
    for seed in seeds:
        try:
            play(seed)
        except SeedFailed as exc:
            failures.append(str(exc))
    if failures:
        first, rest = failures[0], [text.splitlines()[0] for text in failures[1:]]
        pytest.fail("\n".join([first, *rest]), pytrace=False)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seeds", fixed(), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_no_invariant_breaks_in_the_known_worlds(seeds: range) -> None:
    """Memory is never overbooked, nobody is cut or starved, pins hold, everything ends: see tests/watch.py."""
    play_all(seeds)


def test_the_same_seed_plays_the_same_story() -> None:
    """The scheduler is a function of its events: two processes, which order sets differently, give the same actions."""
    again = "from tests.world import play; print(*(play(seed).digest for seed in range({})))"
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", again.format(REPLAYS)], cwd=ROOT, env=env, check=True, capture_output=True, text=True)

    assert done.stdout.split() == [play(seed).digest for seed in range(REPLAYS)]


def test_the_worlds_are_eventful() -> None:
    """The checks mean something: requests are served, refused and cut, engines start and leave."""
    stories = [play(seed) for seed in range(REPLAYS)]

    assert sum(s.admitted for s in stories) > 1000
    assert sum(s.refused for s in stories) > 20
    assert sum(s.starts for s in stories) > 50
    assert sum(s.moves for s in stories) > 50
    assert sum(s.cuts for s in stories) > 5
    assert sum(s.sleeps for s in stories) > 10
    assert sum(s.dozes for s in stories) > 0
    assert sum(s.sleep_faults for s in stories) > 3
