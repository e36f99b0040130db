"""Hugging Face's text-embeddings-inference (`text-embeddings-router`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from greenroom.engines.base import Call, DeviceRef, Estimate
from greenroom.engines.generic import Generic, in_ram
from greenroom.engines.weights import folder_mib

CONCURRENT_DEFAULT = 512
GPU_OVERHEAD_MIB = 1536  # context, and the warm-up of a batch of 16,384 tokens
HOST_OVERHEAD_MIB = 512


class Tei(Generic):
    kind = "tei"
    port_flags: ClassVar[tuple[str, ...]] = ("--port", "-p")
    host_flags: ClassVar[tuple[str, ...]] = ("--hostname",)
    host_variables: ClassVar[tuple[str, ...]] = ("HOSTNAME",)
    public_by_default: ClassVar[bool] = True
    key_variables: ClassVar[tuple[str, ...]] = ("API_KEY",)
    ready_lines: ClassVar[re.Pattern[str]] = re.compile(r"\bReady\b|Starting HTTP server")
    phase_lines: ClassVar[re.Pattern[str]] = re.compile(r"(?P<listen>Starting (?:HTTP|gRPC) server)|(?P<weights>Warming up model)")

    def metrics_call(self) -> Call | None:
        return Call("/metrics", "GET")

    def estimate(self, devices: Sequence[DeviceRef]) -> Estimate:
        weights = folder_mib(self.model_path())  # where its own hub cache lies is the image's business
        if not weights:
            detail = "its weights are not on this host yet: the need is learned at the first start"
            return Estimate(None, HOST_OVERHEAD_MIB, detail=detail, in_ram=in_ram(devices))
        if in_ram(devices):
            detail = f"weights 2 x {weights:,} + {HOST_OVERHEAD_MIB} MiB"
            return Estimate(2 * weights + HOST_OVERHEAD_MIB, 0, "estimated", detail, in_ram=True)
        return Estimate(weights + GPU_OVERHEAD_MIB, HOST_OVERHEAD_MIB, "estimated", f"weights {weights:,} + {GPU_OVERHEAD_MIB:,} MiB")

    def default_parallel(self) -> int:
        return self.flags.integer("--max-concurrent-requests", env="MAX_CONCURRENT_REQUESTS") or CONCURRENT_DEFAULT

    def fetches_from(self) -> str:
        return self.named_on_hub()

    def times(self) -> tuple[float, float]:
        return 5.0, 0.5

    def model_name(self) -> str | None:
        return self.flags.value("--model-id", env="MODEL_ID")
