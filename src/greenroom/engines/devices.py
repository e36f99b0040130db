"""Which device an engine sees: pinned by UUID in its environment, unless the operator has pinned it by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from greenroom.engines.base import DeviceRef

NVIDIA_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
AMD_VARIABLES = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
OTHER_VARIABLES = ("GGML_VK_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")
PIN_VARIABLES = NVIDIA_VARIABLES + AMD_VARIABLES + OTHER_VARIABLES
NOTHING = frozenset({"", "-1", "none", "void", "NoDevFiles"})
LLAMA_DEVICE = re.compile(r"^(?:CUDA|ROCm|HIP|Vulkan|SYCL|MUSA)(\d+)$", re.IGNORECASE)


def pin_env(devices: Sequence[DeviceRef], operator_env: Mapping[str, str]) -> dict[str, str]:
    """Variables that make an engine see exactly these devices.

    {} for declared devices and when the operator's own variables name devices: then only the numbering is made the one
    greenroom books by.  A UUID means the same card under every numbering, an index does not.
    """
    if any(variable in operator_env for variable in PIN_VARIABLES):
        return _bus_order(operator_env)
    kinds = {device.kind for device in devices}
    if kinds == {"ram"}:
        return {"CUDA_VISIBLE_DEVICES": ""}
    if not kinds or not kinds <= {"gpu", "mig"}:
        return {}
    return _amd(devices) if any(device.vendor == "amd" for device in devices) else _bus_order(operator_env) | _nvidia(devices)


def vulkan_env(devices: Sequence[DeviceRef], operator_env: Mapping[str, str]) -> dict[str, str]:
    """The same for a llama.cpp built on Vulkan, which knows its devices only by index; {} when an index is not known."""
    if any(variable in operator_env for variable in PIN_VARIABLES):
        return {}
    indices = [device.index for device in devices if device.kind == "gpu" and device.index is not None]
    if not devices or len(indices) != len(devices):
        return {}
    return {"GGML_VK_VISIBLE_DEVICES": ",".join(str(index) for index in indices)}


def _nvidia(devices: Sequence[DeviceRef]) -> dict[str, str]:
    # CUDA enumerates one MIG instance per process: the first one stands alone.
    mig = [device.uuid for device in devices if device.kind == "mig" and device.uuid]
    names = mig[:1] or [device.uuid or _index(device) for device in devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)} if all(names) else {}


def _amd(devices: Sequence[DeviceRef]) -> dict[str, str]:
    # HIP knows indices only, and counts them after ROCR has filtered: set one of the two, never both.
    if all(device.uuid.startswith("GPU-") for device in devices):
        return {"ROCR_VISIBLE_DEVICES": ",".join(device.uuid for device in devices)}
    names = [_index(device) for device in devices]
    return {"HIP_VISIBLE_DEVICES": ",".join(names)} if all(names) else {}


def _index(device: DeviceRef) -> str:
    return "" if device.index is None else str(device.index)


def _bus_order(operator_env: Mapping[str, str]) -> dict[str, str]:
    # Without it CUDA numbers the fastest card first while every monitoring tool counts in bus order.
    return {} if "CUDA_DEVICE_ORDER" in operator_env else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def pinned(operator_env: Mapping[str, str]) -> tuple[str, ...]:
    """UUIDs or bus indices that the operator's variables name; () when they name none (or hide every device)."""
    for variable in PIN_VARIABLES:
        if variable in operator_env:
            names = tuple(name.strip() for name in operator_env[variable].split(","))
            return tuple(name for name in names if name not in NOTHING and name.lower() != "all")
    return ()


def pinned_by_flag(value: str | None) -> tuple[str, ...]:
    """Indices in llama-server's `--device CUDA1,CUDA2`; () for `none` or names without a number."""
    names = [LLAMA_DEVICE.match(name.strip()) for name in (value or "").split(",")]
    return tuple(match[1] for match in names if match)
