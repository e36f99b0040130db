"""Run an engine in a container: the same launch, wrapped into `podman run` or `docker run`.

Pure: words of command lines, and what the runtimes answer.  `host.runtimes` runs them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.config import secrets
from greenroom.config.model import ContainerConfig, ModelConfig
from greenroom.core.facts import Cause
from greenroom.engines.base import AsleepCheck, Box, Call, Canary, Costs, DeviceRef, Ending, Estimate, Launch, Readiness, SleepRecipe
from greenroom.engines.devices import PIN_VARIABLES
from greenroom.engines.discovery import IMAGE_PROGRAM, PROGRAM
from greenroom.engines.exposure import is_loopback, volumes
from greenroom.engines.generic import mounted

if TYPE_CHECKING:
    from greenroom.engines.generic import Generic

RUNTIMES = ("podman", "docker")
LABEL = "dev.greenroom"
HOME_LABEL = f"{LABEL}.home"
NAME_CHARS_MAX = 40  # of the readable part
HOME_CHARS = 8  # of the state directory's mark, in names
PIDS_MAX = 16384  # threads count; a vLLM on a large machine has thousands
SHM_MIB = 8192  # of engines whose workers talk through shared memory; it is a limit, nothing is taken in advance
SHM_ENGINES = frozenset({"vllm", "sglang"})
LOG_BYTES_MAX = "10m"  # of the runtime's own copy of the log; by default docker keeps all of it for ever
LOG_DRIVERS = {"podman": "k8s-file", "docker": "local"}  # those that keep a file of limited size and can be read again
RESERVED = frozenset({"--name", "-d", "--detach", "--restart", "--cidfile", "--pull", "--pod", "-t", "--tty", "-it"})
NEEDLESS = frozenset({"--rm", "--replace"})  # ours to do; how it ended must still be there to be asked for
# What would steer the runtime's own client if it stood in its environment.
CLIENT_VARIABLE = re.compile(
    r"^(?:PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|(?:LD|XDG|DOCKER|PODMAN|CONTAINERS?|BUILDAH|REGISTRY|STORAGE|DBUS|SSL)_?[A-Z_]*|GO[A-Z]+)$"
)
PART = re.compile(r"^(?P<stem>.*)-\d{5}-of-\d{5}\.gguf$")
RUNTIME_FAILED = 125  # the exit code of a client that could not make the container
ABSENT = re.compile(r"no such (?:container|object|image)|image not known|unable to find image|no container with name", re.IGNORECASE)
NAME_TAKEN = re.compile(r"name .* is already in use", re.IGNORECASE)
PORT_TAKEN = re.compile(r"port is already allocated|address already in use", re.IGNORECASE)
UNREACHABLE = re.compile(r"docker daemon (?:socket|at) ", re.IGNORECASE)
PODMAN_INSTEAD = re.compile(r"invalid log driver|unknown flag: --gpus|Emulate Docker CLI using podman")
FILLER = re.compile(r"^(?:Run '\S+ .*--help' for more information\.?|See '\S+ .*--help'\.?|\[\]|\s*)$")
PREFIX = re.compile(r"^(?:(?:Error|docker|podman): |Error response from daemon: |ERRO\[\d+\] |time=\S+ level=\S+ msg=)+", re.IGNORECASE)
TRANSPORT = re.compile(r"^(?:oci|oci-archive|docker-archive|docker-daemon|docker|dir|containers-storage):(?!\d+/)")


# -------------------------------------------------------------------------------------------------------------- launch


def is_podman(runtime: str) -> bool:
    return os.path.basename(runtime).startswith("podman")


def safe_name(model: str) -> str:
    """A container, unit or file name made of a model id: readable, safe, and different for different ids.

    Ids that differ only in what is not allowed in such a name would collide, so any change adds a digest.
    """
    safe = re.sub(r"[^a-z0-9._-]+", "-", model.lower()).strip("-._")[:NAME_CHARS_MAX].strip("-._")
    if safe == model:
        return safe
    digest = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{safe}-{digest}" if safe else digest


def container_name(model: str, generation: int, home: str = "") -> str:
    """`greenroom-HOME-MODEL-GENERATION`: two greenrooms of one machine never want the same name."""
    return "-".join(("greenroom", *filter(None, (home[:HOME_CHARS], safe_name(model))), str(generation)))


def wrap(
    launch: Launch, config: ModelConfig, devices: Sequence[DeviceRef], generation: int, *, kind: str = "", own_entry: int = 0
) -> Launch:
    """Turn a launch into one that runs in a container; raises ValueError when the config names none.

    `own_entry`: so many words at the front of its command stand for the image's own entry point.
    """
    container = config.container
    if container is None:
        raise ValueError(f"{config.id} has no `container` entry")
    args = tuple(word for word in container.args if word.partition("=")[0] not in NEEDLESS)
    env = {key: value for key, value in launch.env.items() if key not in PIN_VARIABLES or key in dict(config.env)}
    by_name = {key: value for key, value in env.items() if not CLIENT_VARIABLE.match(key) or secrets.in_variable(key, value)}
    options = (
        *_publish(launch, args),
        *_device_arguments(devices, container),
        "--cap-drop",
        "ALL",
        "--security-opt",
        "no-new-privileges",
        *_unlabelled(args),
        *_limits(container, args, kind, config.stop_s_max),
        *(word for volume in container.volumes for word in ("--volume", _read_only(volume, launch.cwd))),
        # Only the names: values on a command line are readable by everybody on the machine.
        *(word for key in sorted(env) for word in ("--env", key if key in by_name else f"{key}={env[key]}")),
        *args,
        *_entry(container, launch.argv, own_entry),
    )
    box = Box(
        container.runtime,
        container_name(config.id, generation),
        container.image,
        (("model", config.id), ("generation", str(generation)), ("supervisor", str(os.getpid()))),
        options,
        container.pull,
        container.pull_s_max,
    )
    return replace(launch, argv=run_argv(box), env=by_name, detached=True, box=box)


def owned(launch: Launch, home: str) -> Launch:
    """The launch of one greenroom: its container has the mark of that state directory in its name and on a label."""
    box = launch.box
    if box is None:
        return launch
    labels = dict(box.labels)
    name = container_name(labels["model"], int(labels["generation"]), home)
    box = replace(box, name=name, labels=(*box.labels, ("home", home)))
    return replace(launch, argv=run_argv(box), box=box)


def run_argv(box: Box) -> tuple[str, ...]:
    """The client stays in the foreground: the engine's words come through it, and its exit code is the engine's.

    An image that names another transport than a registry is the runtime's own to fetch.
    """
    pull = box.pull if TRANSPORT.match(box.image) else "never"
    labels = (word for key, value in box.labels for word in ("--label", f"{LABEL}.{key}={value}"))
    return (box.runtime, "run", "--name", box.name, "--pull", pull, *labels, *box.options)


def _publish(launch: Launch, args: Sequence[str]) -> tuple[str, ...]:
    """On loopback only; not where the container has no network of its own."""
    if _value(args, "--network", "--net") in ("host", "none") or (_value(args, "--network", "--net") or "").startswith("container:"):
        return ()
    host = launch.host if is_loopback(launch.host) and launch.host != "localhost" else "127.0.0.1"
    return ("--publish", f"[{host}]:{launch.port}:{launch.port}" if ":" in host else f"{host}:{launch.port}:{launch.port}")


def _unlabelled(args: Sequence[str]) -> tuple[str, ...]:
    """Under SELinux: labels would have to be changed on the models' own files, and devices are closed to labelled containers."""
    own = any(word.removeprefix("--security-opt=").startswith(("label=", "label:")) for word in args)
    return () if own else ("--security-opt", "label=disable")


