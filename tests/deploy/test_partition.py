"""Plans for sharing GPUs: slices that the chip has, shares that hold, refusals with numbers; and the files made of them."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.deploy.gpu_types import SLICED, TYPES, WHOLE, GpuType, find
from greenroom.deploy.partition import MigPlan, Need, plan_mig, plan_mps, plan_turns
from greenroom.deploy.partition_files import mig_files, mps_files, time_slicing_files
from greenroom.deploy.unfit import Unfit
from tests.deploy import units
from tests.deploy.kube_cases import VERSIONS, Invalid, read_all, validate

GIB = 1024
H100 = TYPES["H100-80GB"]
CARD_24 = GpuType("a card of 24 GiB", 24 * GIB)
PLACES = {"name": "greenroom", "namespace": "gpu-operator", "node": "gpu-1", "command": "greenroom generate mig"}

# NVIDIA's table of supported profiles, "number of instances" per GPU
INSTANCES = {
    "A30": {"1g.6gb": 4, "2g.12gb": 2, "4g.24gb": 1},
    "A100-40GB": {"1g.5gb": 7, "1g.10gb": 4, "2g.10gb": 3, "3g.20gb": 2, "4g.20gb": 1, "7g.40gb": 1},
    "A100-80GB": {"1g.10gb": 7, "1g.20gb": 4, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 1, "7g.80gb": 1},
    "H100-80GB": {"1g.10gb": 7, "1g.20gb": 4, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 1, "7g.80gb": 1},
    "H100-94GB": {"1g.12gb": 7, "1g.24gb": 4, "2g.24gb": 3, "3g.47gb": 2, "4g.47gb": 1, "7g.94gb": 1},
    "H100-96GB": {"1g.12gb": 7, "1g.24gb": 4, "2g.24gb": 3, "3g.48gb": 2, "4g.48gb": 1, "7g.96gb": 1},
    "H200": {"1g.18gb": 7, "1g.35gb": 4, "2g.35gb": 3, "3g.71gb": 2, "4g.71gb": 1, "7g.141gb": 1},
    "B200": {"1g.23gb": 7, "1g.45gb": 4, "2g.45gb": 3, "3g.90gb": 2, "4g.90gb": 1, "7g.180gb": 1},
    "GB200": {"1g.24gb": 7, "1g.47gb": 4, "2g.47gb": 3, "3g.95gb": 2, "4g.95gb": 1, "7g.189gb": 1},
    "B300": {"1g.34gb": 7, "1g.67gb": 4, "2g.67gb": 3, "3g.135gb": 2, "4g.135gb": 1, "7g.269gb": 1},
    "RTX-PRO-6000": {"1g.24gb": 4, "2g.48gb": 2, "4g.96gb": 1},
}


# --------------------------------------------------------------------------------------------------------------- the table


def test_profiles_are_those_of_nvidias_table() -> None:
    """Names, and how many of each a GPU can have at most: as many as there are starts that do not overlap."""
    found = {}
    for gpu in SLICED:
        counts = {}
        for profile in gpu.profiles:
            end, count = 0, 0
            for start in profile.starts:
                if start >= end:
                    count, end = count + 1, start + profile.width
            counts[profile.name] = count
        found[gpu.name] = counts
    assert found == INSTANCES


def test_no_slice_is_thought_larger_than_its_part_of_the_gpu() -> None:
    """What is reckoned from a name is on the safe side; slices grow with their names."""
    for gpu in SLICED:
        for profile in gpu.profiles:
            assert profile.memory_mib <= gpu.memory_mib * profile.width / gpu.width * 1.01, (gpu.name, profile)
            assert profile.memory_mib > gpu.memory_mib * profile.width / gpu.width * 0.82, (gpu.name, profile)
            assert max(profile.starts) + profile.width <= gpu.width
        assert [profile.memory_mib for profile in gpu.profiles] == sorted(profile.memory_mib for profile in gpu.profiles)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA-H100-80GB-HBM3", "H100-80GB"),
        ("NVIDIA-A100-SXM4-80GB", "A100-80GB"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("nvidia h200", "H200"),
        ("NVIDIA H100 NVL", "H100-94GB"),
        ("NVIDIA GH200 480GB", "H100-96GB"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-ADA"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA A10", "A10"),
        ("h100", None),
        ("a100", None),
        ("", None),
        ("Radeon", None),
    ],
)
def test_a_gpu_is_known_by_what_people_and_drivers_call_it(written: str, meant: str | None) -> None:
    """An A100 is no A10; what leaves the memory open is asked again."""
    found = find(written)
    assert (found.name if found else None) == meant


# --------------------------------------------------------------------------------------------------------------------- MIG


def assert_lawful(plan: MigPlan, needs: list[Need]) -> None:
    """Every model once, in a slice that holds it, at a place that the chip has, beside nobody's."""
    assert sorted([one.need.model for one in plan.slices] + [need.model for need, _ in plan.whole]) == sorted(one.model for one in needs)
    taken: set[tuple[int, int]] = set()
    compute = dict.fromkeys(range(plan.gpus), 0)
    for one in plan.slices:
        assert one.profile.memory_mib >= one.need.mib
        assert one.start in one.profile.starts
        assert 0 <= one.gpu < plan.gpus
        cells = {(one.gpu, cell) for cell in range(one.start, one.start + one.profile.width)}
        assert not cells & taken
        taken |= cells
        compute[one.gpu] += one.profile.compute
    assert all(used <= (7 if plan.gpu.width == 8 else 4) for used in compute.values())
    whole = [index for _, gpus in plan.whole for index in gpus]
    assert len(set(whole)) == len(whole)
    assert not set(whole) & set(plan.cut)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*SLICED]),
    st.lists(st.tuples(st.integers(100, 150_000), st.sampled_from([1, 1, 1, 1, 2])), min_size=1, max_size=12),
    st.integers(1, 4),
)
def test_a_plan_is_lawful_or_refused_with_what_would_do(gpu: GpuType, wanted: list[tuple[int, int]], gpus: int) -> None:
    """For any models on any GPUs; what a refusal offers can be had."""
    needs = [Need(f"m{number}", mib, count) for number, (mib, count) in enumerate(wanted)]
    try:
        plan = plan_mig(needs, gpu, gpus)
    except Unfit as refusal:
        if enough := re.search(r"; (\d+) of them hold it", str(refusal)):
            assert_lawful(plan_mig(needs, gpu, int(enough[1])), needs)
            with pytest.raises(Unfit):
                plan_mig(needs, gpu, int(enough[1]) - 1)
        if larger := re.search(r"× ([A-Z0-9-]+) would hold it", str(refusal)):
            assert_lawful(plan_mig(needs, TYPES[larger[1]], gpus), needs)
        if fewer := re.search(r"without (m\d+) the rest fits", str(refusal)):
            rest = [one for one in needs if one.model != fewer[1]]
            assert_lawful(plan_mig(rest, gpu, gpus), rest)
    else:
        assert_lawful(plan, needs)


