"""Engines in containers: the command line, names, and a recording stand-in for the runtime."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from greenroom.config.model import ContainerConfig, ModelConfig
from greenroom.engines.base import DeviceRef
from greenroom.engines.container import container_name, kill_argv, list_argv, safe_name
from greenroom.engines.detect import describe
from tests.engines.builders import AMD0, GPU0, MIG0, RAM, a_model

RECORDER = """#!{python}
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps({{"argv": sys.argv[1:], "token": os.environ.get("HF_TOKEN")}}) + "\\n")
"""


def in_container(
    runtime: str = "podman", command: str = "llama-server -m /models/a.gguf --port ${PORT}", **settings: object
) -> ModelConfig:
    container = ContainerConfig(
        runtime, "ghcr.io/ggml-org/llama.cpp:server", ("--memory", "8g"), ("/srv/models:/models", "/cache:/cache:rw")
    )
    return a_model(command, container=container, **settings)


def test_a_launch_becomes_a_podman_run() -> None:
    """Every word of it, in order: loopback only, no capabilities, model folder read-only, the GPU by its UUID."""
    launch = describe(in_container(env=(("HF_TOKEN", "hf_secret"),))).launch(5801, [GPU0], generation=7)

    assert launch.argv == (
        "podman", "run", "--rm", "--name", "greenroom-m-7", "--replace",
        "--label", "dev.greenroom.model=m", "--label", "dev.greenroom.generation=7", "--label", f"dev.greenroom.supervisor={os.getpid()}",
        "--publish", "127.0.0.1:5801:5801",
        "--device", "nvidia.com/gpu=GPU-aaaa",
        "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
        "--volume", "/srv/models:/models:ro", "--volume", "/cache:/cache:rw",
        "--env", "CUDA_DEVICE_ORDER", "--env", "HF_TOKEN",
        "--memory", "8g",
        "--entrypoint", "/app/llama-server", "ghcr.io/ggml-org/llama.cpp:server",
        "-m", "/models/a.gguf", "--port", "5801", "--host", "0.0.0.0",
    )  # fmt: skip
    assert (launch.detached, launch.port) == (True, 5801)


def test_a_container_is_stopped_by_name_with_the_configured_grace() -> None:
    """Unless the operator has a stop command."""
    assert describe(in_container(stop_s_max=15.0)).launch(1, [], generation=2).stop_argv == (
        "podman",
        "stop",
        "-t",
        "15",
        "greenroom-m-2",
    )
    assert describe(in_container(stop_argv=("end", "it"))).launch(1, []).stop_argv == ("end", "it")


@pytest.mark.parametrize(
    ("runtime", "devices", "words"),
    [
        ("docker", [GPU0], ["--device", "nvidia.com/gpu=GPU-aaaa"]),
        ("docker", [MIG0], ["--device", "nvidia.com/gpu=MIG-cccc"]),
        ("docker", [AMD0], ["--device", "/dev/kfd", "--device", "/dev/dri", "--group-add", "video", "--env", "HIP_VISIBLE_DEVICES=2"]),
        (
            "podman",
            [AMD0],
            ["--device", "/dev/kfd", "--device", "/dev/dri", "--group-add", "keep-groups", "--env", "HIP_VISIBLE_DEVICES=2"],
        ),
        ("docker", [RAM], []),
        ("docker", [DeviceRef("bench0", "declared")], []),
    ],
)
def test_devices_are_handed_in(runtime: str, devices: list[DeviceRef], words: list[str]) -> None:
    """NVIDIA through CDI by UUID, AMD through its device files."""
    argv = list(describe(in_container(runtime)).launch(1, devices).argv)
    between = argv[argv.index("--publish") + 2 : argv.index("--cap-drop")]

    assert between == words


def test_no_secret_is_on_the_command_line_and_the_runtime_gets_it_all_the_same(tmp_path: Path) -> None:
    """Run for real against a recording runtime: the value travels in the environment."""
    runtime = tmp_path / "podman"
    runtime.write_text(RECORDER.format(python=os.path.realpath("/proc/self/exe")))
    runtime.chmod(0o755)
    record = tmp_path / "record"
    launch = describe(in_container(str(runtime), env=(("HF_TOKEN", "hf_secret"),))).launch(5801, [GPU0], generation=3)
    env = {**os.environ, **launch.env, "RECORD": str(record)}

    for argv in (launch.argv, launch.stop_argv, kill_argv(str(runtime), "greenroom-m-3"), list_argv(str(runtime))):
        subprocess.run(argv, env=env, check=True, timeout=60)
    run, stop, kill, listed = [json.loads(line) for line in record.read_text().splitlines()]

    assert "hf_secret" not in " ".join(run["argv"])
    assert run["token"] == "hf_secret"
    assert stop["argv"] == ["stop", "-t", "10", "greenroom-m-3"]
    assert kill["argv"] == ["rm", "--force", "greenroom-m-3"]
    assert listed["argv"][:2] == ["ps", "--all"]


def test_an_entry_point_of_the_operators_is_kept() -> None:
    """Then the whole command goes behind the image."""
    config = a_model("serve --port ${PORT}", container=ContainerConfig("docker", "img", ("--entrypoint", "/run.sh")))

    assert describe(config).launch(9, []).argv[-6:] == ("--entrypoint", "/run.sh", "img", "serve", "--port", "9")


NAMES = [
    "plain",
    "org/name:tag",
    "org-name-tag",
    "Fam3.5-27B:UD-IQ3_XXS",
    "modèle 7b",
    "a+b",
    "a-b",
    "A+B",
    "…",
    "模型",
    "x" * 200,
    "x" * 201,
    "--rm",
    "../../etc",
]


def test_odd_model_ids_give_safe_and_different_names() -> None:
    """What a runtime accepts as a name, and never the same one twice (B12)."""
    names = [container_name(model, 1) for model in NAMES]

    assert len(set(names)) == len(NAMES)
    assert all(re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,80}", name) for name in names)
    assert safe_name("plain") == "plain"


def test_without_a_generation_the_port_keeps_names_apart() -> None:
    """Two running engines never share a port."""
    assert "greenroom-m-5801" in describe(in_container()).launch(5801, []).argv
