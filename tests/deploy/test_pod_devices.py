"""In a pod devices are those that its device plugin gave it, counted from 0."""

from __future__ import annotations

import pytest

from greenroom.config.load import load_config_text
from greenroom.config.model import Config
from greenroom.config.yaml_out import dump
from greenroom.deploy.build import Options, build
from greenroom.deploy.intent import Intent
from greenroom.deploy.kube_pod import KubeOptions, accelerators
from greenroom.deploy.unfit import Unfit
from greenroom.host.gpus import GpuInfo
from greenroom.serve.wiring import find_devices

VLLM = "vllm serve org/m --port ${PORT}"
CARDS = {
    "devices": {"left": {"uuid": "GPU-a", "memory": "40GiB"}, "gpu3": {"memory": "24GiB"}},
    "models": {
        "a": {"cmd": VLLM, "device": "left"},
        "b": {"cmd": VLLM, "device": "gpu3", "env": {"CUDA_VISIBLE_DEVICES": "GPU-a,3"}},
        "c": {"cmd": VLLM, "env": {"CUDA_VISIBLE_DEVICES": "GPU-of-another-host"}},
    },
}
SLICES = {
    "devices": {"m0": {"uuid": "MIG-a", "memory": "40GiB"}, "m1": {"uuid": "MIG-b", "memory": "40GiB"}},
    "models": {"a": {"cmd": VLLM, "device": "m0"}, "b": {"cmd": VLLM, "device": ["m0", "m1"], "devices_count": 2}},
}


def made(top: dict[str, object], *, mode: str = "greenroom", target: str = "nvidia", **options: object) -> Intent:
    config = load_config_text(dump(top), env={})
    return build(config, mode=mode, target=target, options=Options(in_cluster=True, no_auth=True, **options))  # type: ignore[arg-type]


def read(intent: Intent) -> Config:
    return load_config_text(intent.config_text, env={})


def test_cards_are_named_as_the_pod_counts_them() -> None:
    """With the memory that each may use; what pins a card by hand follows."""
    intent = made(CARDS)
    config = read(intent)
    assert [(one.id, one.uuid, one.size.memory_mib) for one in config.devices] == [("gpu0", None, 40960), ("gpu1", None, 24576)]
    assert [one.devices for one in config.models] == [("gpu0",), ("gpu1",), ()]
    assert [dict(one.env).get("CUDA_VISIBLE_DEVICES") for one in config.models] == [None, "0,1", None]
    assert accelerators(intent.workloads[0], KubeOptions()) == {"nvidia.com/gpu": "2"}
    assert any("left is gpu0, gpu3 is gpu1" in note for note in intent.notes)
    assert any(note.startswith("c: CUDA_VISIBLE_DEVICES names a device of another host") for note in intent.notes)


@pytest.mark.parametrize(
    ("cmd", "told", "words"),
    [
        ("env CUDA_VISIBLE_DEVICES=3 vllm serve org/m --port ${PORT}", False, ["CUDA_VISIBLE_DEVICES=1"]),
        ("env CUDA_VISIBLE_DEVICES=GPU-zzz vllm serve org/m --port ${PORT}", True, []),
        ("env CUDA_VISIBLE_DEVICES= vllm serve org/m --port ${PORT}", False, ["CUDA_VISIBLE_DEVICES="]),
        ("llama-server -m /m.gguf --device CUDA3 --port ${PORT}", False, ["CUDA1"]),
        ("llama-server -m /m.gguf --device=CUDA2,CUDA3 --port ${PORT}", False, ["--device=CUDA0,CUDA1"]),
        ("llama-server -m /m.gguf --device none --port ${PORT}", False, ["none"]),
    ],
)
def test_what_a_command_says_of_cards_follows(cmd: str, told: bool, words: list[str]) -> None:
    intent = made({"devices": {"gpu2": {"memory": "24GiB"}, "gpu3": {"memory": "24GiB"}}, "models": {"m": {"cmd": cmd}}})
    (model,) = read(intent).models
    assert [word for word in model.argv if "CUDA" in word or word == "none"] == words
    assert any("device of another host" in note for note in intent.notes) == told
    assert accelerators(intent.workloads[0], KubeOptions()) == {"nvidia.com/gpu": "2"}