def test_small_services_share_one_gpu() -> None:
    """Three little ones and a chat model of 30 GiB: the chat model gets the compute that nobody else can have."""
    plan = plan_mig([Need("embed", 5 * GIB), Need("rerank", 3 * GIB), Need("guard", 8 * GIB), Need("chat", 30 * GIB)], H100)
    assert [(one.need.model, one.profile.name, one.start) for one in plan.slices] == [
        ("chat", "4g.40gb", 0),
        ("embed", "1g.10gb", 4),
        ("guard", "1g.10gb", 5),
        ("rerank", "1g.10gb", 6),
    ]


def test_seven_of_the_smallest_are_all_that_fit() -> None:
    """The eighth memory slice has no compute of its own."""
    assert len(plan_mig([Need(f"m{n}", 9 * GIB) for n in range(7)], H100).slices) == 7
    with pytest.raises(Unfit, match="8 memory slices of 8, which no layout of the chip gives; 2 of them hold it"):
        plan_mig([Need(f"m{n}", 9 * GIB) for n in range(8)], H100)


def test_many_small_models_are_placed_at_once() -> None:
    """A hundred on sixteen GPUs, and the refusal of one too many, take no search that anybody waits for."""
    begun = time.process_time()
    assert len(plan_mig([Need(f"m{n}", (4 if n % 3 else 15) * GIB) for n in range(80)], H100, 16).slices) == 80
    with pytest.raises(Unfit, match="17 of them hold it"):
        plan_mig([Need(f"m{n}", 4 * GIB) for n in range(113)], H100, 16)
    assert time.process_time() - begun < 10.0


