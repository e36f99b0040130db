"""What is to be deployed says the same as the configuration: paths moved, ports fixed, secrets named, devices shared."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from greenroom.config.load import load_config_text
from greenroom.config.model import Config
from greenroom.config.yaml_out import dump
from greenroom.deploy import compose, quadlet, systemd
from greenroom.deploy.build import BuildError, Options, build, guess_target
from greenroom.deploy.containerfile import text_of
from greenroom.deploy.intent import Mount, Workload
from greenroom.deploy.kube import kube
from greenroom.deploy.own import Own
from greenroom.deploy.references import config_of, engine_of
from greenroom.store.references import parse
from tests.deploy import sets
from tests.deploy.readback import back
from tests.validators import tool


def one(entry: dict[str, object], *, mode: str = "engines", target: str = "cpu", **options: object) -> Workload:
    config = load_config_text(dump({"models": {"m": entry}}), env={})
    return build(config, mode=mode, target=target, options=Options(**options)).workloads[0]  # type: ignore[arg-type]


def model(entry: dict[str, object], **options: object) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command of its entry inside greenroom's container, and where its mounts come from."""
    config = load_config_text(dump({"models": {"m": entry}}), env={})
    intent = build(config, target="cpu", options=Options(**options))  # type: ignore[arg-type]
    sources = {mount.target: mount.source for mount in intent.workloads[0].mounts if mount.kind == "bind"}
    return intent.config.models[0].argv, sources


@pytest.mark.parametrize("count", [1, 3, 12])
def test_the_mounted_configuration_is_the_one_that_was_read(count: int) -> None:
    """greenroom.yaml for the container loads to the same models, once its paths are turned back."""
    config = sets.config(count)
    intent = build(config, target="nvidia")
    again = load_config_text(intent.config_text, env={**sets.SECRETS, "HF_TOKEN": sets.SECRETS["ORG_MODEL_A_HF_TOKEN"]})
    assert sets.comparable(again) == sets.comparable(intent.config)
    mounts = {mount.target: {"source": mount.source} for mount in intent.workloads[0].mounts if mount.kind == "bind"}
    for before, after in zip(config.models, again.models, strict=True):
        words = [back(word, mounts) for word in after.argv]
        assert (
            words == list(before.argv) if before.container is None else words[1:] == ["--port", "${PORT}", "--model", "/srv/whisper/w.bin"]
        )
        kept = ("id", "aliases", "ttl_s", "start_s_max", "stop_s_max", "memory_mib", "devices", "filters", "proxy", "pin")
        assert [getattr(before, name) for name in kept] == [getattr(after, name) for name in kept]
        assert dict(before.env).items() <= dict(after.env).items()
    assert again.devices == config.devices
    assert again.keys == config.keys


def test_the_same_configuration_gives_the_same_intent() -> None:
    """Nothing depends on the moment, on chance or on what this host has."""
    for mode in ("greenroom", "engines"):
        assert build(sets.config(12), mode=mode, target="nvidia") == build(sets.config(12), mode=mode, target="nvidia")


def test_names_and_ports_are_unique() -> None:
    """Names that differ only in case or far behind are different workloads on different ports."""
    workloads = build(sets.config(12), mode="engines", target="nvidia").workloads
    names = {one.name for one in workloads}
    assert len(names) == len({one.host_port for one in workloads}) == 12
    assert all(len(name) <= 63 and name.isascii() and name == name.lower() for name in names)


def test_a_port_that_a_command_names_is_kept() -> None:
    """Fixed ports stay, others are counted from startPort around them; two of one number are published apart."""
    entry = {"cmd": "llama-server -m /m.gguf --port 6900", "proxy": "http://127.0.0.1:6900"}
    other = {"cmd": "llama-server -m /m.gguf --port 6900 --host 127.0.0.2", "proxy": "http://127.0.0.2:6900"}
    text = dump({"startPort": 6900, "models": {"free": {"cmd": "llama-server -m /m.gguf --port ${PORT}"}, "a": entry, "b": other}})
    workloads = build(load_config_text(text, env={}), mode="engines", target="cpu").workloads
    assert [(each.port, each.host_port) for each in workloads] == [(6901, 6901), (6900, 6900), (6900, 6902)]


def test_probes_ask_the_engine_on_its_port() -> None:
    """B49: port 8123 and a load of 300 s are in every probe, on whatever path the configuration names."""
    workload = one(
        {"cmd": "x --port 8123", "proxy": "http://127.0.0.1:8123/base", "checkEndpoint": "/ok", "healthCheckTimeout": 300}, image=""
    )
    for probe in (workload.live, workload.ready):
        assert probe is not None
        assert (probe.port, probe.path, probe.start_s) == (8123, "/base/ok", 300.0)


