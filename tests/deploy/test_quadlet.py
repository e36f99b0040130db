"""Quadlet units: the real generator takes them without a word, and what podman would be told is what the configuration says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from greenroom.config.load import load_config_text
from greenroom.config.model import Config
from greenroom.config.yaml_out import dump
from greenroom.deploy import quadlet
from greenroom.deploy.build import Options, build
from greenroom.deploy.files import write
from greenroom.deploy.intent import Intent, Workload
from greenroom.deploy.unfit import Unfit
from tests.deploy import sets, units
from tests.deploy.readback import assert_same_command, back, expected_env
from tests.validators import tool

SPECIFIERS = {"%t": "/run/user/1", "%N": "unit", "%n": "unit.service"}


def generated(folder: Path, intent: Intent, *, rootful: bool = False) -> dict[str, units.Run]:
    """Workload -> what its service would tell podman, by the real quadlet."""
    write(quadlet.files(intent, rootful=rootful), folder)
    services = units.quadlet(folder, user=not rootful)
    return {one.name: run_of(services[f"{one.name}.service"]) for one in intent.workloads}


def run_of(service: str) -> units.Run:
    return units.podman_run(units.words(units.value(units.parse(service), "Service", "ExecStart"), SPECIFIERS))


@pytest.mark.parametrize("count", [1, 3, 12])
@pytest.mark.parametrize("mode", ["greenroom", "engines"])
@pytest.mark.parametrize("rootful", [False, True])
def test_the_real_generator_reads_back_what_was_meant(tmp_path: Path, count: int, mode: str, rootful: bool) -> None:
    """Command, environment, ports, mounts, devices and health come out of quadlet as they are in the configuration."""
    config = sets.config(count)
    intent = build(config, mode=mode, target="nvidia")
    runs = generated(tmp_path, intent, rootful=rootful)
    assert len(runs) == (count if mode == "engines" else 1)
    for workload in intent.workloads:
        check_run(runs[workload.name], workload, tmp_path)


def check_run(run: units.Run, workload: Workload, folder: Path) -> None:
    assert run.image == workload.image
    assert run.command == workload.argv
    assert_same_command(workload, run.command, run.mounts)
    assert run.env == {**expected_env(workload), **dict.fromkeys(workload.offered_env, "")}  # named alone: from the service
    assert run.all("--publish") == [f"127.0.0.1:{workload.host_port}:{workload.port}"]
    probe = workload.ready
    assert probe is not None
    health = json.loads(run.one("--health-cmd"))
    assert health[-1] == f"http://127.0.0.1:{workload.port}{probe.path or '/'}"
    assert float(run.one("--health-start-period").rstrip("s")) >= probe.start_s
    assert run.one("--cap-drop") == "all"
    if workload.secret_env:
        assert run.all("--env-file") == [str(folder / f"{workload.name}.env")]
    if workload.memory_mib:
        assert run.one("--memory") == f"{math.ceil(workload.memory_mib * 1.25) + workload.shm_mib}m"
    share = workload.share
    names = share.devices or (("all",) if share.every else tuple(map(str, range(share.count))))
    assert run.all("--device") == [f"nvidia.com/gpu={name}" for name in names]


@pytest.mark.parametrize("mode", ["greenroom", "engines"])
def test_the_services_are_clean_for_systemd(tmp_path: Path, mode: str) -> None:
    """What quadlet makes of twelve models is verified by systemd-analyze without a word."""
    tool("podman")
    source = tmp_path / "source"
    write(quadlet.files(build(sets.config(12), mode=mode, target="nvidia")), source)
    services = units.quadlet(source)
    target = tmp_path / "units"
    # That unit comes with podman.
    write({**services, "podman-user-wait-network-online.service": "[Service]\nType=oneshot\nExecStart=/bin/true\n"}, target)
    units.verify(target, *services, user=True)


@pytest.mark.parametrize("mode", ["greenroom", "engines"])
def test_one_key_a_line(mode: str) -> None:
    """Every line of every unit is a section, a comment, or one key, and no value has lost its line end."""
    for name, text in quadlet.files(build(sets.config(12), mode=mode, target="nvidia")).items():
        if name.endswith((".container", ".volume", ".network", ".build")):
            assert units.parse(text)
            assert text.endswith("\n")


def test_no_secret_is_in_any_file() -> None:
    """Values of secrets are nowhere, their names are in an example to fill in."""
    for mode in ("greenroom", "engines"):
        intent = build(sets.config(12), mode=mode, target="nvidia")
        files = quadlet.files(intent)
        everything = "\n".join(files.values())
        assert [name for name, value in sets.SECRETS.items() if value in everything] == []
        examples = "\n".join(text for name, text in files.items() if name.endswith(".env.example"))
        wanted = sets.SECRETS.keys() if mode == "greenroom" else {"HF_TOKEN", "EIGHTH_SECRET"}  # each engine has its own file
        assert {line.removesuffix("=") for line in examples.splitlines() if line and line[0] != "#"} == wanted


@pytest.mark.parametrize(
    ("target", "devices", "groups"),
    [
        ("nvidia", ["nvidia.com/gpu=GPU-11111111-bbbb"], []),
        ("amd", ["/dev/kfd", "/dev/dri"], ["keep-groups"]),
        ("intel", ["/dev/dri"], ["keep-groups"]),
        ("cpu", [], []),
    ],
)
def test_devices_by_target(tmp_path: Path, target: str, devices: list[str], groups: list[str]) -> None:
    """Each kind of accelerator is handed in by its own names."""
    intent = build(sets.config(1), mode="engines", target=target)
    (run,) = generated(tmp_path, intent).values()
    assert (run.all("--device"), run.all("--group-add")) == (devices, groups)


def test_all_devices_where_none_is_named(tmp_path: Path) -> None:
    """greenroom itself gets every card when the configuration names none."""
    config = sets.replace(sets.config(1), devices=())
    (run,) = generated(tmp_path, build(config, target="nvidia")).values()
    assert run.all("--device") == ["nvidia.com/gpu=all"]


def test_one_slice_of_a_card(tmp_path: Path) -> None:
    """A MIG slice is handed in by its UUID, and refused without one."""
    slice_ = "MIG-01234567-89ab-cdef-0123-456789abcdef"
    intent = build(sets.config(1), mode="engines", target="nvidia", options=Options(mig="3g.40gb", gpus=(slice_,)))
    (run,) = generated(tmp_path, intent).values()
    assert run.all("--device") == [f"nvidia.com/gpu={slice_}"]
    with pytest.raises(Unfit, match=r"3g\.40gb"):
        quadlet.files(build(sets.config(1), mode="engines", target="nvidia", options=Options(mig="3g.40gb")))


def test_ipv6_is_published_in_brackets(tmp_path: Path) -> None:
    """An IPv6 address to publish on is one podman takes, and greenroom listens on IPv6 inside."""
    (run,) = generated(tmp_path, build(sets.config(1), target="cpu", options=Options(listen="[fd00::1]:8088"))).values()
    assert run.all("--publish") == ["[fd00::1]:8088:8080"]
    assert run.command[run.command.index("--listen") + 1] == "[::]:8080"


def test_engines_that_measure_their_card_start_one_after_another() -> None:
    """A vLLM server that may share a card with an earlier one is ordered behind it; llama-servers are not."""
    intent = build(sets.config(3), mode="engines", target="nvidia")
    files = quadlet.files(intent)
    one, two, three = (units.parse(files[f"{workload.name}.container"]) for workload in intent.workloads)
    assert units.values(one, "Unit", "After") == units.values(two, "Unit", "After") == ["network-online.target"]
    assert units.values(three, "Unit", "After") == ["network-online.target", f"{intent.workloads[1].name}.service"]


def test_the_start_may_take_as_long_as_the_model_needs() -> None:
    """systemd waits longer for the unit than the configuration allows for the start."""
    intent = build(sets.config(2), mode="engines", target="nvidia")
    for workload in intent.workloads:
        unit = units.parse(quadlet.files(intent)[f"{workload.name}.container"])
        assert workload.ready is not None
        assert float(units.value(unit, "Service", "TimeoutStartSec")) > workload.ready.start_s
        assert float(units.value(unit, "Service", "TimeoutStopSec")) > workload.stop_s
        assert units.value(unit, "Service", "Restart") == "always"


def test_a_model_that_is_an_image_is_mounted_from_it(tmp_path: Path) -> None:
    """An engine without greenroom gets a model of a registry as an image mount, fetched only when it is not there."""
    config = sets.load_config_text(
        "models: {m: {model: 'oci://registry.example/team/m:1', cmd: 'llama-server -m ${MODEL_PATH} --port ${PORT}'}}", env={}
    )
    intent = build(config, mode="engines", target="cpu")
    (run,) = generated(tmp_path, intent).values()
    assert run.mounts["/models/m"] == {"type": "image", "source": "registry.example/team/m:1", "destination": "/models/m"}
    assert run.command[:3] == ("/app/llama-server", "-m", "/models/m/models/model.file")
    unit = units.parse((tmp_path / f"{intent.workloads[0].name}.container").read_text())
    assert units.words(units.value(unit, "Service", "ExecStartPre"))[2].startswith("podman image exists registry.example/team/m:1 ||")


def test_back_names_every_mount() -> None:
    """The reader of these tests itself: a path inside is turned into the host's, another word is left alone."""
    mounts = {"/models/a.gguf": {"source": "/srv/a.gguf"}, "/models/d": {"source": "/srv/deep/d"}}
    assert back("--lora=/models/a.gguf,/models/d/x", mounts) == "--lora=/srv/a.gguf,/srv/deep/d/x"
    assert back("/models/abc", mounts) == "/models/abc"