def test_large_models_keep_their_gpus_whole() -> None:
    """Slices cannot be joined: tensor parallel, and what no slice holds, stands on uncut GPUs."""
    needs = [Need("70b", 70 * GIB, gpus=2), Need("big", 60 * GIB), Need("embed", 3 * GIB)]
    plan = plan_mig(needs, H100, 5)
    assert [(need.model, gpus) for need, gpus in plan.whole] == [("70b", (0, 1)), ("big", (2,))]
    assert [(one.need.model, one.gpu) for one in plan.slices] == [("embed", 3)]
    assert plan.unused == (4,)


@pytest.mark.parametrize(
    ("needs", "gpu", "said"),
    [
        (
            [Need("a", 90 * GIB)],
            H100,
            "a needs 92,160 MiB and one whole H100-80GB has 81,559: take H100-94GB (95,830 MiB), or spread it over 2",
        ),
        (
            [Need("a", 8 * GIB)],
            TYPES["L40S"],
            "L40S cannot be cut into slices: it has no MIG; use `generate mps` or `generate time-slicing`",
        ),
        (
            [Need("a", 30 * GIB), Need("b", 30 * GIB), Need("c", 3 * GIB)],
            H100,
            "1 × H100-80GB cannot hold a (30,720 MiB: 3g.40gb), b (30,720 MiB: 3g.40gb), c (3,072 MiB: 1g.10gb): 9 memory slices of 8; "
            "2 of them hold it; 1 × H200 would hold it; without c the rest fits",
        ),
        ([], H100, "no model uses a GPU"),
    ],
)
def test_what_does_not_fit_is_told_with_numbers(needs: list[Need], gpu: GpuType, said: str) -> None:
    """And with the nearest that would."""
    with pytest.raises(Unfit, match=re.escape(said)):
        plan_mig(needs, gpu)


# --------------------------------------------------------------------------------------------------------- MPS and turns


def test_the_limit_of_mps_is_of_a_process() -> None:
    """Ten shares of a card of 46,068 MiB: 4,606 for each client process; two processes of one pod may take it twice."""
    needs = [Need(f"m{n}", 4000) for n in range(9)] + [Need("worker", 8000, processes=2)]
    plan = plan_mps(needs, TYPES["L40S"])
    assert (plan.replicas, plan.limit_mib) == (10, 4606)
    assert "worker has 2 processes on the GPU: together they may take 2 × 4,606 = 9,212 MiB" in plan.notes[0]
    assert "All limits together come to 50,666 MiB on a GPU of 46,068" in plan.notes[1]
    text = mps_files(plan, **PLACES)["device-plugin.yaml"]
    assert "Each client process may take 4,606 MiB (46,068 ÷ 10)" in text
    assert "of a process, not of a container" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"shares_mib": (16_000, 8_000)}, "MPS shares of 16,000, 8,000 MiB cannot be had: the device plugin makes equal ones only"),
        ({"shares_mib": (16_000, 16_000)}, "2 shares of 16,000 MiB do not fit on 24,576: 1 do, or each has at most 12,288"),
        ({"per_pod": 2}, "a pod takes 1 share, not 2: with MPS 2 shares give it no more memory and no more compute than 1"),
        ({"replicas": 1}, "2 models on 1 GPU(s) take at least 2 shares of each, not 1"),
        (
            {"replicas": 12},
            "a needs 4,096 MiB in one process, and 12 equal shares of a card of 24 GiB give 2,048 each (24,576 ÷ 12): 6 shares",
        ),
    ],
)
def test_mps_refuses_what_it_cannot_give(arguments: dict[str, Any], said: str) -> None:
    """Unequal shares, more than one a pod, shares that are too small."""
    with pytest.raises(Unfit, match=re.escape(said)):
        plan_mps([Need("a", 4 * GIB), Need("b", 2 * GIB)], CARD_24, **arguments)