def _limits(container: ContainerConfig, args: Sequence[str], kind: str, stop_s: float) -> tuple[str, ...]:
    """What keeps an engine from hurting the machine; the operator's own arguments win."""
    words: list[str] = []
    if not _given(args, "--pids-limit"):
        words += ["--pids-limit", str(PIDS_MAX)]
    shm_mib = container.shm_mib or (SHM_MIB if kind in SHM_ENGINES else None)
    if shm_mib and not _given(args, "--shm-size", "--ipc"):
        words += ["--shm-size", f"{shm_mib}m"]
    if not any(word.startswith(("--health", "--no-health")) for word in args):
        words += ["--no-healthcheck"]  # that of an image asks a fixed port; greenroom asks itself
    if not _given(args, "--log-driver", "--log-opt"):
        driver = LOG_DRIVERS["podman" if is_podman(container.runtime) else "docker"]
        words += ["--log-driver", driver, "--log-opt", f"max-size={LOG_BYTES_MAX}"]
    if not _given(args, "--stop-timeout"):
        words += ["--stop-timeout", str(max(0, round(stop_s)))]  # also when somebody else stops it
    return tuple(words)


def _device_arguments(devices: Sequence[DeviceRef], container: ContainerConfig) -> tuple[str, ...]:
    podman = is_podman(container.runtime)
    groups = ("--group-add", "keep-groups") if podman else ("--group-add", "video")
    real = [device for device in devices if device.kind in ("gpu", "mig")]
    words = [*_nvidia([device for device in real if device.vendor not in ("amd", "intel")], container)]
    amd = [device for device in real if device.vendor == "amd"]
    if amd:
        words += ["--device", "/dev/kfd", "--device", "/dev/dri", *groups]
        words += _chosen(amd, "HIP_VISIBLE_DEVICES")
    intel = [device for device in real if device.vendor == "intel"]
    if intel:
        words += ["--device", "/dev/dri", *groups, *_chosen(intel, "ZE_AFFINITY_MASK")]
    if devices and not real and not podman and all(device.kind == "ram" for device in devices):
        # Where docker's default runtime is NVIDIA's, images that ask for every GPU get them.
        words += ["--env", "NVIDIA_VISIBLE_DEVICES=void"]
    return tuple(words)