def texts(config: Config, **how: object) -> dict[str, str]:
    options = {name: how.pop(name) for name in ("listen", "no_auth") if name in how}
    mode, target = str(how.pop("mode", "greenroom")), str(how.pop("target", "nvidia"))
    return dict(quadlet.files(build(config, mode=mode, target=target, options=Options(**options)), **how))  # type: ignore[arg-type]


def one_model(**entry: object) -> Config:
    return load_config_text(dump({"models": {"m": {"cmd": "llama-server -m /srv/m.gguf --port ${PORT}", **entry}}}), env={})


def test_users_of_their_own_get_their_volumes_anew(tmp_path: Path) -> None:
    """UserNS=auto may give other users at each start: volumes are made theirs, and what the host needs is told."""
    apart = texts(one_model(), rootful=True)["greenroom.container"]
    assert "UserNS=auto" in apart
    assert "Volume=greenroom-state.volume:/var/lib/greenroom:U\n" in apart
    assert "# Its users are none of the host's: /etc/subuid" in apart
    plain = texts(one_model())["greenroom.container"]
    assert [word for word in ("UserNS", ":U\n", "subuid") if word in plain] == []
    written = one_model(cmd="llama-server -m /srv/m.gguf --slot-save-path /srv/slots --port ${PORT}")
    assert "UserNS" not in texts(written, rootful=True)["greenroom.container"], "nobody there could write into /srv/slots"
    run = generated(tmp_path, build(one_model(), target="nvidia"), rootful=True)["greenroom"]
    assert "greenroom-state:/var/lib/greenroom:U" in run.all("-v") + run.all("--volume")