def test_mps_tells_how_many_gpus_would_do() -> None:
    """The largest model decides, shares being equal."""
    with pytest.raises(Unfit, match="2 shares give 12,288 MiB each; 3 models at 2 a GPU take 2 GPUs"):
        plan_mps([Need("a", 10 * GIB), Need("b", 2 * GIB), Need("c", 2 * GIB)], CARD_24)
    assert plan_mps([Need("a", 10 * GIB), Need("b", 2 * GIB), Need("c", 2 * GIB)], CARD_24, 2).replicas == 2


def test_turns_do_not_divide_memory() -> None:
    """Models of 10, 9 and 8 GiB do not fit on 24, whatever the scheduler is told."""
    needs = [Need("a", 10 * GIB), Need("b", 9 * GIB), Need("c", 8 * GIB)]
    with pytest.raises(Unfit) as refusal:
        plan_turns(needs, CARD_24)
    assert "a 10,240 + b 9,216 + c 8,192 = 27,648 MiB is more than the 24,576" in str(refusal.value)
    assert "no memory isolation" in str(refusal.value)
    assert "2 a GPU fit, on 2 GPUs" in str(refusal.value)
    assert "3,072 MiB less would do" in str(refusal.value)
    assert plan_turns(needs, CARD_24, 2).replicas == 2


def test_any_pods_may_meet_on_one_gpu() -> None:
    """Which shares go to whom is the scheduler's: the largest that may meet must fit, not a lucky mixture."""
    needs = [Need("a", 13 * GIB), Need("b", 13 * GIB), Need("c", 2 * GIB), Need("d", 2 * GIB)]
    with pytest.raises(Unfit, match=r"a 13,312 \+ b 13,312 = 26,624"):
        plan_turns(needs, CARD_24, 2)


def test_more_than_one_share_is_refused_with_turns_too() -> None:
    """Two shares are not twice the GPU."""
    with pytest.raises(Unfit, match="failRequestsGreaterThanOne"):
        plan_turns([Need("a", GIB)], CARD_24, per_pod=2)
    for plan in (plan_mps, plan_turns):
        with pytest.raises(Unfit, match="runs over 2 GPUs at once"):
            plan([Need("a", GIB, gpus=2)], CARD_24, 2)


# --------------------------------------------------------------------------------------------------------------- the files

SHARED: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["resources"],
    "properties": {
        "renameByDefault": {"type": "boolean"},
        "failRequestsGreaterThanOne": {"type": "boolean"},
        "resources": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "replicas"],
                "properties": {
                    "name": {"const": "nvidia.com/gpu"},
                    "rename": {"type": "string"},
                    "devices": {},
                    "replicas": {"type": "integer", "minimum": 1},
                },
            },
        },
    },
}
# The device plugin's own structures (api/config/v1), as far as they concern sharing.
PLUGIN: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["version"],
    "properties": {
        "version": {"const": "v1"},
        "flags": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                name: {} for name in ("migStrategy", "failOnInitError", "nvidiaDriverRoot", "gdsEnabled", "mofedEnabled", "plugin", "gfd")
            },
        },
        "resources": {"type": "object"},
        "sharing": {
            "type": "object",
            "additionalProperties": False,
            "maxProperties": 1,
            "properties": {"timeSlicing": SHARED, "mps": SHARED},
        },
    },
}
# mig-parted's (api/spec/v1): unknown fields are errors, mig-devices come with mig-enabled and only with it.
PARTED: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["version", "mig-configs"],
    "properties": {
        "version": {"const": "v1"},
        "mig-configs": {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["devices", "mig-enabled"],
                    "properties": {
                        "device-filter": {},
                        "devices": {
                            "oneOf": [{"const": "all"}, {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}]
                        },
                        "mig-enabled": {"type": "boolean"},
                        "mig-devices": {
                            "type": "object",
                            "propertyNames": {"pattern": r"^\d+g\.\d+gb(\+[a-z.]+)?$"},
                            "additionalProperties": {"type": "integer", "minimum": 1},
                        },
                    },
                    "if": {"properties": {"mig-enabled": {"const": True}}},
                    "then": {"required": ["mig-devices"]},
                    "else": {"not": {"required": ["mig-devices"]}},
                },
            },
        },
    },
}
NEEDS = [Need("org/näme:7b q4", 30 * GIB, utilization=0.45), Need("new\nline: injected", 3 * GIB), Need("70b", 70 * GIB, gpus=2)]


