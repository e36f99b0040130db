"""Short ways to say what a test is about."""

from __future__ import annotations

import shlex
from typing import Any

from greenroom.config.model import ModelConfig
from greenroom.engines.base import DeviceRef

RAM = DeviceRef("ram", "ram", total_mib=24_000)
GPU0 = DeviceRef("gpu0", "gpu", "nvidia", "GPU-aaaa", 0, 81_920)
GPU1 = DeviceRef("gpu1", "gpu", "nvidia", "GPU-bbbb", 1, 81_920)
MIG0 = DeviceRef("mig0", "mig", "nvidia", "MIG-cccc", None, 20_480)
AMD0 = DeviceRef("gpu0", "gpu", "amd", "", 2, 65_536)
BENCH0 = DeviceRef("bench0", "declared", total_mib=1_500)


def a_model(command: str | list[str], **settings: Any) -> ModelConfig:
    """A model named `m` with this command."""
    argv = tuple(shlex.split(command)) if isinstance(command, str) else tuple(command)
    return ModelConfig(**{"id": "m", "argv": argv, **settings})
