"""`greenroom check` of models in containers, with runtimes that make none."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.cli.conftest import run
from tests.stories.boxes import IMAGE, Dock

MODEL = '{{cmd: "engine --port ${{PORT}}", memory: 1GiB, container: {{runtime: podman, image: "{image}", pull: {pull}}}}}'


@pytest.fixture
def dock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dock:
    made = Dock(tmp_path)
    monkeypatch.setenv("PATH", made.env["PATH"])
    return made


def written(tmp_path: Path, *models: tuple[str, str, str]) -> str:
    path = tmp_path / "greenroom.yaml"
    lines = [f"  {name}: {MODEL.format(image=image, pull=pull)}" for name, image, pull in models]
    path.write_text("devices: {gpu0: {memory: 24GiB}}\nmodels:\n" + "\n".join(lines) + "\n")
    return str(path)


def test_it_tells_where_a_model_runs_and_whether_its_image_is_here(tmp_path: Path, dock: Dock) -> None:
    """Asked of its runtime; nothing is pulled."""
    path = written(
        tmp_path, ("a", IMAGE, "missing"), ("b", "new:1", "missing"), ("c", IMAGE, "always"), ("d", "oci-archive:/x.tar", "missing")
    )
    result = run("check", path)
    body = json.loads(run("check", path, "--json").output)

    assert result.exit_code == 0, result.output
    assert [line for line in result.output.splitlines() if " runs in " in line] == [
        f"a runs in podman, image {IMAGE}, which is here",
        "b runs in podman, image new:1, which the first start pulls",
        f"c runs in podman, image {IMAGE}, which each start pulls anew",
        "d runs in podman, image oci-archive:/x.tar",
    ]
    assert [model["container"]["image_is_here"] for model in body["models"]] == [True, False, True, None]
    assert dock.calls("pull") == []


def test_an_image_that_must_not_be_fetched_and_is_not_here_is_a_problem(tmp_path: Path, dock: Dock) -> None:
    """Exit 1, with the command that brings it."""
    result = run("check", written(tmp_path, ("a", "new:1", "never"), ("b", IMAGE, "never")))

    assert result.exit_code == 1
    assert "a: the image new:1 is not here, and `pull: never` forbids to fetch it; `podman pull new:1`" in result.output


def test_a_runtime_that_does_not_answer_is_told_and_bounded(tmp_path: Path, dock: Dock, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may answer when it is needed: no problem, however many models there are."""
    monkeypatch.setattr("greenroom.cli.check_boxes.ASK_S_MAX", 1.0)
    dock.faults(image="hang")
    began_at = time.monotonic()
    result = run("check", written(tmp_path, *((f"m{number}", f"new:{number}", "never") for number in range(12))))

    assert result.exit_code == 0, result.output
    assert result.output.count("podman does not do its work: podman image did not answer within 1 s") == 12
    assert time.monotonic() - began_at < 11


def test_a_runtime_that_is_not_here_is_the_only_thing_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is there to be asked."""
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run("check", written(tmp_path, ("a", IMAGE, "missing")))

    assert result.exit_code == 1
    assert "a: podman was not found on PATH" in result.output
    assert " runs in " not in result.output
