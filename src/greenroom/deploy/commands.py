"""What is changed in a command on its way into a container, and what is read from it.  Pure functions of words."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from greenroom.config import secrets
from greenroom.config.model import ContainerConfig, ModelConfig
from greenroom.deploy.intent import Mount, Share, Workload
from greenroom.deploy.scripts import everywhere
from greenroom.engines.container import Containerized
from greenroom.engines.detect import DIALECTS, describe
from greenroom.engines.devices import LLAMA_DEVICE
from greenroom.engines.exposure import is_loopback
from greenroom.engines.flags import unwrap
from greenroom.engines.generic import Generic
from greenroom.engines.llama_server import DEVICE

HANDED_ON = '"$@"'  # in a shell's script


def dialect(model: ModelConfig) -> Generic:
    """The dialect itself, which knows what the protocol does not tell."""
    engine = describe(model)
    found = engine.inner if isinstance(engine, Containerized) else engine
    assert isinstance(found, Generic)
    return found


def dialect_of(workload: Workload) -> Generic:
    """The dialect of a workload's command as it stands there."""
    known = workload.source or ModelConfig(workload.model, workload.argv)
    argv = workload.argv if workload.args_entrypoint else ("", *workload.argv)  # the program is the image's
    return DIALECTS.get(workload.kind, Generic)(replace(known, argv=argv, env=workload.env, container=None))


def on_host(engine: Generic, word: str, *, inside: bool = True) -> str | None:
    """Absolute host path of a word; None when it is the image's own.  `inside`: the entry may have a container of its own."""
    if inside and engine.config.container is not None:
        found = engine.host_path(word)
        return None if found is None else os.path.abspath(found)
    path = os.path.expanduser(word)
    return os.path.normpath(os.path.join(os.path.abspath(os.path.expanduser(engine.config.cwd or ".")), path))


def with_words(model: ModelConfig, words: Mapping[str, str]) -> ModelConfig:
    def fill(text: str) -> str:
        for macro, value in words.items():
            text = text.replace(macro, value)
        return text

    container = model.container
    if container is not None:
        container = replace(container, args=tuple(map(fill, container.args)), volumes=tuple(map(fill, container.volumes)))
    env = tuple((name, fill(value)) for name, value in model.env)
    return replace(model, argv=tuple(map(fill, model.argv)), env=env, container=container, reference="")


def opened(argv: tuple[str, ...], engine: Generic) -> tuple[str, ...]:
    """Loopback inside a container is reachable by nobody: the engine listens on all its addresses there."""
    out = list(argv)
    for position, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name not in engine.host_flags:
            continue
        value = value if equals else argv[position + 1] if position + 1 < len(argv) else ""
        if is_loopback(value):
            out[position if equals else position + 1] = f"{name}={everywhere(value)}" if equals else everywhere(value)
    return tuple(out)


def renumbered(argv: tuple[str, ...], share: Share) -> tuple[str, ...]:
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


def without_flag(argv: tuple[str, ...], flags: Collection[str]) -> tuple[str, ...]:
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


def shell_word(word: str, variables: Mapping[str, str]) -> str:
    """Quoted for a shell, with secrets as variables."""
    longest_first = sorted(variables, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", word)
    return "".join(f'"${{{variables[piece]}}}"' if piece in variables else shlex.quote(piece) for piece in pieces if piece) or "''"


def in_shell(script: str) -> tuple[str, ...]:
    """A command run by a shell that hands on the words written after it."""
    return ("/bin/sh", "-c", f"exec {script} {HANDED_ON}", "sh")


def takes_words(argv: Sequence[str]) -> bool:
    """Whether words written after a command reach its program: a shell keeps them, unless its script hands them on."""
    return not unwrap(argv).shell or any(HANDED_ON in word for word in argv[:-1])  # the first of them would be $0


def has_key(engine: Generic) -> bool:
    in_file = engine.flags.value("--api-key-file", env="LLAMA_ARG_API_KEY_FILE")
    return bool(engine.flags.value(*engine.key_flags) or in_file or any(engine.env.get(name) for name in engine.key_variables))


def secrets_of(engine: Generic) -> tuple[str, ...]:
    """Secrets of its entry; not the key in a file, which stays on the host."""
    in_file = engine.engine_key() if engine.flags.value("--api-key-file", env="LLAMA_ARG_API_KEY_FILE") else ""
    written = written_secrets(engine.config)
    return tuple(value for value in dict.fromkeys((*written, *engine.secret_values())) if value and (value != in_file or value in written))


def written_secrets(model: ModelConfig) -> tuple[str, ...]:
    """Those among the words of its commands."""
    found = [value for words in (model.argv, model.stop_argv) for value in secrets.in_arguments(words)]
    return tuple(dict.fromkeys(value for value in found if value))


def kept(container: ContainerConfig | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return ((), ()) if container is None else (container.args, container.volumes)


def container_env(container: ContainerConfig, env: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """`-e NAME=VALUE` among the arguments of the container."""
    known = {name for name, _ in env}
    found = []
    for option, word in zip(("", *container.args), container.args, strict=False):
        if option in ("-e", "--env") or word.startswith("--env="):
            name, equals, value = word.removeprefix("--env=").partition("=")
            if equals and name not in known:
                found.append((name, value))
    return tuple(found)


def volume_mounts(volumes: Sequence[str]) -> tuple[Mount, ...]:
    """Volumes as the operator wrote them."""
    out = []
    for volume in volumes:
        source, _, rest = volume.partition(":")
        target, _, options = (rest or source).partition(":")
        is_path = source.startswith(("/", "~", "."))
        where = os.path.abspath(os.path.expanduser(source)) if is_path else source
        out.append(Mount("bind" if is_path else "volume", where, target, "rw" not in options.split(",") and is_path))
    return tuple(out)