def _nvidia(devices: Sequence[DeviceRef], container: ContainerConfig) -> list[str]:
    names = [device.uuid or str(device.index) for device in devices if device.uuid or device.index is not None]
    by_hand = _given(container.args, "--gpus") or any("nvidia.com/gpu" in word for word in container.args)
    if not names or container.gpus == "none" or by_hand:
        return []
    if container.gpus == "flag" or (container.gpus == "auto" and not is_podman(container.runtime)):
        return ["--gpus", f'"device={",".join(names)}"']  # with its quotes: the value is a line of CSV
    return [word for name in names for word in ("--device", f"nvidia.com/gpu={name}")]


def _chosen(devices: Sequence[DeviceRef], variable: str) -> list[str]:
    indices = [str(device.index) for device in devices if device.index is not None]
    return ["--env", f"{variable}={','.join(indices)}"] if len(indices) == len(devices) else []


def _read_only(volume: str, cwd: str | None) -> str:
    source, _, rest = volume.partition(":")
    target, _, options = (rest or source).partition(":")
    if source.startswith("."):
        source = str((Path(cwd or Path.cwd()) / source).resolve())
    elif source.startswith("~"):
        source = str(Path(source).expanduser())
    words = [word for word in options.split(",") if word]
    if not {"ro", "rw", "O"}.intersection(words):  # O: changes go to a layer of their own
        words.append("ro")
    return f"{source}:{target}:{','.join(words)}"


def _entry(container: ContainerConfig, argv: tuple[str, ...], own_entry: int) -> tuple[str, ...]:
    """Image and command.  The program becomes the entry point, unless the operator's `args` name one or the command has none."""
    if own_entry:
        return (container.image, *argv[own_entry:])
    if _given(container.args, "--entrypoint"):
        return (container.image, *argv)
    program = IMAGE_PROGRAM if argv[0] == PROGRAM and "llama.cpp" in container.image else argv[0]
    return ("--entrypoint", program, container.image, *argv[1:])


def _given(words: Sequence[str], *options: str) -> bool:
    return any(word.partition("=")[0] in options for word in words)


def _value(words: Sequence[str], *options: str) -> str | None:
    """The value of the last of these options; None when none is there."""
    found = None
    for word, following in zip(words, (*words[1:], ""), strict=False):
        name, equals, value = word.partition("=")
        if name in options:
            found = value if equals else following
    return found


def mount_words(path: Path) -> tuple[str, ...]:
    """A file or folder of this host, read-only at its own path.  A snapshot of a hub is links into the folder above."""
    if path.parent.name == "snapshots":
        path = path.parent.parent
    if ":" in str(path):
        return ("--mount", f"type=bind,source={path},target={path},readonly")
    return ("--volume", f"{path}:{path}:ro")


