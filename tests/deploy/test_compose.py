"""compose.yaml: the real docker compose reads back what the configuration says."""

from __future__ import annotations

import json
import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from greenroom.config.load import load_config_text
from greenroom.config.yaml_out import dump
from greenroom.deploy import compose, quadlet
from greenroom.deploy.build import Options, build
from greenroom.deploy.files import write
from greenroom.deploy.intent import Intent, Workload
from greenroom.deploy.unfit import Unfit
from tests.deploy import sets
from tests.deploy.readback import assert_same_command, expected_env
from tests.validators import tool

VALUES = {"GREENROOM_API_KEY": "sk-$front", "HF_TOKEN": "hf 'x'", "ORG_MODEL_A_HF_TOKEN": "hf y", "EIGHTH_SECRET": 'a"b\\c$'}


def read_by_compose(folder: Path, values: dict[str, str]) -> dict[str, Any]:
    """The file as the real docker compose sees it; `values` are in its environment."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **values}
    done = subprocess.run(
        [tool("docker-compose"), "-f", folder / "compose.yaml", "config", "--format", "json", "--no-path-resolution"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    read: dict[str, Any] = json.loads(done.stdout)
    return read


def generated(folder: Path, intent: Intent) -> dict[str, Any]:
    write(compose.files(intent), folder)
    return read_by_compose(folder, VALUES)


def undollared(value: Any) -> Any:
    """`config` prints a dollar as two, so that its output can be read again."""
    if isinstance(value, str):
        return value.replace("$$", "$")
    if isinstance(value, dict):
        return {key: undollared(item) for key, item in value.items()}
    return [undollared(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("count", [1, 3, 12])
@pytest.mark.parametrize("mode", ["greenroom", "engines"])
def test_docker_compose_reads_back_what_was_meant(tmp_path: Path, count: int, mode: str) -> None:
    """Command, environment, ports, mounts, devices, limits and health come out of docker compose as in the configuration."""
    intent = build(sets.config(count), mode=mode, target="nvidia")
    read = undollared(generated(tmp_path, intent))
    assert sorted(read["services"]) == sorted(one.name for one in intent.workloads)
    for workload in intent.workloads:
        check(read["services"][workload.name], workload)


def check(service: dict[str, Any], workload: Workload) -> None:
    mounts = {mount["target"]: mount for mount in service.get("volumes", [])}
    command = (*service["entrypoint"], *(service["command"] or []))
    assert command == workload.argv
    assert_same_command(workload, command, mounts)
    assert service["image"] == workload.image
    secret = {name: VALUES[key] for name, key in workload.secret_env}
    offered = {name: VALUES[name] for name in workload.offered_env}
    assert (service.get("environment") or {}) == {**expected_env(workload), **secret, **offered}
    (port,) = service["ports"]
    assert (port["host_ip"], port["published"], port["target"]) == ("127.0.0.1", str(workload.host_port), workload.port)
    for mount in workload.mounts:
        found = mounts[mount.target]
        assert (found["type"] == "volume") == (mount.kind == "volume")
        assert found.get("read_only", False) == mount.read_only
    probe = workload.ready
    assert probe is not None
    assert service["healthcheck"]["test"][-1] == f"http://127.0.0.1:{workload.port}{probe.path or '/'}"
    assert seconds(service["healthcheck"]["start_period"]) >= probe.start_s
    resources = service["deploy"]["resources"]
    if workload.share.vendor != "nvidia":
        assert "reservations" not in resources
    else:
        (device,) = resources["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert tuple(device.get("device_ids", ())) == workload.share.devices
        assert device.get("count") == (None if workload.share.devices else -1 if workload.share.every else workload.share.count)
    limit_mib = math.ceil(workload.memory_mib * 1.25) + workload.shm_mib if workload.memory_mib else 0
    assert (int(resources["limits"].get("memory", 0)) >> 20) == limit_mib
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True


def seconds(text: str) -> float:
    hours, _, below = text.rpartition("h")
    minutes, _, rest = below.rpartition("m")
    return 3600 * float(hours or 0) + 60 * float(minutes or 0) + float(rest.rstrip("s"))


@pytest.mark.parametrize("mode", ["greenroom", "engines"])
def test_yaml_1_1_and_docker_compose_agree(tmp_path: Path, mode: str) -> None:
    """A reader of YAML 1.1 (`on`, `1e3` and `no` are no texts to it) finds the same services, commands and variables."""
    intent = build(sets.config(12), mode=mode, target="nvidia")
    read = generated(tmp_path, intent)["services"]
    plain = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]
    assert sorted(plain) == sorted(read)
    for name, service in plain.items():
        assert (service["entrypoint"], service["command"]) == (read[name]["entrypoint"], read[name]["command"])
        kept = {key: value for key, value in (service.get("environment") or {}).items() if value and not value.startswith("${")}
        assert kept.items() <= (read[name].get("environment") or {}).items()


def test_a_secret_that_was_not_filled_in_is_named(tmp_path: Path) -> None:
    """Without its value nothing starts, and compose says which one is missing."""
    write(compose.files(build(sets.config(2), mode="engines", target="cpu")), tmp_path)
    done = subprocess.run(
        [tool("docker-compose"), "-f", tmp_path / "compose.yaml", "config", "-q"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "HF_TOKEN" in done.stderr


def test_the_example_of_secrets_can_be_filled_in(tmp_path: Path) -> None:
    """`.env.example` with values between its quotes is what compose reads as .env, dollars and backslashes unharmed."""
    files = compose.files(build(sets.config(12), target="cpu"))
    write(files, tmp_path)
    lines = [line.replace("=''", "='p$w\\d #x'") for line in files[".env.example"].splitlines()]
    (tmp_path / ".env").write_text("\n".join(lines))
    environment = undollared(read_by_compose(tmp_path, {}))["services"]["greenroom"]["environment"]
    assert {environment[name] for name in sets.SECRETS} == {"p$w\\d #x"}


def test_no_secret_is_in_any_file() -> None:
    """Values of secrets are in none of the files."""
    for mode in ("greenroom", "engines"):
        everything = "\n".join(compose.files(build(sets.config(12), mode=mode, target="nvidia")).values())
        assert [name for name, value in sets.SECRETS.items() if value in everything] == []


@pytest.mark.parametrize(
    ("target", "devices"), [("amd", ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"]), ("intel", ["/dev/dri:/dev/dri"]), ("cpu", [])]
)
def test_devices_by_target(target: str, devices: list[str]) -> None:
    """AMD and Intel cards are handed in as nodes, and nothing where there is no card."""
    service = yaml.safe_load(compose.files(build(sets.config(1), mode="engines", target=target))["compose.yaml"])["services"].popitem()[1]
    assert service.get("devices", []) == devices
    assert "reservations" not in service["deploy"]["resources"]


def test_ipv6_is_published(tmp_path: Path) -> None:
    """An IPv6 address to publish on is one for compose too."""
    read = generated(tmp_path, build(sets.config(1), target="cpu", options=Options(listen="[::1]:8088")))
    (port,) = read["services"]["greenroom"]["ports"]
    assert (port["host_ip"], port["published"]) == ("::1", "8088")


def test_engines_that_measure_their_card_start_one_after_another(tmp_path: Path) -> None:
    """The second vLLM server that may share a card waits until the first one is healthy."""
    intent = build(sets.config(3), mode="engines", target="nvidia")
    read = generated(tmp_path, intent)["services"]
    _, two, three = (one.name for one in intent.workloads)
    assert "depends_on" not in read[two]
    assert read[three]["depends_on"][two]["condition"] == "service_healthy"


def test_a_model_in_a_registry_needs_greenroom_in_front() -> None:
    """Compose of that age mounts no image: the refusal says what to do instead."""
    config = sets.load_config_text(
        "models: {m: {model: 'oci://registry.example/team/m:1', cmd: 'llama-server -m ${MODEL_PATH} --port ${PORT}'}}", env={}
    )
    with pytest.raises(Unfit, match="--mode greenroom"):
        compose.files(build(config, mode="engines", target="cpu"))
    assert "oci://registry.example/team/m:1" in compose.files(build(config, target="cpu"))["greenroom.yaml"]


def test_every_card_where_none_is_named(tmp_path: Path) -> None:
    """greenroom itself gets all cards when the configuration names none."""
    read = generated(tmp_path, build(replace(sets.config(1), devices=()), target="nvidia"))
    (device,) = read["services"]["greenroom"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == -1


def test_all_addresses_are_both_families(tmp_path: Path) -> None:
    """`[::]` is every address without containers; docker would take it for IPv6 alone."""
    intent = build(sets.config(1), target="cpu", options=Options(listen="[::]:8088"))
    (port,) = generated(tmp_path, intent)["services"]["greenroom"]["ports"]
    assert (port.get("host_ip"), port["published"]) == (None, "8088")


def test_what_is_compiled_on_the_fly_can_be_loaded(tmp_path: Path) -> None:
    """docker mounts /tmp without the right to execute unless it is told otherwise."""
    assert generated(tmp_path, build(sets.config(1), target="cpu"))["services"]["greenroom"]["tmpfs"] == ["/tmp:exec"]


def test_greenroom_has_room_for_the_threads_of_all_its_engines(tmp_path: Path) -> None:
    """One engine of many threads does not take another's."""
    found = {}
    for mode in ("greenroom", "engines"):
        services = generated(tmp_path / mode, build(sets.config(3), mode=mode, target="cpu"))["services"]
        found[mode] = {int(one["deploy"]["resources"]["limits"]["pids"]) for one in services.values()}
    assert found == {"greenroom": {4 * 4096}, "engines": {4096}}


def test_what_files_must_allow_is_told(tmp_path: Path) -> None:
    """Without capabilities root reads no file that is closed to others, and writes to no folder of others."""
    cmd = "llama-server -m /home/ann/m.gguf --slot-save-path /srv/slots --port ${PORT}"
    intent = build(load_config_text(dump({"models": {"m": {"cmd": cmd}}}), env={}), target="cpu")
    head = compose.files(intent)["compose.yaml"].partition("name:")[0]
    assert "the files it reads must be readable for everybody" in head
    assert "# It writes to /srv/slots: make it first, and give it to root." in head
    assert "give it to root" in quadlet.files(intent, rootful=True)["greenroom.container"]
    assert "give it to root" not in quadlet.files(intent)["greenroom.container"], "without root it is the user's own"
    fetched = build(load_config_text(dump({"models": {"m": {"cmd": "llama-server -hf a/b --port ${PORT}"}}}), env={}), target="cpu")
    assert "Root in a container" not in compose.files(fetched)["compose.yaml"]
