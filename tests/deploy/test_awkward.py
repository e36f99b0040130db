"""Words made of everything that means something to some reader: each file gives them back as they went in."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

import pytest

from greenroom.config.load import load_config_text
from greenroom.config.model import Config, ModelConfig
from greenroom.deploy import compose, quadlet
from greenroom.deploy.build import build
from greenroom.deploy.files import write
from greenroom.deploy.intent import Intent
from tests.deploy import sets, units
from tests.deploy.test_compose import read_by_compose, undollared
from tests.deploy.test_quadlet import run_of

PIECES = [
    *"ab %$\\\"'`;#:,={}[]()<>|&*?!~@^\n\t\x07\x1b-/._",
    *("%h", "%i", "%%", "$$", "${X}", "$(id)", "\\n", "\\x41", "é", "☃", "\u2028", "\x85", "\xa0", "\ufeff", "😀", "\x7f", "\u200b"),
    *("; ", " #", "''", '""', "true", "1e3"),
]
MODELS, WORDS, WORD_PIECES_MAX = 6, 10, 12


def awkward(seed: int) -> Config:
    """Models whose names, words, variables and paths are made of `PIECES`."""
    chance = random.Random(seed)

    def word() -> str:
        return "".join(chance.choice(PIECES) for _ in range(chance.randint(0, WORD_PIECES_MAX)))

    def model(number: int) -> ModelConfig:
        name = "".join(char for char in word() if char.isprintable()).strip()
        path = "/srv/" + "".join(char for char in word() if char not in "\n/").replace("..", "") + "m.gguf"
        words = [part for index in range(WORDS) for part in (f"--x{index}", word())]
        argv = ("llama-server", "--model", path, "--port", "${PORT}", *words)
        return ModelConfig(id=f"{number}{name}", argv=argv, env=tuple((f"V{index}", word()) for index in range(WORDS)))

    return Config(path="x", models=tuple(model(number) for number in range(MODELS)), start_port=7000)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", ["greenroom", "engines"])
def test_every_reader_gets_what_was_meant(tmp_path: Path, seed: int, mode: str) -> None:
    """Commands, variables and paths come back from quadlet, docker compose and greenroom's own reader."""
    intent = build(awkward(seed), mode=mode, target="nvidia")
    if mode == "greenroom":
        assert sets.comparable(load_config_text(intent.config_text, env={})).models == sets.comparable(intent.config).models
    write(quadlet.files(intent), tmp_path / "quadlet")
    write(compose.files(intent), tmp_path / "compose")
    services = units.quadlet(tmp_path / "quadlet")
    read = undollared(read_by_compose(tmp_path / "compose", {}))["services"]
    for workload in intent.workloads:
        sources = {mount.target: mount.source for mount in workload.mounts if mount.kind == "bind"}
        run, service = run_of(services[f"{workload.name}.service"]), read[workload.name]
        assert shell_free(run.command) == (*service["entrypoint"], *service["command"]) == workload.argv
        assert run.env == (service.get("environment") or {}) == dict(workload.env)
        assert {target: mount["source"] for target, mount in run.mounts.items() if target in sources} == sources
        assert {mount["target"]: mount["source"] for mount in service.get("volumes", []) if mount["target"] in sources} == sources


def shell_free(command: tuple[str, ...]) -> tuple[str, ...]:
    """Words behind `sh -c exec`: how a unit says an empty one."""
    return tuple(shlex.split(command[2]))[1:] if command[:2] == ("/bin/sh", "-c") else command


def test_an_empty_word_hides_no_other(tmp_path: Path) -> None:
    """quadlet drops an empty word and what follows it: such a command goes through a shell."""
    argv = ("llama-server", "-m", "/m.gguf", "--port", "${PORT}", "--chat-template", "", "--jinja")
    intent: Intent = build(Config(path="x", models=(ModelConfig(id="m", argv=argv),)), mode="engines", target="cpu")
    write(quadlet.files(intent), tmp_path)
    run = run_of(units.quadlet(tmp_path)[f"{intent.workloads[0].name}.service"])
    assert run.command[:2] == ("/bin/sh", "-c")
    assert shell_free(run.command) == intent.workloads[0].argv


@pytest.mark.parametrize("name", ["/srv/$.", "/srv/..-", "/srv/...", "/srv/-", "/srv/.hidden"])
def test_no_name_leads_out_of_the_models_folder(name: str) -> None:
    """Whatever a file is called on the host, inside it has a plain name."""
    argv = ("llama-server", "-m", name, "--port", "${PORT}")
    (workload,) = build(Config(path="x", models=(ModelConfig(id="m", argv=argv),)), mode="engines", target="cpu").workloads
    (mount,) = workload.mounts
    assert mount.target.startswith("/models/")
    assert not mount.target.removeprefix("/models/").startswith((".", "-", "/"))
