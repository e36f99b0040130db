"""Entries that can never start are told before anything is started (B39)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from greenroom import demo_models
from greenroom.config.model import ContainerConfig
from greenroom.engines.detect import describe
from tests.engines.builders import a_model


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """A program named llama-server; it is never run."""
    path = tmp_path / "llama-server"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return demo_models.tiny_llama(tmp_path / "tiny.gguf", layers=1)


def test_a_good_entry_has_nothing_missing(server: Path, model: Path) -> None:
    """Also behind wrappers, and with a path below its folder."""
    assert describe(a_model(f"{server} -m {model}")).missing() == ""
    assert describe(a_model(f"env A=1 nice {server} -m {model}")).missing() == ""
    assert describe(a_model(f"{server} -m tiny.gguf", cwd=str(model.parent))).missing() == ""


def test_a_model_file_that_is_not_there_is_named(server: Path) -> None:
    """With its full path."""
    assert describe(a_model(f"{server} -m /does/not/exist.gguf")).missing() == "the model file /does/not/exist.gguf does not exist"


def test_a_directory_is_not_a_model(server: Path, tmp_path: Path) -> None:
    """A common mistake after moving models into folders."""
    assert describe(a_model(f"{server} -m {tmp_path}")).missing() == f"the model {tmp_path} is a directory; name the .gguf file inside it"


def test_a_model_that_is_not_whole_is_told_before_the_start(server: Path, model: Path) -> None:
    """An interrupted download."""
    model.write_bytes(model.read_bytes()[:-5_000])

    sentence = describe(a_model(f"{server} -m {model}")).missing()

    assert sentence.startswith(f"the model cannot be loaded: {model} is cut short")
    assert sentence.endswith("fetch it again")


def test_a_missing_draft_model_counts(server: Path, model: Path) -> None:
    """The server would not start without it."""
    assert "the draft model file /no.gguf does not exist" in describe(a_model(f"{server} -m {model} -md /no.gguf")).missing()


def test_a_llama_server_without_a_model_would_come_up_as_a_router(server: Path) -> None:
    """And never be ready for anything."""
    assert "names no model" in describe(a_model(f"{server} --port 1")).missing()
    assert describe(a_model(f"{server} -hf user/repo")).missing() == ""
    assert describe(a_model(f"{server} --models-dir /m")).missing() == ""
    assert describe(a_model(f"{server} --fim-qwen-3b-default")).missing() == ""
    assert "names no model" not in describe(a_model(f"{server}", env=(("LLAMA_ARG_MODEL", "/no.gguf"),))).missing()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("no-such-program-anywhere --port ${PORT}", "'no-such-program-anywhere' was not found on PATH; install it or write its full path"),
        ("/no/such/program", "'/no/such/program' is not an executable file"),
        ("nice no-such-program-anywhere", "'no-such-program-anywhere' was not found on PATH"),
        ("env A=1 greenroom serve -c x", "starts greenroom itself"),
        (f"{sys.executable} -m greenroom serve", "starts greenroom itself"),
        ("/usr/local/bin/greenroom demo", "starts greenroom itself"),
    ],
)
def test_a_program_that_cannot_be_it_is_named(command: str, words: str) -> None:
    """Not installed, or greenroom inside greenroom."""
    assert words in describe(a_model(command)).missing()


def test_an_entry_without_a_command_or_kept_as_broken_says_so() -> None:
    """Lenient loading keeps a bad entry with its sentence."""
    assert describe(a_model([])).missing() == "it has no command; write `cmd: PROGRAM ARGUMENTS`"
    assert describe(a_model("sh -c true", misconfigured="m: unknown key modle")).missing() == "m: unknown key modle"


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve /no/model",
        "python -m vllm.entrypoints.openai.api_server --model /no/model",
        "python -m sglang.launch_server --model-path /no/model",
    ],
)
def test_a_model_folder_that_is_not_there_is_told(command: str) -> None:
    """A name on a hub is not looked for."""
    from greenroom.engines.generic import Generic

    engine = describe(a_model(command))
    assert isinstance(engine, Generic)

    assert engine.model_missing() == "the model /no/model does not exist"
    assert describe(a_model("engine --model /no/model")).missing().startswith("the program")  # of others nothing is known


def test_inside_a_container_only_mounted_paths_are_looked_at(model: Path, tmp_path: Path, server: Path) -> None:
    """What is not mounted from here may well be in the image."""
    runtime = str(server)  # any program will do
    container = ContainerConfig(runtime, "img", (), (f"{tmp_path}:/models",))

    assert describe(a_model("llama-server -m /models/tiny.gguf", container=container)).missing() == ""
    assert describe(a_model("llama-server -m /inside/the/image.gguf", container=container)).missing() == ""
    assert f"{tmp_path}/no.gguf does not exist" in describe(a_model("llama-server -m /models/no.gguf", container=container)).missing()
    absent = ContainerConfig("no-such-runtime", "img")
    assert "no-such-runtime was not found on PATH" in describe(a_model("llama-server -m /x", container=absent)).missing()
