"""Engines in containers: the command line, names, and a recording stand-in for the runtime."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from greenroom.config.model import ContainerConfig, ModelConfig
from greenroom.core.facts import Cause
from greenroom.engines.base import DeviceRef
from greenroom.engines.container import BoxState, Listed, container_name, owned, parse_list, parse_state, safe_name, stop_argv
from greenroom.engines.detect import describe
from tests.engines.builders import AMD0, GPU0, GPU1, MIG0, RAM, a_model

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
        "podman", "run", "--name", "greenroom-m-7", "--pull", "never",
        "--label", "dev.greenroom.model=m", "--label", "dev.greenroom.generation=7", "--label", f"dev.greenroom.supervisor={os.getpid()}",
        "--publish", "127.0.0.1:5801:5801",
        "--device", "nvidia.com/gpu=GPU-aaaa",
        "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--security-opt", "label=disable",
        "--pids-limit", "16384", "--no-healthcheck", "--log-driver", "k8s-file", "--log-opt", "max-size=10m", "--stop-timeout", "10",
        "--volume", "/srv/models:/models:ro", "--volume", "/cache:/cache:rw",
        "--env", "CUDA_DEVICE_ORDER", "--env", "HF_TOKEN",
        "--memory", "8g",
        "--entrypoint", "/app/llama-server", "ghcr.io/ggml-org/llama.cpp:server",
        "-m", "/models/a.gguf", "--port", "5801", "--host", "0.0.0.0",
    )  # fmt: skip
    assert (launch.detached, launch.port) == (True, 5801)
    assert launch.box is not None
    assert (launch.box.runtime, launch.box.name, launch.box.image) == ("podman", "greenroom-m-7", "ghcr.io/ggml-org/llama.cpp:server")


@pytest.mark.parametrize("args", [("--security-opt", "label=type:gpu_t"), ("--security-opt=label=level:s0",)])
def test_a_label_of_the_operators_is_kept(args: tuple[str, ...]) -> None:
    """Without one, SELinux would close the models and the devices to the container."""
    argv = describe(a_model("x", container=ContainerConfig("podman", "img", args))).launch(1, []).argv

    assert "label=disable" not in argv
    assert args[-1] in argv


def test_the_container_of_one_greenroom_bears_its_mark() -> None:
    """In its name and on a label: two greenrooms of one machine never want the same name, nor end each other's."""
    launch = owned(describe(in_container()).launch(1, [], generation=2), "0123456789abcdef")

    assert launch.box is not None
    assert launch.box.name == "greenroom-01234567-m-2"
    assert launch.argv[:4] == ("podman", "run", "--name", "greenroom-01234567-m-2")
    assert "dev.greenroom.home=0123456789abcdef" in launch.argv


def test_a_process_is_left_alone_by_that() -> None:
    """No container, no mark."""
    launch = describe(a_model("llama-server -m a.gguf")).launch(1, [])

    assert launch is owned(launch, "0123456789abcdef")


def test_a_container_is_stopped_by_name_with_the_configured_grace() -> None:
    """Unless the operator has a stop command; and another who stops it gives it as much time."""
    launch = describe(in_container(stop_s_max=15.0)).launch(1, [], generation=2)

    assert launch.stop_argv == ()
    assert stop_argv("podman", "greenroom-m-2", 15.0) == ("podman", "stop", "-t", "15", "greenroom-m-2")
    assert launch.argv[launch.argv.index("--stop-timeout") + 1] == "15"
    assert describe(in_container(stop_argv=("end", "it"))).launch(1, []).stop_argv == ("end", "it")


KFD = ["--device", "/dev/kfd", "--device", "/dev/dri"]
INTEL0 = DeviceRef("gpu0", "gpu", "intel", "", 1, 16_384)


@pytest.mark.parametrize(
    ("runtime", "gpus", "devices", "words"),
    [
        ("podman", "auto", [GPU0, GPU1], ["--device", "nvidia.com/gpu=GPU-aaaa", "--device", "nvidia.com/gpu=GPU-bbbb"]),
        ("docker", "auto", [GPU0], ["--gpus", '"device=GPU-aaaa"']),
        ("docker", "auto", [GPU0, GPU1], ["--gpus", '"device=GPU-aaaa,GPU-bbbb"']),
        ("docker", "cdi", [MIG0], ["--device", "nvidia.com/gpu=MIG-cccc"]),
        ("docker", "flag", [MIG0], ["--gpus", '"device=MIG-cccc"']),
        ("docker", "none", [GPU0], []),
        ("docker", "auto", [AMD0], [*KFD, "--group-add", "video", "--env", "HIP_VISIBLE_DEVICES=2"]),
        ("podman", "auto", [AMD0], [*KFD, "--group-add", "keep-groups", "--env", "HIP_VISIBLE_DEVICES=2"]),
        ("podman", "auto", [INTEL0], ["--device", "/dev/dri", "--group-add", "keep-groups", "--env", "ZE_AFFINITY_MASK=1"]),
        ("podman", "auto", [RAM], []),
        ("docker", "auto", [RAM], ["--env", "NVIDIA_VISIBLE_DEVICES=void"]),
        ("docker", "auto", [DeviceRef("bench0", "declared")], []),
    ],
)
def test_devices_are_handed_in(runtime: str, gpus: str, devices: list[DeviceRef], words: list[str]) -> None:
    """NVIDIA by UUID, through CDI or docker's own flag; AMD and Intel through their device files."""
    argv = list(describe(a_model("serve ${PORT}", container=ContainerConfig(runtime, "img", gpus=gpus))).launch(1, devices).argv)
    between = argv[argv.index("--publish") + 2 : argv.index("--cap-drop")]

    assert between == words