@pytest.fixture(autouse=True)
def _generic_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image for programs that nobody knows."""
    from greenroom.deploy import images

    monkeypatch.setitem(images.IMAGES, "generic", dict.fromkeys(("nvidia", "amd", "intel", "cpu"), "registry.example/x:1"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "inside"),
    [
        (["--lora", "/a/x.gguf,/b/y.gguf"], ["--lora", "/models/x.gguf,/models/y.gguf"]),
        (["--mmproj=/a/p.gguf"], ["--mmproj=/models/p.gguf"]),
        (["--lora-modules", "sql=/a/sql"], ["--lora-modules", "sql=/models/sql"]),
        (["--cfg", '{"model": "/a/d", "n": 3}'], ["--cfg", '{"model": "/models/d", "n": 3}']),
        (["--api-prefix", "/v1/x"], ["--api-prefix", "/v1/x"]),
        (["--served-model-name", "/models/fake"], ["--served-model-name", "/models/fake"]),
        (["--model-url", "https://h/a.gguf"], ["--model-url", "https://h/a.gguf"]),
        (["-f", "/dev/null"], ["-f", "/dev/null"]),
        (["-p", "/not a path/"], ["-p", "/not a path/"]),
        (["--json", "{not json /a}"], ["--json", "{not json /a}"]),
        (["--regex", "a,b"], ["--regex", "a,b"]),
        (["/a/x/same", "/b/x/same", "/c/x/same"], ["/models/same", "/models/x-same", "/models/"]),
    ],
)
def test_paths_of_the_host_are_mounted_and_renamed(words: list[str], inside: list[str]) -> None:
    """Whatever form a path has in a command, the file is there inside under the name that the command says."""
    found, sources = model({"cmd": ["llama-server", "--port", "${PORT}", *words]})
    assert all(word.startswith(want) if want == "/models/" else word == want for word, want in zip(found[3:], inside, strict=True)), found
    assert [back(word, {target: {"source": source} for target, source in sources.items()}) for word in found[3:]] == words


def test_the_parts_of_a_split_model_stay_together() -> None:
    """Its folder is mounted: the command names only the first part."""
    found, sources = model({"cmd": "llama-server -m /srv/big/b-00001-of-00004.gguf --port ${PORT}"})
    assert found[2] == "/models/big/b-00001-of-00004.gguf"
    assert sources == {"/models/big": "/srv/big"}


def test_relative_paths_are_seen_from_the_working_directory(tmp_path: Path) -> None:
    """`cwd` of the model counts, else where greenroom stood."""
    _, sources = model({"cmd": "llama-server -m ./m.gguf --port ${PORT}", "cwd": str(tmp_path)})
    assert sources == {"/models/m.gguf": str(tmp_path / "m.gguf")}
    _, sources = model({"cmd": "llama-server -m m.gguf --port ${PORT}"})
    assert sources == {"/models/m.gguf": os.path.join(os.getcwd(), "m.gguf")}


def test_variables_keep_their_values() -> None:
    """Folders and files that variables name are mounted where they lie, a cache writable, system folders not at all."""
    env = {"HF_HOME": "/data/hf", "LLAMA_ARG_MODEL": "/data/m.gguf", "PATH": "/usr/bin", "XDG_CACHE_HOME": "/usr/cache", "OTHER": "/data/x"}
    workload = one({"cmd": "llama-server --port ${PORT}", "env": env})
    assert dict(workload.env) == env
    assert {mount.target: mount.read_only for mount in workload.mounts} == {"/data/hf": False, "/data/m.gguf": True}


def test_secrets_are_named_never_written() -> None:
    """A key in a command becomes the variable its engine knows; one that no engine knows goes through a shell."""
    workload = one({"cmd": "llama-server -m /m.gguf --port ${PORT} --api-key sk-1234"})
    assert "sk-1234" not in repr((workload.argv, workload.env))
    assert workload.secret_env == (("LLAMA_API_KEY", "M_SECRET"),)
    workload = one({"cmd": "sglang serve --model-path org/m --port ${PORT} --api-key=it$is-1234"}, target="nvidia")
    assert workload.argv[:2] == ("/bin/sh", "-c")
    assert workload.argv[2].endswith(' "$@"'), "what a writer adds reaches the engine"
    assert workload.argv[3:] == ("sh",)
    assert workload.secret_env == (("M_SECRET", "M_SECRET"),)
    assert "1234" not in repr((workload.argv, workload.env))


UNSPOKEN: Mapping[str, Mapping[str, object]] = {
    "env": {
        "cmd": "llama-server -m /m.gguf --port ${PORT}",
        "env": {
            "HTTPS_PROXY": "http://user:PLAINPW1@proxy:3128",
            "PGURL": "postgres://u:PLAINPW2@db/x",
            "OTEL_HEADERS": "a=1,authorization=Basic PLAINPW3",
            "EXTRA_ARGS": "--api-key PLAINPW4",
        },
    },
    "client": {
        "cmd": ["docker", "run", "--rm", "-p", "${PORT}:80", "-e", "HTTPS_PROXY=http://u:PLAINPW@p", "-eA=--token PLAINPW5", "x:1", "go"]
    },
    "words": {
        "cmd": [
            "llama-server",
            "-m",
            "/m.gguf",
            "--port",
            "${PORT}",
            "--x=http://u:PLAINPW@h",
            "--header",
            "Authorization: Bearer PLAINPW6",
        ],
        "cmdStop": "curl -X POST -H 'Authorization: Bearer PLAINPW7' http://127.0.0.1:${PORT}/stop",
    },
    "script": {
        "cmd": "llama-server -m /m.gguf --port ${PORT}",
        "cmdStop": ["sh", "-c", 'A=1 exec curl -H "Authorization: Bearer PLAINPW8" http://127.0.0.1:${PORT}/stop'],
    },
    "container": {
        "cmd": "llama-server -m /m.gguf --port ${PORT}",
        "container": {"image": "x:1", "args": "-e HTTPS_PROXY=http://u:PLAINPW@p --env=TOKEN=PLAINPW9"},
    },
    "calls": {
        "cmd": "llama-server -m /m.gguf --port ${PORT}",
        "sleep": {"path": "/sleep?token=PLAINPW%2B1"},
        "wake": {"path": "/wake", "body": {"inner": {"url": "http://u:PLAINPW@h"}}},
        "warmup": {"path": "/x", "body": {"auth": [{"api_key": "PLAINPW2"}]}},
    },
}


@pytest.mark.parametrize("case", UNSPOKEN)
@pytest.mark.parametrize("way", ["compose", "quadlet", "kube", "systemd", "engines"])
def test_what_holds_a_password_is_referred_to_as_a_whole(case: str, way: str) -> None:
    """URLs with a password and headers that let in, wherever they stand: in no file, and the configuration reads back with the values."""
    config = load_config_text(dump({"models": {"m": UNSPOKEN[case]}}), env={})
    if case == "client" and way in ("compose", "quadlet", "kube"):
        way = "engines"
    if way == "systemd":
        basis = Own(config, "cpu", Options(bare=True))
        intent = basis.greenroom()
        files = dict(systemd.files(intent, user=True))
        again = load_config_text(intent.config_text, env={key: value for value, key in basis.vault.keys.items()}).models[0]
        before = config.models[0]
        assert (again.argv, again.env, again.stop_argv) == (before.argv, before.env, before.stop_argv)
        assert (again.container, again.sleep_calls, again.warmup) == (before.container, before.sleep_calls, before.warmup)
    elif way == "engines":
        intent = build(config, mode="engines", target="cpu")
        files = {**compose.files(intent), **quadlet.files(intent), **kube(intent)}
    else:
        intent = build(config, target="cpu")
        files = dict({"compose": compose.files, "quadlet": quadlet.files, "kube": kube}[way](intent))
    assert files
    assert "PLAINPW" not in "".join((*files.values(), intent.config_text))


def test_a_variable_with_a_password_is_a_secret_for_its_engine_alone() -> None:
    """Under the key of its model: in greenroom's own environment a proxy would steer greenroom."""
    config = load_config_text(dump({"models": {"m": UNSPOKEN["env"]}}), env={})
    (workload,) = build(config, mode="engines", target="cpu").workloads
    names = ("EXTRA_ARGS", "HTTPS_PROXY", "OTEL_HEADERS", "PGURL")
    assert workload.secret_env == tuple((name, f"M_{name}") for name in names)
    assert workload.env == ()
    assert build(config, target="cpu").workloads[0].secret_env == tuple((f"M_{name}", f"M_{name}") for name in names)


