"""Run an engine in a container: the same launch, wrapped into `podman run` or `docker run`."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from greenroom.config.model import ContainerConfig, ModelConfig
from greenroom.engines.base import AsleepCheck, Call, Canary, Costs, DeviceRef, Ending, Estimate, Launch, Readiness, SleepRecipe
from greenroom.engines.devices import PIN_VARIABLES
from greenroom.engines.discovery import IMAGE_PROGRAM, PROGRAM

if TYPE_CHECKING:
    from greenroom.engines.generic import Generic

LABEL = "dev.greenroom"
NAME_CHARS_MAX = 40  # of the readable part


def safe_name(model: str) -> str:
    """A container, unit or file name made of a model id: readable, safe, and different for different ids.

    Ids that differ only in what is not allowed in such a name would collide, so any change adds a digest.
    """
    safe = re.sub(r"[^a-z0-9._-]+", "-", model.lower()).strip("-._")[:NAME_CHARS_MAX].strip("-._")
    if safe == model:
        return safe
    digest = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{safe}-{digest}" if safe else digest


def container_name(model: str, generation: int) -> str:
    """`greenroom-MODEL-GENERATION`."""
    return f"greenroom-{safe_name(model)}-{generation}"


def wrap(launch: Launch, config: ModelConfig, devices: Sequence[DeviceRef], generation: int) -> Launch:
    """Turn a launch into one that runs in a container; raises ValueError when the config names none."""
    container = config.container
    if container is None:
        raise ValueError(f"{config.id} has no `container` entry")
    name = container_name(config.id, generation)
    env = {key: value for key, value in launch.env.items() if key not in PIN_VARIABLES or key in dict(config.env)}
    argv = (
        container.runtime,
        "run",
        "--rm",
        "--name",
        name,
        *(("--replace",) if container.runtime.endswith("podman") else ()),
        *_labels(config.id, generation),
        "--publish",
        f"127.0.0.1:{launch.port}:{launch.port}",
        *_device_arguments(devices, container.runtime),
        "--cap-drop",
        "ALL",
        "--security-opt",
        "no-new-privileges",
        *(word for volume in container.volumes for word in ("--volume", _read_only(volume, launch.cwd))),
        # Only the names: values on a command line are readable by everybody on the machine.
        *(word for key in sorted(env) for word in ("--env", key)),
        *container.args,
        *_entry(container, launch.argv),
    )
    stop = launch.stop_argv or stop_argv(container.runtime, name, config.stop_s_max)
    return replace(launch, argv=argv, env=env, stop_argv=stop, detached=True)


def stop_argv(runtime: str, name: str, grace_s: float) -> tuple[str, ...]:
    """End a container: TERM, `grace_s` seconds, KILL."""
    return (runtime, "stop", "-t", str(max(0, round(grace_s))), name)


def kill_argv(runtime: str, name: str) -> tuple[str, ...]:
    """Remove a container at once."""
    return (runtime, "rm", "--force", name)


def list_argv(runtime: str) -> tuple[str, ...]:
    """Print the containers greenroom has started, one JSON object a line: what a crashed supervisor left behind."""
    return (runtime, "ps", "--all", "--no-trunc", "--filter", f"label={LABEL}.model", "--format", "json")


def _labels(model: str, generation: int) -> tuple[str, ...]:
    values = {"model": model, "generation": str(generation), "supervisor": str(os.getpid())}
    return tuple(word for key, value in values.items() for word in ("--label", f"{LABEL}.{key}={value}"))


def _device_arguments(devices: Sequence[DeviceRef], runtime: str) -> tuple[str, ...]:
    words: list[str] = []
    for device in devices:
        if device.kind in ("gpu", "mig") and device.vendor != "amd" and (device.uuid or device.index is not None):
            words += ["--device", f"nvidia.com/gpu={device.uuid or device.index}"]
    amd = [device for device in devices if device.vendor == "amd"]
    if amd:
        words += ["--device", "/dev/kfd", "--device", "/dev/dri"]
        words += ["--group-add", "keep-groups"] if runtime.endswith("podman") else ["--group-add", "video"]
        indices = [str(device.index) for device in amd if device.index is not None]
        words += ["--env", f"HIP_VISIBLE_DEVICES={','.join(indices)}"] if len(indices) == len(amd) else []
    return tuple(words)


def _read_only(volume: str, cwd: str | None) -> str:
    source, _, rest = volume.partition(":")
    target, _, options = (rest or source).partition(":")
    if source.startswith("."):
        source = str((Path(cwd or Path.cwd()) / source).resolve())
    elif source.startswith("~"):
        source = str(Path(source).expanduser())
    return f"{source}:{target}:{options or 'ro'}"


def _entry(container: ContainerConfig, argv: tuple[str, ...]) -> tuple[str, ...]:
    """Image and command.  The program becomes the entry point, unless the operator's `args` name one."""
    if any(word == "--entrypoint" or word.startswith("--entrypoint=") for word in container.args):
        return (container.image, *argv)
    program = IMAGE_PROGRAM if argv[0] == PROGRAM and "llama.cpp" in container.image else argv[0]
    return ("--entrypoint", program, container.image, *argv[1:])


class Containerized:
    """Any dialect, run in a container; everything but the launch is the dialect's own."""

    def __init__(self, inner: Generic) -> None:
        self.inner = inner
        self.kind = inner.kind
        self.config = inner.config

    def launch(self, port: int, devices: Sequence[DeviceRef], generation: int = 0) -> Launch:
        """Generation 0 (not told) takes the port instead: no two running engines share one."""
        return wrap(self.inner.launch(port, devices), self.config, devices, generation or port)

    def readiness(self) -> Readiness:
        return self.inner.readiness()

    def estimate(self, devices: Sequence[DeviceRef]) -> Estimate:
        return self.inner.estimate(devices)

    def costs(self, estimate: Estimate) -> Costs:
        costs = self.inner.costs(estimate)
        return replace(costs, up_s=costs.up_s + 0.5, down_s=costs.down_s + 0.5)

    def parallel(self) -> int:
        return self.inner.parallel()

    def lone_start(self) -> bool:
        return self.inner.lone_start()

    def pinned_devices(self) -> tuple[str, ...]:
        return self.inner.pinned_devices()

    def devices_count(self) -> int | None:
        return self.inner.devices_count()

    def missing(self) -> str:
        return self.inner.missing()

    def is_ready_hint(self, line: str) -> bool:
        return self.inner.is_ready_hint(line)

    def phase_of(self, line: str) -> str:
        return self.inner.phase_of(line)

    def metrics_call(self) -> Call | None:
        return self.inner.metrics_call()

    def ending(self, exit_code: int | None, log_tail: Sequence[str]) -> Ending:
        return self.inner.ending(exit_code, log_tail)

    def files(self) -> tuple[Path, ...]:
        return self.inner.files()

    def no_sleep(self) -> str:
        return self.inner.no_sleep()

    def sleep_notes(self) -> tuple[str, ...]:
        return self.inner.sleep_notes()

    def control_headers(self) -> tuple[tuple[str, str], ...]:
        return self.inner.control_headers()

    def version_call(self) -> Call | None:
        return self.inner.version_call()

    def sleep_recipe(self, level: int, version: tuple[int, ...]) -> SleepRecipe:
        return self.inner.sleep_recipe(level, version)

    def canaries(self) -> tuple[Canary, ...]:
        return self.inner.canaries()

    def dozes(self) -> AsleepCheck | None:
        return self.inner.dozes()
