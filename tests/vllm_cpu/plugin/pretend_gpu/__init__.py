"""A vLLM plugin for tests: the CPU platform gets a sleep mode that frees memory, and a GPU's bookkeeping to go with it.

vLLM finds it through `PYTHONPATH` (the `dist-info` folder beside this one).  Server, engine core, scheduler, routes and
the GPU worker's own sleep code are vLLM's; replaced is what needs a GPU: the allocator (pages.py) and the answer to "how
much memory is free" (ledger.py, a folder shared by all servers on the pretend device).

Environment: PRETEND_GPU_LEDGER (folder), PRETEND_GPU_BYTES (size of the device), PRETEND_GPU_CONTEXT_BYTES (what each
process holds besides weights and KV, also asleep), PRETEND_GPU_FORK=1 (processes are forked, which halves a cold start).
"""

from __future__ import annotations

import os
from typing import Any

CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def register() -> None:
    """Called by vLLM in each of its processes; those that were forked have it already."""
    from vllm.platforms.cpu import CpuPlatform

    if CpuPlatform.is_sleep_mode_available is _yes:
        return
    CpuPlatform.is_sleep_mode_available = _yes
    of_vllm = CpuPlatform.check_and_update_config

    def check_and_update_config(cls: type[CpuPlatform], vllm_config: Any) -> None:
        of_vllm(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == CPU_WORKER:
            parallel.worker_cls = "pretend_gpu.worker.PretendGpuWorker"
        if os.environ.get("PRETEND_GPU_FORK") == "1":
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM has just set it to spawn

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _yes(platform: object) -> bool:
    return True
