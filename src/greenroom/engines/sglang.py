"""SGLang's server (`python -m sglang.launch_server`, `sglang serve`)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import ClassVar

from greenroom.engines.base import DeviceRef, Estimate
from greenroom.engines.generic import Generic
from greenroom.engines.vllm import product

FRACTION_DEFAULT = 0.88  # it computes its own from the size of the card; this is the usual outcome
BESIDE_MIB = 3072  # graphs and activations live beside the static share
HOST_MIB = 3072
PARALLEL_DEFAULT = 256
HEALTH_VARIABLE = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"


class Sglang(Generic):
    kind = "sglang"
    underscores: ClassVar[bool] = True
    port_flags: ClassVar[tuple[str, ...]] = ("--port",)
    host_flags: ClassVar[tuple[str, ...]] = ("--host",)
    ready_lines: ClassVar[re.Pattern[str]] = re.compile(r"The server is fired up and ready to roll|Application startup complete")

    def own_env(self, devices: Sequence[DeviceRef]) -> dict[str, str]:
        # Its /health generates a token by default: a probe would cost compute, and could kill it while memory is released.
        return {} if HEALTH_VARIABLE in self.env else {HEALTH_VARIABLE: "0"}

    def estimate(self, devices: Sequence[DeviceRef]) -> Estimate:
        """The static share (weights + KV pool) of the device, and what lives beside it."""
        total = max((device.total_mib for device in devices), default=0)
        if not total:
            return Estimate(None, HOST_MIB, detail="the size of the device is not known, so its share is not either")
        explicit = self.flags.number("--mem-fraction-static")
        share = FRACTION_DEFAULT if explicit is None else explicit
        wanted = min(total, math.ceil(share * total) + BESIDE_MIB)
        detail = f"static share {share:g} of {total:,} MiB + {BESIDE_MIB:,} MiB" + ("" if explicit is not None else " (a usual default)")
        return Estimate(wanted, HOST_MIB, "flags", detail)

    def devices_count(self) -> int | None:
        return product(
            self.flags.integer("--tensor-parallel-size", "--tp-size", "--tp"),
            self.flags.integer("--pipeline-parallel-size", "--pp-size", "--pp"),
        )

    def default_parallel(self) -> int:
        return self.flags.integer("--max-running-requests") or PARALLEL_DEFAULT

    def lone_start(self) -> bool:
        return True

    def times(self) -> tuple[float, float]:
        return 60.0, 3.0

    def model_name(self) -> str | None:
        return self.flags.value("--model-path", "--model")