def inner(text: str, key: str) -> Any:
    """What a ConfigMap holds under a key; the ConfigMap itself is valid everywhere."""
    (config_map,) = read_all(text)
    for version in VERSIONS:
        validate(config_map, version)
    assert config_map["metadata"]["namespace"] == "gpu-operator"
    assert list(config_map["data"]) == [key]
    (value,) = read_all(config_map["data"][key])
    return value


def test_the_operator_gets_the_slices_of_the_plan() -> None:
    """By mig-parted's own rules; every GPU of the node is named once, cut or not."""
    files = mig_files(plan_mig(NEEDS, H100, 4), **PLACES)
    value = inner(files["mig-manager.yaml"], "config.yaml")
    jsonschema.validate(value, PARTED)
    assert value["mig-configs"]["greenroom"] == [
        {"devices": [2], "mig-enabled": True, "mig-devices": {"1g.10gb": 1, "4g.40gb": 1}},
        {"devices": [0, 1, 3], "mig-enabled": False},
    ]
    (alone,) = read_all(files["mig-parted.yaml"])
    assert alone == value
    for text in files.values():
        assert "Its pod asks for nvidia.com/mig-4g.40gb: 1" in text
        assert "its --gpu-memory-utilization 0.45 is of a whole GPU: with 4g.40gb write 0.75" in text
        assert "\nline: injected" not in text
    assert "kubectl label node gpu-1 nvidia.com/mig.config=greenroom --overwrite" in files["mig-manager.yaml"]


def test_the_commands_for_a_host_are_only_shown() -> None:
    """The file does nothing when it is run; by hand, each slice goes to its place."""
    text = mig_files(plan_mig(NEEDS, H100, 4), **PLACES)["mig-host.sh"]
    assert all(line.startswith("#") for line in text.splitlines())
    assert subprocess.run(["sh", "-c", text], capture_output=True, check=True).stdout == b""
    assert "nvidia-smi mig -i 2 -cgi 4g.40gb:0,1g.10gb:4 -C" in text


def test_a_reckoned_size_says_so() -> None:
    """Nobody has a listing of every GPU."""
    assert "reckoned from its name" in mig_files(plan_mig([Need("a", 8 * GIB)], TYPES["B200"]), **PLACES)["mig-manager.yaml"]
    assert "reckoned" not in mig_files(plan_mig([Need("a", 8 * GIB)], H100), **PLACES)["mig-manager.yaml"]


def test_four_turns_are_renamed_where_the_plugin_looks() -> None:
    """renameByDefault stands beside `resources`, and pods are told the new name."""
    text = time_slicing_files(plan_turns([Need(f"m{n}", 5 * GIB) for n in range(4)], CARD_24), **PLACES)["device-plugin.yaml"]
    value = inner(text, "greenroom")
    jsonschema.validate(value, PLUGIN)
    assert value["sharing"] == {
        "timeSlicing": {
            "renameByDefault": True,
            "failRequestsGreaterThanOne": True,
            "resources": [{"name": "nvidia.com/gpu", "replicas": 4}],
        }
    }
    assert "Pods ask for nvidia.com/gpu.shared: 1" in text
    assert "NO MEMORY ISOLATION" in text


