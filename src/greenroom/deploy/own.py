"""greenroom itself as the one workload, with its engines as its processes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from urllib.parse import urlsplit

from greenroom.config import write
from greenroom.config.model import Config, ContainerConfig, ModelConfig
from greenroom.deploy import first_start, images, scripts
from greenroom.deploy.basis import OWN_PORT, Basis
from greenroom.deploy.commands import container_env, dialect, on_host
from greenroom.deploy.fetching import reference_of
from greenroom.deploy.intent import Intent, Mount, Probe, Share, Workload
from greenroom.deploy.places import CACHE_PLACE, FILES, Places
from greenroom.deploy.pod_devices import in_pod
from greenroom.deploy.unfit import BuildError
from greenroom.engines.detect import IMAGE_ENTRY
from greenroom.engines.discovery import PROGRAM
from greenroom.engines.exposure import is_loopback
from greenroom.engines.generic import Generic

CONFIG_FILE = "greenroom.yaml"
CONFIG_PLACE = f"/etc/greenroom/{CONFIG_FILE}"
STATE_PLACE = "/var/lib/greenroom"
CLUSTER_DOMAIN = "cluster.local"  # unless a cluster was made with another
ELSEWHERE = ("/", "~", "-", "$")  # so begins what is no file below the folder a command stands in
# flags and variables that name files or folders
FILE_NAMES = re.compile(
    r"(?:^--?m|^-md|^-mm|(?:file|path|dir|folder|home|root|model|tokenizer|lora|adapter|mmproj|template|config|grammar|vector|cache)s?)$",
    re.I,
)
HERE = re.compile(r"^pwd$|\$\{?PWD\b")
GOES_TO = frozenset({"cd", ".", "source", ">", ">>", "<"})
OWN_START_S = 60.0
OWN_STOP_S = 35.0  # requests in flight have 30


@dataclass(slots=True)
class Own(Basis):
    """One workload."""

    def greenroom(self) -> Intent:
        """One workload: greenroom with its configuration, engines as its processes."""
        config = self.keyed(self.config)
        self.keep_secrets(config)
        host, port = self.listen()
        self.check_public(host, config)
        slices = 0
        if self.options.in_cluster and self.target != "cpu":
            podded = in_pod(config, self.options.mig)
            config, slices = podded.config, podded.slices
            self.notes += podded.notes
        places = Places()
        config = _with_files_at(places.stay if self.options.bare else places.place, config)
        if self.options.bare:
            config = replace(config, models=tuple(self._at_home(model, places) for model in config.models))
        else:
            config = replace(config, models=tuple(self._inside(model, places) for model in config.models))
            self._tell_of_loopback(config)
            if not config.keys:
                config = replace(config, allowed_hosts=tuple(dict.fromkeys((*config.allowed_hosts, *self._called(host)))))
        self.notes += filter(None, map(first_start.note, config.models))
        text = write.text_of(config, self.vault.keys, comments=self.head("The models, and how they share the devices."))
        workload = self._own_workload(config, text, places, host, port, self.whole_share(config, slices))
        return self.intent("greenroom", (workload,), config, text, host)

    def _own_workload(self, config: Config, text: str, places: Places, host: str, port: int, share: Share) -> Workload:
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
            offered_env=() if bare else self.offered(config),  # engines hand on what greenroom has, and it asks hubs by itself
            mounts=_where_they_lie(places) if bare else (*kept, *places.mounts()),
            share=share,
            memory_mib=0,
            shm_mib=0 if bare else self.shm(config.models),
            live=probe,
            ready=probe,
            stop_s=OWN_STOP_S + max((model.stop_s_max for model in config.models), default=0.0),
            host_port=port,
        )

    def _called(self, host: str) -> tuple[str, ...]:
        """What its neighbours call it; without keys greenroom answers to names that it knows alone."""
        published = () if is_loopback(host) or host in ("0.0.0.0", "::") else (host,)
        name, space = self.name, self.options.namespace
        service = (f"{name}.{space}", f"{name}.{space}.svc", f"{name}.{space}.svc.{CLUSTER_DOMAIN}") if self.options.in_cluster else ()
        return (*published, name, *service)

    def _tell_of_loopback(self, config: Config) -> None:
        """Addresses of this host that would mean the container itself."""
        named = [(f"the peer {peer.id}", peer.url) for peer in config.peers]
        named += [("tracing", config.tracing.endpoint)] if config.tracing is not None else []
        for what, url in named:
            if is_loopback(urlsplit(url).hostname or ""):
                self.notes.append(f"{what} is at {url}, which is the container itself inside: write an address of this host instead.")

    def _at_home(self, model: ModelConfig, places: Places) -> ModelConfig:
        """The entry on its own host: only what was relative to where greenroom stood is made whole."""
        engine = dialect(model)
        if model.container is None and not engine.command.client:
            places.argv(model.argv, lambda word: on_host(engine, word))
            places.environment(model.env)
        if model.cwd is None and not _is_relative(model, engine):
            return model
        cwd = os.path.abspath(model.cwd or ".")
        if model.container is None:
            places.stay(cwd)
        return replace(model, cwd=cwd)

    def _inside(self, model: ModelConfig, places: Places) -> ModelConfig:
        """The entry of a model as greenroom reads it inside its container: paths as there, no container of its own."""
        engine = dialect(model)
        self.refuse_client(model, engine)
        argv = engine.config.argv  # a command of flags alone has got the program of its image
        if argv[:1] == (IMAGE_ENTRY,):
            raise BuildError(
                f"{model.id}: what its image starts by itself is not known, and greenroom's own image starts something else; "
                "write the program into `cmd`, or take --mode engines"
            )
        if engine.command.shell:
            argv = self.script(model, places)
        else:
            argv = places.argv(self._program_inside(argv, engine), lambda word: on_host(engine, word))
        env = model.env
        places.environment(env)
        if engine.command.shell:
            self.tell_of_unmounted(model, argv, places.mounts())
        if model.container is not None:
            self.notes.append(
                f"{model.id} had the image {model.container.image}: greenroom starts its command in its own image now, which must hold it."
            )
            env = (*env, *container_env(model.container, env))
            self._container_volumes(model.container, places)
        if model.cwd is not None:
            self.notes.append(
                f"{model.id}: its working directory {model.cwd!r} is not there inside; relative paths of its command were resolved."
            )
        reference = reference_of(model)
        where = model.reference
        if reference is not None and reference.scheme == "file":
            where = str(replace(reference, path=places.place(reference.path)))
        stop = places.argv(model.stop_argv, lambda word: on_host(engine, word)) if model.stop_argv else ()
        return replace(model, argv=argv, env=env, cwd=None, container=None, stop_argv=stop, reference=where)

    def _program_inside(self, argv: tuple[str, ...], engine: Generic) -> tuple[str, ...]:
        """A llama-server of the host, or one inside an image, is the image's own one by name."""
        position = len(argv) - len(engine.command.argv)
        if engine.kind == "generic" or not 0 <= position < len(argv) or engine.command.python:
            return argv
        program, count = os.path.basename(argv[position]), scripts.own_words(engine)
        is_llama = engine.kind == "llama_server" and (program.startswith(PROGRAM) or count > 1)
        return (*argv[:position], PROGRAM if is_llama else program, *argv[position + count :])

    def _container_volumes(self, container: ContainerConfig, places: Places) -> None:
        for volume in container.volumes:
            source, _, rest = volume.partition(":")
            _, _, options = (rest or source).partition(":")
            if source.startswith(("/", "~", ".")) and "rw" in options.split(","):
                places.same[os.path.abspath(os.path.expanduser(source))] = False


