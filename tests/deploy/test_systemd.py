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
@pytest.mark.parametrize("run_as", ["", "llm"])
def test_systemd_has_nothing_to_say(tmp_path: Path, count: int, user: bool, run_as: str) -> None:
    """The unit is verified for the system and for a user, whatever the models are called."""
    program = tmp_path / "bin dir" / "greenroom"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    write(systemd.files(bare(count), user=user, program=str(program), run_as="" if user else run_as), tmp_path / "units")
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
    files = systemd.files(bare(12))
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


def test_it_stops_later_than_its_slowest_engine() -> None:
    """systemd waits for requests in flight and for the longest grace of an engine."""
    unit = units.parse(systemd.files(bare(12))["greenroom.service"])
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
