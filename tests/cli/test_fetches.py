"""What the commands say of a model whose files are on their way."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.cli.load import PlainLines, ending, progress
from greenroom.cli.ps import next_of_absent

FETCH: dict[str, Any] = {"done_bytes": 34, "total_bytes": 100, "eta_s": 12.0, "stage": "fetching", "waiting": 2}


def absent(fetch: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": "qwen", "state": "stopped", "instances": [], "absent": True, "fetch": fetch, "eta_s": 30.0, "queued": 0}


def test_a_load_shows_the_fetch_and_not_that_nothing_moves(capsys: pytest.CaptureFixture[str]) -> None:
    """Each figure on a terminal, one line in a pipe."""
    assert progress(absent(FETCH)) == "qwen  fetching, 34%, about 12 s"
    lines = PlainLines("ready")
    for done in (34, 35):
        lines(progress(absent({**FETCH, "done_bytes": done})))
    assert capsys.readouterr().out == "qwen  fetching, 34%, about 12 s\n"


def test_who_waits_for_files_is_counted_by_ps() -> None:
    """They stand in no queue of the scheduler."""
    assert next_of_absent(absent(FETCH)) == "fetching, 34%, about 12 s, 2 waiting"
    assert next_of_absent(absent({**FETCH, "waiting": 0})) == "fetching, 34%, about 12 s"
    assert next_of_absent(absent(None)) == "its files are fetched on request"
    assert next_of_absent({**absent(FETCH), "pinned": True}).startswith("pinned, fetching, 34%")


def test_a_fetch_that_failed_is_seen_in_ps() -> None:
    """Not only by who asks why: a pinned one tries again and again."""
    failed = {**absent(None), "fetch_error": "401: log in first\x1b[2J"}
    assert next_of_absent(failed) == "could not be fetched: 401: log in first\\x1b[2J"
    assert next_of_absent({**failed, **absent(FETCH)}).startswith("fetching")


def test_an_unload_tells_that_it_stopped_a_fetch() -> None:
    """In the server's words: the model was stopped before."""
    value = {"done": True, "message": "the fetch of qwen was stopped; what has come is kept"}
    assert ending(value, absent(None), "unload", 0.1) == value["message"]


def test_a_pin_tells_that_its_model_is_fetched() -> None:
    """It is not loaded yet."""
    value = {"done": True, "message": "qwen is pinned, its files are fetched, and it is loaded when they are here"}
    assert ending(value, absent(FETCH), "pin", 0.1) == value["message"]


def test_a_pin_tells_that_its_model_cannot_start() -> None:
    value = {"done": True, "message": "qwen is pinned, and cannot start: its files are not here"}
    model = {**absent(None), "absent": False, "missing": "its files are not here"}
    assert ending(value, model, "pin", 0.1) == value["message"]
    assert ending({"done": True, "message": "-"}, {**model, "missing": ""}, "pin", 0.1) == "qwen is pinned: it is never evicted"
