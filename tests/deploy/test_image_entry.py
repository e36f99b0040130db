"""A command of flags alone belongs to the entry point of its image, in generated files as well."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from ruamel.yaml import YAML

from greenroom.cli import main

CONFIG = """
models:
  known: {cmd: "--model /models/8b --port ${PORT}", memory: 1GiB, container: {image: "docker.io/vllm/vllm-openai:v0.11.0"}}
  other: {cmd: ["--listen", "0.0.0.0:${PORT}"], memory: 1GiB, container: {image: "registry.example/own:1"}}
"""


def test_the_program_of_a_known_image_is_named_and_that_of_another_left_to_it(tmp_path: Path) -> None:
    """Nothing of the command is lost, and no flag is taken for a program."""
    (tmp_path / "greenroom.yaml").write_text(CONFIG)
    words = ["generate", "compose", str(tmp_path / "greenroom.yaml"), "--mode", "engines", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    services = YAML(typ="safe").load(tmp_path / "out" / "compose.yaml")["services"].values()
    known, other = sorted(services, key=lambda service: "entrypoint" not in service)

    assert known["entrypoint"] == ["vllm"]
    assert known["command"][:5] == ["serve", "--model", "/models/8b", "--port", "5800"]
    assert other["command"] == ["--listen", "0.0.0.0:5801"]
    assert "entrypoint" not in other
