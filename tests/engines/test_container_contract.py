"""What is said to podman and docker is what the real programs understand, and what they answer is what is read.

podman makes containers without running them here (`create`), in a store of its own; docker is asked for its help.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from greenroom.config.model import ContainerConfig
from greenroom.engines import container as words
from greenroom.engines.base import DeviceRef
from greenroom.engines.detect import describe
from greenroom.host.runtimes import Answer
from tests.engines.builders import AMD0, GPU0, GPU1, RAM, a_model
from tests.fakes.container_runtime import PLAIN, VALUED, install

OTHER_ARGS = ("--memory", "8g")
INTEL0 = DeviceRef("gpu0", "gpu", "intel", "", 1, 16_384)
HOME = "0123456789abcdef"
IMAGE = "localhost/greenroom-contract:1"

Call = Callable[..., subprocess.CompletedProcess[str]]


def needs(runtime: str) -> str:
    found = shutil.which(runtime)
    if found is None:
        pytest.skip(f"{runtime} is not on PATH")
    return found


def run_lines(runtime: str) -> Iterator[tuple[str, ...]]:
    """`run` command lines in all their variety."""
    for devices, gpus, command, model in itertools.product(
        ([GPU0, GPU1], [AMD0], [INTEL0], [RAM]),
        ("auto", "cdi", "none"),
        ("vllm serve /models/a", "llama-server -m a.gguf"),
        ("a", "org/b c:1"),
    ):
        container = ContainerConfig(runtime, IMAGE, OTHER_ARGS, ("/tmp:/models",), gpus=gpus)
        config = a_model(command, id=model, container=container, env=(("HF_TOKEN", "x"), ("HOME", "/data")))
        yield words.owned(describe(config).launch(5801, devices, 7), HOME).argv


def options_of(argv: tuple[str, ...]) -> set[str]:
    """The options before the image."""
    return {word.partition("=")[0] for word in argv[2 : argv.index(IMAGE)] if word.startswith("--")}


@pytest.mark.parametrize("runtime", ["podman", "docker"])
def test_every_option_of_a_run_exists(runtime: str) -> None:
    """As its own help says; and the stand-in of the tests takes the same ones."""
    program = needs(runtime)
    text = subprocess.run([program, "run", "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
    known = set(re.findall(r"(--[a-z][a-z0-9-]*)", text))
    said = set().union(*map(options_of, run_lines(runtime)))

    assert said - known == set()
    assert said >= {"--name", "--label", "--publish", "--cap-drop", "--shm-size", "--pids-limit", "--pull"}
    assert said - (VALUED | PLAIN) == set()


@pytest.mark.parametrize("runtime", ["podman", "docker"])
@pytest.mark.parametrize(
    "argv",
    [
        words.stop_argv("", "x", 2),
        words.signal_argv("", "x", "TERM"),
        words.remove_argv("", "x"),
        words.list_argv("", HOME),
        words.inspect_argv("", "x"),
        words.follow_argv("", "x", 2.5),
        words.image_argv("", "x"),
    ],
    ids=lambda argv: argv[1],
)
def test_every_option_of_the_other_commands_exists(runtime: str, argv: tuple[str, ...]) -> None:
    """`stop`, `rm`, `ps`, `inspect`, `logs`, `image inspect`."""
    program = needs(runtime)
    command = list(itertools.takewhile(lambda word: not word.startswith("-"), argv[1:3]))
    command = [word for word in command if word != "x"]
    text = subprocess.run([program, *command, "--help"], capture_output=True, text=True, check=True, timeout=60).stdout

    assert [word for word in argv if word.startswith("-") and not re.search(rf"(?:^|[\s,]){word}\b", text, re.MULTILINE)] == []


@pytest.fixture
def store() -> Iterator[Call]:
    """A real podman with an empty store and one image."""
    program = needs("podman")
    if shutil.which("buildah") is None:
        pytest.skip("buildah, which makes the image, is not on PATH")
    folder = Path(tempfile.mkdtemp(prefix="dock-"))  # podman takes no longer path
    place = ["--root", str(folder / "root"), "--runroot", str(folder / "run"), "--storage-driver", "vfs"]

    def call(*argv: str, with_: str = program) -> subprocess.CompletedProcess[str]:
        return subprocess.run([with_, *place, *argv], capture_output=True, text=True, timeout=120, check=False)

    made = call("from", "--name", "made", "scratch", with_="buildah")
    made = call("commit", "made", IMAGE, with_="buildah") if made.returncode == 0 else made
    if made.returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(f"no image can be made here: {made.stderr.strip()}")
    yield call
    call("rm", "--all", "--force")
    call("rm", "--all", with_="buildah")
    call("rmi", "--all", "--force")
    shutil.rmtree(folder, ignore_errors=True)


def answer(done: subprocess.CompletedProcess[str]) -> Answer:
    return Answer(done.returncode, done.stdout, done.stderr)


def test_a_real_podman_makes_finds_and_removes_our_container(store: Call, tmp_path: Path) -> None:
    """With every option that needs no device, a name with a colon in a mount, labels with odd characters."""
    model = tmp_path / "org:m"
    model.mkdir()
    container = ContainerConfig("podman", IMAGE, ("--memory", "64m"), (f"{tmp_path}:/models:z",))
    config = a_model(["vllm", "serve", str(model)], id="org/a b,c=d", container=container, proxy="http://[::1]:${PORT}")
    argv = words.owned(describe(config).launch(5801, [RAM], 7), HOME).argv
    created = store("create", *argv[2:])
    assert created.returncode == 0, created.stderr

    (listed,) = words.parse_list(store(*words.list_argv("podman", HOME)[1:]).stdout)
    assert (listed.id, listed.name, listed.state) == (created.stdout.strip(), argv[3], "created")
    assert words.parse_list(store(*words.list_argv("podman", "f" * 16)[1:]).stdout) == ()
    state = words.parse_state(store(*words.inspect_argv("podman", argv[3])[1:]).stdout)
    assert state == words.BoxState(False, 0, 0, False, HOME)

    inspected = json.loads(store(*words.inspect_argv("podman", argv[3])[1:]).stdout)[0]
    assert inspected["Config"]["Labels"]["dev.greenroom.model"] == "org/a b,c=d"
    assert {mount["Destination"]: mount["RW"] for mount in inspected["Mounts"]} == {"/models": False, str(model): False}
    assert inspected["HostConfig"]["PidsLimit"] == words.PIDS_MAX
    assert inspected["HostConfig"]["ShmSize"] == words.SHM_MIB << 20
    assert inspected["HostConfig"]["PortBindings"] == {"5801/tcp": [{"HostIp": "::1", "HostPort": "5801"}]}
    assert inspected["HostConfig"]["LogConfig"]["Type"] == "k8s-file"
    assert inspected["BoundingCaps"] in (None, [])
    assert inspected["Config"]["StopTimeout"] == 10

    assert words.NAME_TAKEN.search(store("create", *argv[2:]).stderr)
    killed = store(*words.kill_argv("podman", argv[3])[1:])
    assert (killed.returncode, "can only kill running containers" in killed.stderr) == (125, True)
    assert store(*words.remove_argv("podman", argv[3])[1:]).returncode == 0
    assert words.parse_list(store(*words.list_argv("podman", HOME)[1:]).stdout) == ()


def test_what_a_real_podman_says_of_what_is_not_there_is_understood(store: Call) -> None:
    """A container, an image: absent, not broken; and the reason of a pull that fails is found among its words."""
    for argv in (words.inspect_argv("podman", "nope"), words.image_argv("podman", "localhost/nope:1"), words.kill_argv("podman", "nope")):
        done = store(*argv[1:])
        assert (done.returncode, bool(words.ABSENT.search(done.stderr))) == (125, True), argv
    assert store(*words.image_argv("podman", IMAGE)[1:]).returncode == 0
    refused = answer(store("run", "--name", "x", "--pull", "never", "localhost/nope:1"))
    assert (refused.code, refused.said) == (125, "localhost/nope:1: image not known")
    assert store(*words.remove_argv("podman", "nope")[1:]).returncode == 0


def test_a_real_docker_without_its_service_is_understood(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not taken for a container that is not there; with the advice to start it."""
    program = needs("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    for argv in (words.inspect_argv(program, "x"), words.image_argv(program, "x"), words.list_argv(program, HOME), (program, "run", "x")):
        done = answer(subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False))
        assert done.code != 0
        assert not words.ABSENT.search(done.err)
        assert done.said.startswith("Cannot connect to the Docker daemon at unix://"), done
        assert words.advice("docker", done.said).startswith("; start the docker service")


