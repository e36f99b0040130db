"""From a configuration to what is to be deployed.  Pure: the same configuration and options give the same intent on any host."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from greenroom.config import secrets, write
from greenroom.config.model import Config, ContainerConfig, KeyConfig, ModelConfig
from greenroom.deploy import containerfile, docker_run, images
from greenroom.deploy.intent import TARGETS, Intent, Mount, Probe, Share, Workload
from greenroom.deploy.names import label, labels
from greenroom.deploy.places import CACHE_VARIABLES, Places
from greenroom.deploy.unfit import Unfit
from greenroom.deploy.vault import Vault, variable_name
from greenroom.engines import devices as pinning
from greenroom.engines.container import Containerized
from greenroom.engines.detect import describe, devices_count
from greenroom.engines.devices import LLAMA_DEVICE, PIN_VARIABLES
from greenroom.engines.discovery import IMAGE_PROGRAM, PROGRAM
from greenroom.engines.exposure import is_loopback
from greenroom.engines.generic import PORT_MACRO, Generic
from greenroom.engines.llama_server import DEVICE, FETCHED

MODES = ("greenroom", "engines")
CONFIG_FILE = "greenroom.yaml"
CONFIG_PLACE = f"/etc/greenroom/{CONFIG_FILE}"
STATE_PLACE = "/var/lib/greenroom"
CACHE_PLACE = "/cache"
TEI_CACHE_PLACE = "/data"  # its image names this one itself
OWN_PORT = 8080
OWN_START_S = 60.0
OWN_STOP_S = 35.0  # requests in flight have 30
SHM_MIB_PER_GPU = 2048  # workers of PyTorch servers talk through /dev/shm; 64 MiB, a container's default, is too little
API_KEY = "GREENROOM_API_KEY"
OWN_KEY = f"${{env.{API_KEY}}}"
PORTS_END = 65535
SET_CHARS_MAX = 30  # of a set's name: those of its workloads begin with it
MIG_PROFILE = re.compile(r"\d+g\.\d+gb(?:\+[a-z.]+)?")


class BuildError(Unfit):
    """This cannot be deployed like that, by whatever format."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the operator may say beside the configuration."""

    name: str = "greenroom"  # of the set
    namespace: str = "default"
    listen: str = ""  # HOST:PORT a single host publishes on; "" = 127.0.0.1:8080
    image: str = ""  # greenroom's own
    engine_images: Mapping[str, str] = field(default_factory=dict)  # engine or model id -> image
    gpus: tuple[str, ...] = ()  # UUIDs or indices; () = what the configuration says, else all
    mig: str = ""  # profile of a slice
    require_key: bool = False  # clients must show a key even if the configuration has none
    no_auth: bool = False  # publish on a public address without keys
    gpu_mib: Mapping[str, int] = field(default_factory=dict)  # model id -> measured need on each device
    bare: bool = False  # for a host without containers: commands and paths stay as they are
    command: str = ""  # that makes these files again; written in their heads
    extra: Mapping[str, str] = field(default_factory=dict)  # for one format alone; handed on in the intent's options


def build(config: Config, *, mode: str = "greenroom", target: str = "cpu", options: Options | None = None) -> Intent:
    """The whole set.  Raises BuildError for what no format could run."""
    options = options or Options()
    if mode not in MODES:
        raise BuildError(f"there is no mode {mode!r}; write greenroom or engines")
    if target not in TARGETS:
        raise BuildError(f"there is no target {target!r}; write one of {', '.join(TARGETS)}")
    if options.mig and not MIG_PROFILE.fullmatch(options.mig):
        raise BuildError(f"{options.mig!r} is not a MIG profile; write one such as 3g.40gb")
    if not config.models and (mode == "engines" or not config.peers):
        raise BuildError("there is no model to deploy; name a configuration with models, or references")
    return _Builder(config, target, options).engines() if mode == "engines" else _Builder(config, target, options).greenroom()


def guess_target(config: Config, found_vendor: str = "") -> str:
    """What the configuration speaks of (images, variables, UUIDs, host RAM alone), else what this host has, else cpu."""
    words = [word.lower() for model in config.models for word in (*(model.container.args if model.container else ()), *_image_words(model))]
    variables = {name for model in config.models for name, _ in model.env}
    if variables & set(pinning.AMD_VARIABLES) or any("rocm" in word or "/dev/kfd" in word for word in words):
        return "amd"
    if variables & {"ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"} or any("intel" in word or "xpu" in word for word in words):
        return "intel"
    named = any((device.uuid or "").startswith(("GPU-", "MIG-")) for device in config.devices)
    if named or variables & set(pinning.NVIDIA_VARIABLES) or any("cuda" in word or "nvidia" in word for word in words):
        return "nvidia"
    if all(model.devices == ("ram",) for model in config.models) or {device.id for device in config.devices} == {"ram"}:
        return "cpu"
    return found_vendor or "cpu"