def test_a_script_may_take_its_secrets_from_variables() -> None:
    """What a refusal advises is then taken: names of variables are no secrets."""
    script = 'exec llama-server -m /m.gguf --host 0.0.0.0 --port ${PORT} --api-key "$KEY" --proxy "http://u:$${PASS}@p"'
    workload = one({"cmd": ["sh", "-c", script], "env": {"KEY": "sk-12345", "PASS_TOKEN": "t-12345"}})
    assert workload.argv[:2] == ("sh", "-c")
    assert '--api-key "$KEY" --proxy "http://u:${PASS}@p"' in workload.argv[2]
    assert workload.secret_env == (("KEY", "KEY"), ("PASS_TOKEN", "PASS_TOKEN"))


def test_two_models_may_use_one_variable_for_two_secrets() -> None:
    """The second value gets a key of its own, and each engine its own value by the name it knows."""
    entry = {"cmd": "llama-server -m /m.gguf --port ${PORT}"}
    text = dump({"models": {"a": {**entry, "env": {"HF_TOKEN": "token-1"}}, "b/c": {**entry, "env": {"HF_TOKEN": "token-2"}}}})
    config = load_config_text(text, env={})
    a, b = build(config, mode="engines", target="cpu").workloads
    assert (a.secret_env, b.secret_env) == ((("HF_TOKEN", "HF_TOKEN"),), (("HF_TOKEN", "B_C_HF_TOKEN"),))
    intent = build(config, target="cpu")
    assert sets.comparable(load_config_text(intent.config_text, env={"HF_TOKEN": "token-1", "B_C_HF_TOKEN": "token-2"})) == sets.comparable(
        intent.config
    )


def test_a_key_can_be_wanted_where_there_is_none() -> None:
    """For a place that others reach, the configuration asks for a key that the environment holds."""
    config = replace(sets.config(1), keys=())
    intent = build(config, target="cpu", options=Options(require_key=True))
    assert load_config_text(intent.config_text, env={"GREENROOM_API_KEY": "k-1234"}).api_keys == ("k-1234",)
    assert "GREENROOM_API_KEY" in dict(intent.workloads[0].secret_env)
    assert "--no-auth" not in intent.workloads[0].argv
    assert "--no-auth" in build(config, target="cpu").workloads[0].argv


@pytest.mark.parametrize(
    ("entry", "devices", "count"),
    [
        ({"device": "gpu1"}, ("GPU-b",), 1),
        ({"device": ["gpu0", "gpu1"], "devices_count": 2}, ("GPU-a", "GPU-b"), 2),
        ({"device": ["gpu0", "gpu1"]}, ("GPU-a",), 1),
        ({"env": {"CUDA_VISIBLE_DEVICES": "3"}}, ("3",), 1),
        ({}, (), 1),
    ],
)
def test_devices_of_a_model(entry: dict[str, object], devices: tuple[str, ...], count: int) -> None:
    """Named devices by UUID, pinned ones by what pins them, else only how many."""
    top = {"devices": {"gpu0": {"memory": "1GiB", "uuid": "GPU-a"}, "gpu1": {"memory": "1GiB", "uuid": "GPU-b"}}}
    text = dump({**top, "models": {"m": {"cmd": "llama-server -m /m.gguf --port ${PORT}", **entry}}})
    (workload,) = build(load_config_text(text, env={}), mode="engines", target="nvidia").workloads
    assert (workload.share.devices, workload.share.count) == (devices, count)
    assert "CUDA_VISIBLE_DEVICES" not in dict(workload.env)


def test_a_model_in_ram_asks_for_no_card() -> None:
    """`device: ram` is the CPU, with its image and its memory, among others on cards."""
    workload = one({"cmd": "llama-server -m /m.gguf --port ${PORT}", "device": "ram", "memory": "2GiB"}, target="nvidia")
    assert (workload.share.vendor, workload.share.count, workload.memory_mib) == ("cpu", 0, 2048)
    assert "cuda" not in workload.image


def test_what_is_measured_is_handed_on() -> None:
    """Measured needs win over declared ones."""
    entry = {"cmd": "llama-server -m /m.gguf --port ${PORT}", "memory": "9GiB"}
    assert one(entry, target="nvidia").gpu_mib == 9216
    assert one(entry, target="nvidia", gpu_mib={"m": 7000}).gpu_mib == 7000


@pytest.mark.parametrize(
    ("reference", "entry", "words"),
    [
        ("hf://org/m-GGUF:Q4_K_M", "llama-server -m ${MODEL_PATH} --port ${PORT}", ["--hf-repo", "org/m-GGUF:Q4_K_M"]),
        ("https://h/m.gguf", "llama-server --model ${MODEL_PATH} --port ${PORT}", ["--model-url", "https://h/m.gguf"]),
        ("hf://org/m-GGUF:q4.gguf", "llama-server -m ${MODEL_PATH} --port ${PORT}", ["--hf-repo", "org/m-GGUF", "--hf-file", "q4.gguf"]),
        ("hf://org/m@v1", "vllm serve ${MODEL_PATH} --port ${PORT} --revision x", ["serve", "org/m"]),
        ("file:///srv/a%20b.gguf", "llama-server -m ${MODEL_PATH} --port ${PORT}", ["-m", "/models/a-b.gguf"]),
        ("hf://org/m", "vllm serve ${MODEL_PATH} --port ${PORT}", ["serve", "org/m"]),
        ("file:///srv/m.gguf", "llama-server -m ${MODEL_PATH} --port ${PORT}", ["-m", "/models/m.gguf"]),
    ],
)
def test_an_engine_without_greenroom_fetches_its_model_itself(reference: str, entry: str, words: list[str]) -> None:
    """References become what the engine knows; no macro of greenroom is left in its command."""
    workload = one({"model": reference, "cmd": entry})
    assert list(workload.argv[1 : len(words) + 1]) == words
    assert "${" not in repr(workload.argv)