# -------------------------------------------------------------------------------------------------- later command lines


def stop_argv(runtime: str, name: str, grace_s: float) -> tuple[str, ...]:
    """End a container: its stop signal, `grace_s` seconds, KILL."""
    return (runtime, "stop", "-t", str(max(0, round(grace_s))), name)


def signal_argv(runtime: str, name: str, signal: str) -> tuple[str, ...]:
    """Send a signal to its first process."""
    return (runtime, "kill", "--signal", signal, name)


def kill_argv(runtime: str, *names: str) -> tuple[str, ...]:
    """KILL at once.  Before `remove_argv`, which by podman would wait for a grace first."""
    return (runtime, "kill", *names)


def remove_argv(runtime: str, *names: str) -> tuple[str, ...]:
    """Remove containers, whatever they do."""
    return (runtime, "rm", "--force", *names)


def list_argv(runtime: str, home: str) -> tuple[str, ...]:
    """The containers that runs of greenroom on one state directory have made, running or not; see `parse_list`."""
    return (runtime, "ps", "--all", "--no-trunc", "--filter", f"label={HOME_LABEL}={home}", "--format", "json")


def inspect_argv(runtime: str, name: str) -> tuple[str, ...]:
    return (runtime, "inspect", "--type", "container", name)


def follow_argv(runtime: str, name: str, since_s: float) -> tuple[str, ...]:
    """What a running container printed in the last so many seconds, and prints from now on."""
    return (runtime, "logs", "--follow", "--since", f"{since_s:.3f}s", name)


def pull_argv(runtime: str, image: str) -> tuple[str, ...]:
    return (runtime, "pull", image)


def image_argv(runtime: str, image: str) -> tuple[str, ...]:
    return (runtime, "image", "inspect", "--format", "{{.Id}}", image)


