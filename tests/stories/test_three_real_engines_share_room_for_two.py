"""Three real llama-servers and a RAM budget for two, under mixed load from many clients (bench/soak.py runs it in full)."""

from pathlib import Path

import pytest
from bench.soak import soak


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