def _image_words(model: ModelConfig) -> tuple[str, ...]:
    return (model.container.image,) if model.container is not None else ()


@dataclass(slots=True)
class _Builder:
    config: Config
    target: str
    options: Options
    vault: Vault = field(default_factory=Vault)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the set, as it can stand in file and object names."""
        return label(self.options.name, chars_max=SET_CHARS_MAX)

    # ------------------------------------------------------------------------------------------------ greenroom itself

    def greenroom(self) -> Intent:
        """One workload: greenroom with its configuration, engines as its processes."""
        config = self._keyed(self.config)
        self._keep_secrets(config)
        host, port = self._listen()
        self._check_public(host, config)
        places = Places()
        if self.options.bare:
            config = replace(config, models=tuple(self._at_home(model, places) for model in config.models))
        else:
            config = replace(config, models=tuple(self._inside(model, places) for model in config.models))
            peers = [replace(peer, tls_ca=places.place(os.path.abspath(peer.tls_ca))) if peer.tls_ca else peer for peer in config.peers]
            config = replace(config, peers=tuple(peers))
            if not is_loopback(host) and host not in ("0.0.0.0", "::") and host not in config.allowed_hosts and not config.keys:
                config = replace(config, allowed_hosts=(*config.allowed_hosts, host))
        text = write.text_of(config, self.vault.keys, comments=self._head("The models, and how they share the devices."))
        workload = self._own_workload(config, text, places, host, port)
        return self._intent("greenroom", (workload,), config, text, host)

    def _own_workload(self, config: Config, text: str, places: Places, host: str, port: int) -> Workload:
        bare = self.options.bare
        inside_port = port if bare else OWN_PORT
        inside_host = host if bare else "::" if ":" in host else "0.0.0.0"
        shown = f"[{inside_host}]" if ":" in inside_host else inside_host
        no_auth = not config.keys and (not bare or not is_loopback(host))
        argv = ["greenroom", "serve", "--config", CONFIG_PLACE, "--listen", f"{shown}:{inside_port}", "--state-dir", STATE_PLACE]
        if no_auth:
            argv.append("--no-auth")
        kept = [
            Mount("config", CONFIG_FILE, CONFIG_PLACE),
            Mount("volume", f"{self.name}-state", STATE_PLACE, read_only=False),
            Mount("volume", f"{self.name}-cache", CACHE_PLACE, read_only=False),
        ]
        probe = Probe("/health", inside_port, OWN_START_S)
        return Workload(
            name=self.name,
            model="",
            image=self.options.image or images.own_image(self.target),
            argv=tuple(argv),
            port=inside_port,
            env=() if bare else (("HOME", CACHE_PLACE),),
            secret_env=tuple((name, name) for name in sorted(self.vault.keys.values()) if f"${{env.{name}}}" in text),
            mounts=_where_they_lie(places) if bare else (*kept, *places.mounts()),
            share=self._whole_share(config),
            memory_mib=0,
            shm_mib=0 if bare else self._shm(config.models),
            live=probe,
            ready=probe,
            stop_s=OWN_STOP_S + max((model.stop_s_max for model in config.models), default=0.0),
            host_port=port,
        )

    def _at_home(self, model: ModelConfig, places: Places) -> ModelConfig:
        """The entry on its own host: only what was relative to where greenroom stood is made whole."""
        engine = _inner(model)
        if model.container is None and not engine.command.client:
            places.argv(model.argv, lambda word: _on_host(engine, word))
            places.environment(model.env)
        is_relative = any(word.startswith(("./", "../")) or (word.endswith(".gguf") and word[0] not in "/~-$") for word in model.argv)
        return replace(model, cwd=os.path.abspath(model.cwd or ".")) if is_relative or model.cwd is not None else model

    def _inside(self, model: ModelConfig, places: Places) -> ModelConfig:
        """The entry of a model as greenroom reads it inside its container: paths as there, no container of its own."""
        engine = _inner(model)
        self._refuse_client(model, engine)
        argv = model.argv
        if engine.command.shell:
            argv = self._script(model, places)
        else:
            argv = places.argv(self._program_inside(argv, engine), lambda word: _on_host(engine, word))
        env = model.env
        places.environment(env)
        if model.container is not None:
            self.notes.append(
                f"{model.id} had the image {model.container.image}: greenroom starts its command in its own image now, which must hold it."
            )
            env = (*env, *_container_env(model.container, env))
            self._container_volumes(model.container, places)
        if model.cwd is not None:
            self.notes.append(
                f"{model.id}: its working directory {model.cwd!r} is not there inside; relative paths of its command were resolved."
            )
        stop = places.argv(model.stop_argv, lambda word: _on_host(engine, word)) if model.stop_argv else ()
        return replace(model, argv=argv, env=env, cwd=None, container=None, stop_argv=stop)

    def _program_inside(self, argv: tuple[str, ...], engine: Generic) -> tuple[str, ...]:
        """A llama-server of the host, or one inside an image, is the image's own one by name."""
        position = len(argv) - len(engine.command.argv)
        if engine.kind == "generic" or not 0 <= position < len(argv) or engine.command.python:
            return argv
        program = os.path.basename(argv[position])
        return (
            *argv[:position],
            PROGRAM if engine.kind == "llama_server" and program.startswith(PROGRAM) else program,
            *argv[position + 1 :],
        )

    def _container_volumes(self, container: ContainerConfig, places: Places) -> None:
        for volume in container.volumes:
            source, _, rest = volume.partition(":")
            _, _, options = (rest or source).partition(":")
            if source.startswith(("/", "~", ".")) and "rw" in options.split(","):
                places.same[os.path.abspath(os.path.expanduser(source))] = False

    # -------------------------------------------------------------------------------------------- one workload a model

    def engines(self) -> Intent:
        """One workload for each model, without greenroom in front."""
        names = labels([model.id for model in self.config.models], chars_max=63 - len(self.name) - 1)
        self._keep_secrets(self.config)
        host, _ = self._listen()
        self._check_open(host)
        ports = self._ports()
        built = [self._engine(model, f"{self.name}-{names[model.id]}", *ports[model.id]) for model in self.config.models]
        text = write.text_of(self.config, self.vault.keys, comments=self._head("The configuration these files were made from."))
        return self._intent("engines", tuple(built), self.config, text, host)

    def _ports(self) -> dict[str, tuple[int, int]]:
        """Model -> its port inside and the one a host publishes.  Ports that commands name come first."""
        fixed = {model.id: _inner(model).launch(1, ()).port for model in self.config.models if PORT_MACRO not in model.proxy}
        taken: set[int] = set()
        out: dict[str, tuple[int, int]] = {}
        free = (port for port in range(self.config.start_port, PORTS_END + 1) if port not in taken and port not in fixed.values())
        for model in self.config.models:
            inside = fixed.get(model.id, 0)
            outside = inside if inside and inside not in taken else next(free, 0)
            if not outside:
                raise BuildError(
                    f"there are not enough ports from startPort {self.config.start_port} up for {len(self.config.models)} models"
                )
            taken.add(outside)
            out[model.id] = (inside or outside, outside)
        return out

    def _engine(self, model: ModelConfig, name: str, port: int, host_port: int) -> Workload:
        model = replace(model, sleep="off", sleep_calls=None)  # nobody is there to put it to sleep; its control routes stay shut
        engine = _inner(model)
        if engine.command.client:
            return self._client(model, engine, name, host_port)
        image = self._image(model, engine)
        model, fetched = self._fetched(model, engine)
        places = Places(inside=tuple(mount.target for mount in fetched))
        engine = _inner(replace(model, container=ContainerConfig("podman", image, *_kept(model.container))))
        launch = engine.launch(port, ())
        share = self._share(model, engine)
        argv = self._engine_argv(model, engine, launch.argv, image, places, share)
        env = self._engine_env(model, engine, launch.env, share)
        places.environment(env)
        argv, secret_argv = self._without_secrets(model, engine, argv)
        secret_env = {**secret_argv, **{key: self.vault.keys[value] for key, value in env if value in self.vault.keys and _is_secret(key)}}
        mounts = (
            *fetched,
            *(_volume_mounts(model.container.volumes) if model.container else ()),
            *places.mounts(),
            *self._caches(engine, env),
        )
        env = tuple((key, value) for key, value in env if key not in secret_env)
        ready = engine.readiness()
        probe = Probe(f"{ready.base_path}{ready.path}" if ready.path is not None else "", port, model.start_s_max)
        return Workload(
            name=name,
            model=model.id,
            image=image,
            argv=argv,
            port=port,
            env=env if "HOME" in dict(env) or all(mount.target != CACHE_PLACE for mount in mounts) else (*env, ("HOME", CACHE_PLACE)),
            secret_env=tuple(sorted(secret_env.items())),
            mounts=mounts,
            share=share,
            memory_mib=_host_memory(model, share),
            shm_mib=self._shm((model,)),
            live=probe,
            ready=probe,
            stop_s=model.stop_s_max,
            aliases=model.aliases,
            source=model,
            gpu_mib=self.options.gpu_mib.get(model.id, model.memory_mib if share.count else None),
            host_port=host_port,
            kind=engine.kind,
            tcp_only=ready.path is None,
        )

    def _client(self, model: ModelConfig, engine: Generic, name: str, host_port: int) -> Workload:
        """One whose command is `docker run …`: the same image with the same arguments, started by its own entry point."""
        run = docker_run.parse(model.argv)
        inside = 0 if run is None else host_port if run.host_network else run.port_inside(PORT_MACRO) or run.port_inside(str(host_port))
        if run is None or not inside:
            raise BuildError(
                f"{model.id}: its `cmd` calls a container runtime in a way that cannot be taken apart (no -p ${{PORT}}:PORT is seen); "
                "write the image under `container` and the engine's own command in `cmd`"
            )
        if run.left:
            self.notes.append(f"{model.id}: of its `{run.runtime} run` these are not carried over: {', '.join(dict.fromkeys(run.left))}.")
        share = self._share(model, engine)
        if share.count and not self.options.gpus:
            named = run.gpus or share.devices
            share = replace(share, devices=named, count=max(len(run.gpus), run.gpu_count) or share.count)
        given = dict(model.env)
        env = {name: given.get(name, "") if value is None else value for name, value in run.env.items()}
        env = {name: value.replace(PORT_MACRO, str(host_port)) for name, value in env.items()}
        args = tuple(word.replace(PORT_MACRO, str(host_port)) for word in run.args)
        args = (*args, *self._served_names(model, engine, args))
        argv, secret_argv = self._without_secrets(model, engine, (*((run.entrypoint,) if run.entrypoint else ()), *args))
        if argv[:1] == ("/bin/sh",):
            raise BuildError(f"{model.id}: its arguments hold a secret that its engine takes from no variable; write it under `env`")
        # A variable that is only named comes from whoever starts it: its value is not this file's business.
        told = {name: self.vault.keys[value] for name, value in env.items() if value in self.vault.keys and _is_secret(name)}
        absent = {name: name for name, value in run.env.items() if value is None and name not in given}
        hidden = {**secret_argv, **told, **absent}
        ready = engine.readiness()
        probe = Probe(f"{ready.base_path}{ready.path}" if ready.path is not None else "", inside, model.start_s_max)
        return Workload(
            name=name,
            model=model.id,
            image=self.options.engine_images.get(model.id) or run.image,
            argv=argv,
            port=inside,
            env=tuple((name, value) for name, value in env.items() if name not in hidden),
            secret_env=tuple(sorted(hidden.items())),
            mounts=_volume_mounts(run.volumes),
            share=share,
            memory_mib=_host_memory(model, share),
            shm_mib=run.shm_mib or self._shm((model,)),
            live=probe,
            ready=probe,
            stop_s=model.stop_s_max,
            args_entrypoint=bool(run.entrypoint),
            aliases=model.aliases,
            source=model,
            gpu_mib=self.options.gpu_mib.get(model.id, model.memory_mib if share.count else None),
            host_port=host_port,
            kind=engine.kind,
            tcp_only=ready.path is None,
        )

    def _image(self, model: ModelConfig, engine: Generic) -> str:
        named = self.options.engine_images.get(model.id)
        if named is None and model.container is not None:
            named = model.container.image
        image = named or self.options.engine_images.get(engine.kind) or images.engine_image(engine.kind, self._target_of(model))
        if not image:
            known = f"no usual image for {self._target_of(model)}" if engine.kind in images.IMAGES else "no usual image"
            raise BuildError(
                f"{model.id}: its engine ({engine.kind}) has {known}; name one with --engine-image {shlex.quote(model.id)}=IMAGE"
            )
        return image

    def _fetched(self, model: ModelConfig, engine: Generic) -> tuple[ModelConfig, tuple[Mount, ...]]:
        """A model that comes from a registry: where the engine finds it without greenroom's store."""
        if not model.reference:
            return model, ()
        scheme, _, rest = model.reference.partition("://")
        if scheme in ("oci", "docker"):
            place = f"/models/{label(model.id)}"
            words = {"${MODEL_PATH}": f"{place}/models/model.file", "${MODEL_DIR}": f"{place}/models"}
            self.notes.append(f"{model.id}: {rest} must be an OCI image (`greenroom push --layout image`); its files are mounted from it.")
            return _with_words(model, words), (Mount("image", rest, place),)
        if scheme == "file":
            path = rest if rest.startswith("/") else f"/{rest}"
            return _with_words(model, {"${MODEL_PATH}": path, "${MODEL_DIR}": os.path.dirname(path)}), ()
        if scheme == "hf" and engine.kind in ("vllm", "sglang", "tei"):
            return _with_words(model, {"${MODEL_PATH}": rest.partition(":")[0], "${MODEL_DIR}": rest.partition(":")[0]}), ()
        native = {"hf": "--hf-repo", "https": "--model-url", "http": "--model-url"}.get(scheme)
        if (
            native
            and engine.kind == "llama_server"
            and (swapped := _swapped(model.argv, native, model.reference if scheme != "hf" else rest))
        ):
            return replace(model, argv=swapped, reference=""), ()
        raise BuildError(
            f"{model.id}: {engine.kind} cannot fetch {model.reference} by itself; deploy greenroom in front (--mode greenroom), "
            "or push the model to a registry as an OCI image"
        )

    def _engine_argv(
        self, model: ModelConfig, engine: Generic, argv: tuple[str, ...], image: str, places: Places, share: Share
    ) -> tuple[str, ...]:
        if engine.command.shell:
            return _filled(self._script(model, places), argv)
        # What wraps the engine on the host (env, nice, uv run) is not there inside; variables it set are in the environment.
        inner = argv[len(model.argv) - len(engine.command.argv) :]
        if engine.command.python:
            inner = ("python3", *(("-m",) if "-m" in model.argv[: len(model.argv) - len(engine.command.argv)] else ()), *inner)
        elif engine.kind == "llama_server":
            inner = (IMAGE_PROGRAM if "llama.cpp" in image else PROGRAM, *inner[1:])
        elif engine.kind != "generic":
            inner = (os.path.basename(inner[0]), *inner[1:])
        inner = _open(inner, engine)
        inner = _renumbered(inner, share)
        inner = (*inner, *self._served_names(model, engine, inner))
        if model.container is not None:
            return inner  # its paths are the container's already
        # The program of a known engine is the image's, by whatever path.
        bare = inner if engine.kind == "generic" else ("", *inner[1:])
        moved = places.argv(bare, lambda word: _on_host(engine, word, inside=False))
        return moved if engine.kind == "generic" else (inner[0], *moved[1:])

    def _served_names(self, model: ModelConfig, engine: Generic, argv: tuple[str, ...]) -> tuple[str, ...]:
        """What clients send must be what the engine answers to."""
        wanted = (model.id, *model.aliases)
        if engine.kind == "llama_server" and engine.flags.value("-a", "--alias", env="LLAMA_ARG_ALIAS") is None:
            return ("--alias", model.id) if "," not in model.id else ()
        if engine.kind in ("vllm", "sglang") and not any(
            word.partition("=")[0].replace("_", "-") == "--served-model-name" for word in argv
        ):
            return ("--served-model-name", *wanted) if engine.kind == "vllm" else ("--served-model-name", model.id)
        return ()

    def _engine_env(self, model: ModelConfig, engine: Generic, launched: Mapping[str, str], share: Share) -> tuple[tuple[str, str], ...]:
        by_hand = {name for name in engine.env if name in PIN_VARIABLES} if share.devices else set()
        wrapped = dict(engine.command.env)
        own = {name: value for name, value in engine.own_env(()).items() if name != "LD_LIBRARY_PATH"}  # of this host's package
        operators = {name: launched.get(name, value) for name, value in model.env}
        extra = dict(_container_env(model.container, model.env)) if model.container else {}
        merged = {**own, **wrapped, **operators, **extra}
        if share.vendor == "amd" and share.devices:
            merged["ROCR_VISIBLE_DEVICES"] = ",".join(share.devices)
        return tuple((name, value) for name, value in merged.items() if name not in by_hand or share.vendor == "amd")

    def _without_secrets(self, model: ModelConfig, engine: Generic, argv: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
        """A command that shows no secret: keys by the variable the engine knows, others through a shell that fills them in."""
        known = set(_secrets(engine))
        others = [value for word in argv for value in (word, word.partition("=")[2]) if value in known]
        found = [value for value in dict.fromkeys((*secrets.in_arguments(argv), *others)) if value]
        if not found:
            return argv, {}
        key = engine.flags.value(*engine.key_flags)
        if engine.key_variables and key and set(found) <= {key}:
            shorter = _without_flag(argv, engine.key_flags)
            if key not in shorter:
                return shorter, {engine.key_variables[0]: self.vault.key(key, f"{variable_name(model.id)}_API_KEY")}
        variables = {value: self.vault.key(value, f"{variable_name(model.id)}_SECRET") for value in found}
        if engine.command.shell:
            raise BuildError(f"{model.id}: the script in its `cmd` holds a secret; put it into a variable under `env` and use that one")
        script = " ".join(_shell_word(word, variables) for word in argv)
        return ("/bin/sh", "-c", f"exec {script}"), {name: name for name in variables.values()}

    def _caches(self, engine: Generic, env: Sequence[tuple[str, str]]) -> tuple[Mount, ...]:
        """Where it keeps what it downloads and compiles, unless the operator has named a place."""
        if engine.config.container is not None and engine.config.container.volumes:
            return ()
        if any(name in CACHE_VARIABLES for name, _ in env):
            return ()
        volume = f"{self.name}-cache"
        if engine.kind == "tei":
            return (Mount("volume", volume, TEI_CACHE_PLACE, read_only=False),)
        if engine.kind in ("vllm", "sglang") or any(engine.flags.has(flag) for flag in FETCHED):
            return (Mount("volume", volume, CACHE_PLACE, read_only=False),)
        return ()

    # --------------------------------------------------------------------------------------------------------- devices

    def _target_of(self, model: ModelConfig) -> str:
        return "cpu" if model.devices == ("ram",) else self.target

    def _share(self, model: ModelConfig, engine: Generic) -> Share:
        """What one model asks for: its devices where they are named, else as many as its flags want."""
        vendor = self._target_of(model)
        if vendor == "cpu":
            return Share()
        count = devices_count(model)
        if self.options.mig:
            return Share(vendor, count, self.options.gpus, self.options.mig)
        if self.options.gpus:
            return Share(vendor, len(self.options.gpus), self.options.gpus)
        by_hand = engine.pinned_devices()
        named = by_hand or self._named([name for name in model.devices if name != "ram"])
        # Of more candidates than it takes, the first are as good as any: there is no scheduler to choose.
        return Share(vendor, count, named[:count] if len(named) >= count else ())

    def _whole_share(self, config: Config) -> Share:
        """What greenroom itself is given: every device that is declared, else all."""
        if self.target == "cpu" or not config.models or all(model.devices == ("ram",) for model in config.models):
            return Share()
        if self.options.gpus or self.options.mig:
            return Share(self.target, max(1, len(self.options.gpus)), self.options.gpus, self.options.mig)
        declared = [device.id for device in config.devices if device.id != "ram"]
        named = tuple(device.uuid for device in config.devices if device.id != "ram" and device.uuid)
        by_index = any(_inner(model).pinned_devices() for model in config.models)
        if declared and len(named) == len(declared) and not by_index:
            return Share(self.target, len(named), named)
        least = max(len(declared), *(devices_count(model) for model in config.models), 1)
        return Share(self.target, least, every=True)

    def _named(self, names: Sequence[str]) -> tuple[str, ...]:
        """UUIDs, or indices of gpu0, gpu1, …; () when one has neither."""
        uuids = {device.id: device.uuid or "" for device in self.config.devices}
        found = [uuids.get(name) or (name.removeprefix("gpu") if re.fullmatch(r"gpu\d+", name) else "") for name in names]
        return tuple(found) if all(found) else ()

    def _shm(self, models: Sequence[ModelConfig]) -> int:
        gpus = [devices_count(model) for model in models if _inner(model).kind in ("vllm", "sglang")]
        return SHM_MIB_PER_GPU * max(gpus) if gpus else 0

    # --------------------------------------------------------------------------------------------------------- secrets

    def _keyed(self, config: Config) -> Config:
        """With a key to ask for, where the operator wants one and the configuration has none.  Its value is its own macro."""
        if config.keys or not self.options.require_key:
            return config
        self.vault.keys[OWN_KEY] = API_KEY
        return replace(config, keys=(KeyConfig(OWN_KEY, "key-1"),))

    def _keep_secrets(self, config: Config) -> None:
        for peer in config.peers:
            if peer.key:
                self.vault.key(peer.key, f"{variable_name(peer.id)}_PEER_KEY")
        for key in config.keys:
            wanted = API_KEY if len(config.keys) == 1 else f"{API_KEY}_{variable_name(key.name)}"
            self.vault.key(key.key, wanted)
        for model in config.models:
            prefix = variable_name(model.id)
            for name, value in _inner(model).env.items():
                if _is_secret(name) and value and PORT_MACRO not in value:
                    self.vault.key(value, name, f"{prefix}_{name}")
            for value in _secrets(_inner(model)):
                self.vault.key(value, f"{prefix}_SECRET")
        for value, variable in self.vault.keys.items():
            if any(char in value for char in "\n\r\0"):
                raise BuildError(
                    f"the secret {variable} has several lines, which no file of variables carries; keep it in a file and name that file"
                )

    # ------------------------------------------------------------------------------------------------------------ rest

    def _listen(self) -> tuple[str, int]:
        host, colon, port = (self.options.listen or f"127.0.0.1:{OWN_PORT}").rpartition(":")
        if not colon or not port.isdigit() or not 0 < int(port) <= PORTS_END:
            raise BuildError(
                f"--listen {self.options.listen!r} is not an address; write HOST:PORT, for example 127.0.0.1:8080 or [::1]:8080"
            )
        return host.strip("[]") or "0.0.0.0", int(port)

    def _check_public(self, host: str, config: Config) -> None:
        if not is_loopback(host) and not config.keys and not self.options.no_auth:
            raise BuildError(
                f"{host} is reachable from other machines and there are no API keys; set `apiKeys`, publish on 127.0.0.1, or give --no-auth"
            )

    def _check_open(self, host: str) -> None:
        """Engines know nothing of greenroom's keys."""
        if is_loopback(host) or self.options.no_auth:
            return
        without = [model.id for model in self.config.models if not _has_key(_inner(model))]
        if without:
            raise BuildError(
                f"{host} is reachable from other machines and engines do not ask for `apiKeys`: {without[0]} has no key of its own "
                "(--api-key); publish on 127.0.0.1, put greenroom in front (--mode greenroom), or give --no-auth"
            )

    def _refuse_client(self, model: ModelConfig, engine: Generic) -> None:
        if engine.command.client and not self.options.bare:
            raise BuildError(
                f"{model.id}: its `cmd` calls a container runtime itself, which does not work inside a container; "
                "write the image under `container` and the engine's own command in `cmd`, or take --mode engines, or generate systemd"
            )

    def _script(self, model: ModelConfig, places: Places) -> tuple[str, ...]:
        """`sh -c SCRIPT`: whole paths in it are renamed as text."""
        paths = [word for text in model.argv for word in re.findall(r"(?<![\w/.:=])/[^\s'\";|&<>()$]+", text) if word.endswith(".gguf")]
        return tuple(places.script(word, paths) for word in model.argv)

    def _head(self, first: str) -> tuple[str, ...]:
        return (first, *((f"Made by: {self.options.command}",) if self.options.command else ()))

    def _intent(self, mode: str, workloads: tuple[Workload, ...], config: Config, text: str, host: str) -> Intent:
        wants_build = mode == "greenroom" and not self.options.image and not self.options.bare
        kinds = tuple(dict.fromkeys(_inner(model).kind for model in config.models))
        return Intent(
            name=self.name,
            mode=mode,
            workloads=workloads,
            config=config,
            config_text=text,
            target=self.target,
            namespace=self.options.namespace,
            listen_host=host,
            builds=containerfile.text_of(kinds, self.target, self.options.engine_images) if wants_build else "",
            notes=tuple(self.notes),
            options={**self.options.extra, **({"command": self.options.command} if self.options.command else {})},
        )


# ------------------------------------------------------------------------------------------------------------- commands


def _inner(model: ModelConfig) -> Generic:
    """The dialect itself, which knows what the protocol does not tell."""
    engine = describe(model)
    found = engine.inner if isinstance(engine, Containerized) else engine
    assert isinstance(found, Generic)
    return found


def _where_they_lie(places: Places) -> tuple[Mount, ...]:
    """Mounts that say only what is read and written, each at its own path."""
    read = dict.fromkeys(places.targets, True)
    return tuple(Mount("bind", path, path, read_only) for path, read_only in sorted({**read, **places.same}.items()))


def _kept(container: ContainerConfig | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return ((), ()) if container is None else (container.args, container.volumes)


def _on_host(engine: Generic, word: str, *, inside: bool = True) -> str | None:
    """Absolute host path of a word; None when it is the image's own.  `inside`: the entry may have a container of its own."""
    if inside and engine.config.container is not None:
        found = engine.host_path(word)
        return None if found is None else os.path.abspath(found)
    path = os.path.expanduser(word)
    return os.path.normpath(os.path.join(os.path.abspath(os.path.expanduser(engine.config.cwd or ".")), path))


def _has_key(engine: Generic) -> bool:
    in_file = engine.flags.value("--api-key-file", env="LLAMA_ARG_API_KEY_FILE")
    return bool(engine.flags.value(*engine.key_flags) or in_file or any(engine.env.get(name) for name in engine.key_variables))


def _with_words(model: ModelConfig, words: Mapping[str, str]) -> ModelConfig:
    def fill(text: str) -> str:
        for macro, value in words.items():
            text = text.replace(macro, value)
        return text

    return replace(model, argv=tuple(map(fill, model.argv)), env=tuple((name, fill(value)) for name, value in model.env), reference="")


def _swapped(argv: tuple[str, ...], flag: str, value: str) -> tuple[str, ...]:
    """`--model ${MODEL_PATH}` by the engine's own way to fetch; () when the command uses the path elsewhere too."""
    for position, word in enumerate(argv[:-1]):
        if word in ("-m", "--model") and argv[position + 1] == "${MODEL_PATH}":
            swapped = (*argv[:position], flag, value, *argv[position + 2 :])
            return () if any("${MODEL_" in word for word in swapped) else swapped
    return ()


def _filled(script: tuple[str, ...], launched: tuple[str, ...]) -> tuple[str, ...]:
    """The renamed words of a script with the port that the launch has filled in."""
    port = next((match[0] for word in launched for match in [re.search(r"(?<=--port[ =])\d+", word)] if match), "")
    return tuple(word.replace(PORT_MACRO, port) for word in script)


def _open(argv: tuple[str, ...], engine: Generic) -> tuple[str, ...]:
    """Loopback inside a container is reachable by nobody: the engine listens on all its addresses there."""
    out = list(argv)
    for position, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name not in engine.host_flags:
            continue
        value = value if equals else argv[position + 1] if position + 1 < len(argv) else ""
        if is_loopback(value):
            everywhere = "::" if ":" in value else "0.0.0.0"
            out[position if equals else position + 1] = f"{name}={everywhere}" if equals else everywhere
    return tuple(out)


def _renumbered(argv: tuple[str, ...], share: Share) -> tuple[str, ...]:
    """llama-server's `--device CUDA3,CUDA5`: a container that is given two cards counts them from 0."""
    if not share.devices:
        return argv
    out = list(argv)
    for position, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name not in DEVICE:
            continue
        value = value if equals else argv[position + 1] if position + 1 < len(argv) else ""
        names = value.split(",")
        if all(LLAMA_DEVICE.match(one) for one in names):
            counted = ",".join(re.sub(r"\d+$", str(number), one) for number, one in enumerate(names))
            out[position if equals else position + 1] = f"{name}={counted}" if equals else counted
    return tuple(out)


def _without_flag(argv: tuple[str, ...], flags: Collection[str]) -> tuple[str, ...]:
    out: list[str] = []
    skip = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in flags:
            skip = not equals
        else:
            out.append(word)
    return tuple(out)


def _shell_word(word: str, variables: Mapping[str, str]) -> str:
    """Quoted for a shell, with secrets as variables."""
    longest_first = sorted(variables, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", word)
    return "".join(f'"${{{variables[piece]}}}"' if piece in variables else shlex.quote(piece) for piece in pieces if piece) or "''"


def _secrets(engine: Generic) -> tuple[str, ...]:
    """Secrets of its entry; not the key in a file, which stays on the host."""
    in_file = engine.engine_key() if engine.flags.value("--api-key-file", env="LLAMA_ARG_API_KEY_FILE") else ""
    written = secrets.in_arguments((*engine.config.argv, *engine.config.stop_argv))
    return tuple(value for value in dict.fromkeys((*written, *engine.secrets())) if value and (value != in_file or value in written))


def _is_secret(name: str) -> bool:
    return secrets.NAME.search(name) is not None


def _host_memory(model: ModelConfig, share: Share) -> int:
    """Host RAM where it was declared; on a CPU that is where the model lies too."""
    beside = model.host_memory_mib or 0
    return beside + (model.memory_mib or 0) if share.vendor == "cpu" else beside


def _container_env(container: ContainerConfig, env: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """`-e NAME=VALUE` among the arguments of the container."""
    known = {name for name, _ in env}
    found = []
    for option, word in zip(("", *container.args), container.args, strict=False):
        if option in ("-e", "--env") or word.startswith("--env="):
            name, equals, value = word.removeprefix("--env=").partition("=")
            if equals and name not in known:
                found.append((name, value))
    return tuple(found)


def _volume_mounts(volumes: Sequence[str]) -> tuple[Mount, ...]:
    """Volumes as the operator wrote them."""
    out = []
    for volume in volumes:
        source, _, rest = volume.partition(":")
        target, _, options = (rest or source).partition(":")
        is_path = source.startswith(("/", "~", "."))
        where = os.path.abspath(os.path.expanduser(source)) if is_path else source
        out.append(Mount("bind" if is_path else "volume", where, target, "rw" not in options.split(",") and is_path))
    return tuple(out)