def test_what_the_operator_says_of_gpus_holds() -> None:
    """Then greenroom adds nothing of its own."""
    argv = describe(a_model("x", container=ContainerConfig("docker", "img", ("--gpus", "all")))).launch(1, [GPU0]).argv

    assert [word for word in argv if "GPU-aaaa" in word] == []


@pytest.mark.parametrize(
    ("args", "absent"),
    [
        (("--pids-limit", "-1"), "16384"),
        (("--shm-size=1g",), "8192m"),
        (("--ipc", "host"), "8192m"),
        (("--log-driver", "journald"), "max-size=10m"),
        (("--network", "host"), "127.0.0.1:9:9"),
        (("--net=container:vpn",), "127.0.0.1:9:9"),
        (("--health-cmd", "true"), "--no-healthcheck"),
    ],
)
def test_arguments_of_the_operator_win(args: tuple[str, ...], absent: str) -> None:
    """What would contradict them is not said at all."""
    plain = describe(a_model("vllm serve m", container=ContainerConfig("docker", "img"))).launch(9, []).argv
    given = describe(a_model("vllm serve m", container=ContainerConfig("docker", "img", args))).launch(9, []).argv

    assert (absent in plain, absent in given) == (True, False)
    assert "".join(args) in "".join(given)


def test_engines_with_workers_get_shared_memory() -> None:
    """64 MiB, the default of the runtimes, makes them die; others do not need it."""
    sizes = {}
    for command in ("vllm serve m", "sglang serve --model m", "llama-server -m m"):
        argv = describe(a_model(command, container=ContainerConfig("podman", "img"))).launch(9, []).argv
        sizes[command.split()[0]] = argv[argv.index("--shm-size") + 1] if "--shm-size" in argv else ""
    small = describe(a_model("vllm serve m", container=ContainerConfig("podman", "img", shm_mib=100))).launch(9, []).argv

    assert sizes == {"vllm": "8192m", "sglang": "8192m", "llama-server": ""}
    assert "100m" in small


@pytest.mark.parametrize(
    ("volume", "words"),
    [
        ("/a:/b", "/a:/b:ro"),
        ("/a:/b:z", "/a:/b:z,ro"),
        ("/a:/b:rw,z", "/a:/b:rw,z"),
        ("/a:/b:O", "/a:/b:O"),
        ("/a", "/a:/a:ro"),
        ("cache:/b:rw", "cache:/b:rw"),
    ],
)
def test_a_volume_is_read_only_unless_it_says_otherwise(volume: str, words: str) -> None:
    """Options that say nothing of it do not make it writable."""
    argv = describe(a_model("x", container=ContainerConfig("podman", "img", volumes=(volume,)))).launch(1, []).argv

    assert argv[argv.index("--volume") + 1] == words


def test_an_address_of_ipv6_is_published_in_brackets() -> None:
    """And never on all interfaces."""
    argv = describe(in_container(proxy="http://[::1]:${PORT}")).launch(5801, []).argv
    other = describe(in_container(proxy="http://10.0.0.9:${PORT}")).launch(5801, []).argv

    assert "[::1]:5801:5801" in argv
    assert "127.0.0.1:5801:5801" in other


def test_a_model_that_the_command_names_is_handed_in(tmp_path: Path) -> None:
    """Read-only and at its own path: all parts of a split file, nothing else of the folder; not what a volume holds already."""
    folder = tmp_path / "my models"
    folder.mkdir()
    parts = [folder / f"a-0000{part}-of-00002.gguf" for part in (1, 2)]
    for path in (*parts, folder / "other.gguf"):
        path.write_bytes(b"GGUF")
    named = describe(in_container(command=["llama-server", "-m", str(parts[0]), "--port", "${PORT}"])).launch(1, []).argv
    inside = describe(in_container(command=["llama-server", "-m", "/models/a.gguf", "--port", "${PORT}"])).launch(1, []).argv

    mounts = [word for option, word in pairwise(named) if option == "--volume"]
    assert sorted(mounts) == sorted(["/srv/models:/models:ro", "/cache:/cache:rw", *(f"{path}:{path}:ro" for path in parts)])
    assert [word for option, word in pairwise(inside) if option == "--volume"] == mounts[:2]