@pytest.mark.parametrize("kind", ["podman", "docker"])
def test_the_stand_in_answers_in_the_same_shapes(kind: str, tmp_path: Path) -> None:
    """Where both can be asked: lists and states, and what is not there."""
    state = tmp_path / "state"
    program = str(install(tmp_path / "bin", kind, state))
    (state / "images").write_text(IMAGE)

    def call(argv: tuple[str, ...]) -> Answer:
        return answer(subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "HF_TOKEN": "x"}))

    config = a_model(["sh", "-c", "echo $HF_TOKEN; exit 3"], container=ContainerConfig(program, IMAGE), env=(("HF_TOKEN", "x"),))
    launch = words.owned(describe(config).launch(5801, [], 7), HOME)
    assert launch.box is not None
    name = launch.box.name
    ran = call(launch.argv)

    assert (ran.code, ran.out) == (3, "x\n")
    assert [each.name for each in words.parse_list(call(words.list_argv(program, HOME)).out)] == [name]
    assert words.parse_state(call(words.inspect_argv(program, name)).out) == words.BoxState(False, 0, 3, False, HOME)
    assert words.NAME_TAKEN.search(call(launch.argv).err)
    assert call(words.remove_argv(program, name)).code == 0
    assert words.parse_list(call(words.list_argv(program, HOME)).out) == ()
    assert words.ABSENT.search(call(words.inspect_argv(program, name)).err)
    assert call((program, "run", "--no-such-flag", IMAGE)).code == 125
