"""A unit for a bare host: systemd-analyze takes it without a word, and its command serves a request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.config.load import load_config_text
from greenroom.config.yaml_out import dump
from greenroom.deploy import systemd
from greenroom.deploy.build import Options, build
from greenroom.deploy.files import write
from greenroom.deploy.intent import Intent
from greenroom.deploy.unfit import Unfit
from tests.deploy import sets, units


def bare(count: int, **options: object) -> Intent:
    return build(sets.config(count), target="nvidia", options=Options(bare=True, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 3, 12])
@pytest.mark.parametrize("user", [False, True])
def test_systemd_has_nothing_to_say(tmp_path: Path, count: int, user: bool) -> None:
    """The unit is verified for the system and for a user, whatever the models are called."""
    program = tmp_path / "bin dir" / "greenroom"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    write(systemd.files(bare(count), user=user, program=str(program), run_as="" if user else "llm"), tmp_path / "units")
    units.verify(tmp_path / "units", "greenroom.service", user=user)


def test_the_command_is_that_of_the_options() -> None:
    """Address, configuration and state come from the options and from systemd."""
    unit = units.parse(systemd.files(bare(3, listen="[::1]:8123"))["greenroom.service"])
    command = units.words(units.value(unit, "Service", "ExecStart"), {"%E": "/etc", "%S": "/var/lib"})
    assert command == [
        "/usr/local/bin/greenroom",
        "serve",
        "--listen",
        "[::1]:8123",
        "--config",
        "/etc/greenroom/greenroom.yaml",
        "--state-dir",
        "/var/lib/greenroom",
    ]


def test_the_configuration_is_the_one_that_was_read() -> None:
    """Beside the unit lies the same configuration: nothing is moved on a bare host, secrets are in the environment."""
    files = systemd.files(bare(12), run_as="llm")
    assert [name for name, value in sets.SECRETS.items() if value in "\n".join(files.values())] == []
    again = load_config_text(files["greenroom.yaml"], env=sets.SECRETS)
    assert sets.comparable(again) == sets.comparable(sets.config(12))
    assert units.values(units.parse(files["greenroom.service"]), "Service", "EnvironmentFile") == ["%E/greenroom/greenroom.env"]
    assert sorted(line for line in files["greenroom.env.example"].splitlines() if not line.startswith("#")) == [
        f"{name}=''" for name in sorted(sets.SECRETS)
    ]


def test_a_relative_path_still_means_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model named from where greenroom was started is found by a unit that starts elsewhere."""
    monkeypatch.chdir(tmp_path)
    config = load_config_text(dump({"models": {"m": {"cmd": "llama-server -m ./m.gguf --port ${PORT}"}}}), env={})
    intent = build(config, target="cpu", options=Options(bare=True))
    assert intent.config.models[0].cwd == str(tmp_path)
    assert f"RequiresMountsFor={tmp_path}/m.gguf" in systemd.files(intent)["greenroom.service"]