@pytest.mark.parametrize(
    "command", [["llama-server", "-m", "{}/a.gguf"], ["whisper-server", "--model={}/a.gguf"], ["vllm", "serve", "{}"], ["sh", "-c", "x {}"]]
)
def test_a_model_of_the_store_is_handed_in_whatever_engine_it_is_for(tmp_path: Path, command: list[str]) -> None:
    """Its folder, read-only and once; not where a volume holds it already, and not when nothing names it."""
    folder = tmp_path / "models" / "m"
    folder.mkdir(parents=True)
    for name in ("a.gguf", "mmproj.gguf"):
        (folder / name).write_bytes(b"GGUF")
    argv = [word.format(folder) for word in command]

    def mounts(argv: list[str], *volumes: str) -> list[str]:
        config = a_model(argv, container=ContainerConfig("podman", "img", volumes=volumes))
        launch = describe(replace(config, model_folder=str(folder))).launch(1, [])
        return [word for option, word in pairwise(launch.argv) if option == "--volume"]

    assert mounts(argv) == [f"{folder}:{folder}:ro"]
    assert mounts(argv, f"{tmp_path}:{tmp_path}") == [f"{tmp_path}:{tmp_path}:ro"]
    assert mounts(["llama-server", "-hf", "org/m"]) == []


@pytest.mark.parametrize("name", ["REGISTRY_TOKEN", "STORAGE_SECRET_KEY", "LDAP_PASSWORD", "DOCKER_PASSWORD", "SSL_KEY"])
def test_a_secret_that_is_named_like_a_variable_of_the_client_is_not_on_its_command_line(name: str) -> None:
    """Everybody on the machine can read that."""
    launch = describe(in_container(env=((name, "not-to-be-seen"),))).launch(1, [])

    assert launch.env[name] == "not-to-be-seen"
    assert not any("not-to-be-seen" in word for word in launch.argv)


def test_a_snapshot_of_a_hub_is_handed_in_with_what_its_links_point_to(tmp_path: Path) -> None:
    """Its files lie two folders up."""
    snapshot = tmp_path / "models--org--m" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    argv = describe(a_model(["vllm", "serve", str(snapshot)], container=ContainerConfig("podman", "img"))).launch(1, []).argv
    repository = snapshot.parent.parent

    assert f"{repository}:{repository}:ro" in argv


def test_a_path_with_a_colon_is_mounted_in_other_words(tmp_path: Path) -> None:
    """A colon separates the parts of --volume."""
    model = tmp_path / "org:m"
    model.mkdir()
    argv = describe(a_model(["vllm", "serve", str(model)], container=ContainerConfig("podman", "img"))).launch(1, []).argv

    assert f"type=bind,source={model},target={model},readonly" in argv


def test_a_command_of_flags_goes_to_the_images_own_entry_point() -> None:
    """And the image tells which engine it is."""
    engine = describe(a_model("--model org/m --port ${PORT}", container=ContainerConfig("docker", "vllm/vllm-openai:v0.11.0")))
    argv = engine.launch(9, []).argv

    assert engine.kind == "vllm"
    assert "--entrypoint" not in argv
    assert argv[argv.index("vllm/vllm-openai:v0.11.0") + 1 :][:4] == ("--model", "org/m", "--port", "9")


def test_variables_that_would_steer_the_client_do_not_reach_it() -> None:
    """They are the engine's: the client would look for its store under another HOME."""
    env = (("HOME", "/data"), ("DOCKER_HOST", "tcp://elsewhere"), ("LD_PRELOAD", "x.so"), ("HF_TOKEN", "hf_secret"), ("GOMAXPROCS", "2"))
    launch = describe(in_container(env=env)).launch(1, [])

    assert set(launch.env) == {"HF_TOKEN", "CUDA_DEVICE_ORDER"} & set(launch.env)
    assert {"HOME=/data", "DOCKER_HOST=tcp://elsewhere", "LD_PRELOAD=x.so", "GOMAXPROCS=2", "HF_TOKEN"} <= set(launch.argv)


def test_what_is_greenrooms_own_is_refused_in_args() -> None:
    """A second name or a client that leaves would make it lose its container."""
    for word in ("--name=x", "-d", "--detach", "--restart", "--pull"):
        engine = describe(a_model("x", container=ContainerConfig("/bin/sh", "img", (word,))))
        assert engine.missing() == f"`container.args` has {word.partition('=')[0]}, which is greenroom's own to set; take it out"
    kept = describe(a_model("x", container=ContainerConfig("/bin/sh", "img", ("--rm", "--memory", "8g"))))
    assert kept.missing() == ""
    assert "--rm" not in kept.launch(1, []).argv