# ------------------------------------------------------------------------------------------------ what runtimes answer


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of `ps`."""

    id: str
    name: str
    state: str  # running | exited | created | paused | ...


@dataclass(frozen=True, slots=True)
class BoxState:
    """One container now."""

    running: bool  # also while it is paused, restarting or being removed: something of it may hold memory
    pid: int  # of its first process, as the runtime's machine numbers it; 0 = none
    exit_code: int
    oom_killed: bool
    home: str = ""  # whose it is


def parse_list(text: str) -> tuple[Listed, ...]:
    """podman prints one JSON array, docker one object a line.  Raises ValueError on anything else."""
    text = text.strip()
    if not text:
        return ()
    entries = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines() if line.strip()]
    return tuple(_listed(entry) for entry in entries or ())


def _listed(entry: Any) -> Listed:
    if not isinstance(entry, dict):
        raise ValueError("not an object")
    names = entry.get("Names") or ""
    name = ",".join(names) if isinstance(names, list) else str(names)
    return Listed(str(entry.get("Id") or entry.get("ID") or name), name, str(entry.get("State") or ""))


def parse_state(text: str) -> BoxState:
    """The first container of an `inspect`.  Raises ValueError when there is none."""
    entries = json.loads(text)
    if not isinstance(entries, list) or not entries or not isinstance(entries[0], dict):
        raise ValueError("no container")
    state = entries[0].get("State") or {}
    labels = (entries[0].get("Config") or {}).get("Labels") or {}
    status = str(state.get("Status") or "").lower()
    alive = bool(state.get("Running")) or status in ("running", "paused", "restarting", "removing", "stopping")
    return BoxState(
        alive,
        int(state.get("Pid") or 0) if alive else 0,
        int(state.get("ExitCode") or 0),
        bool(state.get("OOMKilled")),
        str(labels.get(HOME_LABEL) or ""),
    )


def telling(lines: Iterable[str]) -> str:
    """What a runtime says went wrong, without the words around it; "" when it said nothing."""
    said = [line.strip() for line in lines if not FILLER.match(line)]
    marked = [line for line in said if PREFIX.match(line)]
    return PREFIX.sub("", (marked or said or [""])[-1]).strip()


def advice(runtime: str, said: str) -> str:
    """What to do about it; "" when that is plain from its words."""
    if UNREACHABLE.search(said):
        return "; start the docker service, and see that this user may use it (group docker)"
    if "unresolvable CDI devices" in said or "nvidia.com/gpu" in said:
        return "; install the NVIDIA container toolkit and run `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"
    if not is_podman(runtime) and PODMAN_INSTEAD.search(said):
        return "; this docker is podman: write `runtime: podman`"
    if "could not select device driver" in said:
        return "; install the NVIDIA container toolkit, or write `gpus: cdi` under `container`"
    return ""


class Containerized:
    """Any dialect, run in a container; everything but the launch is the dialect's own."""

    def __init__(self, inner: Generic, own_entry: int = 0) -> None:
        self.inner = inner
        self.own_entry = own_entry  # words at the front of its command that stand for the image's own entry point
        self.kind = inner.kind
        self.config = inner.config

    def launch(self, port: int, devices: Sequence[DeviceRef], generation: int = 0) -> Launch:
        """Generation 0 (not told) takes the port instead: no two running engines share one."""
        launch = self.inner.launch(port, devices)
        config, kind = replace(self.config, container=self._with_mounts()), self.kind
        return wrap(launch, config, devices, generation or port, kind=kind, own_entry=self.own_entry)

    def _with_mounts(self) -> ContainerConfig | None:
        """Model files that the command names by their place on this host are handed in."""
        container = self.config.container
        if container is None:
            return None
        words = tuple(dict.fromkeys(word for path in self._named() for word in mount_words(path)))
        pairs = [word for word in words if word not in ("--volume", "--mount")]
        options = tuple(word for pair in pairs for word in ("--mount" if pair.startswith("type=bind,") else "--volume", pair))
        return replace(container, args=(*options, *container.args))

    def _named(self) -> list[Path]:
        """Of its model files and folders those that its command or environment name and no volume holds."""
        container = self.config.container
        given = (*container.volumes, *volumes(container.args)) if container is not None else ()
        texts = [*self.config.argv, *(value for _, value in self.config.env)]
        named = {text.partition("=")[2] if text.startswith("-") and "=" in text else text for text in texts}
        paths = {Path(text) for text in named if text.startswith("/") and mounted(Path(text), given) is None}
        stems = {found["stem"] for path in paths if (found := PART.match(str(path)))}
        if (own := self.config.model_folder) and mounted(Path(own), given) is None and any(own in text for text in texts):
            # As a whole, whatever the engine: it holds the files of this model and nothing else, none of them a link that leads out of it.
            others = [path for path in self.inner.files() if path in paths and not path.is_relative_to(own)]
            return [Path(own), *sorted(set(others))]
        folder = self.inner.model_path()
        if folder is not None and folder in paths and folder.is_dir():
            return [folder]
        files = [path for path in self.inner.files() if path in paths or ((part := PART.match(str(path))) and part["stem"] in stems)]
        return sorted(set(files))

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
        container = self.config.container
        if container is not None and shutil.which(container.runtime) is None:
            other = next((each for each in RUNTIMES if each != container.runtime and shutil.which(each)), None)
            instead = f"write `runtime: {other}`, which is here" if other else "run the engine without `container`"
            return f"{container.runtime} was not found on PATH; install it, or {instead}"
        for word in container.args if container is not None else ():
            if word.partition("=")[0] in RESERVED:
                return f"`container.args` has {word.partition('=')[0]}, which is greenroom's own to set; take it out"
        return self.inner.missing()

    def is_ready_hint(self, line: str) -> bool:
        return self.inner.is_ready_hint(line)

    def phase_of(self, line: str) -> str:
        return self.inner.phase_of(line)

    def metrics_call(self) -> Call | None:
        return self.inner.metrics_call()

    def ending(self, exit_code: int | None, log_tail: Sequence[str]) -> Ending:
        container = self.config.container
        if exit_code != RUNTIME_FAILED or container is None:
            return self.inner.ending(exit_code, log_tail)
        said = telling(log_tail)
        why = f"{container.runtime} could not start its container (exit code 125): {said or 'it did not say why'}"
        return Ending(Cause.EXITED, why + advice(container.runtime, said))

    def files(self) -> tuple[Path, ...]:
        return self.inner.files()

    def contexts(self, devices: Sequence[DeviceRef]) -> tuple[tuple[int, int], ...]:
        return self.inner.contexts(devices)

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
