"""What both ways to deploy share: names, addresses, secrets, devices."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from greenroom.config.model import Config, KeyConfig, ModelConfig
from greenroom.config.secrets import NAME, in_variable
from greenroom.deploy import containerfile, docker_run, first_start, scripts
from greenroom.deploy.commands import container_env, dialect, secrets_of, written_secrets
from greenroom.deploy.fetching import reference_of
from greenroom.deploy.intent import Intent, Mount, Share, Workload
from greenroom.deploy.names import label
from greenroom.deploy.places import Places, unmounted
from greenroom.deploy.pod_devices import least_cards, refuse_slices
from greenroom.deploy.unfit import BuildError
from greenroom.deploy.vault import Vault, variable_name
from greenroom.engines.detect import devices_count
from greenroom.engines.exposure import is_loopback
from greenroom.engines.generic import PORT_MACRO, Generic, set_texts
from greenroom.store.facts import Stored

OWN_PORT = 8080
SHM_MIB_PER_GPU = 2048  # workers of PyTorch servers talk through /dev/shm; 64 MiB, a container's default, is too little
API_KEY = "GREENROOM_API_KEY"
OWN_KEY = f"${{env.{API_KEY}}}"
PORTS_END = 65535
SET_CHARS_MAX = 30  # of a set's name: those of its workloads begin with it


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
    stored: Mapping[str, Stored] = field(default_factory=dict)  # model id -> what this host's store has of its reference
    bare: bool = False  # for a host without containers: commands and paths stay as they are
    in_cluster: bool = False  # clients call it by a Service's names, a device plugin chooses the cards
    sliced: bool = False  # what each pod asks for is planned afterwards
    command: str = ""  # that makes these files again; written in their heads
    extra: Mapping[str, str] = field(default_factory=dict)  # for one format alone; handed on in the intent's options


@dataclass(slots=True)
class Basis:
    """One configuration on its way; the two ways are made of it."""

    config: Config
    target: str
    options: Options
    vault: Vault = field(default_factory=Vault)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the set, as it can stand in file and object names."""
        return label(self.options.name, chars_max=SET_CHARS_MAX)

    def target_of(self, model: ModelConfig) -> str:
        return "cpu" if model.devices == ("ram",) else self.target

    def share(self, model: ModelConfig, engine: Generic) -> Share:
        """What one model asks for: its devices where they are named, else as many as its flags want."""
        vendor = self.target_of(model)
        if vendor == "cpu":
            return Share()
        count = devices_count(model)
        if self.options.gpus:
            return Share(vendor, count, self._dealt(model, count), self.options.mig)
        if self.options.mig:
            return Share(vendor, count, mig=self.options.mig)
        by_hand = engine.pinned_devices()
        named = by_hand or self._named([name for name in model.devices if name != "ram"])
        if self.options.in_cluster and not self.options.sliced:
            refuse_slices(((f"the device of {model.id}", name) for name in named), "")
        # Of more candidates than it takes, the first are as good as any: there is no scheduler to choose.
        return Share(vendor, count, named[:count] if len(named) >= count else ())

    def _dealt(self, model: ModelConfig, count: int) -> tuple[str, ...]:
        """Its part of the devices that the operator named: they go round among the models, in their order."""
        given = self.options.gpus
        if count > len(given):
            raise BuildError(f"{model.id} wants {count} devices and --gpu names {len(given)}; name more, or lower its tensor parallel size")
        before = sum(devices_count(other) for other in self._on_devices(until=model))
        return tuple(given[(before + index) % len(given)] for index in range(count))

    def _on_devices(self, until: ModelConfig) -> list[ModelConfig]:
        ids = [model.id for model in self.config.models]
        return [model for model in self.config.models[: ids.index(until.id)] if self.target_of(model) != "cpu"]

    def whole_share(self, config: Config, slices: int = 0) -> Share:
        """What greenroom itself is given: every device that is declared (or a slice for each of `slices`), else all."""
        if self.target == "cpu" or not config.models or all(model.devices == ("ram",) for model in config.models):
            return Share()
        if self.options.gpus or self.options.mig:
            return Share(self.target, max(1, slices, len(self.options.gpus)), self.options.gpus, self.options.mig)
        declared = [device.id for device in config.devices if device.id != "ram"]
        named = tuple(device.uuid for device in config.devices if device.id != "ram" and device.uuid)
        by_index = any(dialect(model).pinned_devices() for model in config.models)
        if declared and len(named) == len(declared) and not by_index:
            return Share(self.target, len(named), named)
        least = max(len(declared), *(devices_count(model) for model in config.models), least_cards(config), 1)
        return Share(self.target, least, every=True)

    def _named(self, names: Sequence[str]) -> tuple[str, ...]:
        """UUIDs, or indices of gpu0, gpu1, …; () when one has neither."""
        uuids = {device.id: device.uuid or "" for device in self.config.devices}
        found = [uuids.get(name) or (name.removeprefix("gpu") if re.fullmatch(r"gpu\d+", name) else "") for name in names]
        return tuple(found) if all(found) else ()

    def shm(self, models: Sequence[ModelConfig]) -> int:
        gpus = [devices_count(model) for model in models if dialect(model).kind in ("vllm", "sglang")]
        return SHM_MIB_PER_GPU * max(gpus) if gpus else 0

    def keyed(self, config: Config) -> Config:
        """With a key to ask for, where the operator wants one and the configuration has none.  Its value is its own macro."""
        if config.keys or not self.options.require_key:
            return config
        self.vault.keys[OWN_KEY] = API_KEY
        return replace(config, keys=(KeyConfig(OWN_KEY, "key-1"),))

    def keep_secrets(self, config: Config) -> None:
        self.vault.reserved = frozenset(self.offered(config))
        for peer in config.peers:
            if peer.key:
                self.vault.key(peer.key, f"{variable_name(peer.id)}_PEER_KEY")
            for name, value in set_texts(peer.filters):
                if in_variable(name, value):
                    self.vault.key(value, f"{variable_name(peer.id)}_PEER_SECRET")
        for key in config.keys:
            wanted = API_KEY if len(config.keys) == 1 else f"{API_KEY}_{variable_name(key.name)}"
            self.vault.key(key.key, wanted)
        for model in config.models:
            self._keep_secrets_of(model)
        for value, variable in self.vault.keys.items():
            if any(char in value for char in "\n\r\0"):
                raise BuildError(
                    f"the secret {variable} has several lines, which no file of variables carries; keep it in a file and name that file"
                )

    def offered(self, config: Config) -> tuple[str, ...]:
        """Variables that are handed to all who may need them, where somebody sets them."""
        asks = any((found := reference_of(model)) is not None and found.scheme == "hf" for model in config.models)
        named = {name for model in config.models for name in first_start.offered(dialect(model))}
        return tuple(sorted(named | ({first_start.TOKEN} if asks else set())))

    def _keep_secrets_of(self, model: ModelConfig) -> None:
        engine, prefix = dialect(model), variable_name(model.id)
        env = {**engine.env, **(dict(container_env(model.container, model.env)) if model.container is not None else {})}
        if engine.command.client and (run := docker_run.parse(model.argv)) is not None:
            env |= {name: value for name, value in run.env.items() if value is not None}
        for name, value in env.items():
            if in_variable(name, value) and value != PORT_MACRO:
                _refuse_port(model, value, f"its variable {name}")
                # A proxy's address is for the engine that has it: under its own name it would steer greenroom too.
                self.vault.key(value, *([name] if NAME.search(name) else []), f"{prefix}_{name}")
        for value in written_secrets(model):
            if not any(value in word for word in (*model.argv, *model.stop_argv)):
                raise BuildError(
                    f"{model.id}: a secret in a script of its `cmd` or `cmdStop` is written with a shell's quotes inside "
                    "and cannot be taken out; put it into a variable under `env` and use that one"
                )
        for value in secrets_of(engine):
            _refuse_port(model, value, "a word of its `cmd` or `cmdStop`")
            self.vault.key(value, f"{prefix}_SECRET")

    def listen(self) -> tuple[str, int]:
        host, colon, port = (self.options.listen or f"127.0.0.1:{OWN_PORT}").rpartition(":")
        if not colon or not port.isdigit() or not 0 < int(port) <= PORTS_END:
            raise BuildError(
                f"--listen {self.options.listen!r} is not an address; write HOST:PORT, for example 127.0.0.1:8080 or [::1]:8080"
            )
        return host.strip("[]") or "0.0.0.0", int(port)

    def check_public(self, host: str, config: Config) -> None:
        if not is_loopback(host) and not config.keys and not self.options.no_auth:
            raise BuildError(
                f"{host} is reachable from other machines and there are no API keys; set `apiKeys`, publish on 127.0.0.1, or give --no-auth"
            )

    def refuse_client(self, model: ModelConfig, engine: Generic) -> None:
        if engine.command.client and not self.options.bare:
            raise BuildError(
                f"{model.id}: its `cmd` calls a container runtime itself, which does not work inside a container; "
                "write the image under `container` and the engine's own command in `cmd`, or take --mode engines, or generate systemd"
            )

    def script(self, model: ModelConfig, places: Places, image: str = "") -> tuple[str, ...]:
        """`sh -c SCRIPT`: whole paths in it are renamed as text, its program too.  `image`: of the engine alone; "" = greenroom's own."""
        engine = dialect(model)
        paths = [word for text in model.argv for word in re.findall(r"(?<![\w/.:=])/[^\s'\";|&<>()$]+", text) if word.endswith(".gguf")]
        words = scripts.with_program([places.script(word, paths) for word in model.argv], engine, image)
        return tuple(scripts.opened(word, engine) for word in words) if image else words

    def tell_of_unmounted(self, model: ModelConfig, argv: Sequence[str], mounts: Iterable[Mount]) -> None:
        """What a script names beside GGUF files: whether it is a file, and read or written, nobody knows."""
        if model.container is None and (left := unmounted(scripts.words(argv), [mount.target for mount in mounts])):
            self.notes.append(
                f"{model.id}: the script in its `cmd` names {', '.join(left)}, and nothing is mounted there: "
                "write the command without a shell, or mount it yourself."
            )

    def head(self, first: str) -> tuple[str, ...]:
        return (first, *((f"Made by: {self.options.command}",) if self.options.command else ()))

    def _tell_of_absent(self, config: Config, held: Collection[str]) -> None:
        """Engines that the generated image lacks: their models would be listed and never start."""
        for model in config.models:
            engine = dialect(model)
            if engine.kind not in held:
                what = os.path.basename((*engine.command.argv, "its program")[0]) if engine.kind == "generic" else engine.kind
                self.notes.append(
                    f"{model.id}: the image made by the Containerfile has no {what}; add it there, "
                    "take the model out, or deploy it apart (--mode engines)."
                )

    def intent(self, mode: str, workloads: tuple[Workload, ...], config: Config, text: str, host: str) -> Intent:
        wants_build = mode == "greenroom" and not self.options.image and not self.options.bare
        kinds = tuple(dict.fromkeys(dialect(model).kind for model in config.models))
        if wants_build:
            self._tell_of_absent(config, containerfile.held(kinds, self.target, self.options.engine_images))
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


def _refuse_port(model: ModelConfig, value: str, where: str) -> None:
    """Neither could the port be filled in where a secret is kept, nor the secret be taken from around it."""
    if PORT_MACRO in value:
        raise BuildError(
            f"{model.id}: {where} holds a secret and {PORT_MACRO} at once; write the port as a number, "
            "or put the secret into a variable of its own under `env`"
        )
