"""Any program with an HTTP port; the dialects beside it say only where they differ."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

from greenroom.config import secrets
from greenroom.config.model import CallConfig, FiltersConfig, ModelConfig, SleepConfig
from greenroom.core.facts import SleepTier
from greenroom.engines import devices as pinning
from greenroom.engines import exposure, oom, weights
from greenroom.engines.base import (
    AsleepCheck,
    Call,
    Canary,
    Costs,
    DeviceRef,
    Ending,
    Estimate,
    Launch,
    Readiness,
    SleepRecipe,
)
from greenroom.engines.flags import ASSIGNMENT, OFF, PYTHON, Flags, Unwrapped, basename, unwrap

PORT_MACRO = "${PORT}"
PARALLEL_DEFAULT = 8
SECRET_CHARS_MIN = 4  # shorter values would mask half of every log line
KEY_FILE_BYTES_MAX = 64 * 1024
OWN_NAME = "greenroom"
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN")
HUB_FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE")
HUB_OFFLINE = "HF_HUB_OFFLINE"
LOCAL = ("/", "./", "../", "~", "${")  # so begins a folder of this machine, or of greenroom's store; everything else is a name on a hub
CANARY_TEXT = "1 2 3 4 5 6 7 8 9"
CANARY_DOCUMENTS = ("10 11 12", "a quiet room")
CANARY_TOKENS = 4


class Generic:
    """An engine known by its command only; every dialect is one of these with more knowledge."""

    kind: str = "generic"
    underscores: ClassVar[bool] = False
    port_flags: ClassVar[tuple[str, ...]] = ()  # empty: nothing is ever appended to the command
    host_flags: ClassVar[tuple[str, ...]] = ()
    host_variables: ClassVar[tuple[str, ...]] = ()
    public_by_default: ClassVar[bool] = False  # listens on every interface unless told otherwise
    key_flags: ClassVar[tuple[str, ...]] = ("--api-key",)
    key_variables: ClassVar[tuple[str, ...]] = ()
    ready_lines: ClassVar[re.Pattern[str]] = re.compile(r"listening on|Uvicorn running on|Application startup complete", re.IGNORECASE)
    phase_lines: ClassVar[re.Pattern[str]] = re.compile(
        r"(?P<listen>listening on|Uvicorn running on|Application startup complete)", re.IGNORECASE
    )  # a group's name is the phase that its line ends

    term_again_s: ClassVar[float | None] = None  # see Launch
    canary_extras: ClassVar[Mapping[str, Any]] = {}  # more parameters of a greedy completion

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.command: Unwrapped = unwrap(config.argv)
        self.env: Mapping[str, str] = {**dict(config.env), **self.command.env}
        self.flags = Flags(self.command.argv[1:], self.env, self.underscores)

    # ------------------------------------------------------------------------------------------------------- launching

    def launch(self, port: int, devices: Sequence[DeviceRef], generation: int = 0) -> Launch:
        """The command with port and devices filled in.  `generation` names containers; a process does not need it."""
        proxy = urlsplit(_fill(self.config.proxy, port))
        own_env = self.own_env(devices)
        operator_env = {name: _fill(value, port) for name, value in self.config.env}
        env = {**pinning.pin_env(devices, self.env), **own_env, **operator_env}
        return Launch(
            argv=tuple(_fill(item, port) for item in (*self.program_argv(), *self.appended())),
            env=env,
            host=_host(proxy.hostname),
            port=proxy.port or (443 if proxy.scheme == "https" else 80),
            stop_argv=tuple(_fill(item, port) for item in self.config.stop_argv),
            cwd=self.config.cwd,
            term_again_s=self.term_again_s,
            detached=self.command.client,
            secrets=self.secrets(),
        )

    def program_argv(self) -> tuple[str, ...]:
        """The operator's command; a dialect may know better where its program is."""
        return self.config.argv

    def own_env(self, devices: Sequence[DeviceRef]) -> dict[str, str]:
        """Variables this dialect sets where the operator has not."""
        return {}

    def appended(self) -> tuple[str, ...]:
        """Arguments a command lacks: the port when it names none, the loopback address when the engine would listen everywhere."""
        if self.command.shell or self.command.client:
            return ()
        words: list[str] = []
        names_port = any(PORT_MACRO in text for text in (*self.config.argv, *(value for _, value in self.config.env)))
        if self.port_flags and not names_port and PORT_MACRO in self.config.proxy and self.flags.value(*self.port_flags) is None:
            words += [self.port_flags[0], PORT_MACRO]
        inside = self.config.container is not None
        if self.host_flags and (inside or self.public_by_default) and self.flags.value(*self.host_flags) is None:
            words += [self.host_flags[0], "0.0.0.0" if inside else _host(urlsplit(_fill(self.config.proxy, 1)).hostname)]
        return tuple(words)

    def secrets(self) -> tuple[str, ...]:
        """What must never be shown: whole values, and what of them would be said alone."""
        found = (part for value in self.secret_values() for part in secrets.parts(value))
        return tuple(dict.fromkeys(part for part in found if len(part) >= SECRET_CHARS_MIN))

    def secret_values(self) -> tuple[str, ...]:
        """Engine keys and other secrets of the command, variables and calls that hold one: each as it is written."""
        container = self.config.container
        words = (*self.config.argv, *self.config.stop_argv, *(container.args if container is not None else ()))
        named = (*self.env.items(), ("", self.config.reference), *self._declared_values())
        found = [*secrets.in_arguments(words), *(value for name, value in named if secrets.in_variable(name, value))]
        # Only keys stand in lists: pieces of another text that holds a secret are words like any others.
        lists = (
            *self._key_lists(),
            *filter(None, map(self.given, self.key_variables)),
            *(value for name, value in self.env.items() if secrets.KEYS.search(name)),
        )
        found += [self.engine_key(), *(key for value in lists for key in value.split(","))]
        texts = dict.fromkeys(value.strip() for value in found)
        return tuple(text for text in texts if len(text) >= SECRET_CHARS_MIN and text != PORT_MACRO)

    def _declared_values(self) -> Iterator[tuple[str, str]]:
        """What the config has sent, by name: queries of calls (as written, and as meant), their bodies and `setParams`, however deep."""
        yield from set_texts(self.config.filters)
        declared, warmup = self.config.sleep_calls, self.config.warmup
        calls = [(call.path, call.body) for call in (*declared.sleep, *declared.wake)] if declared is not None else []
        for path, body in (*calls, *([(warmup.path, warmup.body)] if warmup is not None else [])):
            query = urlsplit(path).query
            yield from parse_qsl(query)
            yield from ((name, value) for name, _, value in (pair.partition("=") for pair in query.split("&")))
            yield from _texts("", body)

    def pinned_devices(self) -> tuple[str, ...]:
        """UUIDs or bus indices named in the operator's environment; () = greenroom chooses."""
        return pinning.pinned(self.env)

    def devices_count(self) -> int | None:
        """How many devices the flags ask for (tensor and pipeline parallel); None = they do not say."""
        return None

    # ------------------------------------------------------------------------------------------------------- readiness

    def readiness(self) -> Readiness:
        """What to probe.  Path None: the config says `none`, an open port is enough."""
        warmup = self.config.warmup
        path = self.config.check_path
        return Readiness(
            path=path,
            fallback_paths=() if path is None or self.config.check_explicit else self.fallback_paths(),
            headers=self.probe_headers(),
            base_path=urlsplit(self.config.proxy).path.rstrip("/"),
            warmup_path=warmup.path if warmup else None,
            warmup_body=json.dumps(warmup.body).encode() if warmup else b"",
        )

    def fallback_paths(self) -> tuple[str, ...]:
        return ("/v1/models",)

    def probe_headers(self) -> tuple[tuple[str, str], ...]:
        """The engine's own key: without it a locked engine would never look ready."""
        key = self.engine_key()
        return (("Authorization", f"Bearer {key}"),) if key else ()

    def engine_key(self) -> str:
        """The first key the engine accepts; "" when it wants none (or it cannot be known)."""
        if (value := next(self._key_lists(), None)) is not None:
            return value.split(",", 1)[0].strip()
        key_file = self.flags.value("--api-key-file", env="LLAMA_ARG_API_KEY_FILE")
        return _first_key(self.host_path(key_file)) if key_file else ""

    def _key_lists(self) -> Iterator[str]:
        """What its flags and variables for keys hold: one key, or several between commas."""
        for value in (self.flags.value(*self.key_flags), *map(self.env.get, self.key_variables)):
            if value and self.command.shell and (name := secrets.variable(value)) is not None:
                value = self.env.get(name)  # what its shell will put there
            if value:
                yield value

    def is_ready_hint(self, line: str) -> bool:
        return self.ready_lines.search(line) is not None

    def phase_of(self, line: str) -> str:
        found = self.phase_lines.search(line)
        return found.lastgroup or "" if found is not None else ""

    # --------------------------------------------------------------------------------------------------------- numbers

    def estimate(self, devices: Sequence[DeviceRef]) -> Estimate:
        detail = "the memory need of this program is not known before it was measured"
        return Estimate(None, detail=detail, in_ram=in_ram(devices))

    def costs(self, estimate: Estimate) -> Costs:
        up_s, down_s = self.times()
        doze = self.doze(estimate)
        tiers = tuple(self._within(tier, estimate) for tier in self._tiers(estimate))
        return Costs(up_s, down_s, tiers, None if doze is None else self._within(doze, estimate))

    def _within(self, tier: SleepTier, estimate: Estimate) -> SleepTier:
        """A sleeper holds no more than it holds awake: a small model stays below what large ones keep."""
        awake_mib = self.config.memory_mib or estimate.device_mib or tier.residue_mib
        return replace(tier, residue_mib=min(tier.residue_mib, awake_mib))

    def times(self) -> tuple[float, float]:
        """Seconds of a cold start and of a stop, until measured."""
        return 2.0, 0.2

    def parallel(self) -> int:
        return self.config.parallel or self.default_parallel()

    def default_parallel(self) -> int:
        return PARALLEL_DEFAULT

    def lone_start(self) -> bool:
        return False

    def files(self) -> tuple[Path, ...]:
        """Model files on this host that the command names; part of what a learned footprint is keyed by."""
        return weights.folder_files(self.model_path())

    def model_name(self) -> str | None:
        """What the command says it serves: a folder, or a name on a hub; None = it does not say."""
        return None

    def fetches_from(self) -> str:
        """Where it gets its weights by itself when they are not here yet: `hub`, `web`; "" = from nowhere, as far as can be seen."""
        return "hub" if self.has_hub_token() or any(self.given(name) for name in HUB_FOLDERS) else ""

    def has_hub_token(self) -> bool:
        return any(self.given(name) for name in HUB_TOKENS) or self.flags.has("-hft", "--hf-token", "--hf-api-token")

    def hub_folder(self) -> str | None:
        """Where the command says that models of a hub are kept."""
        return None

    def hub_revision(self) -> str | None:
        return None

    def weights_mib(self) -> int:
        """MiB of all its weights: in a local folder, or in the cache of a hub; 0 = not on this host."""
        path = self.model_path()
        if path is None and (name := self.model_name()) and (hub := self._hub_cache()) is not None:
            path = weights.hub_snapshot(hub, name, self.hub_revision() or "main")
        return weights.folder_mib(path)

    def _hub_cache(self) -> Path | None:
        if (folder := self.hub_folder()) is not None:
            return self.host_path(folder, unmounted=False)
        # What greenroom itself has in its environment reaches a process, not a container.
        inside = self.config.container is not None
        values = {name: self.given(name) or ("" if inside else os.environ.get(name, "")) for name in weights.CACHE_VARIABLES}
        return self.host_path(weights.hub_cache(values, "/root" if inside else "~"), unmounted=False)

    def all_weights_mib(self, estimate: Estimate) -> int:
        """All its weights, or what bounds them while they are not on this host."""
        if estimate.weights_mib is not None:
            return estimate.weights_mib
        return (self.config.memory_mib or estimate.device_mib or 0) * (self.devices_count() or 1)

    def model_path(self) -> Path | None:
        """The local folder it serves; None for a name on a hub."""
        name = self.model_name()
        return self.host_path(name) if name and name.startswith(LOCAL[:-1]) else None

    def named_on_hub(self) -> str:
        """`hub` where it serves a model by its name there, and may ask it; else ""."""
        is_offline = (self.given(HUB_OFFLINE) or "0").strip().lower() not in OFF
        return "" if is_offline or (self.model_name() or "").startswith(LOCAL) else "hub"

    def contexts(self, devices: Sequence[DeviceRef]) -> tuple[tuple[int, int], ...]:
        return ()

    # ----------------------------------------------------------------------------------------------------------- sleep

    def no_sleep(self) -> str:
        if self.config.sleep == "off" or self.config.sleep_calls is not None:
            return ""
        return self.own_no_sleep()

    def own_no_sleep(self) -> str:
        """The dialect's reason, when it has no level that the config allows."""
        return "greenroom knows no sleep routes of this engine; declare its `sleep` and `wake` calls"

    def sleep_notes(self) -> tuple[str, ...]:
        return ()

    def own_tiers(self, estimate: Estimate) -> tuple[SleepTier, ...]:
        """The levels this dialect can do as configured."""
        return ()

    def doze(self, estimate: Estimate) -> SleepTier | None:
        return None

    def _tiers(self, estimate: Estimate) -> tuple[SleepTier, ...]:
        if self.config.sleep == "off":
            return ()
        declared = self.config.sleep_calls
        tiers = self.own_tiers(estimate) if declared is None else (self._declared_tier(declared, estimate),)
        return tuple(tier for tier in tiers if self.allows(tier.level))

    def allows(self, level: int) -> bool:
        """Whether the config lets it sleep at this level."""
        return self.config.sleep in ("auto", str(level))

    def _declared_tier(self, declared: SleepConfig, estimate: Estimate) -> SleepTier:
        host_mib = declared.host_mib
        if host_mib is None:
            # On host RAM the residue says it all; elsewhere a copy is as large as what it books.
            host_mib = 0 if estimate.in_ram else self.config.memory_mib or estimate.device_mib or 0
        return SleepTier(declared.level, declared.residue_mib, host_mib, declared.sleep_s, declared.wake_s)

    def control_headers(self) -> tuple[tuple[str, str], ...]:
        return self.probe_headers()

    def version_call(self) -> Call | None:
        return None

    def sleep_recipe(self, level: int, version: tuple[int, ...]) -> SleepRecipe:
        """Paths are bare, as in a readiness check: the prefix of `proxy` is put before them by who calls."""
        declared = self.config.sleep_calls
        if declared is None:
            return self.own_recipe(level, version)
        asked = declared.asleep
        check = None if asked is None else AsleepCheck(asked.path, asked.field, asked.value)
        return SleepRecipe(level, _calls(declared.sleep), _calls(declared.wake), check, self.verifies(level))

    def own_recipe(self, level: int, version: tuple[int, ...]) -> SleepRecipe:
        return SleepRecipe(level, (), (), unfit=self.own_no_sleep() or f"it has no sleep level {level}")

    def verifies(self, level: int) -> bool:
        """Whether the canary is compared after each wake from this level."""
        return self.config.canary == "always" or (self.config.canary == "auto" and level == 2)

    def canaries(self) -> tuple[Canary, ...]:
        return () if self.config.canary == "off" else self.own_canaries()

    def own_canaries(self) -> tuple[Canary, ...]:
        """Text that hardly any model continues in two ways, a vector, scores: one of them is what it was made for."""
        name = self.request_name()
        greedy: dict[str, Any] = {"model": name, "max_tokens": CANARY_TOKENS, "temperature": 0, "seed": 0, **self.canary_extras}
        question = {"role": "user", "content": CANARY_TEXT}
        return (
            canary("/v1/completions", {**greedy, "prompt": CANARY_TEXT}, "choices.0.text"),
            canary("/v1/chat/completions", {**greedy, "messages": [question]}, "choices.0.message.content"),
            canary("/v1/embeddings", {"model": name, "input": CANARY_TEXT}, "data.0.embedding"),
            canary("/score", {"model": name, "text_1": CANARY_TEXT, "text_2": list(CANARY_DOCUMENTS)}, "data.*.score"),
            canary("/v1/rerank", {"model": name, "query": CANARY_TEXT, "documents": list(CANARY_DOCUMENTS)}, "results.*.relevance_score"),
        )

    def request_name(self) -> str:
        """What a request sent straight to it must call its model."""
        return self.config.use_model_name or self.served_name() or self.config.id

    def served_name(self) -> str | None:
        """The name it answers to, where the command says so."""
        return None

    def dozes(self) -> AsleepCheck | None:
        return None

    # --------------------------------------------------------------------------------------------------------- exposure

    def given(self, variable: str) -> str | None:
        """An environment variable as the operator hands it to the engine, or into its container; None = not at all."""
        container = self.config.container
        if self.command.client:
            return exposure.handed_in(self.config.argv, variable, self.env)
        inside = exposure.handed_in(container.args, variable, self.env) if container is not None else None
        return self.env.get(variable) if inside is None else inside

    def open_to_network(self) -> str:
        """The words that let others than this machine reach it; "" when it listens on a loopback address only."""
        if self.command.client:
            return exposure.published(self.config.argv)
        if self.config.container is not None:
            return exposure.published(self.config.container.args)
        host = self.flags.value(*self.host_flags)
        if host is None and self.public_by_default and self.command.shell:
            return f"no {self.host_flags[0]} in its script"
        if host is None:
            host = _host(urlsplit(_fill(self.config.proxy, 1)).hostname) if self.public_by_default else "127.0.0.1"
        return "" if exposure.is_loopback(host) else f"{self.host_flags[0]} {host}"

    # ---------------------------------------------------------------------------------------------------------- faults

    def missing(self) -> str:
        """A sentence when this entry can never start, without its name; "" when nothing speaks against it."""
        if self.config.misconfigured:
            return self.config.misconfigured
        if not self.config.argv:
            return "it has no command; write `cmd: PROGRAM ARGUMENTS`"
        try:
            return self._own_program() or self._program_missing() or self.model_missing()
        except OSError as exc:  # a disk that is gone, a folder that is locked: it may be there again at the next look
            return f"{exc.filename or 'its model'} cannot be read: {exc.strerror or exc}"

    def model_missing(self) -> str:
        path = self.model_path()
        return f"the model {path} does not exist" if path is not None and not path.exists() else ""

    def _own_program(self) -> str:
        program = self.command.argv[0] if self.command.argv else ""
        if basename(program).removesuffix(".py") == OWN_NAME and not self.command.client:
            return "it starts greenroom itself; its `cmd` must start an engine (llama-server, vllm serve, ...)"
        return ""

    def _program_missing(self) -> str:
        if self.config.container is not None:
            runtime = self.config.container.runtime
            return "" if shutil.which(runtime) else f"{runtime} was not found on PATH; install it or drop `container`"
        if assigned := ASSIGNMENT.match(self.config.argv[0]):
            name = assigned[1]  # not its value, which may be a secret
            return f"its command begins with {name}=..., which only a shell would take; write {name} under `env`"
        programs = [self.program_argv()[0]]
        if not (self.command.shell or self.command.client or self.command.python) and self.command.argv[0] != self.config.argv[0]:
            programs.append(self.command.argv[0])
        for program in programs:
            if PORT_MACRO not in program and not self._runnable(program):
                where = "is not an executable file" if "/" in program else "was not found on PATH"
                return f"the program {program!r} {where}; install it or write its full path"
        return ""

    def _runnable(self, program: str) -> bool:
        if "/" in program:
            path = self.host_path(program)
            return path is not None and path.is_file() and os.access(path, os.X_OK)
        search = self.env.get("PATH")
        return bool(shutil.which(program, path=search)) or bool(PYTHON.match(program) and shutil.which(program))

    def host_path(self, text: str, *, unmounted: bool = True) -> Path | None:
        """Where a path of the command lies on this host; None when only the container knows.

        `unmounted`: a path that no volume of its container holds, and that is here, is meant to be handed in.
        """
        path = Path(text).expanduser()
        if self.command.client:
            return None
        if (container := self.config.container) is not None:
            found = mounted(path, (*container.volumes, *exposure.volumes(container.args)))
            return path if found is None and unmounted and path.is_absolute() and path.exists() else found
        return path if path.is_absolute() else Path(self.config.cwd or Path.cwd()) / path

    def metrics_call(self) -> Call | None:
        return None

    def ending(self, exit_code: int | None, log_tail: Sequence[str]) -> Ending:
        return oom.ending(exit_code, log_tail)


