"""From configuration to what the core works with: devices, needs, digests, keys, policy."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from typing import Any

import pytest

from greenroom.config.errors import ConfigError
from greenroom.config.load import load_config_text
from greenroom.config.model import Config, DeviceConfig, FiltersConfig, GroupConfig, ModelConfig, PullConfig, SizeSpec
from greenroom.core.facts import Device, Group, Policy
from greenroom.engines.base import Estimate
from greenroom.host.gpus import GpuInfo
from greenroom.host.memory import total_mib
from greenroom.ledger import store as ledger
from greenroom.ledger.footprints import Footprints, Key, Learned
from greenroom.serve.wiring import (
    GPU_HEADROOM_MIB,
    LIVE_FIELDS,
    Plan,
    digest_of,
    find_devices,
    footprint_key,
    ledger_limits_of,
    make_plan,
    need_of,
    policy_of,
)

GPUS = (GpuInfo(0, "GPU-aaaa", "NVIDIA H200", 140_000), GpuInfo(1, "GPU-bbbb", "NVIDIA L4", 24_000))
MIGS = (
    GpuInfo(0, "MIG-1", "H200 MIG 1g.18gb", 16_000, "mig", "GPU-aaaa"),
    GpuInfo(0, "MIG-2", "H200 MIG 1g.18gb", 16_000, "mig", "GPU-aaaa"),
)
UNKNOWN = Estimate(None, 0, "unknown", "")


def a_model(name: str = "m", **more: Any) -> ModelConfig:
    return ModelConfig(name, ("engine", "--port", "${PORT}"), **more)


def a_config(*models: ModelConfig, **more: Any) -> Config:
    return Config("greenroom.yaml", models or (a_model(),), **more)


def a_plan(config: Config, gpus: tuple[GpuInfo, ...] = GPUS, learned: Footprints | None = None) -> Plan:
    return make_plan(config, gpus, learned or Footprints(None))


def declared(name: str, memory_mib: int | None = None, *, uuid: str | None = None, **more: Any) -> DeviceConfig:
    return DeviceConfig(name, SizeSpec(memory_mib, **more), uuid)


def devices_of(*configured: DeviceConfig, gpus: tuple[GpuInfo, ...] = GPUS) -> dict[str, Device]:
    found, _ = find_devices(a_config(devices=configured), gpus)
    return {device.id: device for device in found}


# ------------------------------------------------------------------------------------------------------------- devices


def test_without_a_word_every_gpu_and_host_ram_are_devices() -> None:
    """GPUs by index, each with some headroom; a tenth of RAM is left alone."""
    found = devices_of()

    assert Device("gpu0", "gpu", 140_000, GPU_HEADROOM_MIB, 140_000, "NVIDIA H200") == found["gpu0"]
    assert {"gpu0", "gpu1", "ram"} == set(found)
    assert (total_mib(), int(total_mib() * 0.1)) == (found["ram"].capacity_mib, found["ram"].headroom_mib)


def test_mig_devices_are_named_after_their_gpu() -> None:
    """And known by their own uuid."""
    _, refs = find_devices(a_config(), MIGS)

    assert {name: ref.uuid for name, ref in refs.items() if ref.kind == "mig"} == {"gpu0.mig0": "MIG-1", "gpu0.mig1": "MIG-2"}


def test_a_declared_device_is_capped_and_the_others_are_not_used() -> None:
    """24 GB of the card: no headroom of ours on top, and the rest of it is for others."""
    found = devices_of(declared("gpu0", 24_000))

    assert Device("gpu0", "gpu", 24_000, 0, 140_000, "NVIDIA H200") == found["gpu0"]
    assert "gpu1" not in found


def test_no_more_is_planned_than_the_card_has() -> None:
    """A declared size above the physical one is the physical one."""
    assert devices_of(declared("gpu1", 80_000))["gpu1"].capacity_mib == 24_000


def test_a_device_may_be_named_by_its_uuid() -> None:
    """Whatever it is called."""
    _, refs = find_devices(a_config(devices=(declared("big", uuid="GPU-aaaa"),)), GPUS)

    assert (refs["big"].kind, refs["big"].uuid, refs["big"].index) == ("gpu", "GPU-aaaa", 0)


def test_a_device_that_nobody_can_read_is_booked() -> None:
    """probe: none, also where the name is that of a card."""
    found = devices_of(declared("bench0", 1500, probe="none"), declared("gpu0", 1000, probe="none"))

    assert Device("bench0", "declared", 1500, 0, measured=False) == found["bench0"]
    assert (found["gpu0"].kind, found["gpu0"].measured) == ("declared", False)


def test_a_device_that_is_not_here_needs_a_size() -> None:
    """The error names it and says what to write."""
    with pytest.raises(ConfigError, match=r"devices.gpu7.*is not on this machine and has no `memory`"):
        a_plan(a_config(devices=(declared("gpu7"),)))


def test_declared_ram_is_the_host_budget() -> None:
    """No headroom of ours on top."""
    ram = devices_of(declared("ram", 2000))["ram"]

    assert (ram.capacity_mib, ram.headroom_mib, ram.measured) == (2000, 0, True)


# ---------------------------------------------------------------------------------------------------------- candidates


def candidates(model: ModelConfig, gpus: tuple[GpuInfo, ...] = GPUS, **more: Any) -> tuple[str, ...]:
    return a_plan(a_config(model, **more), gpus).setup.models[0].devices


def test_a_model_may_go_to_any_gpu_or_to_ram_where_there_is_none() -> None:
    """Never to RAM beside GPUs unless it is said."""
    assert (candidates(a_model()), candidates(a_model(), ())) == (("gpu0", "gpu1"), ("ram",))


def test_a_model_goes_where_it_is_configured_to() -> None:
    """Also to RAM."""
    assert (candidates(a_model(devices=("gpu1",))), candidates(a_model(devices=("ram",)))) == (("gpu1",), ("ram",))


@pytest.mark.parametrize("pin", ["1", "GPU-bbbb"])
def test_an_operators_own_pinning_is_obeyed(pin: str) -> None:
    """CUDA_VISIBLE_DEVICES in its environment, by index or uuid."""
    assert candidates(a_model(env=(("CUDA_VISIBLE_DEVICES", pin),))) == ("gpu1",)


def test_an_unknown_device_is_an_error_at_its_line() -> None:
    """With those that are there."""
    with pytest.raises(ConfigError, match=r"greenroom.yaml:7.*there is no device 'gpu9' here; known: gpu0, gpu1, ram"):
        candidates(a_model(devices=("gpu9",), line=7))


def test_all_that_is_not_here_is_told_at_once() -> None:
    """Of every model and device."""
    config = a_config(a_model("a", devices=("gpu9",)), a_model("b", devices=("gpu8",)), devices=(declared("gpu7"),))
    with pytest.raises(ConfigError) as caught:
        a_plan(config)

    assert [problem.where for problem in caught.value.problems] == ["devices.gpu7", "models.a.device", "models.b.device"]


def a_lenient_plan(*models: ModelConfig, gpus: tuple[GpuInfo, ...] = (), devices: tuple[DeviceConfig, ...] = ()) -> Plan:
    return make_plan(a_config(*models, devices=devices), gpus, Footprints(None), strict=False)


def test_with_lenient_an_unknown_device_is_the_fault_of_its_model() -> None:
    """The others are planned, and it takes the room of none of them."""
    python = sys.executable
    plan = a_lenient_plan(replace(a_model("cpu"), argv=(python,)), replace(a_model("gpu", devices=("gpu0",), pin=True), argv=(python,)))
    cpu, gpu = plan.setup.models

    assert plan.missing == {"gpu": "models.gpu.device: there is no device 'gpu0' here; known: ram."}
    assert (cpu.misconfigured, gpu.misconfigured) == ("", plan.missing["gpu"])
    assert (cpu.devices, gpu.devices) == (("ram",), ("gpu0",))


def test_with_lenient_a_declared_device_that_is_not_here_takes_down_only_those_who_need_it() -> None:
    """One that names it, and one that may be on any declared card: it is not put on another card, nor on host RAM."""
    models = (a_model("cpu", devices=("ram",)), a_model("named", devices=("gpu0",)), a_model("any"))
    plan = a_lenient_plan(*models, gpus=GPUS[1:], devices=(declared("gpu0", headroom_mib=500),))

    assert [device.id for device in plan.setup.devices] == ["ram"]
    assert {id: text for id, text in plan.missing.items() if "device" in text} == {
        "named": "models.named.device: there is no device 'gpu0' here; known: ram.",
        "any": "models.any.device: no device for it is here: gpu0 is not on this machine.",
    }
    assert plan.setup.models[2].devices == ("gpu0",)
    assert "devices.gpu0: is not on this machine" in plan.config.warnings[0]


# --------------------------------------------------------------------------------------------------------------- needs


@pytest.mark.parametrize(
    ("memory", "estimate", "learned", "need"),
    [
        (5000, Estimate(4000, 0, "flags", ""), Learned(3000), (3000, "measured")),
        (5000, Estimate(4000, 0, "flags", ""), Learned(None, up_s=3.0), (5000, "declared")),
        (5000, Estimate(4000, 0, "flags", ""), None, (5000, "declared")),
        (None, Estimate(4000, 0, "flags", ""), None, (4000, "flags")),
        (None, UNKNOWN, None, (None, "unknown")),
    ],
)
def test_the_best_word_on_a_need_counts(memory: int | None, estimate: Estimate, learned: Learned | None, need: tuple[Any, str]) -> None:
    """Measured before declared before told by flags or files before unknown."""
    assert need == need_of(a_model(memory_mib=memory), estimate, learned)


def test_learned_times_replace_the_priors() -> None:
    """From an earlier run of the same command on the same kind of device."""
    config = a_config(a_model(memory_mib=500))
    learned = Footprints(None)
    learned.put(a_plan(config).keys["m"], Learned(321, None, 4.5, 0.7))
    model = a_plan(config, learned=learned).setup.models[0]

    assert (model.need_mib, model.need_source, model.up_s, model.down_s) == (321, "measured", 4.5, 0.7)


def test_in_host_ram_what_is_declared_is_the_least_whatever_was_measured() -> None:
    """An engine may take it only while it works: two that were seen idle would be booked into the room of one."""
    config = a_config(a_model(memory_mib=500, devices=("ram",)))
    learned = Footprints(None)
    learned.put(a_plan(config).keys["m"], Learned(10))
    (model,) = a_plan(config, learned=learned).setup.models
    assert (model.need_mib, model.need_floor_mib, model.need_source) == (500, 500, "declared")
    learned.put(a_plan(config).keys["m"], Learned(700))
    (model,) = a_plan(config, learned=learned).setup.models
    assert (model.need_mib, model.need_floor_mib, model.need_source) == (700, 500, "measured")


def test_what_a_model_lacks_is_told() -> None:
    """A program that is not there, or the sentence of the loader."""
    plan = a_plan(a_config(a_model("a", misconfigured="its entry is broken"), replace(a_model("b"), argv=("/no/such/engine",))))

    assert plan.missing["a"] == "its entry is broken"
    assert "/no/such/engine" in plan.missing["b"]
    assert {model.id: model.misconfigured for model in plan.setup.models} == plan.missing


# ------------------------------------------------------------------------------------------------------ digests and keys

OTHER: dict[str, Any] = {
    "line": 9,
    "pull": "never",
    "pull_options": PullConfig(offline=True),
    "aliases": ("x",),
    "name": "N",
    "description": "D",
    "unlisted": True,
    "metadata": {"a": 1},
    "start_s_max": 1.0,
    "stop_s_max": 1.0,
    "sleep_s_max": 7.0,
    "wake_s_max": 7.0,
    "ttl_s": 1.0,
    "ttl_auto": True,
    "sleep_after_s": 1.0,
    "parallel": 3,
    "queue_limit": 3,
    "pin": True,
    "on_conflict": "wait",
    "priority": "batch",
    "use_model_name": "u",
    "filters": FiltersConfig(("top_k",)),
    "stall_s_max": 1.0,
    "busy_s_max": 1.0,
    "progress_counts": True,
    "keepalive": False,
    "misconfigured": "x",
}


def test_every_live_field_is_tried_below() -> None:
    """A field that is added to the list must be added here."""
    assert set(OTHER) == LIVE_FIELDS
    assert {each.name for each in fields(ModelConfig)} > LIVE_FIELDS


@pytest.mark.parametrize("name", sorted(OTHER))
def test_what_may_change_while_it_serves_does_not_restart_it(name: str) -> None:
    """The digest stays."""
    assert digest_of(a_model()) == digest_of(replace(a_model(), **{name: OTHER[name]}))


@pytest.mark.parametrize(
    "change",
    [
        {"env": (("A", "1"),)},
        {"cwd": "/srv"},
        {"check_path": None},
        {"proxy": "http://127.0.0.1:9"},
        {"memory_mib": 1},
        {"devices": ("gpu1",)},
        {"devices_count": 2},
        {"sleep": "off"},
        {"stop_argv": ("x",)},
        {"engine": "vllm"},
    ],
)
def test_what_is_executed_is_in_the_digest(change: dict[str, Any]) -> None:
    """A reload starts the engine anew when this changes."""
    assert digest_of(a_model()) != digest_of(a_model(**change))


def test_the_command_is_in_the_digest() -> None:
    """Argument by argument, not as one text."""
    one, other = replace(a_model(), argv=("e", "a b")), replace(a_model(), argv=("e", "a", "b"))

    assert digest_of(one) != digest_of(other)


def key(model: ModelConfig, device: str = "gpu0") -> Key:
    return footprint_key(model, (device,), find_devices(a_config(), GPUS)[0])


def test_figures_are_kept_by_command_and_kind_of_device() -> None:
    """Not by name, line, ttl or port; another kind of card has other figures."""
    model = a_model()

    assert key(model) == key(replace(model, id="other", line=3, ttl_s=9.0))
    assert (key(model).device_kind, key(model, "gpu1").device_kind) == ("NVIDIA H200", "NVIDIA L4")
    assert key(model) != key(replace(model, argv=(*model.argv, "-c", "4096")))


def test_other_weights_under_the_same_name_have_other_figures(tmp_path: Any) -> None:
    """The file's size and age are part of the key."""
    weights = tmp_path / "m.gguf"
    weights.write_bytes(b"GGUF")
    model = replace(a_model(), argv=("llama-server", "-m", str(weights), "--port", "${PORT}"))
    before = key(model)
    weights.write_bytes(b"GGUF and more")

    assert before.files != key(model).files