def test_a_runtime_that_is_not_here_is_told_with_what_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other runtime where there is one, else to do without."""
    config = a_model("x", container=ContainerConfig("podman", "img"))
    monkeypatch.setenv("PATH", str(tmp_path))
    alone = describe(config).missing()
    (tmp_path / "docker").write_text("#!/bin/sh\n")
    (tmp_path / "docker").chmod(0o755)
    beside = describe(config).missing()

    assert alone == "podman was not found on PATH; install it, or run the engine without `container`"
    assert beside == "podman was not found on PATH; install it, or write `runtime: docker`, which is here"


DOCKER_DOWN = (
    "docker: Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
    "",
    "Run 'docker run --help' for more information",
)
NO_CDI = ("Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=GPU-aaaa",)


@pytest.mark.parametrize(
    ("runtime", "lines", "words"),
    [
        (
            "docker",
            DOCKER_DOWN,
            "docker could not start its container (exit code 125): Cannot connect to the Docker daemon at unix:///var/run/docker.sock. "
            "Is the docker daemon running?; start the docker service, and see that this user may use it (group docker)",
        ),
        (
            "podman",
            NO_CDI,
            "podman could not start its container (exit code 125): setting up CDI devices: unresolvable CDI devices "
            "nvidia.com/gpu=GPU-aaaa; install the NVIDIA container toolkit and run "
            "`nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`",
        ),
        (
            "docker",
            ("Emulate Docker CLI using podman. Create /etc/containers/nodocker to quiet msg.", "Error: unknown flag: --gpus"),
            "docker could not start its container (exit code 125): unknown flag: --gpus; this docker is podman: write `runtime: podman`",
        ),
        ("podman", (), "podman could not start its container (exit code 125): loading"),
    ],
)
def test_a_container_that_could_not_be_made_is_told_in_its_runtimes_words(runtime: str, lines: tuple[str, ...], words: str) -> None:
    """Without those around them, and with what to do."""
    ending = describe(in_container(runtime)).ending(125, ["loading", *lines])

    assert (ending.cause, ending.summary) == (Cause.EXITED, words)
    assert describe(in_container(runtime)).ending(1, ["it broke"]).summary == "ended by itself, exit code 1: it broke"


def test_lists_of_both_runtimes_are_read() -> None:
    """One array, or an object a line; nothing is an empty list too."""
    podman = '[{"Id": "a1", "Names": ["greenroom-x-1"], "State": "running"}]'
    docker = '{"ID":"a1","Names":"greenroom-x-1","State":"running"}\n{"ID":"b2","Names":"y","State":"exited"}\n'

    assert parse_list(podman) == (Listed("a1", "greenroom-x-1", "running"),)
    assert parse_list(docker) == (Listed("a1", "greenroom-x-1", "running"), Listed("b2", "y", "exited"))
    assert (parse_list("[]"), parse_list("")) == ((), ())
    for nonsense in ("what", "[1]", '"x"'):
        with pytest.raises(ValueError, match=r"Expecting value|not an object|Extra data"):
            parse_list(nonsense)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"Status": "running", "Running": True, "Pid": 7}, BoxState(True, 7, 0, False)),
        ({"Status": "exited", "Running": False, "Pid": 0, "ExitCode": 137, "OOMKilled": True}, BoxState(False, 0, 137, True)),
        ({"Status": "paused", "Running": True, "Paused": True, "Pid": 7}, BoxState(True, 7, 0, False)),
        ({"Status": "removing", "Running": False, "Pid": 0}, BoxState(True, 0, 0, False)),
        ({"Status": "created", "Running": False}, BoxState(False, 0, 0, False)),
    ],
)
def test_the_state_of_a_container_is_read(state: dict[str, object], expected: BoxState) -> None:
    """One that is paused or being removed may still hold memory."""
    assert parse_state(json.dumps([{"State": state}])) == expected


def test_no_secret_is_on_the_command_line_and_the_runtime_gets_it_all_the_same(tmp_path: Path) -> None:
    """Run for real against a recording runtime: the value travels in the environment."""
    runtime = tmp_path / "podman"
    runtime.write_text(RECORDER.format(python=os.path.realpath("/proc/self/exe")))
    runtime.chmod(0o755)
    record = tmp_path / "record"
    launch = describe(in_container(str(runtime), env=(("HF_TOKEN", "hf_secret"),))).launch(5801, [GPU0], generation=3)
    env = {**os.environ, **launch.env, "RECORD": str(record)}

    subprocess.run(launch.argv, env=env, check=True, timeout=60)
    run = json.loads(record.read_text())

    assert "hf_secret" not in " ".join(run["argv"])
    assert run["token"] == "hf_secret"


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