@pytest.mark.parametrize(
    ("entry", "options", "message"),
    [
        ({"cmd": "docker run -p ${PORT}:80 vllm/vllm-openai --model x"}, {"mode": "greenroom"}, "calls a container runtime itself"),
        ({"cmd": "docker run --rm vllm/vllm-openai --model x ${PORT}"}, {}, "cannot be taken apart"),
        ({"cmd": "docker run -p ${PORT}:80 lmsysorg/sglang --api-key sk-1234"}, {}, "takes from no variable"),
        ({"cmd": "llama-server -m ${MODEL_PATH} --port ${PORT}", "model": "ollama://x"}, {}, "--mode greenroom"),
        ({"cmd": "llama-server -m /m.gguf --port ${PORT}"}, {"listen": "0.0.0.0:8080"}, "m has no key of its own"),
        ({"cmd": "llama-server -m /m.gguf --port ${PORT}"}, {"listen": "0.0.0.0:8080", "mode": "greenroom"}, "no API keys"),
        ({"cmd": "llama-server -m ${MODEL_PATH} -md ${MODEL_DIR}/d --port ${PORT}", "model": "hf://o/r"}, {}, "--mode greenroom"),
        ({"cmd": "llama-server -m /m.gguf --port ${PORT}"}, {"listen": "nowhere"}, "HOST:PORT"),
        ({"cmd": "llama-server -m /m.gguf --port ${PORT}"}, {"mig": "half"}, "MIG profile"),
        ({"cmd": "sh -c 'sglang serve --port ${PORT} --api-key sk-12345'"}, {"target": "nvidia"}, "holds a secret"),
        (
            {"cmd": "--port ${PORT} --api-key sk-12345", "container": {"image": "r/own:1"}},
            {},
            "what its image starts by itself is not known",
        ),
        ({"cmd": "sh -c 'llama-server --port ${PORT} --api-key sk-12345'"}, {}, "the script in its `cmd` holds a secret"),
        ({"cmd": "sh -c 'x --port ${PORT} --to http://u:pw@h'"}, {}, "the script in its `cmd` holds a secret"),
        ({"cmd": ["sh", "-c", "x --port ${PORT} -H Authorization:\\ Bearer\\ abc"]}, {}, "put it into a variable under `env`"),
        ({"cmd": "llama-server --port ${PORT}", "env": {"BACK": "http://u:pw@h:${PORT}"}}, {}, "BACK holds a secret and .* at once"),
        ({"cmd": "llama-server --port ${PORT} --x http://u:pw@h:${PORT}"}, {}, "its `cmd` or `cmdStop` holds a secret and"),
        (
            {"cmd": ["docker", "run", "-p", "${PORT}:80", "x:1", "--header", "Authorization: Bearer abc"]},
            {},
            "write it under `env`, or the image under `container`",
        ),
    ],
)
def test_what_cannot_be_deployed_is_refused(entry: dict[str, object], options: dict[str, object], message: str) -> None:
    """One sentence that says what to do."""
    with pytest.raises(BuildError, match=message):
        one(entry, **options)


def test_unknown_words_are_refused() -> None:
    """Mode, target, and a set without models."""
    with pytest.raises(BuildError, match="no mode"):
        build(sets.config(1), mode="both")
    with pytest.raises(BuildError, match="no target"):
        build(sets.config(1), target="tpu")
    with pytest.raises(BuildError, match="no model"):
        build(Config(path="x", models=()))


def test_an_engine_without_an_image_is_named() -> None:
    """sglang has no usual image for a CPU: it has to be named, for the engine or for the model."""
    entry: dict[str, object] = {"cmd": "sglang serve --model-path org/m --port ${PORT}"}
    with pytest.raises(BuildError, match="--engine-image m=IMAGE"):
        one(entry)
    assert one(entry, engine_images={"sglang": "r/s:1"}).image == "r/s:1"
    assert one(entry, engine_images={"sglang": "r/s:1", "m": "r/m:1"}).image == "r/m:1"


@pytest.mark.parametrize(
    ("top", "entry", "found", "target"),
    [
        ({}, {"env": {"HIP_VISIBLE_DEVICES": "0"}}, "nvidia", "amd"),
        ({}, {"cmd": "env HIP_VISIBLE_DEVICES=0 llama-server -m /m.gguf --port ${PORT}"}, "nvidia", "amd"),
        ({}, {"cmd": "docker run --rm -p ${PORT}:8000 rocm/vllm:1 --model org/m"}, "nvidia", "amd"),
        ({}, {"env": {"ZE_AFFINITY_MASK": "0"}}, "", "intel"),
        ({"devices": {"gpu0": {"memory": "1GiB", "uuid": "GPU-a"}}}, {}, "", "nvidia"),
        ({}, {"device": "ram"}, "nvidia", "cpu"),
        ({}, {}, "amd", "amd"),
        ({}, {}, "", "cpu"),
    ],
)
def test_the_target_is_guessed_only_from_what_is_said(top: dict[str, object], entry: dict[str, object], found: str, target: str) -> None:
    """What the configuration names wins over what this host has."""
    text = dump({**top, "models": {"m": {"cmd": "llama-server -m /m.gguf --port ${PORT}", **entry}}})
    assert guess_target(load_config_text(text, env={}), found) == target


def test_references_make_a_configuration() -> None:
    """Names from references, an engine for each, and a text that loads."""
    texts = ["oci://registry.example/team/chat:1", "hf://org/embed-GGUF:Q8_0", "hf://org/Big", "file:///srv/a b.gguf"]
    config = config_of([parse(text) for text in texts])
    assert [model.argv[0] for model in config.models] == ["llama-server", "llama-server", "vllm", "llama-server"]
    assert len({model.id for model in config.models}) == 4
    again = load_config_text(build(config, target="nvidia").config_text, env={})
    assert [model.reference for model in again.models] == [*(str(parse(text)) for text in texts[:3]), "file:///models/a-b.gguf"]
    with pytest.raises(BuildError, match="given twice"):
        config_of([parse(texts[0]), parse(texts[0])])
    with pytest.raises(BuildError, match="no engine"):
        config_of([parse(texts[0])], engine="tgi")
    assert engine_of(parse("hf://org/x:Q4_K_M")) == "llama_server"


def test_the_image_holds_the_engines_that_are_used() -> None:
    """The largest engine is the base, llama-server is copied in, and what does not fit is said."""
    both = text_of(["llama_server", "vllm"], "nvidia", {})
    assert "FROM docker.io/vllm/vllm-openai" in both
    assert "/app /opt/llama.cpp" in both
    assert "FROM r/own:1\n" in text_of(["llama_server"], "cpu", {"llama_server": "r/own:1"})
    assert "sglang does not fit beside vllm" in text_of(["vllm", "sglang"], "nvidia", {})
    assert build(sets.config(1), target="cpu", options=Options(image="r/greenroom:1")).builds == ""