def test_a_script_that_names_cards_is_told() -> None:
    cmd = ["sh", "-c", "CUDA_VISIBLE_DEVICES=3 exec vllm serve org/m --port ${PORT}"]
    intent = made({"devices": {"gpu3": {"memory": "24GiB"}}, "models": {"m": {"cmd": cmd}}})
    assert any("the script in its `cmd` names devices" in note for note in intent.notes)


def test_no_pin_is_left_where_slices_are_given() -> None:
    """Not by the UUID of a slice of another host, nor by a number."""
    env = {"a": "MIG-a", "b": "0"}
    models = {name: {"cmd": VLLM, "env": {"CUDA_VISIBLE_DEVICES": value}} for name, value in env.items()}
    intent = made({**SLICES, "models": models}, mig="3g.40gb")
    assert not [one for one in read(intent).models if dict(one.env)]
    assert len([note for note in intent.notes if "device of another host" in note]) == 2


def test_what_runs_in_the_pod_finds_its_cards() -> None:
    """The cards' UUIDs are the cluster's."""
    found = [GpuInfo(0, "GPU-x", "H100", 81920), GpuInfo(1, "GPU-y", "H100", 81920)]
    devices, refs = find_devices(read(made(CARDS)), found)
    assert [(one.id, one.capacity_mib, one.measured) for one in devices if one.id != "ram"] == [
        ("gpu0", 40960, True),
        ("gpu1", 24576, True),
    ]
    assert (refs["gpu0"].uuid, refs["gpu1"].uuid) == ("GPU-x", "GPU-y")


@pytest.mark.parametrize(("entry", "count"), [({"device": "gpu2"}, "3"), ({"env": {"CUDA_VISIBLE_DEVICES": "1"}}, "2"), ({}, "1")])
def test_so_many_cards_are_asked_for_that_every_index_is_one(entry: dict[str, object], count: str) -> None:
    """Where no devices are declared, names stay."""
    intent = made({"models": {"m": {"cmd": VLLM, **entry}}})
    assert accelerators(intent.workloads[0], KubeOptions()) == {"nvidia.com/gpu": count}


def test_slices_are_asked_for_by_their_profile() -> None:
    """As many as were declared; greenroom uses those that it finds."""
    intent = made(SLICES, mig="3g.40gb")
    config = read(intent)
    assert (config.devices, [one.devices for one in config.models]) == ((), [(), ()])
    assert accelerators(intent.workloads[0], KubeOptions()) == {"nvidia.com/mig-3g.40gb": "2"}
    engines = made(SLICES, mode="engines", mig="3g.40gb")
    assert [accelerators(one, KubeOptions()) for one in engines.workloads] == [
        {"nvidia.com/mig-3g.40gb": "1"},
        {"nvidia.com/mig-3g.40gb": "2"},
    ]


@pytest.mark.parametrize("mode", ["greenroom", "engines"])
def test_slices_named_by_uuid_alone_are_refused(mode: str) -> None:
    """A whole card for each would be another thing."""
    with pytest.raises(Unfit, match="--mig"):
        made(SLICES, mode=mode)
    pinned = {"m": {"cmd": VLLM, "env": {"CUDA_VISIBLE_DEVICES": "MIG-a,GPU-b"}}}
    with pytest.raises(Unfit, match="the device of m"):  # wherever it stands among others
        made({"models": pinned}, mode="engines")
    made(SLICES, mode="engines", sliced=True)  # asked for by a plan that is made afterwards


@pytest.mark.parametrize("target", ["nvidia", "amd", "intel"])
def test_an_engine_with_a_pod_to_itself_sees_what_it_was_given(target: str) -> None:
    """Its card is number 0 there, whatever it was on the host."""
    top = {
        "devices": {"gpu0": {"memory": "24GiB"}, "gpu1": {"memory": "24GiB"}},
        "models": {
            "a": {"cmd": "llama-server -m /m.gguf --port ${PORT}", "device": "gpu1"},
            "b": {"cmd": "llama-server -m /m.gguf --port ${PORT}", "env": {"HIP_VISIBLE_DEVICES": "1", "A": "b"}},
            "c": {"cmd": "docker run -p ${PORT}:80 -e HIP_VISIBLE_DEVICES=1 -e A=b --device /dev/kfd image:1"},
        },
    }
    for workload in made(top, mode="engines", target=target).workloads:
        assert not [name for name, _ in workload.env if name.endswith(("VISIBLE_DEVICES", "MASK"))], workload.model
        assert workload.model == "a" or dict(workload.env)["A"] == "b"
