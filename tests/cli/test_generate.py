"""`greenroom generate`: files only, the same each time, all or none, and nothing started."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from greenroom.cli import generate_options, main
from greenroom.cli.generate_cmd import FORMATS
from greenroom.config.load import load_config
from greenroom.config.yaml_out import dump
from tests.deploy import units

NOTE = '50% off "x" \\d$HOME'
OURS = ("quadlet", "compose", "systemd")
PROGRAMS = ("podman", "docker", "kubectl", "systemctl", "helm", "nvidia-smi", "docker-compose", "buildah", "curl")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the configuration of B47 and B49, from where the command is typed."""
    entry = {
        "cmd": ["llama-server", "-m", "/srv/m.gguf", "--chat-template-file", "/srv/tem plates/c.jinja", "-c", "8192", "--port", "8123"],
        "proxy": "http://127.0.0.1:8123",
        "env": [f"NOTE={NOTE}"],
        "healthCheckTimeout": 300,
    }
    (tmp_path / "greenroom.yaml").write_text(dump({"models": {"org/näme:7b q4": entry}}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["generate", *words], prog_name="greenroom")


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("form", OURS)
def test_only_files_are_written_and_nothing_is_called(home: Path, form: str) -> None:
    """B47: stand-ins for every program that could start something see no call, and a second run is byte for byte the same."""
    stand_ins, calls = home / "bin", home / "calls"
    stand_ins.mkdir()
    for name in PROGRAMS:
        (stand_ins / name).write_text(f'#!/bin/sh\necho "{name} $*" >>"{calls}"\n')
        (stand_ins / name).chmod(0o755)
    before = tree(home)
    for folder in ("one", "two"):
        done = subprocess.run(
            [Path(sys.executable).with_name("greenroom"), "generate", f"{form}:{folder}", "--target", "nvidia"],
            env={**os.environ, "PATH": f"{stand_ins}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert not calls.exists()
    assert tree(home / "one") == tree(home / "two") != {}
    assert {name: text for name, text in tree(home).items() if not name.startswith(("one/", "two/"))} == before


@pytest.mark.parametrize("form", OURS)
def test_a_target_that_cannot_be_written_leaves_nothing(home: Path, form: str) -> None:
    """B47: a file in the way of the folder, and an exit code that tells."""
    (home / "taken").write_text("a file")
    done = run(form, "--target", "cpu", "-o", "taken/deep")
    assert done.exit_code == 1
    assert "cannot be written" in done.stderr
    assert sorted(path.name for path in home.iterdir()) == ["greenroom.yaml", "taken"]


def test_a_folder_without_permission_leaves_nothing(home: Path) -> None:
    """The same where the operating system says no."""
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    folder = home / "closed"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert run("compose:closed", "--target", "cpu").exit_code == 1
    assert list(folder.iterdir()) == []


def test_files_are_not_overwritten_unasked(home: Path) -> None:
    """What is there and differs is named, kept, shown by --diff, and replaced by --force."""
    assert run("compose:out", "--target", "cpu").exit_code == 0
    assert run("compose:out", "--target", "cpu").exit_code == 0  # the same
    done = run("compose:out", "--target", "cpu", "--diff")
    assert (done.exit_code, done.output) == (0, "")
    old = (home / "out" / "compose.yaml").read_text()
    done = run("compose:out", "--target", "nvidia")
    assert done.exit_code == 1
    assert "out/compose.yaml" in done.stderr
    assert (home / "out" / "compose.yaml").read_text() == old
    done = run("compose:out", "--target", "nvidia", "--diff")
    assert done.exit_code == 1
    assert "+++ b/compose.yaml" in done.output
    assert (home / "out" / "compose.yaml").read_text() == old
    assert run("compose:out", "--target", "nvidia", "--force").exit_code == 0
    assert (home / "out" / "compose.yaml").read_text() != old


def test_without_a_folder_they_are_printed(home: Path) -> None:
    """Each file behind its path; nothing is written."""
    done = run("quadlet", "--target", "cpu")
    assert done.exit_code == 0
    assert "# --- greenroom.container\n" in done.output
    assert sorted(path.name for path in home.iterdir()) == ["greenroom.yaml"]


def test_a_full_disk_behind_standard_output_is_told(home: Path) -> None:
    """No traceback, an exit code that tells."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [Path(sys.executable).with_name("greenroom"), "generate", "compose", "--target", "cpu"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "Error: standard output cannot be written: no space left on device\n")


def test_files_say_how_they_were_made(home: Path) -> None:
    """The command in a file's head makes the same file, wherever it was put."""
    assert run("compose", "--target", "nvidia", "--gpu", "GPU-1", "--gpu", "GPU-2", "--name", "my set", "-o", "out").exit_code == 0
    first = (home / "out" / "compose.yaml").read_text()
    (again,) = (line for line in first.splitlines() if line.startswith("# Again: "))
    assert again == "# Again: greenroom generate compose --target nvidia --gpu GPU-1 --gpu GPU-2 --name 'my set'"
    words = units.words(again.removeprefix("# Again: greenroom generate "))
    assert run(*words, "-o", "again").exit_code == 0
    assert (home / "again" / "compose.yaml").read_text() == first


@pytest.mark.parametrize("target", ["nvidia", "amd", "intel", "cpu"])
@pytest.mark.parametrize("form", OURS)
def test_a_named_target_makes_this_host_irrelevant(home: Path, monkeypatch: pytest.MonkeyPatch, form: str, target: str) -> None:
    """B49: the host is not even asked what it has."""

    def asked() -> str:
        raise AssertionError("the host was asked")

    monkeypatch.setattr(generate_options, "found_vendor", asked)
    assert run(form, "--target", target).exit_code == 0


def test_without_a_target_this_host_counts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host has is what it is made for, unless the configuration says."""
    monkeypatch.setattr(generate_options, "found_vendor", lambda: "nvidia")
    assert "nvidia.com/gpu=all" in run("quadlet").output
    monkeypatch.setattr(generate_options, "found_vendor", lambda: "")
    assert "AddDevice" not in run("quadlet").output


def test_ports_and_health_are_the_engines_own(home: Path) -> None:
    """B49: one unit a model asks port 8123 with 300 s to start, whatever its image would ask."""
    service = yaml.safe_load(run("compose", "--mode", "engines", "--target", "cpu").output)["services"]
    (engine,) = service.values()
    assert engine["healthcheck"]["test"][-1] == "http://127.0.0.1:8123/health"
    assert engine["healthcheck"]["start_period"] == "300s"
    assert engine["ports"][0]["target"] == 8123
    assert engine["environment"]["NOTE"] == NOTE.replace("$", "$$")


def test_the_configuration_beside_the_files_can_be_checked(home: Path) -> None:
    """`greenroom check` reads greenroom.yaml of the set."""
    assert run("quadlet:out", "--target", "cpu").exit_code == 0
    assert load_config(home / "out" / "greenroom.yaml", env={}).models[0].id == "org/näme:7b q4"


def test_references_need_no_configuration(home: Path) -> None:
    """Several models by reference become one set, with their names in the configuration of it."""
    (home / "greenroom.yaml").unlink()
    done = run("quadlet:out", "oci://registry.example/team/chat:1", "hf://org/embed-GGUF:Q8_0", "--target", "nvidia")
    assert done.exit_code == 0, done.stderr
    config = load_config(home / "out" / "greenroom.yaml", env={})
    assert [model.reference for model in config.models] == ["oci://registry.example/team/chat:1", "hf://org/embed-GGUF:Q8_0"]
    assert [model.argv[0] for model in config.models] == ["llama-server", "llama-server"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["quadlett"], 2, "Did you mean 'quadlet'?"),
        (["quadlet:"], 2, "names no folder"),
        (["quadlet", "--force"], 2, "-o DIR"),
        (["quadlet", "-c", "nowhere.yaml"], 2, "does not exist"),
        (["quadlet", "a.yaml", "b.yaml"], 2, "more than one configuration"),
        (["quadlet", "greenroom.yaml", "oci://h.example/r:1"], 2, "not both"),
        (["quadlet", "--engine", "vllm"], 2, "--engine is for references"),
        (["quadlet", "--engine-image", "vllm"], 2, "ENGINE=IMAGE"),
        (["quadlet", "ocl://h.example/r:1"], 1, "did you mean oci://"),
        (["quadlet", "--target", "tpu"], 2, "tpu"),
        (["quadlet", "--mig", "3g.40gb", "--target", "nvidia"], 1, "--gpu MIG-"),
        (["quadlet", "--listen", "0.0.0.0:80", "--target", "cpu"], 1, "no API keys"),
        (["systemd", "--mode", "engines", "--target", "cpu"], 1, "bare host"),
        (["systemd", "--user", "--run-as", "llm", "--target", "cpu"], 2, "--run-as"),
    ],
)
def test_mistakes_are_told(home: Path, words: list[str], code: int, told: str) -> None:
    """Each with its exit code and what to do; nothing is written."""
    done = run(*words)
    assert (done.exit_code, told in done.stderr) == (code, True), done.stderr
    assert sorted(path.name for path in home.iterdir()) == ["greenroom.yaml"]


def test_without_anything_to_deploy_it_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration here and none named."""
    monkeypatch.chdir(tmp_path)
    done = run("compose")
    assert done.exit_code == 2
    assert "there is no greenroom.yaml here" in done.stderr


@pytest.mark.parametrize("form", list(FORMATS))
def test_every_format_has_its_help(form: str) -> None:
    """All that are listed can be imported."""
    assert run(form, "--help").exit_code == 0
    assert form in run("--help").output


def test_devices_are_named_one_by_one_or_with_commas(home: Path) -> None:
    """`--gpu 0,1` is two devices; what names none is refused before anything is written."""
    both = run("quadlet", "--target", "nvidia", "--gpu", "0,1").output
    assert [line for line in both.splitlines() if line.startswith("AddDevice=")] == [
        "AddDevice=nvidia.com/gpu=0",
        "AddDevice=nvidia.com/gpu=1",
    ]
    for text in ("", "0,", "all", "-1", "0 1", "x\nAddDevice=/dev/sda"):
        done = run("quadlet", "--target", "nvidia", "--gpu", text)
        assert done.exit_code == 2, text
        assert "names no device" in done.output


def test_a_slice_is_of_an_nvidia_gpu(home: Path) -> None:
    """It says the target where none is named, and contradicts another."""
    assert "AddDevice=nvidia.com/gpu=MIG-1" in run("quadlet", "--mig", "3g.40gb", "--gpu", "MIG-1").output
    done = run("quadlet", "--mig", "3g.40gb", "--target", "amd")
    assert done.exit_code == 1
    assert "is a slice of an NVIDIA GPU, and the target is amd" in done.output


@pytest.mark.parametrize("words", [("--gpu", "0"), ("--image", "x"), ("--engine-image", "vllm=x"), ("--mig", "3g.40gb")])
def test_a_bare_host_has_no_containers_to_give_devices_to(home: Path, words: tuple[str, ...]) -> None:
    """An option without effect is refused, not passed over."""
    done = run("systemd", *words)
    assert done.exit_code == 2
    assert f"{words[0]} means nothing on a host without containers" in done.output