def test_a_docker_command_is_taken_apart() -> None:
    """What people wrote for docker becomes a workload of its own: image, arguments, ports, mounts, devices, variables."""
    command = (
        "docker run --rm --name x --gpus '\"device=0,2\"' --ipc=host -p127.0.0.1:${PORT}:8000 -v /srv/hub:/hub "
        "-v /srv/t.jinja:/t.jinja:ro -e HF_TOKEN -e HF_HUB_OFFLINE=1 --ulimit memlock=-1 vllm/vllm-openai:v0.11.0 --model org/m -tp 2"
    )
    config = load_config_text(dump({"startPort": 7100, "models": {"m": {"cmd": command, "healthCheckTimeout": 500}}}), env={})
    intent = build(config, mode="engines", target="nvidia")
    (workload,) = intent.workloads
    assert (workload.image, workload.args_entrypoint, workload.port, workload.host_port) == ("vllm/vllm-openai:v0.11.0", False, 8000, 7100)
    assert workload.argv == ("--model", "org/m", "-tp", "2", "--served-model-name", "m")
    assert (workload.share.count, workload.share.devices, workload.shm_mib) == (2, ("0", "2"), 8192)
    assert {mount.target: (mount.source, mount.read_only) for mount in workload.mounts} == {
        "/hub": ("/srv/hub", False),
        "/t.jinja": ("/srv/t.jinja", True),
    }
    assert (workload.env, workload.secret_env) == ((("HF_HUB_OFFLINE", "1"),), (("HF_TOKEN", "HF_TOKEN"),))
    assert workload.ready is not None
    assert (workload.ready.port, workload.ready.start_s) == (8000, 500.0)
    assert intent.notes == ("m: of its `docker run` these are not carried over: --ulimit.",)


def test_named_devices_go_round() -> None:
    """Devices given on the command line are dealt to the models in their order, and one that wants more is told."""
    options = Options(gpus=("GPU-x", "GPU-y", "GPU-z"))
    workloads = build(sets.config(3), mode="engines", target="nvidia", options=options).workloads
    assert [each.share.devices for each in workloads] == [("GPU-x",), ("GPU-y", "GPU-z"), ("GPU-x",)]
    with pytest.raises(BuildError, match="wants 2 devices and --gpu names 1"):
        build(sets.config(3), mode="engines", target="nvidia", options=Options(gpus=("0",)))


@pytest.mark.parametrize(
    ("target", "gpus", "env", "found"),
    [
        ("amd", ("1",), {}, {"HIP_VISIBLE_DEVICES": "1"}),
        ("amd", ("GPU-a1",), {}, {"ROCR_VISIBLE_DEVICES": "GPU-a1"}),
        ("amd", (), {"HIP_VISIBLE_DEVICES": "1"}, {"HIP_VISIBLE_DEVICES": "1"}),
        ("intel", ("1",), {}, {"ZE_AFFINITY_MASK": "1"}),
        ("nvidia", (), {"CUDA_VISIBLE_DEVICES": "1"}, {}),
    ],
)
def test_which_card_counts_is_said_once(target: str, gpus: tuple[str, ...], env: dict[str, str], found: dict[str, str]) -> None:
    """Where all cards are handed in, one variable chooses; where one is, none may count it by its old number."""
    workload = one({"cmd": "llama-server -m /m.gguf --port ${PORT}", "env": env}, target=target, gpus=gpus)
    assert dict(workload.env) == found


def test_addresses_of_this_host_are_told() -> None:
    """A peer on loopback would be the container itself."""
    text = dump({"models": {"m": {"cmd": "x --port ${PORT}"}}, "peers": {"west": {"proxy": "http://127.0.0.1:9000", "models": ["far"]}}})
    config = load_config_text(text, env={})
    assert "the peer west is at http://127.0.0.1:9000" in build(config, target="cpu").notes[0]
    assert build(config, target="cpu", options=Options(bare=True)).notes == ()


def test_a_file_by_reference_is_mounted_for_greenroom() -> None:
    """`model: file://…` names a file of the host: inside it is where it was mounted."""
    entry = {"model": "file:///srv/a%20b.gguf", "cmd": "llama-server -m ${MODEL_PATH} --port ${PORT}"}
    intent = build(load_config_text(dump({"models": {"m": entry}}), env={}), target="cpu")
    assert intent.config.models[0].reference == "file:///models/a-b.gguf"
    assert Mount("bind", "/srv/a b.gguf", "/models/a-b.gguf") in intent.workloads[0].mounts