@pytest.mark.parametrize("rootful", [False, True])
def test_ipv6_is_published_where_it_leads_somewhere(tmp_path: Path, rootful: bool) -> None:
    """podman's own network has no IPv6, so root's containers get one that has; `::` is both families, as without containers."""
    found = texts(one_model(), listen="[::]:8088", no_auth=True, rootful=rootful)
    assert "PublishPort=8088:8080\n" in found["greenroom.container"]
    assert ("greenroom.network" in found) == rootful
    if rootful:
        assert "IPv6=true" in found["greenroom.network"]
    intent = build(one_model(), target="nvidia", options=Options(listen="[::1]:8088"))
    assert generated(tmp_path, intent, rootful=rootful)["greenroom"].all("--publish") == ["[::1]:8088:8080"]
    assert "IPv6" not in "".join(texts(one_model(), mode="engines").values())


def test_an_operator_reads_what_the_host_must_have() -> None:
    """The CDI file for NVIDIA cards, and how a change of the configuration is taken up."""
    text = texts(one_model())["greenroom.container"]
    assert "# podman finds the GPUs by /etc/cdi/nvidia.yaml: nvidia-ctk cdi generate" in text
    assert "# After a change of greenroom.yaml: systemctl --user restart greenroom" in text
    assert "nvidia-ctk" not in texts(one_model(), target="cpu")["greenroom.container"]