@pytest.mark.parametrize(
    "entry",
    [
        {"cmd": "python -S -E bin/vllm serve agent --port ${PORT}"},
        {"cmd": "bin/not-built-yet --port ${PORT}"},
        {"cmd": "python serve.py --port ${PORT}"},
        {"cmd": "vllm serve org/agent --port ${PORT}"},
        {"cmd": "llama-server --model=m.gguf --port ${PORT}"},
        {"cmd": "vllm serve --port ${PORT} --lora-modules=extra --chat-template serve.py"},
        {"cmd": "vllm serve bin --port ${PORT}"},
        {"cmd": "sh -c 'cd bin && exec ./vllm --port ${PORT}'"},
        {"cmd": "sh -c 'cd nowhere; exec /opt/vllm --port ${PORT}'"},
        {"cmd": "sh -c 'exec bin/not-built-yet --port ${PORT}'"},
        {"cmd": "sh -c 'exec vllm serve org/agent --port ${PORT}'"},
        {"cmd": "sh -c 'exec /opt/vllm --port ${PORT} >log'"},
        {"cmd": ["sh", "-c", 'exec /opt/vllm --port ${PORT} --x "$PWD/x"']},
        {"cmd": "engine --port ${PORT}", "env": {"TEMPLATES": "bin"}},
        {"cmd": "engine --port ${PORT}", "cmdStop": "bin/vllm stop"},
        {"cmd": "engine --port ${PORT}", "container": {"image": "i", "volumes": ["./bin:/bin"]}},
    ],
)
def test_whatever_may_lie_in_its_folder_is_looked_for_there(
    entry: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs, scripts, models, values of flags and variables; what a shell is told may name anything."""
    monkeypatch.chdir(tmp_path)
    for name in ("bin/vllm", "org/agent/config.json", "serve.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    intent = build(load_config_text(dump({"models": {"m": entry}}), env={}), target="cpu", options=Options(bare=True))
    assert intent.config.models[0].cwd == str(tmp_path)
    if "container" not in entry:
        assert str(tmp_path) in units.values(units.parse(systemd.files(intent)["greenroom.service"]), "Unit", "RequiresMountsFor")


@pytest.mark.parametrize(
    "cmd",
    [
        "vllm serve org/agent --port ${PORT}",
        "/opt/bin/vllm serve /srv/agent --port ${PORT} --api-prefix=/v1",
        "sh -c 'cd /srv && exec llama-server -m /srv/m.gguf --port ${PORT} 2>/dev/null'",
        "sh -c 'exec vllm serve org/agent --port ${PORT}'",
        "docker run --rm -p ${PORT}:80 vllm/vllm-openai --model org/agent",
    ],
)
def test_what_names_nothing_in_its_folder_gets_none(cmd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run where that folder is not; a folder called like a word of the command changes nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve").mkdir()
    intent = build(load_config_text(dump({"models": {"m": {"cmd": cmd}}}), env={}), target="cpu", options=Options(bare=True))
    assert intent.config.models[0].cwd is None


def test_it_stops_later_than_its_slowest_engine() -> None:
    """systemd waits for requests in flight and for the longest grace of an engine."""
    unit = units.parse(systemd.files(bare(12), run_as="llm")["greenroom.service"])
    slowest = max(model.stop_s_max for model in sets.config(12).models)
    assert float(units.value(unit, "Service", "TimeoutStopSec")) > 30 + slowest
    assert units.value(unit, "Service", "KillMode") == "mixed"


def test_folders_that_engines_write_to_stay_writable() -> None:
    """A cache that the configuration names is opened, its models are waited for, the rest of the system is closed."""
    text = dump({"models": {"m": {"cmd": "vllm serve /data/m --port ${PORT}", "env": {"HF_HOME": "/data/my cache"}}}})
    intent = build(load_config_text(text, env={}), target="nvidia", options=Options(bare=True))
    unit = units.parse(systemd.files(intent)["greenroom.service"])
    assert units.words(units.value(unit, "Service", "ReadWritePaths")) == ["-/data/my cache"]
    assert units.value(unit, "Service", "ProtectSystem") == "strict"
    assert units.values(unit, "Unit", "RequiresMountsFor") == ["/data/m"]


def test_engines_of_their_own_are_for_containers() -> None:
    """One process a model without greenroom is no unit of a bare host."""
    with pytest.raises(Unfit, match="--mode engines"):
        systemd.files(build(sets.config(1), mode="engines", target="cpu"))
    with pytest.raises(Unfit, match="whole path"):
        systemd.files(bare(1), program="greenroom")


def test_a_public_address_needs_a_key() -> None:
    """An address that others reach is refused without keys, as `serve` refuses it."""
    config = replace(sets.config(1), keys=())
    with pytest.raises(Unfit, match="no API keys"):
        build(config, target="cpu", options=Options(bare=True, listen="0.0.0.0:8080"))
    intent = build(config, target="cpu", options=Options(bare=True, listen="0.0.0.0:8080", no_auth=True))
    assert "--no-auth" in systemd.files(intent)["greenroom.service"]


def unit_of(entry: dict[str, object], **how: object) -> str:
    config = load_config_text(dump({"models": {"m": entry}}), env={})
    return systemd.files(build(config, target="nvidia", options=Options(bare=True)), **how)["greenroom.service"]  # type: ignore[arg-type]


def test_the_account_that_is_made_for_each_start_is_verified_too(tmp_path: Path) -> None:
    """Without containers nobody has to name an account, and systemd takes the unit."""
    program = tmp_path / "greenroom"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = unit_of({"cmd": "/opt/llama-server -m /srv/m.gguf --port ${PORT}"}, program=str(program))
    assert units.value(units.parse(text), "Service", "DynamicUser") == "true"
    write({"greenroom.service": text}, tmp_path / "units")
    units.verify(tmp_path / "units", "greenroom.service", user=False)


@pytest.mark.parametrize("cmd", ["docker run --rm -p ${PORT}:80 image", "llama-server -m /models/a.gguf --port ${PORT}"])
def test_containers_need_an_account_and_rights(cmd: str) -> None:
    """podman without root makes namespaces and calls set-uid helpers: the unit forbids neither, and an account is asked for."""
    entry: dict[str, object] = {"cmd": cmd, **({} if "docker" in cmd else {"container": {"runtime": "podman", "image": "i"}})}
    with pytest.raises(Unfit, match="--run-as ACCOUNT"):
        unit_of(entry)
    for how in ({"run_as": "llm"}, {"user": True}):
        service = units.parse(unit_of(entry, **how))
        for name in ("NoNewPrivileges", "RestrictNamespaces", "RestrictSUIDSGID", "CapabilityBoundingSet"):
            assert units.values(service, "Service", name) == []
        assert units.value(service, "Service", "Delegate") == "yes"


def test_what_would_fail_the_first_start_is_told() -> None:
    """Files in somebody's home, programs without a path, folders that are written to."""
    entry: dict[str, object] = {"cmd": "llama-server -m /home/ann/m.gguf --slot-save-path /srv/slots --port ${PORT}"}
    text = unit_of(entry)
    assert "# llama-server: looked for in /usr/local/bin" in text
    assert "# /home/ann/m.gguf may be closed to the account that is made for each start: give --run-as" in text
    assert "# /srv/slots must be there, and writable for that account" in text
    assert "may be closed" not in unit_of(entry, run_as="ann")
    assert "may be closed" not in unit_of(entry, run_as="root")
    assert "# /home/ann/m.gguf may be closed to bob: move it to /srv" in unit_of(entry, run_as="bob")
    assert "# /root may be closed to the account" in unit_of({"cmd": "/opt/x ./y --port ${PORT}", "cwd": "/root"})
    assert "may be closed" not in unit_of(entry, user=True)
    assert "looked for" not in unit_of({"cmd": "/opt/llama-server -m /srv/m.gguf --port ${PORT}"})