def test_what_greenroom_reads_for_its_fetches_is_there_too(tmp_path: Path) -> None:
    """Certificates and keys: mounted in a container, where they lie on a bare host; of no use to engines alone."""
    (file := tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    entry = {"model": "hf://o/r:Q4_K_M", "cmd": "llama-server -m ${MODEL_PATH} --port ${PORT}"}
    peer = {"proxy": "https://h", "models": ["far"], "tls_ca": os.path.relpath(file)}
    text = dump({"models": {"m": entry}, "peers": {"p": peer}, "pull": {"tls_ca": os.path.relpath(file), "offline": True}})
    config = load_config_text(text, env={})
    for bare, place in ((False, "/models/ca.pem"), (True, str(file))):
        intent = build(config, target="cpu", options=Options(bare=bare))
        again = load_config_text(intent.config_text.replace(place, str(file)), env={})
        assert (intent.config.models[0].pull_options.tls_ca, intent.config.peers[0].tls_ca) == (place, place)
        assert again.models[0].pull_options == replace(config.models[0].pull_options, tls_ca=str(file))
        assert Mount("bind", str(file), place) in intent.workloads[0].mounts
    notes = build(replace(config, peers=()), mode="engines", target="cpu").notes
    assert "m: hf://o/r:Q4_K_M is fetched without greenroom; what `pull` says of that does not count there." in notes


def test_flags_alone_get_the_program_of_their_image() -> None:
    """In greenroom's own image nothing starts by itself: the engine's program stands before them, or it is told."""
    container = {"image": "docker.io/vllm/vllm-openai:v0.11.0", "volumes": ["/srv/hub:/hub"]}
    config = load_config_text(dump({"models": {"m": {"cmd": "--model /hub/m --port ${PORT}", "container": container}}}), env={})
    intent = build(config, target="nvidia")
    assert intent.config.models[0].argv == ("vllm", "serve", "--model", "/models/m", "--port", "${PORT}")
    assert Mount("bind", "/srv/hub/m", "/models/m") in intent.workloads[0].mounts
    unknown = {"cmd": "--port ${PORT}", "container": {"image": "registry.example/x:1"}}
    with pytest.raises(BuildError, match="write the program"):
        build(load_config_text(dump({"models": {"m": unknown}}), env={}), target="cpu")


MIXED = {
    "chat": {"cmd": "vllm serve org/chat --port ${PORT}"},
    "embed": {"cmd": "text-embeddings-router --model-id org/e --port ${PORT}"},
    "rerank": {"cmd": "llama-server -m /srv/r.gguf --port ${PORT}"},
    "voice": {"cmd": "/opt/bin/whisper --port ${PORT}"},
}


def test_engines_that_an_image_lacks_are_told() -> None:
    """A model whose engine is not in the image would be listed and never start; with an image of the operator's nobody knows."""
    config = load_config_text(dump({"models": MIXED}), env={})
    said = build(config, target="nvidia").notes
    assert [note.partition(";")[0] for note in said if "fetches its weights" not in note] == [
        "embed: the image made by the Containerfile has no tei",
        "voice: the image made by the Containerfile has no whisper",
    ]
    for options in (Options(image="mine:1"), Options(bare=True)):
        assert [note for note in build(config, target="nvidia", options=options).notes if "fetches its weights" not in note] == []


@pytest.mark.parametrize(
    ("entry", "memory_mib", "limit_mib"),
    [
        ({"device": "ram", "memory": "20GiB", "host_memory": "2GiB"}, 22528, 28160),
        ({"device": "ram", "memory": "20GiB"}, 20480, 25600),
        ({"device": "ram", "host_memory": "2GiB"}, 0, 0),  # beside a model of unknown size: it would be ended while it loads
        ({"device": "ram"}, 0, 0),
        ({"device": "gpu0", "host_memory": "2GiB"}, 2048, 2560),
        ({"cmd": "vllm serve /srv/m --port ${PORT}", "device": "gpu0", "host_memory": "2GiB"}, 2048, 2560 + 2048),
    ],
)
def test_one_limit_of_memory_stands_in_every_format(entry: dict[str, object], memory_mib: int, limit_mib: int) -> None:
    """With room for a long prompt, and for what lies in /dev/shm; none where only part of the need is known."""
    top = {"devices": {"gpu0": {"memory": "80GiB"}, "ram": {"memory": "64GiB"}}}
    config = load_config_text(dump({**top, "models": {"m": {"cmd": "llama-server -m /m.gguf --port ${PORT}", **entry}}}), env={})
    intent = build(config, mode="engines", target="nvidia")
    (workload,) = intent.workloads
    assert workload.memory_mib == memory_mib
    service = yaml.safe_load(compose.files(intent)["compose.yaml"])["services"][workload.name]
    assert service["deploy"]["resources"]["limits"].get("memory", "") == (f"{limit_mib}M" if limit_mib else "")
    lines = quadlet.files(intent)[f"{workload.name}.container"].splitlines()
    assert [line for line in lines if "--memory" in line] == ([f"PodmanArgs=--memory={limit_mib}m"] if limit_mib else [])
    asked = container_of(kube(intent, "plain"))["resources"]
    assert asked.get("limits", {}).get("memory", "") == (f"{limit_mib}Mi" if limit_mib else "")


HUB = "vllm serve org/chat --port ${PORT}"
LLAMA = "llama-server --port ${PORT}"


@pytest.mark.parametrize(
    ("entry", "fetches", "token"),
    [
        ({"cmd": HUB}, True, True),
        ({"cmd": HUB, "healthCheckTimeout": 7200}, True, True),
        ({"cmd": "sglang serve --model-path org/chat --port ${PORT}"}, True, True),
        ({"cmd": "text-embeddings-router --model-id org/e --port ${PORT}"}, True, True),
        ({"cmd": "docker run -p ${PORT}:80 vllm/vllm-openai --model org/chat"}, True, True),
        ({"cmd": ["sh", "-c", "cd /x; exec vllm serve org/chat --port ${PORT}"]}, True, True),
        ({"cmd": f"{LLAMA} --hf-repo org/m-GGUF"}, True, True),
        ({"cmd": f"{LLAMA} -hf org/m-GGUF --hf-token hf_abcdef"}, True, False),
        ({"cmd": f"{LLAMA} -m /m.gguf -hfd org/draft-GGUF"}, True, True),
        ({"cmd": f"{LLAMA} --embd-gemma-default"}, True, True),
        ({"cmd": LLAMA, "env": {"LLAMA_ARG_HF_REPO": "org/m-GGUF"}}, True, True),
        ({"cmd": f"{LLAMA} --model-url https://h/m.gguf"}, True, False),  # a token would go to whoever that is
        ({"cmd": LLAMA, "env": {"LLAMA_ARG_MODEL_URL": "https://h/m.gguf"}}, True, False),
        ({"cmd": f"{LLAMA} -m ${{MODEL_PATH}}", "model": "hf://org/m-GGUF:Q4_0"}, True, True),
        ({"cmd": "x --port ${PORT}", "container": {"image": "x:1", "args": "-e HF_HOME=/data"}}, True, True),
        ({"cmd": HUB, "env": {"HF_TOKEN": "hf_abcdef"}}, True, False),
        ({"cmd": "vllm serve /srv/chat --port ${PORT}"}, False, False),
        ({"cmd": HUB, "env": {"HF_HUB_OFFLINE": "1"}}, False, False),
        ({"cmd": f"{LLAMA} -m /m.gguf"}, False, False),
        ({"cmd": f"{LLAMA} -hf org/m-GGUF --offline"}, False, False),
        ({"cmd": "x --port ${PORT}"}, False, False),
    ],
)
def test_an_engine_that_fetches_has_an_hour_and_is_offered_a_token(entry: dict[str, object], fetches: bool, token: bool) -> None:
    """Whoever fetches, by whatever flag or variable; in every format, and never less than what was configured."""
    config = load_config_text(dump({"models": {"m": entry}}), env={})
    intent = build(config, mode="engines", target="nvidia")
    (workload,) = intent.workloads
    configured_s = config.models[0].start_s_max
    start_s = max(3600.0, configured_s) if fetches else configured_s
    assert {probe.start_s for probe in (workload.live, workload.ready) if probe is not None} == {start_s}
    assert workload.offered_env == (("HF_TOKEN",) if token else ())
    service = yaml.safe_load(compose.files(intent)["compose.yaml"])["services"][workload.name]
    assert service["healthcheck"]["start_period"] == f"{start_s:.0f}s"
    assert ("HF_TOKEN", None) in (service.get("environment") or {}).items() if token else "HF_TOKEN:\n" not in dump(service)
    unit = quadlet.files(intent)[f"{workload.name}.container"]
    assert f"HealthStartPeriod={start_s:.0f}s\n" in unit
    assert ("PodmanArgs=--env=HF_TOKEN\n" in unit) == ("EnvironmentFile=-%E/containers/systemd/greenroom.hub.env\n" in unit) == token
    container = container_of(kube(intent, "plain"))
    probe = container["startupProbe"]
    assert start_s <= probe["periodSeconds"] * probe["failureThreshold"] < start_s + 60
    source = {"secretKeyRef": {"name": "greenroom-secrets", "key": "HF_TOKEN", "optional": True}}
    assert [each["valueFrom"] for each in container["env"] if "optional" in str(each)] == ([source] if token else [])


def container_of(files: Mapping[str, str]) -> dict[str, Any]:
    """Of the one Deployment."""
    found = [one for text in files.values() for one in yaml.safe_load_all(text) if one and one.get("kind") == "Deployment"]
    (deployment,) = found
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert isinstance(container, dict)
    return container


@pytest.mark.parametrize("mode", ["greenroom", "engines"])
def test_the_token_of_one_model_is_no_other_models(mode: str) -> None:
    """It has a key of its own, and what is offered to all who fetch is what the operator sets for all."""
    entries = {"ours": {"cmd": HUB, "env": {"HF_TOKEN": "hf_ours_1"}}, "theirs": {"cmd": HUB, "container": {"image": "x:1"}}}
    intent = build(load_config_text(dump({"models": entries}), env={}), mode=mode, target="nvidia")
    service = yaml.safe_load(compose.files(intent)["compose.yaml"])["services"]
    required = "${OURS_HF_TOKEN:?write it into .env}"
    if mode == "greenroom":
        assert service["greenroom"]["environment"] == {"HOME": "/cache", "HF_TOKEN": None, "OURS_HF_TOKEN": required}
        again = load_config_text(intent.config_text, env={"OURS_HF_TOKEN": "hf_ours_1"})
        assert [dict(model.env).get("HF_TOKEN") for model in again.models] == ["hf_ours_1", None]
        return
    assert [service[f"greenroom-{name}"]["environment"].get("HF_TOKEN") for name in entries] == [required, None]
    assert "HF_TOKEN" in service["greenroom-theirs"]["environment"]
    pods = {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]["containers"][0]["env"]
        for text in kube(intent, "plain").values()
        for one in yaml.safe_load_all(text)
        if one and one["kind"] == "Deployment"
    }
    keys = {name: [each["valueFrom"]["secretKeyRef"]["key"] for each in env if each["name"] == "HF_TOKEN"] for name, env in pods.items()}
    assert keys == {"greenroom-ours": ["OURS_HF_TOKEN"], "greenroom-theirs": ["HF_TOKEN"]}