def test_mps_shares_are_written_where_the_plugin_looks() -> None:
    """The same, for MPS."""
    value = inner(mps_files(plan_mps([Need("a", GIB), Need("b", GIB)], CARD_24), **PLACES)["device-plugin.yaml"], "greenroom")
    jsonschema.validate(value, PLUGIN)
    assert value["sharing"]["mps"]["resources"] == [{"name": "nvidia.com/gpu", "replicas": 2}]


WRONG: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"version": "v1", "flags": {"renameByDefault": True}, "sharing": {"timeSlicing": {"resources": []}}}, PLUGIN),
    (
        {"version": "v1", "sharing": {"renameByDefault": True, "timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 2}]}}},
        PLUGIN,
    ),
    ({"version": "v1", "sharing": {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replica": 2}]}}}, PLUGIN),
    ({"version": "v1", "sharing": {"timeslicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 2}]}}}, PLUGIN),
    ({"version": "v1", "mig-configs": {"a": [{"devices": [0], "mig-enabled": True}]}}, PARTED),
    ({"version": "v1", "mig-configs": {"a": [{"devices": [0], "mig-enabled": True, "mig-device": {"1g.10gb": 1}}]}}, PARTED),
    ({"version": "v1", "mig-configs": {"a": [{"devices": [0], "mig-enabled": True, "mig-devices": {"40gb": 1}}]}}, PARTED),
    ({"version": "v1", "mig-configs": {"a": [{"devices": [0], "mig-enabled": False, "mig-devices": {"1g.10gb": 1}}]}}, PARTED),
]


@pytest.mark.parametrize(("wrong", "schema"), WRONG, ids=[json.dumps(one) for one, _ in WRONG])
def test_the_schemas_know_a_wrong_key(wrong: dict[str, Any], schema: dict[str, Any]) -> None:
    """A key that the target would pass over in silence is an error here: the tests above could fail."""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


def test_a_config_map_that_is_none_is_seen() -> None:
    """Values of a ConfigMap are text."""
    with pytest.raises(Invalid):
        validate({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"a": {"b": 1}}}, "1.33")


def test_systemd_takes_the_daemons_unit(tmp_path: Path) -> None:
    """By the real systemd-analyze; programs of a driver that is not here stand in by name."""
    text = mps_files(plan_mps([Need("a", GIB), Need("b\nExecStart=/bin/evil", GIB)], CARD_24, 2, replicas=3), **PLACES)[
        "nvidia-mps.service"
    ]
    assert "\nExecStart=/bin/evil" not in text
    unit = (
        text.replace("=nvidia-cuda-mps-control", "=/bin/true").replace("=nvidia-smi", "=/bin/true").replace("=-nvidia-smi", "=-/bin/true")
    )
    (tmp_path / "nvidia-mps.service").write_text(unit)
    units.verify(tmp_path, "nvidia-mps.service")
    parsed = units.parse(text)
    assert [one for one in units.values(parsed, "Service", "ExecStartPost") if "pinned" in one] == [
        f"/bin/sh -c 'echo set_default_device_pinned_mem_limit {gpu} 8192M | nvidia-cuda-mps-control'" for gpu in (0, 1)
    ]


@pytest.mark.parametrize("gpu", [*SLICED, *WHOLE], ids=lambda gpu: gpu.name)
def test_the_same_plan_gives_the_same_bytes(gpu: GpuType) -> None:
    """On every GPU that is known."""
    needs = [Need("a", 2 * GIB), Need("b", GIB)]
    made = []
    for _ in range(2):
        files = [mps_files(plan_mps(needs, gpu), **PLACES), time_slicing_files(plan_turns(needs, gpu), **PLACES)]
        if gpu.width:
            files.append(mig_files(plan_mig(needs, gpu), **PLACES))
        made.append(files)
    assert made[0] == made[1]
