"""`greenroom graduate` and `generate llm-d` on what a ledger kept and a configuration says; no server runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
from ruamel.yaml import YAML

from greenroom.cli import generate_llmd, generate_options, graduate_cmd
from greenroom.config.load import load_config_text
from tests.cli.conftest import run
from tests.cli.test_past import written
from tests.planner.test_outgrown import scene

CONFIG = """
devices:
  gpu0: {memory: 80GiB, probe: none}
models:
  a: {cmd: "vllm serve org/a --port ${PORT} --tensor-parallel-size 1", memory: 78GiB, aliases: [gpt-4o]}
  b: {cmd: "vllm serve org/b --port ${PORT}", memory: 78GiB}
  c: {cmd: "llama-server --model /m/c.gguf --port ${PORT}", memory: 78GiB}
"""


@pytest.fixture(scope="module")
def outgrown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outgrown")
    written(folder / "journal.sqlite", scene(need_gib=78, every_s=20.0, seconds=4500.0))
    (folder / "greenroom.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roomy")
    written(folder / "journal.sqlite", scene(need_gib=20, every_s=20.0, seconds=4500.0))
    (folder / "greenroom.yaml").write_text(CONFIG)
    return folder


def graduate(folder: Path, *words: str) -> tuple[int, str]:
    ledger, config = str(folder / "journal.sqlite"), str(folder / "greenroom.yaml")
    result = run("graduate", "-c", config, "--ledger", ledger, "--since", "2h", *words)
    return result.exit_code, result.output


def test_where_the_box_is_outgrown_the_plan_and_its_price_are_told(outgrown: Path) -> None:
    """What each model becomes, how many GPUs that takes, and who can stay."""
    code, output = graduate(outgrown)
    assert code == 0
    assert "has outgrown one card" in output
    assert "2 GPUs held all the time, in place of 1" in output
    assert "c can stay" in output
    plan = json.loads(graduate(outgrown, "--json")[1])
    assert plan["ready"] is True
    assert {one["model"]: (one["becomes"], one["replicas"], one["gpus"]) for one in plan["models"]} == {
        "a": ("pool", 1, 1),
        "b": ("pool", 1, 1),
        "c": ("stay", 1, 1),
    }


def test_models_whose_engines_ask_for_a_key_are_passed_on_with_it(outgrown: Path, tmp_path: Path) -> None:
    """Else each request of theirs would be refused; the key itself is in no file."""
    keyed = tmp_path / "greenroom.yaml"
    keyed.write_text(CONFIG.replace("serve org/b", "serve org/b --api-key engine-key-1"))
    words = ("-c", str(keyed), "--ledger", str(outgrown / "journal.sqlite"), "--since", "2h", "-o", str(tmp_path / "out"))
    assert run("graduate", *words).exit_code == 0
    text = (tmp_path / "out" / "peers.yaml").read_text()
    variable = re.search(r"start greenroom with (\w+) \(of b\)", text)
    assert variable is not None
    peers = load_config_text(text, env={variable[1]: "engine-key-1"}).peers
    assert {tuple(name for name, _ in one.models): one.key for one in peers} == {("a", "gpt-4o"): None, ("b",): "engine-key-1"}
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file() and "engine-key" in path.read_text()]


def test_the_files_are_those_of_the_models_that_go(outgrown: Path, tmp_path: Path) -> None:
    """With the way for greenroom to pass them on; smaller GPUs make more of them, and the command says so."""
    code, _ = graduate(outgrown, "-o", str(tmp_path / "out"), "--gpu-memory", "48GiB")
    assert code == 0
    read = YAML(typ="safe").load
    peers = read((tmp_path / "out" / "peers.yaml").read_text())
    assert peers["peers"]["cluster"]["models"] == ["a", "gpt-4o", "b"]
    (a,) = [path for path in (tmp_path / "out" / "modelservers").glob("deployment-*.yaml") if path.stem.endswith("-a")]
    container = read(a.read_text())["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    at = container["args"].index("--tensor-parallel-size")
    assert container["args"][at + 1] == "2"
    assert container["args"].count("--tensor-parallel-size") == 1
    assert not [path for path in (tmp_path / "out" / "modelservers").glob("deployment-*.yaml") if path.stem.endswith("-c")]


def test_where_nothing_calls_for_it_nothing_is_written(roomy: Path, tmp_path: Path) -> None:
    """Unless somebody wants it anyway."""
    code, output = graduate(roomy, "-o", str(tmp_path / "out"))
    assert (code, "Not now" in output, (tmp_path / "out").exists()) == (1, True, False)
    assert "--anyway" in output
    code, _ = graduate(roomy, "-o", str(tmp_path / "out"), "--anyway", "--gpu-memory", "24GiB")
    assert (code, (tmp_path / "out" / "README.md").exists()) == (0, True)


def test_only_models_that_are_configured_are_planned_for(outgrown: Path, tmp_path: Path) -> None:
    """What only the ledger knows, or only the configuration, is named; files are written of the others."""
    config = tmp_path / "greenroom.yaml"
    config.write_text(CONFIG.replace("  b:", "  new:"))
    ledger, out = str(outgrown / "journal.sqlite"), tmp_path / "out"
    result = run("graduate", "-c", str(config), "--ledger", ledger, "--since", "2h", "-o", str(out))
    assert result.exit_code == 0, result.output
    assert "does not name them any more: b." in result.output
    assert "has not run with them yet: new." in result.output
    assert "1 GPU held all the time" in result.output
    assert [path.stem for path in (out / "modelservers").glob("deployment-*")] == ["deployment-greenroom-a"]
    config.write_text("models:\n  new: {cmd: 'vllm serve org/new --port ${PORT}'}\n")
    result = run("graduate", "-c", str(config), "--ledger", ledger, "--since", "2h")
    assert (result.exit_code, "None of the models would go to a cluster" in result.output) == (0, True), result.output


def test_llm_d_files_come_from_a_configuration(outgrown: Path, tmp_path: Path) -> None:
    """In a folder, the same each time, shown as a difference, refused in words."""
    config, out = str(outgrown / "greenroom.yaml"), str(tmp_path / "out")
    words = ["generate", f"llm-d:{out}", config, "--replicas", "a=2", "--zero", "b"]
    assert run(*words).exit_code == 0
    assert run(*words, "--diff").output == ""
    assert (tmp_path / "out" / "keda").is_dir()
    for wrong, said in (
        (["--replicas", "a"], "MODEL=N"),
        (["--replicas", "nobody=2"], "no model 'nobody'"),
        (["--host", "10.0.0.1"], "--no-kubernetes"),
        (["--no-kubernetes", "--host", "worker-1"], "no IPv4"),
    ):
        result = run("generate", "llm-d", config, *wrong)
        assert (result.exit_code in (1, 2), said in result.output) == (True, True), result.output


def test_the_readme_of_llm_d_advises_only_what_the_command_takes(outgrown: Path, tmp_path: Path) -> None:
    """And nothing of what holds for one box."""
    config, out = str(outgrown / "greenroom.yaml"), tmp_path / "out"
    assert run("generate", f"llm-d:{out}", config, "--storage-class", "shared-ssd", "--replicas", "a=2").exit_code == 0
    readme = (out / "README.md").read_text()
    assert "(see --storage-class)" in readme
    assert "nothing makes room" not in readme
    claims = [YAML(typ="safe").load(path.read_text()) for path in (out / "modelservers").glob("persistentvolumeclaim-*")]
    assert [claim["spec"]["storageClassName"] for claim in claims] == ["shared-ssd"] * 3


@pytest.mark.parametrize("command", ["generate", "graduate"])
@pytest.mark.parametrize(
    ("entry", "words", "image", "resource"),
    [
        ("", (), "docker.io/vllm/vllm-openai:", "nvidia.com/gpu"),
        ("env: [HIP_VISIBLE_DEVICES=0]", (), "docker.io/vllm/vllm-openai-rocm:", "amd.com/gpu"),
        ("env: [HIP_VISIBLE_DEVICES=0]", ("--target", "nvidia"), "docker.io/vllm/vllm-openai:", "nvidia.com/gpu"),
        ("", ("--target", "amd", "--engine-image", "vllm=registry.local/vllm:1"), "registry.local/vllm:1", "amd.com/gpu"),
    ],
    ids=["nobody says", "configured", "said", "an image of one's own"],
)
def test_the_accelerator_is_the_configurations(
    outgrown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    command: str, entry: str, words: tuple[str, ...], image: str, resource: str,
) -> None:  # fmt: skip
    """Also where only a model that stays speaks of it; else nvidia, whatever this host has; an option beats both."""

    def look() -> str:
        raise AssertionError("the host was looked at")

    monkeypatch.setattr(generate_options, "found_vendor", look)
    config, out = tmp_path / "greenroom.yaml", tmp_path / "out"
    config.write_text(CONFIG.replace('c.gguf --port ${PORT}"', f'c.gguf --port ${{PORT}}", {entry or "name: c"}'))
    if command == "generate":
        done = run("generate", f"llm-d:{out}", str(config), *words)
    else:
        ledger = str(outgrown / "journal.sqlite")
        done = run("graduate", "-c", str(config), "--ledger", ledger, "--since", "2h", "-o", str(out), *words)
    assert done.exit_code == 0, done.output
    spec = YAML(typ="safe").load((out / "modelservers" / "deployment-greenroom-a.yaml").read_text())["spec"]["template"]["spec"]
    (box,) = spec["containers"]
    assert box["image"].startswith(image)
    assert [name for name in box["resources"]["limits"] if "/" in name] == [resource]
    assert [one["key"] for one in spec["tolerations"]] == [resource]


def test_graduate_is_told_of_the_cluster_what_generate_is(outgrown: Path, tmp_path: Path) -> None:
    """By the same options, in the same words."""
    told = {"target", "engine_images", "models", "models_image", "storage_class", "namespace", "provider", "gpus_per_node"}
    commands: tuple[click.Command, ...] = (generate_llmd.llm_d, graduate_cmd.graduate)
    generates, graduates = ({one.name: one.get_help_record(click.Context(each)) for one in each.params} for each in commands)
    assert told <= {name for name, words in graduates.items() if words == generates.get(name)}
    words = ("--models", "image", "--models-image", "registry.local/m:1", "--storage-class", "fast")
    config = tmp_path / "greenroom.yaml"
    config.write_text(CONFIG.replace("vllm serve org/a", "vllm serve /srv/a"))
    ledger, out = str(outgrown / "journal.sqlite"), tmp_path / "out"
    done = run("graduate", "-c", str(config), "--ledger", ledger, "--since", "2h", "-o", str(out), *words)
    assert done.exit_code == 0, done.output
    read = YAML(typ="safe").load
    volumes = read((out / "modelservers" / "deployment-greenroom-a.yaml").read_text())["spec"]["template"]["spec"]["volumes"]
    assert {"name": "models", "image": {"reference": "registry.local/m:1", "pullPolicy": "IfNotPresent"}} in volumes
    claims = [read(path.read_text())["spec"] for path in (out / "modelservers").glob("persistentvolumeclaim-*")]
    assert {claim["storageClassName"] for claim in claims} == {"fast"}