def test_the_file_that_is_offered_to_all_is_no_models_own() -> None:
    """A model may be called `hub`, and its secrets are its own."""
    entries = {"hub": {"cmd": HUB, "env": {"HF_TOKEN": "hf_ours_1"}}, "theirs": {"cmd": HUB}}
    files = quadlet.files(build(load_config_text(dump({"models": entries}), env={}), mode="engines", target="nvidia"))
    assert "EnvironmentFile=./greenroom-hub.env\n" in files["greenroom-hub.container"]
    assert "EnvironmentFile=-%E/containers/systemd/greenroom.hub.env\n" in files["greenroom-theirs.container"]


def test_words_beside_a_secret_stay_what_they_are() -> None:
    """Lists of hosts and headers are secrets as a whole: their pieces are programs, folders and words elsewhere."""
    entries = {
        "a": {
            "cmd": "vllm serve org/m --port ${PORT}",
            "env": {
                "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer abcdef,x-tenant=main,vllm",
                "NODES": "redis://:pw12345@h1:6379,localhost,vllm",
            },
        },
        "b": {"cmd": "vllm serve /srv/localhost --port ${PORT}"},
    }
    config = load_config_text(dump({"models": entries}), env={})
    a, b = build(config, mode="engines", target="nvidia").workloads
    assert a.argv[:3] == ("vllm", "serve", "org/m")
    assert a.secret_env == (("NODES", "A_NODES"), ("OTEL_EXPORTER_OTLP_HEADERS", "A_OTEL_EXPORTER_OTLP_HEADERS"))
    assert b.argv[:3] == ("vllm", "serve", "/models/localhost")
    text = build(config, target="nvidia").config_text
    values = {"A_NODES": entries["a"]["env"]["NODES"], "A_OTEL_EXPORTER_OTLP_HEADERS": "x"}  # type: ignore[index]
    assert [model.argv[:3] for model in load_config_text(text, env=values).models] == [a.argv[:3], b.argv[:3]]
    assert re.findall(r"env\.\w+", text) == ["env.A_OTEL_EXPORTER_OTLP_HEADERS", "env.A_NODES"]


def test_a_header_that_a_command_fills_in_is_no_secret() -> None:
    """Behind the engine in a script it needs no variable."""
    script = 'vllm serve org/m --port ${PORT} & curl -H "Authorization: Bearer $(cat /run/tok)" http://x/hook; wait'
    (workload,) = build(load_config_text(dump({"models": {"m": {"cmd": ["sh", "-c", script]}}}), env={}), mode="engines").workloads
    assert workload.argv == ("sh", "-c", script.replace("${PORT}", "5800"))
    assert workload.secret_env == ()


def test_a_variable_that_is_the_port_is_no_secret_whatever_its_name() -> None:
    """It is filled in."""
    entry = {"cmd": "llama-server -m /m.gguf --port ${PORT}", "env": {"PORT_KEY": "${PORT}"}}
    assert dict(one(entry).env)["PORT_KEY"] == "5800"
    intent = build(load_config_text(dump({"models": {"m": entry}}), env={}))
    assert dict(load_config_text(intent.config_text, env={}).models[0].env) == {"PORT_KEY": "${PORT}"}


def test_what_is_set_in_requests_and_references_shows_no_secret() -> None:
    """In `setParams` by name or by what it says, in a URL that a model comes from and at peers."""
    text = dump(
        {
            "models": {
                "m": {
                    "model": "https://h/x.gguf?token=PLAINPW1",
                    "cmd": "llama-server -m ${MODEL_PATH} --port ${PORT}",
                    "filters": {"setParams": {"api_key": "PLAINPW2", "eos_token": "<end>", "deep": [{"url": "http://u:PLAINPW3@h"}]}},
                }
            },
            "peers": {"p": {"proxy": "http://h:1", "models": ["x"], "filters": {"setParams": {"api_key": "PLAINPW4"}}}},
        }
    )
    config = load_config_text(text, env={})
    for options in (Options(), Options(bare=True)):
        intent = build(config, options=options)
        assert "PLAINPW" not in intent.config_text
        assert "<end>" in intent.config_text
        given = {
            "M_SECRET": "https://h/x.gguf?token=PLAINPW1",
            "M_SECRET_2": "PLAINPW2",
            "M_SECRET_3": "http://u:PLAINPW3@h",
            "P_PEER_SECRET": "PLAINPW4",
        }
        assert {key for _, key in intent.workloads[0].secret_env} == given.keys()
        again, wanted = load_config_text(intent.config_text, env=given), config
        assert [(model.reference, model.filters) for model in again.models] == [(model.reference, model.filters) for model in wanted.models]
        assert again.peers[0].filters == wanted.peers[0].filters


