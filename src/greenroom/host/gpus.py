"""NVIDIA GPUs and MIG devices through NVML: which there are, how much memory is used and by whom.

No driver, no GPU, no library: a normal answer, not an error.  Calls take a millisecond or so, but a sick driver can
hold one for seconds: run them in a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MIB = 1024 * 1024
GPUS_MAX = 64


class GpuError(Exception):
    """The driver did not answer a question; the message is one sentence."""


class GpuLost(GpuError):
    """The GPU is gone: fell off the bus, was reset or repartitioned.  What was on it is gone too."""


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One device engines can be put on."""

    index: int  # of the GPU, in bus order; MIG devices have their parent's
    uuid: str  # GPU-... or MIG-...
    name: str
    total_mib: int  # 0: the driver does not say (memory shared with the host)
    kind: str = "gpu"  # gpu | mig
    parent_uuid: str = ""  # of a MIG device


@dataclass(frozen=True, slots=True)
class GpuSample:
    """`used_mib` includes what the driver reserves: total - used is free.  Processes by pid; one without a known size is left out."""

    used_mib: int | None  # None: the driver does not say
    processes: dict[int, int]


class Gpus:
    """The GPUs of this machine."""

    def __init__(self) -> None:
        self.why_none = ""  # after `discover` found none: one sentence
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}

    def discover(self) -> tuple[GpuInfo, ...]:
        """All usable devices in bus order; a GPU in MIG mode is given as its MIG devices.  () = none, `why_none` says why."""
        self.why_none = ""
        if not self._open():
            return ()
        nvml = self._nvml
        self._handles.clear()
        found: list[GpuInfo] = []
        try:
            for index in range(min(GPUS_MAX, nvml.nvmlDeviceGetCount())):
                try:
                    found += self._look(index, nvml.nvmlDeviceGetHandleByIndex(index))
                except nvml.NVMLError as exc:  # one sick card does not hide the others
                    self.why_none = f"GPU {index} does not answer: {exc}."
        except nvml.NVMLError as exc:
            self.why_none = f"the NVIDIA driver does not answer: {exc}."
        if not found and not self.why_none:
            self.why_none = "the NVIDIA driver lists no GPU (or only GPUs in MIG mode without a MIG device)."
        return tuple(found)

    def sample(self, uuid: str) -> GpuSample:
        """What is used now.  Raises GpuLost when the device is gone, GpuError when the driver refuses."""
        if not self._open():
            raise GpuLost(f"{uuid}: {self.why_none}")
        nvml = self._nvml
        try:
            handle = self._handle(uuid)
            return GpuSample(_used_mib(nvml, handle), _processes(nvml, handle))
        except nvml.NVMLError as exc:
            raise self._explain(uuid, exc) from exc

    def close(self) -> None:
        nvml, self._nvml = self._nvml, None
        self._handles.clear()
        if nvml is not None:
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError:
                pass  # a lost driver cannot even be left in peace

    def _open(self) -> bool:
        if self._nvml is not None:
            return True
        try:
            import pynvml
        except ImportError:
            self.why_none = "the Python package nvidia-ml-py is missing."
            return False
        nvml: Any = pynvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as exc:
            self.why_none = f"no NVIDIA driver here ({exc})."
            return False
        self._nvml = nvml
        return True

    def _look(self, index: int, handle: Any) -> list[GpuInfo]:
        uuid = self._nvml.nvmlDeviceGetUUID(handle)
        if self._in_mig_mode(handle):
            return self._look_inside(index, uuid, handle)
        self._handles[uuid] = handle
        return [GpuInfo(index, uuid, self._nvml.nvmlDeviceGetName(handle), _total_mib(self._nvml, handle))]

    def _look_inside(self, index: int, parent_uuid: str, parent: Any) -> list[GpuInfo]:
        nvml = self._nvml
        found = []
        for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(parent)):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, slot)
            except nvml.NVMLError_NotFound:
                continue  # slots may be empty
            uuid = nvml.nvmlDeviceGetUUID(handle)
            self._handles[uuid] = handle
            found.append(GpuInfo(index, uuid, nvml.nvmlDeviceGetName(handle), _total_mib(nvml, handle), "mig", parent_uuid))
        return found

    def _in_mig_mode(self, handle: Any) -> bool:
        try:
            current, _pending = self._nvml.nvmlDeviceGetMigMode(handle)
        except self._nvml.NVMLError_NotSupported:
            return False
        return bool(current == self._nvml.NVML_DEVICE_MIG_ENABLE)

    def _handle(self, uuid: str) -> Any:
        if uuid not in self._handles:
            self._handles[uuid] = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        return self._handles[uuid]

    def _explain(self, uuid: str, exc: Any) -> GpuError:
        nvml = self._nvml
        self._handles.pop(uuid, None)
        gone = (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED, nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT)
        if exc.value in (nvml.NVML_ERROR_UNINITIALIZED, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
            self.close()  # the driver was reloaded: the next call starts anew
        elif exc.value not in gone:
            return GpuError(f"{uuid}: the driver does not say how much memory is used: {exc}.")
        return GpuLost(f"{uuid} is gone: {exc}. Look at `nvidia-smi` and the kernel log.")


def here() -> tuple[GpuInfo, ...]:
    """What this machine has, asked once; () where nobody answers."""
    gpus = Gpus()
    try:
        return gpus.discover()
    except GpuError:
        return ()
    finally:
        gpus.close()


def _total_mib(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total // MIB)
    except nvml.NVMLError_NotSupported:
        return 0


def _used_mib(nvml: Any, handle: Any) -> int | None:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_NotSupported:
        return None
    return int(-(-(memory.total - memory.free) // MIB))


def _processes(nvml: Any, handle: Any) -> dict[int, int]:
    used: dict[int, int] = {}
    for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            running = ask(handle)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission):
            continue  # MIG devices have no graphics; a container may hide the processes of others
        for process in running:
            if process.usedGpuMemory is not None:
                # A process in both lists is shown with the same memory in each.
                used[process.pid] = max(used.get(process.pid, 0), -(-process.usedGpuMemory // MIB))
    return used
