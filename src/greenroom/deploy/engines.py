"""One workload for each model, without greenroom in front."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from greenroom.config import secrets, write
from greenroom.config.model import ContainerConfig, ModelConfig, PullConfig
from greenroom.deploy import docker_run, fetching, first_start, images, scripts
from greenroom.deploy.basis import PORTS_END, Basis
from greenroom.deploy.commands import (
    container_env,
    dialect,
    has_key,
    in_shell,
    kept,
    on_host,
    opened,
    renumbered,
    secrets_of,
    shell_word,
    volume_mounts,
    without_flag,
)
from greenroom.deploy.intent import Intent, Mount, Probe, Share, Workload
from greenroom.deploy.names import labels
from greenroom.deploy.places import CACHE_PLACE, CACHE_VARIABLES, Places
from greenroom.deploy.pod_devices import without_pins
from greenroom.deploy.unfit import BuildError
from greenroom.deploy.vault import variable_name
from greenroom.engines.base import Launch
from greenroom.engines.detect import IMAGE_ENTRY
from greenroom.engines.devices import PIN_VARIABLES
from greenroom.engines.exposure import is_loopback
from greenroom.engines.generic import PORT_MACRO, Generic

TEI_CACHE_PLACE = "/data"  # its image names this one itself


@dataclass(slots=True)
class Engines(Basis):
    """One workload a model."""

    def engines(self) -> Intent:
        """One workload for each model, without greenroom in front."""
        names = labels([model.id for model in self.config.models], chars_max=63 - len(self.name) - 1)
        self.keep_secrets(self.config)
        host, _ = self.listen()
        self._check_open(host)
        ports = self._ports()
        built = [self._engine(model, f"{self.name}-{names[model.id]}", *ports[model.id]) for model in self.config.models]
        self._tell_of_company(built)
        text = write.text_of(self.config, self.vault.keys, comments=self.head("The configuration these files were made from."))
        return self.intent("engines", tuple(built), self.config, text, host)

    def _tell_of_company(self, built: Sequence[Workload]) -> None:
        """Who is used to greenroom may not think of it."""
        if self.config.keys and (open_ := [one.model for one in built if not one.key]):
            self.notes.append(
                f"Nobody asks for the keys of `apiKeys` without greenroom: whoever reaches {', '.join(open_)} may use them; "
                "leave greenroom in front with these as its peers, or let what is in front ask for keys."
            )
        on_devices = [one for one in built if one.share.count]
        if len(on_devices) > 1 and len({one.share.devices for one in on_devices}) < len(on_devices):
            self.notes.append(
                f"Without greenroom nothing makes room: {len(on_devices)} models hold their GPU memory at the same time; "
                "name a device for each (`device:`, --gpu), or check that they fit together."
            )

    def _ports(self) -> dict[str, tuple[int, int]]:
        """Model -> its port inside and the one a host publishes.  Ports that commands name come first."""
        fixed = {model.id: dialect(model).launch(1, ()).port for model in self.config.models if PORT_MACRO not in model.proxy}
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
        engine = dialect(model)
        if engine.command.client:
            return self._client(model, engine, name, host_port)
        image = self._image(model, engine)
        fetched = fetching.by_engine(model, engine.kind, self.options.stored.get(model.id))
        if model.reference and model.pull_options != PullConfig():
            self.notes.append(f"{model.id}: {model.reference} is fetched without greenroom; what `pull` says of that does not count there.")
        model = fetched.model
        self.notes += [fetched.note] if fetched.note else []
        places = Places(inside=tuple(mount.target for mount in fetched.mounts))
        engine = dialect(replace(model, container=ContainerConfig("podman", image, *kept(model.container))))
        launch = engine.launch(port, ())
        share = self.share(model, engine)
        argv = self._engine_argv(model, engine, launch, image, places, share, port)
        env = self._engine_env(model, engine, launch.env, share)
        env = tuple(scripts.opened_variables(dict(env), engine).items())
        places.environment(env)
        self._tell_of_doubts(model, engine, argv, dict(env), image)
        argv, secret_argv = self._without_secrets(model, engine, argv)
        own_entry = argv[:1] == (IMAGE_ENTRY,)
        secret_env = {**secret_argv, **self._secret_variables(dict(env))}
        mounts = (
            *fetched.mounts,
            *(volume_mounts(model.container.volumes) if model.container else ()),
            *places.mounts(),
            *self._caches(engine, env),
        )
        if engine.command.shell:
            self.tell_of_unmounted(model, argv, mounts)
        env = tuple((key, value) for key, value in env if key not in secret_env)
        return self._workload(
            model,
            engine,
            name=name,
            image=image,
            argv=argv[1:] if own_entry else argv,
            port=port,
            env=env if "HOME" in dict(env) or all(mount.target != CACHE_PLACE for mount in mounts) else (*env, ("HOME", CACHE_PLACE)),
            secret_env=tuple(sorted(secret_env.items())),
            mounts=mounts,
            share=share,
            shm_mib=self.shm((model,)),
            args_entrypoint=not own_entry,
            host_port=host_port,
        )

    def _workload(self, model: ModelConfig, engine: Generic, *, port: int, share: Share, **more: Any) -> Workload:
        """With what follows from the model alone."""
        ready = engine.readiness()
        probe = Probe(f"{ready.base_path}{ready.path}" if ready.path is not None else "", port, first_start.start_s(model, engine))
        return Workload(
            model=model.id,
            port=port,
            share=share,
            memory_mib=_host_memory(model, share),
            live=probe,
            ready=probe,
            stop_s=model.stop_s_max,
            aliases=model.aliases,
            source=model,
            gpu_mib=self.options.gpu_mib.get(model.id, model.memory_mib if share.count else None),
            kind=engine.kind,
            tcp_only=ready.path is None,
            key=self._key_of(model, engine),
            offered_env=first_start.offered(engine),
            **more,
        )

    def _key_of(self, model: ModelConfig, engine: Generic) -> str:
        key = engine.engine_key()
        return self.vault.keys.get(key, f"{variable_name(model.id)}_API_KEY") if key else ""

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
        share = self.share(model, engine)
        if share.count and not self.options.gpus:
            named = run.gpus or share.devices
            share = replace(share, devices=named, count=max(len(run.gpus), run.gpu_count) or share.count)
        given = dict(model.env)
        env = {name: given.get(name, "") if value is None else value for name, value in run.env.items()}
        env = {name: value.replace(PORT_MACRO, str(host_port)) for name, value in env.items()}
        env = without_pins(env) if self.options.in_cluster else env
        env = scripts.opened_variables(env, engine)
        args = opened(tuple(word.replace(PORT_MACRO, str(host_port)) for word in run.args), engine)
        args = (*args, *self._served_names(model, engine, args))
        self._tell_of_doubts(model, engine, args, env, run.image)
        argv, secret_argv = self._without_secrets(model, engine, (*((run.entrypoint,) if run.entrypoint else ()), *args))
        if argv[:1] == ("/bin/sh",):
            raise BuildError(
                f"{model.id}: its arguments hold a secret that its engine takes from no variable; write it under `env`, "
                "or the image under `container` and the engine's own command in `cmd`"
            )
        # A variable that is only named comes from whoever starts it: its value is not this file's business.
        told = self._secret_variables(env)
        absent = {name: name for name, value in run.env.items() if value is None and name not in given}
        hidden = {**secret_argv, **told, **absent}
        return self._workload(
            model,
            engine,
            name=name,
            image=self.options.engine_images.get(model.id) or run.image,
            argv=argv,
            port=inside,
            env=tuple((name, value) for name, value in env.items() if name not in hidden),
            secret_env=tuple(sorted(hidden.items())),
            mounts=volume_mounts(run.volumes),
            share=share,
            shm_mib=run.shm_mib or self.shm((model,)),
            args_entrypoint=bool(run.entrypoint),
            host_port=host_port,
        )

    def _tell_of_doubts(self, model: ModelConfig, engine: Generic, argv: Sequence[str], env: Mapping[str, str], image: str) -> None:
        """What nobody here can read for certain, or change: scripts, programs that nobody knows, a container that the operator runs."""
        if engine.command.shell:
            self.notes.append(f"{model.id}: its `cmd` is a script for a shell: what it calls beside the engine must be in {image}.")
        if engine.command.shell or engine.command.client:
            flag = scripts.hidden_host(engine)
            if flag and "llama.cpp" not in image:  # those images say it themselves
                self.notes.append(
                    f"{model.id}: its `cmd` names no {flag}: nobody outside its container may reach it; write {flag} 0.0.0.0."
                )
        if engine.command.shell or engine.kind == "generic":
            self.notes += (
                f"{model.id}: {word} is the container itself inside: where it listens there, nobody else reaches it; write 0.0.0.0."
                for word in scripts.closed(argv, env)
            )

    def _image(self, model: ModelConfig, engine: Generic) -> str:
        named = self.options.engine_images.get(model.id)
        if named is None and model.container is not None:
            named = model.container.image
        image = named or self.options.engine_images.get(engine.kind) or images.engine_image(engine.kind, self.target_of(model))
        if not image:
            known = f"no usual image for {self.target_of(model)}" if engine.kind in images.IMAGES else "no usual image"
            raise BuildError(
                f"{model.id}: its engine ({engine.kind}) has {known}; name one with --engine-image {shlex.quote(model.id)}=IMAGE"
            )
        return image

    def _engine_argv(
        self, model: ModelConfig, engine: Generic, launch: Launch, image: str, places: Places, share: Share, port: int
    ) -> tuple[str, ...]:
        if engine.command.shell:
            return tuple(word.replace(PORT_MACRO, str(port)) for word in self.script(model, places, image))
        # What wraps the engine on the host (env, nice, uv run) is not there inside; variables it set are in the environment.
        whole = engine.config.argv  # a command of flags alone has got the program of its image
        inner = launch.argv[len(whole) - len(engine.command.argv) :]
        if engine.command.python:
            inner = ("python3", *(("-m",) if "-m" in whole[: len(whole) - len(engine.command.argv)] else ()), *inner)
        elif engine.kind != "generic":
            inner = (scripts.program(engine, image), *inner[scripts.own_words(engine) :])
        inner = opened(inner, engine)
        inner = renumbered(inner, share)
        inner = (*inner, *self._served_names(model, engine, inner))
        if model.container is not None:
            return inner  # its paths are the container's already
        # The program of a known engine is the image's, by whatever path.
        bare = inner if engine.kind == "generic" else ("", *inner[1:])
        moved = places.argv(bare, lambda word: on_host(engine, word, inside=False))
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
        extra = dict(container_env(model.container, model.env)) if model.container else {}
        merged = {**own, **wrapped, **operators, **extra}
        if self.options.in_cluster:
            return tuple(without_pins(merged).items())
        if share.vendor == "nvidia":
            return tuple((name, value) for name, value in merged.items() if name not in by_hand)
        return tuple((merged if by_hand else {**merged, **_choice(share)}).items())

    def _secret_variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """Those that hold a secret, each with its key."""
        keys = self.vault.keys
        return {name: keys[value] for name, value in env.items() if value in keys and secrets.in_variable(name, value)}

    def _without_secrets(self, model: ModelConfig, engine: Generic, argv: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
        """A command that shows no secret: keys by the variable the engine knows, others through a shell that fills them in."""
        known = set(secrets_of(engine))
        others = [value for word in argv for value in (word, word.partition("=")[2]) if value in known]
        found = [value for value in dict.fromkeys((*secrets.in_arguments(argv), *others)) if value]
        if not found:
            return argv, {}
        key = engine.flags.value(*engine.key_flags)
        if engine.key_variables and key and set(found) <= {key} and not engine.command.shell:
            shorter = without_flag(argv, engine.key_flags)
            if key not in shorter:
                return shorter, {engine.key_variables[0]: self.vault.key(key, f"{variable_name(model.id)}_API_KEY")}
        variables = {value: self.vault.key(value, f"{variable_name(model.id)}_SECRET") for value in found}
        if engine.command.shell:
            raise BuildError(f"{model.id}: the script in its `cmd` holds a secret; put it into a variable under `env` and use that one")
        if argv[:1] == (IMAGE_ENTRY,):
            raise BuildError(
                f"{model.id}: its arguments hold a secret, and what its image starts by itself is not known; "
                "write the program into `cmd`, or the secret into a variable under `env`"
            )
        script = " ".join(shell_word(word, variables) for word in argv)
        return in_shell(script), {name: name for name in variables.values()}

    def _caches(self, engine: Generic, env: Sequence[tuple[str, str]]) -> tuple[Mount, ...]:
        """Where it keeps what it downloads and compiles, unless the operator has named a place."""
        if engine.config.container is not None and engine.config.container.volumes:
            return ()
        if any(name in CACHE_VARIABLES for name, _ in env):
            return ()
        volume = f"{self.name}-cache"
        if engine.kind == "tei":
            return (Mount("volume", volume, TEI_CACHE_PLACE, read_only=False),)
        if engine.kind in ("vllm", "sglang") or engine.fetches_from():
            return (Mount("volume", volume, CACHE_PLACE, read_only=False),)
        return ()

    def _check_open(self, host: str) -> None:
        """Engines know nothing of greenroom's keys."""
        if is_loopback(host) or self.options.no_auth:
            return
        without = [model.id for model in self.config.models if not has_key(dialect(model))]
        if without:
            raise BuildError(
                f"{host} is reachable from other machines and engines do not ask for `apiKeys`: {without[0]} has no key of its own "
                "(--api-key); publish on 127.0.0.1, put greenroom in front (--mode greenroom), or give --no-auth"
            )


def _choice(share: Share) -> dict[str, str]:
    """AMD's and Intel's cards are all handed in: which ones count is said to the engine."""
    names = ",".join(share.devices)
    by_index = all(name.isdigit() for name in share.devices)
    if not names or (share.vendor == "intel" and not by_index):
        return {}
    if share.vendor == "intel":
        return {"ZE_AFFINITY_MASK": names}
    return {"HIP_VISIBLE_DEVICES" if by_index else "ROCR_VISIBLE_DEVICES": names}


def _host_memory(model: ModelConfig, share: Share) -> int:
    """Host RAM where it was declared; on a CPU that is where the model lies too, and what is needed beside it alone says nothing."""
    beside = model.host_memory_mib or 0
    if share.vendor != "cpu":
        return beside
    return beside + model.memory_mib if model.memory_mib else 0