# -------------------------------------------------------------------------------------------------- policy, groups, routes


def test_constants_are_set_by_name_and_keep_their_kind() -> None:
    """Numbers in a file are floats; counts stay counts."""
    policy = policy_of(a_config(policy={"patience_s": 2.5, "lanes": 2.0, "drain_timeout_s": 30.0}))

    assert replace(Policy(), patience_s=2.5, lanes=2, drain_timeout_s=30.0) == policy
    assert isinstance(policy.lanes, int)


def test_groups_and_preloads_are_taken_over() -> None:
    """As the core knows them."""
    plan = a_plan(a_config(a_model("a"), a_model("b"), groups=(GroupConfig("g", ("a", "b"), swap=False),), preload=("b",)))

    assert (Group("g", frozenset("ab"), swap=False),) == plan.setup.groups
    assert {model.id: model.preload for model in plan.setup.models} == {"a": False, "b": True}


def test_every_name_leads_to_its_model() -> None:
    """Ids, aliases and parameter variants; an id wins over another's alias."""
    model = a_model("a", aliases=("x", "b"), filters=FiltersConfig(set_params_by_id={"a:fast": {}}))

    plan = a_plan(a_config(model, a_model("b")))
    assert dict(plan.catalog.names) == {"a": "a", "x": "a", "a:fast": "a", "b": "b"}
    assert [lowered.aliases for lowered in plan.setup.models] == [("x", "b", "a:fast"), ()]


def test_a_ledger_keeps_what_the_configuration_says() -> None:
    models = "models: {a: {cmd: 'engine --port ${PORT}'}}"
    assert ledger_limits_of(load_config_text(models, env={})) == ledger.Limits()
    told = ledger_limits_of(load_config_text(f"ledger: {{keep: 36h, max_size: 64MiB}}\n{models}", env={}))
    assert (told.days, told.size_bytes) == (1.5, 64 << 20)
