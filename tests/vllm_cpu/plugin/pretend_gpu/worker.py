"""vLLM's CPU worker with the GPU worker's sleep, on the pretend GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
import vllm.device_allocator
import vllm.model_executor.layers.utils
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import request_memory

from .ledger import Ledger, NoRoomError
from .pages import PageAllocator


class PretendGpuWorker(CPUWorker):
    """Starts, refuses, runs out, sleeps and wakes as the GPU worker does; computes on the CPU."""

    sleep = Worker.sleep
    wake_up = Worker.wake_up
    discard = Worker.discard

    def init_device(self) -> None:
        super().init_device()
        self._ledger = ledger = Ledger.from_environment()
        self._allocator = PageAllocator(ledger)
        vllm.device_allocator.get_mem_allocator_instance = lambda: self._allocator
        vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm = plain_linear
        torch.accelerator.get_memory_info = lambda device=None: (ledger.free, ledger.total)
        self._context = int(os.environ.get("PRETEND_GPU_CONTEXT_BYTES", "0"))
        try:
            ledger.take(self._context)
        except NoRoomError as exc:
            raise RuntimeError("CUDA error: out of memory") from exc
        request_memory(SimpleNamespace(device_="cuda:0", free_memory=ledger.free, total_memory=ledger.total), self.cache_config)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model = self.model_runner.get_model()
        self._track("weights", [*model.parameters(), *model.buffers()])

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)
        self._track("kv_cache", self.model_runner.kv_caches)

    def _track(self, tag: str, tensors: list[torch.Tensor]) -> None:
        try:
            self._allocator.track(tag, tensors)
        except NoRoomError as exc:
            raise torch.OutOfMemoryError(self._out_of_memory(exc)) from exc

    def _out_of_memory(self, exc: NoRoomError) -> str:
        """PyTorch's sentences, which name the other processes on the device."""
        own = self._allocator.get_current_usage()
        others = {pid: held for pid, held in self._ledger.held().items() if pid != os.getpid()}
        told = "".join(f"Process {pid} has {gib(held)} memory in use. " for pid, held in others.items())
        return (
            f"CUDA out of memory. Tried to allocate {gib(exc.wanted)}. GPU 0 has a total capacity of {gib(self._ledger.total)} of which "
            f"{gib(exc.free)} is free. {told}Including non-PyTorch memory, this process has {gib(own + self._context)} memory in use. "
            f"Of the allocated memory {gib(own)} is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. If reserved "
            "but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
        )


def plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Keep each weight an ordinary tensor: a prepacked private copy could not be freed."""
    layer.cpu_linear = torch.nn.functional.linear


def gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"