def set_texts(filters: FiltersConfig) -> Iterator[tuple[str, str]]:
    """What is put into requests, by name."""
    yield from _texts("", (filters.set_params, filters.set_params_by_id))


def _texts(name: str, value: object) -> Iterator[tuple[str, str]]:
    """The texts of a JSON value, each with the nearest name above it."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(str(key), item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(name, item)


def _fill(text: str, port: int) -> str:
    return text.replace(PORT_MACRO, str(port))


def _host(name: str | None) -> str:
    # `localhost` may mean ::1 first, where most engines do not listen.
    return "127.0.0.1" if name in (None, "", "localhost") else str(name)


def _first_key(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = file.read(KEY_FILE_BYTES_MAX).splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")), "")


def mounted(path: Path, volumes: Sequence[str]) -> Path | None:
    """Where a path inside a container lies on this host; None when no volume holds it."""
    for volume in volumes:
        source, _, rest = volume.partition(":")
        target = Path(rest.partition(":")[0] or source)
        if source.startswith(("/", "~", ".")) and path.is_relative_to(target):
            return Path(source).expanduser() / path.relative_to(target)
    return None


def _calls(declared: Sequence[CallConfig]) -> tuple[Call, ...]:
    return tuple(Call(call.path, call.method, b"" if call.body is None else json_body(call.body)) for call in declared)


def json_body(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def canary(path: str, body: Mapping[str, Any], pick: str) -> Canary:
    return Canary(path, json_body(body), pick)


def in_ram(devices: Sequence[DeviceRef]) -> bool:
    """Whether its device is host RAM."""
    return bool(devices) and all(device.kind == "ram" for device in devices)
