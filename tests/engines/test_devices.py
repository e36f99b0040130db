"""Every engine sees the device it was booked on (B35), and the operator's own choice wins."""

from __future__ import annotations

import pytest

from greenroom.engines.base import DeviceRef
from greenroom.engines.detect import describe
from greenroom.engines.devices import pin_env
from tests.engines.builders import AMD0, BENCH0, GPU0, GPU1, MIG0, RAM, a_model


@pytest.mark.parametrize(
    ("devices", "env"),
    [
        ([GPU0], {"CUDA_VISIBLE_DEVICES": "GPU-aaaa", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ([GPU0, GPU1], {"CUDA_VISIBLE_DEVICES": "GPU-aaaa,GPU-bbbb", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ([MIG0], {"CUDA_VISIBLE_DEVICES": "MIG-cccc", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ([DeviceRef("gpu3", "gpu", "nvidia", "", 3)], {"CUDA_VISIBLE_DEVICES": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ([AMD0], {"HIP_VISIBLE_DEVICES": "2"}),
        ([DeviceRef("gpu0", "gpu", "amd", "GPU-1234", 0)], {"ROCR_VISIBLE_DEVICES": "GPU-1234"}),
        ([RAM], {"CUDA_VISIBLE_DEVICES": ""}),
        ([BENCH0], {}),
        ([], {}),
    ],
)
def test_an_engine_is_pinned_to_its_devices(devices: list[DeviceRef], env: dict[str, str]) -> None:
    """By UUID where there is one; a model on host RAM sees no GPU."""
    assert pin_env(devices, {}) == env


def test_the_operators_choice_wins_and_is_booked() -> None:
    """Only the numbering is fixed, so that its index means the card that the monitoring tool shows."""
    engine = describe(a_model("vllm serve m --port ${PORT}", env=(("CUDA_VISIBLE_DEVICES", "1"),)))

    assert engine.pinned_devices() == ("1",)
    assert dict(engine.launch(5800, [GPU0]).env) == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_a_choice_inside_the_command_counts_too() -> None:
    """`env CUDA_VISIBLE_DEVICES=... vllm serve` and a shell's assignment."""
    for command in ("env CUDA_VISIBLE_DEVICES=GPU-x,GPU-y vllm serve m", "sh -c 'CUDA_VISIBLE_DEVICES=GPU-x,GPU-y vllm serve m'"):
        engine = describe(a_model(command))

        assert engine.pinned_devices() == ("GPU-x", "GPU-y")
        assert "CUDA_VISIBLE_DEVICES" not in engine.launch(5800, [GPU0]).env


@pytest.mark.parametrize(("value", "names"), [("", ()), ("-1", ()), ("all", ()), ("0, 2", ("0", "2")), ("MIG-x", ("MIG-x",))])
def test_what_an_operators_variable_names(value: str, names: tuple[str, ...]) -> None:
    """Hiding all devices, or naming all, pins none."""
    assert describe(a_model("x", env=(("CUDA_VISIBLE_DEVICES", value),))).pinned_devices() == names


def test_llama_servers_own_device_flag_is_a_pin() -> None:
    """`--device CUDA1` names index 1; `none` names nothing."""
    assert describe(a_model("llama-server -m x -dev CUDA1,CUDA2")).pinned_devices() == ("1", "2")
    assert describe(a_model("llama-server -m x --device none")).pinned_devices() == ()


def test_a_vulkan_build_is_pinned_by_index() -> None:
    """Vulkan knows no UUIDs in its variable."""
    assert describe(a_model("/opt/llama-server-vulkan -m x")).launch(1, [GPU1]).env["GGML_VK_VISIBLE_DEVICES"] == "1"
    assert "GGML_VK_VISIBLE_DEVICES" not in describe(a_model("/opt/llama-server -m x")).launch(1, [GPU1]).env


def test_a_llama_server_on_host_ram_offloads_nothing() -> None:
    """Without being told it would take the first GPU it finds, whatever it was built for."""
    env = describe(a_model("/opt/llama-server -m x")).launch(1, [RAM]).env

    assert env["LLAMA_ARG_DEVICE"] == "none"
    assert "LLAMA_ARG_DEVICE" not in describe(a_model("/opt/llama-server -m x -dev CUDA0")).launch(1, [RAM]).env
    assert "LLAMA_ARG_DEVICE" not in describe(a_model("/opt/llama-server -m x")).launch(1, [BENCH0]).env