@pytest.mark.parametrize("bare", [False, True])
def test_a_reference_with_a_password_is_refused(bare: bool) -> None:
    """On a bare host too."""
    text = dump({"models": {"m": {"model": "https://u:PLAINPW@h/x.gguf", "cmd": "llama-server -m ${MODEL_PATH} --port ${PORT}"}}})
    with pytest.raises(BuildError, match="holds a user name or a password") as told:
        build(load_config_text(text, env={}), options=Options(bare=bare))
    assert "PLAINPW" not in str(told.value)


def test_llama_serve_is_llama_server_in_its_image() -> None:
    """The images hold the one program, and the word `serve` is none of its arguments."""
    cmd = "/opt/llama serve -m /m.gguf --port ${PORT}"
    assert one({"cmd": cmd}).argv[:3] == ("/app/llama-server", "-m", "/models/m.gguf")
    intent = build(load_config_text(dump({"models": {"m": {"cmd": cmd}}}), env={}))
    assert load_config_text(intent.config_text, env={}).models[0].argv[:3] == ("llama-server", "-m", "/models/m.gguf")


def test_greenroom_ends_a_start_that_fetches_for_too_long_and_says_so() -> None:
    """What greenroom fetches itself is here before the engine starts; a long limit is enough too."""
    entries = {
        "hub": {"cmd": HUB},
        "repo": {"cmd": f"{LLAMA} -hf org/m-GGUF", "healthCheckTimeout": 600},
        "patient": {"cmd": HUB, "healthCheckTimeout": 3600},
        "stored": {"cmd": f"{LLAMA} -m ${{MODEL_PATH}}", "model": "hf://org/m-GGUF:Q4_0"},
        "here": {"cmd": f"{LLAMA} -m /m.gguf"},
    }
    config = load_config_text(dump({"models": entries}), env={})
    for options in (Options(), Options(bare=True)):
        intent = build(config, target="nvidia", options=options)
        said = [note for note in intent.notes if "fetches its weights itself" in note]
        assert [note.partition(":")[0] for note in said] == ["hub", "repo"]
        assert "longer than 600 s is ended: raise `healthCheckTimeout`" in said[1]
        assert intent.workloads[0].offered_env == (() if options.bare else ("HF_TOKEN",))


def test_an_image_of_two_engines_is_tried_when_it_is_built() -> None:
    """llama.cpp copied beside vLLM may miss a library there: the build ends, instead of models that run on the CPU unseen."""
    both, alone = text_of(("vllm", "llama_server"), "nvidia", {}), text_of(("llama_server",), "nvidia", {})
    assert "RUN llama-server --version && ! ldd /opt/llama.cpp/*.so" in both
    assert "ldd" not in alone


def test_no_registry_decides_what_greenroom_is() -> None:
    """Its wheel is copied in: a stranger's package of that name could not get into the image."""
    text = text_of(("llama_server",), "cpu", {})
    assert "COPY ${WHEEL} /opt/wheel/" in text
    assert "greenroom==" not in text
    config = load_config_text(dump({"models": {"a": {"cmd": "llama-server -m /srv/a.gguf --port ${PORT}"}}}), env={})
    first = "-py3-none-any.whl beside Containerfile, whose head says how it is made."
    for write, name in ((quadlet.files, "greenroom.container"), (compose.files, "compose.yaml")):
        assert first in write(build(config, target="cpu"))[name]
        assert first not in write(build(config, target="cpu", options=Options(image="mine:1")))[name]


def test_models_without_greenroom_are_said_to_stay() -> None:
    """Several models on one device hold it together; who was used to greenroom is told."""
    entry = {"cmd": "llama-server -m /srv/a.gguf --port ${PORT}"}
    config = load_config_text(dump({"models": {"a": entry, "b": entry}}), env={})
    assert "2 models hold their GPU memory at the same time" in build(config, mode="engines", target="nvidia").notes[0]
    assert build(config, mode="engines", target="cpu").notes == ()
    dealt = build(config, mode="engines", target="nvidia", options=Options(gpus=("0", "1")))
    assert dealt.notes == ()


def test_neighbours_may_call_it_by_its_name() -> None:
    """A container of the same network says `http://greenroom:8080`: without keys that name must be known."""
    config = load_config_text(
        dump({"allowed_hosts": ["llm.lan"], "models": {"a": {"cmd": "llama-server -m /srv/a.gguf --port ${PORT}"}}}), env={}
    )
    assert build(config, target="cpu").config.allowed_hosts == ("llm.lan", "greenroom")
    assert build(config, target="cpu", options=Options(bare=True)).config.allowed_hosts == ("llm.lan",)
    assert build(config, target="cpu", options=Options(require_key=True)).config.allowed_hosts == ("llm.lan",)


@pytest.mark.parametrize("before", ["", "/usr/local/cuda/lib64"])
def test_no_library_is_taken_from_the_working_directory(tmp_path: Path, before: str) -> None:
    """An image without LD_LIBRARY_PATH gets no empty part in it, which would be wherever an engine stands; the build tool reads it so."""
    buildah = tool("buildah")
    (line,) = [line for line in text_of(("llama_server",), "cpu", {}).splitlines() if line.startswith("ENV LD_LIBRARY_PATH")]
    given = f"ENV LD_LIBRARY_PATH={before}\n" if before else ""
    (tmp_path / "Containerfile").write_text(f"FROM scratch\n{given}{line}\n")
    storage = ["--root", str(tmp_path / "root"), "--runroot", str(tmp_path / "run"), "--storage-driver", "vfs"]
    words = [buildah, *storage, "build", "--isolation", "chroot", "-t", "t", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    read = subprocess.run([buildah, *storage, "inspect", "t"], capture_output=True, text=True, timeout=300, check=True)
    (found,) = [text for text in json.loads(read.stdout)["OCIv1"]["config"]["Env"] if text.startswith("LD_LIBRARY_PATH=")]
    assert found == f"LD_LIBRARY_PATH=/app{':' + before if before else ''}"
