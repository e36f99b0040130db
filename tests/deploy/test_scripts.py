"""Commands that nobody can read for certain: what is written out in them is the container's, the rest is told."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.config.load import load_config_text
from greenroom.config.yaml_out import dump
from greenroom.deploy.build import Options, build
from greenroom.deploy.intent import Intent

LLAMA_IMAGE = "ghcr.io/ggml-org/llama.cpp:server-b1"
ELSEWHERE = "registry.example/x:1"


def deployed(entry: dict[str, Any], image: str = "", *, mode: str = "engines") -> Intent:
    images = {"m": image} if image else {}
    options = Options(engine_images=images, image="mine:1")
    return build(load_config_text(dump({"models": {"m": entry}}), env={}), mode=mode, target="nvidia", options=options)


def script(text: str) -> dict[str, Any]:
    return {"cmd": ["sh", "-c", text]}


def about(intent: Intent, what: str) -> list[str]:
    return [note for note in intent.notes if what in note]


@pytest.mark.parametrize(
    ("text", "image", "inside"),
    [
        (
            "cd /x && exec /opt/llama-server -m /srv/llama-server/m.gguf --host 127.0.0.1 --port ${PORT}",
            LLAMA_IMAGE,
            "cd /x && exec /app/llama-server -m /models/m.gguf --host 0.0.0.0 --port 5800",
        ),
        (
            "exec llama-server -m /m.gguf --host='::1' --port=${PORT}",
            ELSEWHERE,
            "exec llama-server -m /models/m.gguf --host='::' --port=5800",
        ),
        (
            "LLAMA_ARG_HOST=localhost env A=1 ./llama-server -m /m.gguf --port ${PORT}",
            LLAMA_IMAGE,
            "LLAMA_ARG_HOST=0.0.0.0 env A=1 /app/llama-server -m /models/m.gguf --port 5800",
        ),
        ('exec /v/bin/vllm serve o/x --host "localhost" --port ${PORT}', "", 'exec vllm serve o/x --host "0.0.0.0" --port 5800'),
        (
            "exec /v/bin/python3.11 -u -m sglang.launch_server --model-path o/x --host 10.0.0.1 --port ${PORT}",
            "",
            "exec python3 -u -m sglang.launch_server --model-path o/x --host 10.0.0.1 --port 5800",
        ),
        (
            "exec llama-server -m /m.gguf --port ${PORT} --alias llama-server",
            LLAMA_IMAGE,
            "exec /app/llama-server -m /models/m.gguf --port 5800 --alias llama-server",
        ),
        (
            'echo llama-server; A="b c" nice -n 5 "/opt/llama-server" --version 2>/tmp/log || exit 1; '
            "if true; then 2>&1 exec /opt/llama-server -m /m.gguf --port ${PORT} | tee /tmp/llama-server; fi",
            LLAMA_IMAGE,
            'echo llama-server; A="b c" nice -n 5 "/app/llama-server" --version 2>/tmp/log || exit 1; '
            "if true; then 2>&1 exec /app/llama-server -m /models/m.gguf --port 5800 | tee /tmp/llama-server; fi",
        ),
        (
            "exec env A=1 sh -c 'exec llama-server -m /m.gguf --port ${PORT} -a llama-server'",
            LLAMA_IMAGE,
            "exec env A=1 sh -c 'exec /app/llama-server -m /models/m.gguf --port 5800 -a llama-server'",
        ),
        (
            "exec llama serve -m /m.gguf --port ${PORT} --alias llama",
            LLAMA_IMAGE,
            "exec /app/llama-server -m /models/m.gguf --port 5800 --alias llama",
        ),
        ("exec speak --voice a --listen 0.0.0.0:${PORT}", ELSEWHERE, "exec speak --voice a --listen 0.0.0.0:5800"),
        ("exec speak --peer 127.0.0.11 --listen 0.0.0.0:${PORT}", ELSEWHERE, "exec speak --peer 127.0.0.11 --listen 0.0.0.0:5800"),
    ],
)
def test_a_script_starts_the_images_program_and_listens_to_others(text: str, image: str, inside: str) -> None:
    """The program, the address and the port are those inside, as in a command without a shell; what else it needs is told."""
    intent = deployed(script(text), image)
    assert intent.workloads[0].argv == ("sh", "-c", inside)
    assert len(about(intent, f"what it calls beside the engine must be in {intent.workloads[0].image}.")) == 1


def test_a_script_that_starts_what_is_written_behind_it_renames_that_alone() -> None:
    """The name of a model may be that of the program."""
    behind = ["sh", "llama", "serve", "-m", "/m.gguf", "--port", "${PORT}", "--alias", "llama"]
    (workload,) = deployed({"cmd": ["sh", "-c", 'exec "$@"', *behind]}, LLAMA_IMAGE).workloads
    wanted = ("sh", "/app/llama-server", "-m", "/models/m.gguf", "--port", "5800", "--alias", "llama")
    assert workload.argv == ("sh", "-c", 'exec "$@"', *wanted)


@pytest.mark.parametrize("mode", ["engines", "greenroom"])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("exec vllm serve /srv/m --port ${PORT}", ["/srv/m"]),
        (
            "cd /x; . /opt/env.sh; exec vllm serve --model=/srv/m --lora-modules=/srv/l --port ${PORT}",
            ["/x", "/opt/env.sh", "/srv/m", "/srv/l"],
        ),
        ("exec llama-server -m /srv/m.gguf --api-prefix /v1 --port ${PORT} >/dev/null 2>/tmp/log", []),
        ("exec vllm serve org/m --download-dir $HF_HOME/x --allowed-origins http://h/x --port ${PORT}", []),
        ("exec vllm serve org/m --download-dir /data/hf/x --port ${PORT}", []),
    ],
)
def test_paths_of_a_script_that_are_not_mounted_are_told(text: str, told: list[str], mode: str) -> None:
    """Not those of every system, nor what lies in a mount; a model that is missing inside is not guessed at."""
    entry = {**script(text), "env": {"HF_HOME": "/data/hf"}}
    notes = about(deployed(entry, mode=mode), "nothing is mounted there")
    names = [note.removeprefix("m: the script in its `cmd` names ").partition(", and nothing")[0] for note in notes]
    assert names == ([", ".join(told)] if told else [])


def test_a_script_in_greenrooms_image_starts_the_program_of_that_image() -> None:
    """On loopback as before: greenroom is in the same container."""
    intent = deployed(script("exec /opt/b/llama-server -m /srv/m.gguf --host 127.0.0.1 --port ${PORT}"), mode="greenroom")
    wanted = "exec llama-server -m /models/m.gguf --host 127.0.0.1 --port ${PORT}"
    assert load_config_text(intent.config_text, env={}).models[0].argv == ("sh", "-c", wanted)


@pytest.mark.parametrize(
    ("entry", "image", "told"),
    [
        ({"cmd": "speak --listen 127.0.0.1:${PORT}"}, ELSEWHERE, ["127.0.0.1:5800"]),
        ({"cmd": "speak --bind=http://[::1]:${PORT}/x"}, ELSEWHERE, ["--bind=http://[::1]:5800/x"]),
        ({"cmd": "speak --port ${PORT}", "env": {"OLLAMA_HOST": "localhost"}}, ELSEWHERE, ["OLLAMA_HOST=localhost"]),
        (script("speak --listen localhost:${PORT}; true"), ELSEWHERE, ["localhost:5800"]),
        ({"cmd": "docker run -p ${PORT}:80 x:1 speak --listen 127.0.0.1:80"}, "", ["127.0.0.1:80"]),
        ({"cmd": "speak --listen 0.0.0.0:${PORT} --name localhosts --at http://u:pw@localhost"}, ELSEWHERE, []),
        ({"cmd": "llama-server -m /m.gguf --port ${PORT} --host 127.0.0.1"}, LLAMA_IMAGE, []),
        ({"cmd": "llama-server -m /m.gguf --port ${PORT}", "env": {"LLAMA_ARG_HOST": "127.0.0.1"}}, LLAMA_IMAGE, []),
    ],
)
def test_loopback_that_cannot_be_opened_is_told(entry: dict[str, Any], image: str, told: list[str]) -> None:
    """Of programs that nobody knows, and of scripts: what the words mean there is for the operator to say."""
    notes = about(deployed(entry, image), "is the container itself inside")
    assert [note.removeprefix("m: ").partition(" is the container")[0] for note in notes] == told


@pytest.mark.parametrize(
    ("entry", "image", "is_told"),
    [
        (script("sglang serve --model-path o/x --port ${PORT}"), "", True),
        ({"cmd": "docker run -p ${PORT}:80 lmsysorg/sglang --model-path o/x"}, "", True),
        (script("llama-server -m /m.gguf --port ${PORT}"), ELSEWHERE, True),
        (script("llama-server -m /m.gguf --port ${PORT}"), LLAMA_IMAGE, False),  # that image listens everywhere
        ({**script("llama-server -m /m.gguf --port ${PORT}"), "env": {"LLAMA_ARG_HOST": "0.0.0.0"}}, ELSEWHERE, False),
        (script("vllm serve o/x --port ${PORT}"), "", False),  # so does this engine
        ({"cmd": "sglang serve --model-path o/x --port ${PORT}"}, "", False),  # the flag is added
    ],
)
def test_an_engine_that_listens_on_loopback_unless_told_is_told(entry: dict[str, Any], image: str, is_told: bool) -> None:
    """Where no flag can be added for it."""
    assert bool(about(deployed(entry, image), "names no --host")) == is_told


def test_an_engine_in_an_operators_container_is_open_in_ours() -> None:
    """`--network host` let it listen on the host's loopback."""
    cmd = ["docker", "run", "--network", "host", "vllm/vllm-openai:1", "--model", "o/x", "--host", "127.0.0.1", "--port", "${PORT}"]
    (workload,) = deployed({"cmd": cmd}).workloads
    assert workload.argv[2:4] == ("--host", "0.0.0.0")
