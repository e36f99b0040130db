"""vLLM's OpenAI server (`vllm serve`, `python -m vllm.entrypoints.openai.api_server`)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import ClassVar

from greenroom.engines.base import Costs, DeviceRef, Estimate
from greenroom.engines.generic import Generic, weights_folder_mib

UTILIZATION_DEFAULT = 0.92  # 0.9 up to about 0.19; the larger is the safer guess
MAX_NUM_SEQS_DEFAULT = 256
HOST_MIB = 3072  # API server, engine core and worker in host RAM
CPU_PROCESS_MIB = 1536  # the same three processes on a CPU build: 1.4 GiB measured with a tiny model
GPU_OVERHEAD_MIB = 2048  # context, graphs and activations beside weights and KV
MIB = 1 << 20


class Vllm(Generic):
    kind = "vllm"
    underscores: ClassVar[bool] = True
    port_flags: ClassVar[tuple[str, ...]] = ("--port",)
    host_flags: ClassVar[tuple[str, ...]] = ("--host",)
    public_by_default: ClassVar[bool] = True
    key_variables: ClassVar[tuple[str, ...]] = ("VLLM_API_KEY",)
    ready_lines: ClassVar[re.Pattern[str]] = re.compile(r"Application startup complete|Uvicorn running on|Starting vLLM API server")

    def estimate(self, devices: Sequence[DeviceRef]) -> Estimate:
        """Exact from the flags: it wants `utilization x total` free at start, whatever it will use later."""
        total = max((device.total_mib for device in devices), default=0)
        if devices and all(device.kind == "ram" for device in devices):
            return self._on_cpu(total)
        explicit = self.flags.number("--gpu-memory-utilization")
        share = UTILIZATION_DEFAULT if explicit is None else explicit
        kv = self.flags.integer("--kv-cache-memory-bytes", "--kv-cache-memory")
        if not total:
            return Estimate(None, HOST_MIB, detail="the size of the device is not known, so its share is not either")
        wanted = math.ceil(share * total)
        detail = f"utilization {share:g} of {total:,} MiB" + ("" if explicit is not None else " (vLLM's default)")
        if kv is not None:
            weights = weights_folder_mib(self.model_path()) // (self.devices_count() or 1)
            need = weights + math.ceil(kv / MIB) + GPU_OVERHEAD_MIB
            detail += f"; KV {math.ceil(kv / MIB):,} MiB fixed" + (
                "; lower the utilization to what it needs" if weights and need < wanted else ""
            )
            wanted = max(wanted, need if weights else 0)
        return Estimate(wanted, HOST_MIB, "flags", detail)

    def _on_cpu(self, total: int) -> Estimate:
        weights = weights_folder_mib(self.model_path())
        space_gib = self.flags.integer(env="VLLM_CPU_KVCACHE_SPACE")
        kv = self.flags.integer("--kv-cache-memory-bytes", "--kv-cache-memory")
        kv_mib = space_gib * 1024 if space_gib else math.ceil(kv / MIB) if kv else None
        if kv_mib is None:
            share = self.flags.number("--gpu-memory-utilization") or UTILIZATION_DEFAULT
            return Estimate(math.ceil(share * total) if total else None, 0, "flags", f"{share:g} of all host RAM (no KV size is set)")
        return Estimate(
            weights + kv_mib + CPU_PROCESS_MIB, 0, "estimated", f"weights {weights:,} + KV {kv_mib:,} + processes {CPU_PROCESS_MIB:,} MiB"
        )

    def model_name(self) -> str | None:
        argv = self.command.argv
        if "serve" in argv[:3]:
            index = argv.index("serve") + 1
            if index < len(argv) and not argv[index].startswith("-"):
                return argv[index]
        return self.flags.value("--model")

    def devices_count(self) -> int | None:
        """Tensor x pipeline x data parallel; None when no flag says so."""
        return product(
            self.flags.integer("--tensor-parallel-size", "-tp"),
            self.flags.integer("--pipeline-parallel-size", "-pp"),
            self.flags.integer("--data-parallel-size", "-dp"),
        )

    def default_parallel(self) -> int:
        return self.flags.integer("--max-num-seqs") or MAX_NUM_SEQS_DEFAULT

    def lone_start(self) -> bool:
        return True

    def costs(self, estimate: Estimate) -> Costs:
        return Costs(up_s=60.0, down_s=3.0)


def product(*factors: int | None) -> int | None:
    """The product of the factors that are given; None when none is."""
    given = [factor for factor in factors if factor]
    return math.prod(given) if given else None