def _with_files_at(place: Callable[[str], str], config: Config) -> Config:
    """What greenroom itself reads: certificates and keys."""

    def at(path: str | None) -> str | None:
        return None if path is None else place(os.path.abspath(path))

    def fetched(model: ModelConfig) -> ModelConfig:
        options = model.pull_options
        return replace(model, pull_options=replace(options, tls_ca=at(options.tls_ca), verify_key=at(options.verify_key)))

    peers = tuple(replace(peer, tls_ca=at(peer.tls_ca)) for peer in config.peers)
    return replace(config, models=tuple(map(fetched, config.models)), peers=peers)


def _is_relative(model: ModelConfig, engine: Generic) -> bool:
    """Whether anything that it says may mean a file below the folder it stands in; a shell makes more of a script than can be read."""
    argv = (*model.argv, *model.stop_argv)
    words = ["", *(scripts.words(argv) if engine.command.shell else argv)]
    pairs = [*pairwise(words), *model.env]
    pairs += [("-v", volume) for volume in model.container.volumes] if model.container is not None else []
    pairs += [(name, value) for _, word in pairs for name, equals, value in (word.partition("="),) if equals]
    started = () if engine.command.client else engine.command.argv  # of a client it is an image
    programs = [argv[0] for argv in (model.argv, model.stop_argv, started) if argv]
    served = engine.model_name() or ""
    return (
        any("/" in program and program[0] not in ELSEWHERE for program in programs)
        or any(_names_a_file_here(name, word) for name, word in pairs)
        or (bool(served) and _lies_here(served))
        or (engine.command.shell and _asks_where_it_is(words))
    )


def _names_a_file_here(name: str, word: str) -> bool:
    """`name`: of the flag or variable that has the word; a word alone may as well be what the program is to do."""
    if word.startswith(("./", "../")) or (word.endswith(FILES) and word[0] not in ELSEWHERE):
        return True
    return ("/" in word or "." in word or FILE_NAMES.search(name) is not None) and _lies_here(word)


def _lies_here(word: str) -> bool:
    return word[:1] not in ("", *ELSEWHERE) and os.path.lexists(word)


def _asks_where_it_is(words: Sequence[str]) -> bool:
    """A script that goes on from its folder, writes there, or names it."""
    return any(
        HERE.search(word) is not None or (before in GOES_TO and word[:1] not in ("", *ELSEWHERE)) for before, word in pairwise(words)
    )


def _where_they_lie(places: Places) -> tuple[Mount, ...]:
    """Mounts that say only what is read and written, each at its own path."""
    read = dict.fromkeys(places.targets, True)
    return tuple(Mount("bind", path, path, read_only) for path, read_only in sorted({**read, **places.same}.items()))
